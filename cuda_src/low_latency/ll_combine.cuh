// The common part of the low-latency combines: ll_combine, and ll_combine_large for calls with many tokens. They differ in how warps share
// the send half. A rank selects one by its own number of tokens; the ranks of a call need not select the same one.
//
// Send half: each entry that ll_dispatch received goes back. The warps weight the outputs of this rank's experts for the token and add them
// up. They write the sum as one bfloat16 row to the rank of the token. If the weights did not come with the dispatch, block 0 of each rank
// first sends the weights of its tokens to all ranks.
//
// Receive half: a group of warps shares a token. Each thread adds up some columns of the token's rows as they arrive, in float32. With
// p.reduce_early it adds them in rank order. Otherwise it weights them and adds them in the order of the choices. Each sum starts at zero,
// and each product is rounded before the addition. The result is therefore the same in each run and on the host backend.
//
// Excluded ranks: this call also excludes the ranks that the dispatch excluded. If two ranks were masked for each other then, neither has
// rows of the other.
//
// Protocol: low_latency.cuh describes tagged words, rows, ring slots and masked ranks. Counters only grow; the last block to read them sets
// the numbers of the next call. The send half reads the weights in a ring slot. It runs before the receive half and thus before the
// acknowledgement of that slot.
//
// Progress: blocks wait only for block 0, which starts first. Running blocks claim the entries. The next call relies on the number of
// tickets, so one more claim follows each item, even an item without anything to send. Where time-outs mask, a group first waits for whole
// rows. It then adds all of a row or nothing of it.
//
// Bytes: this rank reads each row of an entry once and sends one row for each entry. It reads and clears each received row once.
#pragma once
#include "low_latency/ll_combine_receive.cuh"
#include "low_latency/ll_combine_send.cuh"

// Rows travel as bfloat16. The other form is CompressedRows.
struct PlainRows {
  static constexpr bool kIsCompressed = false;
  static constexpr bool kHasManyRows = kNumRanks <= 2 && kNumTopk <= 8;  // an entry often has many rows, and a thread can load all at once
  using Share = PlainShare;

  // Called by all warps of a group: computes and writes this thread's part of a row.
  __device__ static __forceinline__ void send_row(const Params& p, const Entry& entry, int thread, int step, Vec16* to) {
    auto write = [&](int i, const Vec16& v) { st_relaxed_sys(to + i, v); };
    if constexpr (kHasManyRows) {
      entry.reduce_in_flight<kNumTopk>(p, thread, step, kRowVecs, write);
    } else if constexpr (kNumRanks <= 2) {
      entry.reduce<1, 8>(p, thread, step, kRowVecs, write);
    } else if (step * 2 >= kRowVecs) {
      entry.reduce<2, 4>(p, thread, step, kRowVecs, write);
    } else {
      entry.reduce<kMaxVecsPerThread, 1>(p, thread, step, kRowVecs, write);
    }
  }

  // Called by one warp: computes and writes the tile that begins at vector `start`.
  __device__ static __forceinline__ void send_tile(const Params& p, const Entry& entry, int start, Vec16* to) {
    auto write = [&](int i, const Vec16& v) { st_relaxed_sys(to + i, v); };
    const int end = min(start + kTileVecs, kRowVecs);
    if constexpr (kHasManyRows) {
      entry.reduce_in_flight<kNumTopk>(p, start + lane_idx(), 32, end, write);
    } else {
      entry.reduce<kMaxVecsPerThread, 2>(p, start + lane_idx(), 32, end, write);
    }
  }
};

// Called before the kernel awaits its predecessor. Prefetches what the kernel reads first.
__device__ __forceinline__ void prefetch_tables(const Params& p) {
  if constexpr (!kHasOverlap) return;
  if (threadIdx.x == 0) {
    prefetch_numbers(p, progress_of(p), kLlCombineAcks);
    if (p.num_tokens > 0) prefetch(p.has_weights ? p.topk_idx : p.topk_weights);
  }
  const u32 offset = threadIdx.x * 128;
  if (blockIdx.x == 0 && offset < kLlHandleEntries + p.num_tokens * sizeof(LlEntry)) prefetch(p.handle + offset);
}

