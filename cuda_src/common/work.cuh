// Work distribution. Item j is chunk j / kNumRanks for some rank. Neighbouring items are for different ranks, so every link is busy all the
// time, for any number of workers.
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

// SMs differ in speed. With equal shares, one SM finishes in 300 us and another one in 550 us. Workers therefore claim tickets as they
// proceed, and a ticket stands for a few items.
struct WorkQueue {
  u32* tickets;  // tickets claimed so far; 0 before the kernel; the last block resets it
  int num_items;
  int per_ticket;
};

// A ticket has up to max_per_ticket items, and fewer where each worker would claim only a few tickets.
__device__ __forceinline__ WorkQueue make_work_queue(u32* tickets, int num_items, int num_workers, int max_per_ticket) {
  const int balanced = num_items / (8 * num_workers);
  return {tickets, num_items, balanced < 1 ? 1 : balanced < max_per_ticket ? balanced : max_per_ticket};
}

// One warp's iteration over the queue. While the warp works on one ticket, it knows the next one, and the claim after that is in flight.
// `on_prefetch(first)` gets the first item of each ticket one ticket early, and can load data that the item needs. That item may lie past
// the end. Even the first ticket comes from the counter. Otherwise items would belong to a block that may start only after other blocks
// have ended.
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

  // Called by all lanes. Returns -1 when no item is left.
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

// Whether this block is the last one of the grid to call this. One thread of each block calls it, after all threads of the block are done.
// It orders all earlier writes of all blocks, also to peers, before the later reads and writes of this thread.
__device__ __forceinline__ bool is_last_block(u32* num_blocks) { return add_acq_rel_sys(num_blocks, 1) == gridDim.x - 1; }

// The same, called by one warp of each block. It orders the writes before the later reads and writes of all lanes of the warp.
__device__ __forceinline__ bool is_warp_of_last_block(u32* num_blocks) {
  bool last = lane_idx() == 0 && is_last_block(num_blocks);
  last = __shfl_sync(~0u, last, 0);
  if (last) __syncwarp();  // all lanes see what lane 0 acquired
  return last;
}

// Rows of the chunk that starts at row chunk * chunk_rows, of num_rows rows.
__device__ __forceinline__ int rows_in_chunk(int num_rows, int chunk, int chunk_rows) {
  const int left = num_rows - chunk * chunk_rows;
  return left < 0 ? 0 : left < chunk_rows ? left : chunk_rows;
}

__device__ __forceinline__ int clamp_rows(i64 room, int num_rows) {
  return room < 0 ? 0 : room < num_rows ? static_cast<int>(room) : num_rows;
}
