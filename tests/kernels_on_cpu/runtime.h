// The interface of the scheduler (runtime.cpp) for kernels that are compiled for the CPU. Each CUDA thread is a fiber. One runs at a time.
// Every kernel includes this file, and <string> would take a third of the time that a kernel compiles.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace cpu_gpu {

struct Index {
  unsigned x;
};

// A CUDA thread, as device code sees it.
struct Thread {
  Index thread_idx, block_idx, block_dim, grid_dim;
  int lane, gpu;
  const void *warp_key, *block_key, *grid_key;  // the same for all threads of a warp, block, grid
};

extern Thread* running;

constexpr unsigned char kGarbage = 0xa5;  // the contents of memory that nothing has written

uint64_t random_below(uint64_t end);

// Call this before each access that other threads may notice: the scheduler may run them here. `wrote`: it may have an effect on others.
void step(bool wrote);

// Whether waiting kernels keep time with a word.
bool keeps_time(const void* p);

// Accesses to memory that other threads may read, up to 8 bytes at a time. A release follows all earlier stores of this thread. That of a
// block lets any thread of the block release these stores to other GPUs.
enum class Order { kRelaxed, kReleaseBlock, kRelease };
void read(const void* from, void* to, size_t num_bytes);
void write(void* to, const void* from, size_t num_bytes, Order order);
void fence();

// The write of a bulk copy that `thread` has started. To memory of another GPU it goes late, like a store of the thread.
bool is_remote(const void* to);
void write_of_copy(void* to, const char* from, size_t num_bytes, const Thread& thread, bool is_remote);

// Synchronises all 32 lanes of a warp. `kind` names the operation. It is an error if lanes are in different operations.
struct Exchange {
  uint64_t values[32];
  uint32_t votes;  // a bit for each lane whose value is not 0
};
const Exchange& sync_warp(const char* kind, uint64_t value);

// Synchronises `num_threads` threads of the block (0: all) at one of its 16 barriers. Returns whether all voted yes.
bool sync_block(int barrier, unsigned num_threads, bool yes);

// Memory of the block. It is filled with garbage when the block starts.
void* shared_memory(int id, size_t num_bytes, size_t alignment);
char* dynamic_shared_memory();

// Threads reach shared memory through another proxy than bulk copies do. After a thread has read or written there, a bulk copy may write
// to that memory only if the thread has made a proxy fence since. After it has written, the same holds for a bulk copy that reads. Plain
// accesses are noted only with weak memory, and of several threads that read the same 16 bytes only the last.
void note_shared_access(const void* p, size_t num_bytes, bool writes);
void fence_proxies();
void check_proxies(uint32_t shared, uint32_t num_bytes, bool copy_writes);

// The copy engine (copy_engine.cpp). Addresses of shared memory are offsets from its start, as in PTX.
void mbarrier_init(uint32_t barrier, int num_arrivals);
void mbarrier_arrive(uint32_t barrier, uint32_t expected_bytes);
bool mbarrier_is_past(uint32_t barrier, uint32_t parity);
void bulk_load(uint32_t to, const void* from, uint32_t num_bytes, uint32_t barrier);
void bulk_store(void* to, uint32_t from, uint32_t num_bytes);
void bulk_commit();
void bulk_wait(int num_groups, bool only_read);  // until at most `num_groups` of the latest groups are not done

// Small floats, as a GPU converts them: to the nearest one, ties to even.
uint32_t to_bfloat16(float value);
float from_bfloat16(uint32_t code);
uint32_t to_half(float value);
uint32_t to_e4m3(float value);  // larger numbers become 448
float from_half(uint32_t bits);
float from_e4m3(uint32_t bits);

// Programmatic launch: the block allows the next grid to start; a thread waits for the end of the grid before its own.
void launch_dependents();
void wait_for_predecessor();

// Reports an error if a byte is in no memory of a GPU. Stores that happen later call this first, while their thread runs.
inline void touch(const void* p) { *static_cast<const volatile char*>(p); }

// Whether memory belongs to the running thread alone. Stores there show no other thread that something has happened.
bool is_on_own_stack(const void* p);

// Nanoseconds of the GPUs' common clock.
uint64_t clock_ns();

// The turns that the scheduler has given so far.
uint64_t current_turn();

// Reports an error of the kernel. The run ends, and Python raises this text.
[[noreturn]] void fail(const char* text);

template <class T>
T& shared_variable(int id) {
  return *static_cast<T*>(shared_memory(id, sizeof(T), alignof(T)));
}

}  // namespace cpu_gpu
