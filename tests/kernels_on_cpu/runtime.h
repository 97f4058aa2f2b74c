// What a kernel that was compiled for the CPU needs from the scheduler (runtime.cpp). Each CUDA thread is a fiber; one runs at a time.
#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace cpu_gpu {

struct Index {
  unsigned x;
};

// Bulk copies of a thread that it waits for together.
struct BulkGroup {
  int unread = 0, unwritten = 0;
};

// What device code knows of the thread that runs it.
struct Thread {
  Index thread_idx, block_idx, block_dim, grid_dim;
  int lane;
  std::vector<std::shared_ptr<BulkGroup>> bulk_groups;  // the last one is not yet committed
};

extern Thread* running;

// Before each access that other threads may notice: the scheduler may run others here. `wrote`: the access is a store.
void step(bool wrote);

// Memory that other threads may look at, up to 8 bytes at a time. A release comes after all that this thread wrote before.
enum class Order { kRelaxed, kRelease };
void read(const void* from, void* to, size_t num_bytes);
void write(void* to, const void* from, size_t num_bytes, Order order);
void fence();

// Work of something that is no thread, such as a copy engine: it is done at a random time, in random order.
void later(std::function<void()> work);

// All 32 lanes of a warp meet. `kind` names the operation; lanes that meet in different operations are an error.
struct Exchange {
  uint64_t values[32];
  uint32_t votes;  // a bit for each lane whose value is not 0
};
const Exchange& meet_warp(const char* kind, uint64_t value);

// `num_threads` threads of the block meet at one of its 16 barriers (0: all threads). True: all of them voted yes.
bool meet_block(int barrier, unsigned num_threads, bool yes);

// Memory of the block. It is filled with garbage when the block starts.
void* shared_memory(int id, size_t num_bytes, size_t alignment);
char* dynamic_shared_memory();

// Nanoseconds of the GPUs' common clock.
uint64_t clock_ns();

// The program is wrong: the run ends, and Python raises this text.
[[noreturn]] void fail(const char* text);

template <class T>
T& shared_variable(int id) {
  return *static_cast<T*>(shared_memory(id, sizeof(T), alignof(T)));
}

}  // namespace cpu_gpu
