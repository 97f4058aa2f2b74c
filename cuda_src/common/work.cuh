// How the rows for all ranks are shared out: item j is chunk j / kNumRanks for some rank, and neighbours are for different ranks, so that
// every link is busy all the time, whatever the number of workers.
#pragma once
#include "common/memory.cuh"

struct Item {
  int rank;
  int chunk;
};

__device__ __forceinline__ Item item_at(int j, int my_rank) {
  const int chunk = j / kNumRanks;
  return {(j + chunk + my_rank) % kNumRanks, chunk};
}

// SMs differ: with equal shares for all, one is done in 300 us where another takes 550. So workers take items as they go, a few at a time.
struct WorkQueue {
  u32* tickets;  // takes so far; 0 before the kernel, and the last block resets it
  int num_items;
  int per_ticket;
};

// `most` items a time, but fewer where workers would only get a few times that.
__device__ __forceinline__ WorkQueue make_work_queue(u32* tickets, int num_items, int num_workers, int max_per_ticket) {
  const int fair = num_items / (8 * num_workers);
  return {tickets, num_items, fair < 1 ? 1 : fair < max_per_ticket ? fair : max_per_ticket};
}

// One warp's way through a queue. It knows what it takes next while it works on what it has taken, and the take after that is on its way:
// `ahead(first)` is told the first item of each take one take in advance, to look up what it has to know about it (there may be no such
// item). Even the first take comes from the counter: items are never bound to a block that may not run before others have ended.
template <class OnPrefetch>
struct WorkIterator {
  WorkQueue queue;
  OnPrefetch on_prefetch;
  int next_first;
  u32 pending_ticket;  // in lane 0
  int item = 0, end = 0;

  __device__ WorkIterator(const WorkQueue& queue, OnPrefetch on_prefetch) : queue(queue), on_prefetch(on_prefetch) {
    claim();
    prefetch();
  }

  __device__ __forceinline__ void claim() {
    if (lane_idx() == 0) pending_ticket = fetch_add_relaxed_gpu(queue.tickets);
  }

  __device__ __forceinline__ void prefetch() {
    next_first = static_cast<int>(__shfl_sync(~0u, pending_ticket, 0)) * queue.per_ticket;
    claim();
    on_prefetch(next_first);
  }

  // All lanes together; -1 when nothing is left.
  __device__ __forceinline__ int next() {
    if (item == end) {
      if (next_first >= queue.num_items) return -1;
      item = next_first;
      end = min(item + queue.per_ticket, queue.num_items);
      prefetch();
    }
    return item++;
  }
};

// Whether this block is the last of the grid to come here. One thread of each block asks, after all of the block; what any block did
// before, what it wrote to peers included, is then ordered before what this thread does and sends to peers.
__device__ __forceinline__ bool is_last_block(u32* num_blocks) { return add_acq_rel_sys(num_blocks, 1) == gridDim.x - 1; }

// Rows of a chunk that starts at row chunk * chunk_rows of num_rows.
__device__ __forceinline__ int rows_in_chunk(int num_rows, int chunk, int chunk_rows) {
  const int left = num_rows - chunk * chunk_rows;
  return left < 0 ? 0 : left < chunk_rows ? left : chunk_rows;
}

__device__ __forceinline__ int clamp_rows(i64 room, int num_rows) {
  return room < 0 ? 0 : room < num_rows ? static_cast<int>(room) : num_rows;
}

// First of all in a kernel that is launched while the one before it in its stream still ends (Kernel.overlaps): from here on that one has
// ended and its writes can be seen; and the next one may be launched.
__device__ __forceinline__ void overlap_kernels() {
  if constexpr (kHasOverlap) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  }
}
