// Work distribution. Item j is chunk j / members.count() for some member. Neighbouring items are for different ranks, so every link is busy
// all the time, for any number of workers.
#pragma once
#include "common/memory.cuh"

// The ranks that share work: all of them. The compiler knows their number.
struct AllRanks {
  AllRanks() = default;
  __device__ __forceinline__ explicit AllRanks(const Params&) {}
  __device__ __forceinline__ static constexpr int count() { return kNumRanks; }
  __device__ __forceinline__ static int at(int place) { return place; }          // the member at a place, ascending
  __device__ __forceinline__ static int place(int my_rank) { return my_rank; }   // of this rank
  __device__ __forceinline__ static int divide(int n) { return n / kNumRanks; }  // by their number
  __device__ __forceinline__ static int modulo(int n) { return n % kNumRanks; }
  static constexpr u32 generation = 0;
};

// In Buffers with slots: those that have a process. Absent slots take no share. Otherwise links and SMs would idle for them.
struct PresentRanks {
  u32 numbers;     // 4 bits for each, ascending. The rest is ~0: lanes of no rank
  u32 reciprocal;  // 2^31 / count(), rounded up
  i32 num, my_place;
  u32 generation;

  PresentRanks() = default;
  __device__ __forceinline__ explicit PresentRanks(const Params& p) {
    const State* state = at_state(p);
    numbers = state->members, reciprocal = state->members_reciprocal, generation = state->generation;
    const u32 present = ~state->absent & (1u << kNumRanks) - 1;
    num = __popc(present), my_place = __popc(present & (1u << p.rank) - 1);
  }
  __device__ __forceinline__ int count() const { return num; }
  __device__ __forceinline__ int at(int place) const { return numbers >> 4 * place & 15; }
  __device__ __forceinline__ int place(int) const { return my_place; }
  __device__ __forceinline__ int divide(int n) const { return static_cast<u64>(n) * reciprocal >> 31; }  // right for n < 2^28
  __device__ __forceinline__ int modulo(int n) const { return n - divide(n) * num; }

 private:
  __device__ __forceinline__ static const State* at_state(const Params& p) { return ::at<const State>(p.state, 0); }
};
static_assert(!kHasSlots || kNumRanks <= 8);

template <bool kSome>
struct Select {
  using Members = AllRanks;
};
template <>
struct Select<true> {
  using Members = PresentRanks;
};
using Members = Select<kHasSlots>::Members;

struct Item {
  int rank;
  int chunk;
};

template <class Ranks>
__device__ __forceinline__ Item item_at(const Ranks& members, int j, int my_rank) {
  const int chunk = members.divide(j);
  return {members.at(members.modulo(j + chunk + members.place(my_rank))), chunk};
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