// Runs the whole call. Each entry consists of num_parts items, and groups of the shape of `senders` claim them. send(call, item, num_items,
// num_entries) runs the send half from the group's first item on. kInterleaved: entry_at gives the entry of a position.
// `Form`: of the rows on the way.
template <bool kInterleaved, class Form, class Send>
__device__ __forceinline__ void combine(const Params& p, const WarpGroup& senders, int num_parts, Send send) {
  __shared__ Call call;
  __shared__ u32 first_item;
  const WarpGroup receivers(log2_warps_per_item(p.num_tokens, kMaxLog2WarpsPerItem));
  // Loads everything that does not depend on the numbers of the call while those are in flight.
  const bool claims = p.phases & kLlSend && threadIdx.x == 0;
  const u32 ticket = claims ? fetch_add_relaxed_gpu(&progress_of(p)->tickets, senders.per_block) : 0;
  Choice choice(p, receivers.first());
  const int num_entries = *at<const i32>(p.handle, kLlHandleNumEntries);
  // The last warp sends and compares headers.
  const u32 dispatch_epoch = warp_idx() == kLastWarp ? *at<const u32>(p.handle, kLlHandleEpoch) : 0;
  __shared__ u32 generation_of_routing;
  if constexpr (kHasSlots) {
    if (warp_idx() == 1 && lane_idx() == 0) generation_of_routing = *at<const u32>(p.handle, kLlHandleGeneration);
  }
  if (warp_idx() == 0)
    acquire_credits(p, progress_of(p), kLlCombineAcks, kPhaseLlCombineRoom, at<const u32>(p.handle, kLlHandleExcluded), call);
  if (claims) first_item = ticket;
  __syncthreads();
  const u64 out_bytes = p.phases & kLlReceive ? static_cast<u64>(p.num_tokens) * kRowVecs * sizeof(Vec16) : 0;
  // With the routing of another generation, entries may belong to slots that are absent now. This rank then takes no part in the call.
  const bool is_old = kHasSlots && generation_of_routing != call.generation;
  if (is_old && threadIdx.x == 0) {
    const u64 then = generation_of_routing;
    if (blockIdx.x == 0) report_event(p, &Report::old_routing, (then + 1) << 32 | call.generation);
    if (claims) fetch_add_relaxed_gpu(&progress_of(p)->tickets, 0u - senders.per_block);
  }
  if (call.failed || is_old) {
    poison(p.out, out_bytes, blockIdx.x * kLlThreads + threadIdx.x, gridDim.x * kLlThreads);
    return;
  }
  const int num_items = (kInterleaved ? per_rank(call, num_entries) * call.count() : num_entries) * num_parts;
  if (threadIdx.x == 32 * kLastWarp) advance(p, progress_of(p), call, num_items + senders.per_block * gridDim.x);
  if (p.phases & kLlSend) {
    clear_next_waits(p, call.sent, kPhaseLlWeights);
    if (blockIdx.x == 0 && p.reduce_early && !p.has_weights) send_weights(p, call);
    send(call, static_cast<int>(first_item - call.tickets_before) + senders.idx, num_items, num_entries);
    // The rows leave first, because other ranks wait for those.
    if (blockIdx.x == 0 && warp_idx() == kLastWarp) send_headers(p, call, dispatch_epoch);
  }
  if (!(p.phases & kLlReceive)) return;
  clear_next_waits(p, call.received, kPhaseLlCombineRows);
  if constexpr (kMasksOnTimeout) __syncthreads();  // groups of another size use the same barriers from here on
  // With few tokens, the last block has none.
  bool ok = blockIdx.x != gridDim.x - 1 || warp_idx() != kLastWarp || compare_headers(p, call, dispatch_epoch);
  for (int token = receivers.first(); ok && token < p.num_tokens; token += receivers.step()) {
    const Choice now = choice;
    choice = Choice(p, token + receivers.step());
    ok = receive_token<typename Form::Share>(p, call, receivers, token, now);
  }
  if (!ok) poison(p.out, out_bytes, lane_idx(), 32);  // all of it: this warp does not know the tokens that other warps skip
}
