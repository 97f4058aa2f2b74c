// Memory of the GPUs: pieces that nothing can leave unnoticed, and stores that take their time to other GPUs.
#pragma once
#include "runtime.h"

namespace cpu_gpu {

// Forgets all stores that are under way, and whether there are any (is_weak).
void reset_memory(bool is_weak);

// What a barrier or __syncwarp orders: stores of a warp come before a release by any thread of the warp, or of the block.
void order_within_warp(const void* warp);
void order_within_block(const void* warp);

// A store of the running thread that the compiler made is complete; to be called before anything else is done for that thread.
void complete_plain_store();

// Lets some stores get to their GPUs. False: none was under way.
bool deliver_stores();

// All stores of a kernel are there when it ends.
void deliver_stores_of(const void* grid);

}  // namespace cpu_gpu
