// Memory of the GPUs: accesses outside of an allocation fail, and stores to other GPUs arrive late.
#pragma once
#include "runtime.h"

namespace cpu_gpu {

// Drops all stores in flight. `is_weak`: whether stores to other GPUs arrive late.
void reset_memory(bool is_weak);

// Orders of __syncwarp and of barriers: stores of a warp precede a later release by any thread of the warp, or of the block.
void order_within_warp(const void* warp);
void order_within_block(const void* warp);

// Completes a plain store of the running thread. Call this before anything else happens to that thread.
void complete_plain_store();

// Delivers some stores to their GPUs. Returns false if none was in flight.
bool deliver_stores();

// Delivers all stores of a kernel, which has ended.
void deliver_stores_of(const void* grid);

}  // namespace cpu_gpu
