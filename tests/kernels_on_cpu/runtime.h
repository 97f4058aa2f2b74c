// What a kernel that was compiled for the CPU needs from the scheduler (runtime.cpp). Each CUDA thread is a fiber; one runs at a time.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace cpu_gpu {

struct Index {
  unsigned x;
};

// What device code knows of the thread that runs it.
struct Thread {
  Index thread_idx, block_idx, block_dim, grid_dim;
  int lane, gpu;
  const void *warp_key, *block_key, *grid_key;  // equal for threads of one warp, block, grid
};

extern Thread* running;

constexpr unsigned char kGarbage = 0xa5;  // what memory holds that nothing has written

uint64_t random_below(uint64_t end);

// Before each access that other threads may notice: the scheduler may run others here. `wrote`: the access is a store.
void step(bool wrote);

// Memory that other threads may look at, up to 8 bytes at a time. A release comes after all that this thread wrote before.
enum class Order { kRelaxed, kRelease };
void read(const void* from, void* to, size_t num_bytes);
void write(void* to, const void* from, size_t num_bytes, Order order);
void fence();

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

// The copy engine (copy_engine.cpp). Addresses of shared memory are offsets from its start, as in PTX.
void mbarrier_init(uint32_t barrier, int num_arrivals);
void mbarrier_arrive(uint32_t barrier, uint32_t expected_bytes);
bool mbarrier_is_past(uint32_t barrier, uint32_t parity);
void bulk_load(uint32_t to, const void* from, uint32_t num_bytes, uint32_t barrier);
void bulk_store(void* to, uint32_t from, uint32_t num_bytes);
void bulk_commit();
void bulk_wait(int num_groups, bool only_read);  // until at most so many of the latest groups are not done

// Small floats, as a GPU converts them: to the nearest one, ties to even.
uint32_t to_bfloat16(float value);
uint32_t to_half(float value);
uint32_t to_e4m3(float value);  // what is too large becomes 448
float from_half(uint32_t bits);
float from_e4m3(uint32_t bits);

// Nanoseconds of the GPUs' common clock.
uint64_t clock_ns();

// The program is wrong: the run ends, and Python raises this text.
[[noreturn]] void fail(const char* text);

template <class T>
T& shared_variable(int id) {
  return *static_cast<T*>(shared_memory(id, sizeof(T), alignof(T)));
}

}  // namespace cpu_gpu
