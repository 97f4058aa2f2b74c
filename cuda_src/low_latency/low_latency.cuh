// The common part of the low-latency kernels: how a call begins and ends, and data that shows by itself whether it has arrived.
//
// Data over NVLink needs no fence and no flag. Numbers travel as tagged words: 8 bytes with the epoch of the call in the lower half. Rows
// travel without a tag. They arrive in memory that holds kEmptySentinel in each 4-byte word, and no row contains such a word on the way
// (avoid_sentinel, and keys in ll_opaque_rows.cuh). After a thread has read a word, it writes kEmptySentinel back. Data over the network
// comes with a signal, and kernels read rows only after the signal.
//
// Memory that no call has used holds kEmptySentinel or 0. Both are also epochs: the last one before the epochs wrap around, and the first
// one after it. Calls have used all of the memory by then, 2^32 calls later, unless no call was ever large enough.
//
// Reuse of memory: inboxes have kRingDepth ring slots, selected by the epoch. When a kernel starts, it acknowledges to each rank the calls
// that this rank has received. This rank has read the data of these calls and has written kEmptySentinel back. A sender waits for the
// acknowledgement of kRingDepth calls ago before it writes. The two halves of a call may therefore run far apart in time. This makes
// staging memory for the network reusable too: the receiver of a put waits for its word.
//
// Masked ranks: a kernel sends nothing to a masked rank, waits for nothing from it, and does not acknowledge to it. The kernel reads the
// masks when it starts.
#pragma once
#include "common/number.cuh"
#include "common/wait.cuh"
#include "common/work.cuh"

constexpr int kWarps = kLlThreads / 32, kLastWarp = kWarps - 1;
constexpr int kLog2Warps = kWarps == 16 ? 4 : 3;
static_assert(1 << kLog2Warps == kWarps);
constexpr u32 kEmptySentinel = 0xffffffff;

// The numbers of a call, in the shared memory of a block.
struct Call : Members {
  u32 sent, received;  // epochs of the two halves
  u32 tickets_before;  // tickets that earlier calls claimed
  bool failed;
  bool excluded[kNumRanks];  // ranks that this call excludes
};

__device__ __forceinline__ bool is_written(const Vec16& v) {
  return v.word[0] != kEmptySentinel && v.word[1] != kEmptySentinel && v.word[2] != kEmptySentinel && v.word[3] != kEmptySentinel;
}

__device__ __forceinline__ Vec16 empty_vec() { return {kEmptySentinel, kEmptySentinel, kEmptySentinel, kEmptySentinel}; }

// Two NaNs of bfloat16 that together equal kEmptySentinel become two other NaNs. Values that this library rounds to FP8 or bfloat16 never
// equal it.
__device__ __forceinline__ Vec16 avoid_sentinel(Vec16 v) {
#pragma unroll
  for (u32& word : v.word) word -= word == kEmptySentinel;
  return v;
}

// Index of a rank's part in the ring slot of an epoch.
__device__ __forceinline__ u64 ring_slot(u32 epoch, int rank) { return static_cast<u64>(epoch % kRingDepth) * kNumRanks + rank; }

// Called by one thread of each block before the kernel awaits its predecessor. Prefetches what acquire_credits reads. So the first accesses
// to the members of Params, and the first translations of addresses, are over too when the predecessor ends.
__device__ __forceinline__ void prefetch_numbers(const Params& p, const LlProgress* progress, u64 acks) {
  prefetch(reinterpret_cast<u64>(progress));
  prefetch(p.peers[p.rank] + acks);
  prefetch(p.state);
}

// The word in which another rank acknowledges to this rank that it has received a call. A network may deliver words in any order. So each
// ring slot has a word for a scale-out rank. That rank never sends it two of them at once: its next call in this ring slot comes after this
// rank has seen the word.
__device__ __forceinline__ const u64* ack_from(const Params& p, u64 acks, u32 epoch, int rank) {
  return at<const u64>(inbox_base(p, rank), acks) + (is_scale_out(p, rank) ? ring_slot(epoch, rank) : rank);
}

// Called by one thread of the GPU for each scale-out rank. It acknowledges each call once, because a word that is sent again could arrive
// after the next word of its ring slot. A rank that was masked gets the words that it missed.
__device__ inline void acknowledge(const Params& p, u64 acks, int rank, u32 received) {
  u32* acked = at<u32>(p.state, kLocalLlAcked) + (acks == kLlDispatchAcks ? 0 : kNumRanks) + rank;
  u32 last = *acked;
  if (!has_reached(last + kRingDepth, received)) last = received - kRingDepth;
  while (last != received) {
    ++last;
    signal(p, rank, acks + ring_slot(last, p.rank) * sizeof(u64), last);
  }
  *acked = received;
}

// Called by warp 0. With a send half, it waits until the ring slot of this call is free at each rank. `acks`: where ranks acknowledge
// received calls. `phase`: the name of these waits in reports. `also_excluded`: more ranks to exclude, or null.
__device__ inline void acquire_credits(const Params& p, const LlProgress* progress, u64 acks, u32 phase, const u32* also_excluded,
                                       Call& call) {
  constexpr int kPerLane = (kNumRanks + 31) / 32;
  const u64* theirs = at<const u64>(p.peers[p.rank], acks);
  // Starts all loads before the first use, without a branch in between. They take one round trip together.
  u64 held[kPerLane];
  u32 masked[kPerLane], excluded_too[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int r = min(32 * i + lane_idx(), kNumRanks - 1);
    held[i] = ld_relaxed_sys(theirs + r);
    masked[i] = ld_relaxed_gpu(masked_at(p, r));
    excluded_too[i] = ld_relaxed_gpu((also_excluded ? also_excluded : masked_at(p, 0)) + r);
  }
  const Members members(p);
  const u32 sent = progress->sent + 1, received = progress->received + 1, tickets_before = progress->tickets_before;
  if constexpr (kHasScaleOut) {
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int r = min(32 * i + lane_idx(), kNumRanks - 1);
      if (is_scale_out(p, r)) held[i] = ld_relaxed_sys(ack_from(p, acks, sent, r));
    }
  }
  const bool is_replayed_too_early = p.phases == (kLlSend | kLlReceive) && sent != received;  // a hook is open
  bool failed = was_aborted(p) || is_replayed_too_early;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int r = 32 * i + lane_idx();
    if (blockIdx.x == 0 && r < kNumRanks && !(masked[i] | excluded_too[i])) {
      // This store needs no fence: earlier kernels have ended, and so have their reads of rows and their stores of kEmptySentinel. The peer
      // stores its next rows after a branch on this word. PTX's memory model does not order a relaxed load, a branch and a store. GPUs do,
      // because they never store before a branch is decided. By the model this must be a release, and an acquire where the peer waits.
      const u64 mine = acks + p.rank * sizeof(u64);
      if (is_scale_out(p, r)) {
        acknowledge(p, acks, r, received - 1);
      } else {
        st_relaxed_sys(at<u64>(p.peers[r], mine), received - 1);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    // This rank has acknowledged to all ranks before it waits for any of them.
    const int r = 32 * i + lane_idx();
    if (r >= kNumRanks) continue;
    bool excluded = (masked[i] | excluded_too[i]) != 0;
    // An acknowledgement guards only later writes and no reads, so relaxed loads are enough.
    const bool has_room = !(p.phases & kLlSend) || excluded || has_reached(static_cast<u32>(held[i]), sent - kRingDepth);
    if (!has_room && !wait_count(p, kHasScaleOut ? ack_from(p, acks, sent, r) : theirs + r, sent - kRingDepth, phase, r))
      (kMasksOnTimeout ? excluded : failed) = true;
    call.excluded[r] = excluded;
  }
  if (p.phases & kLlSend) clear_next_waits(p, sent - kRingDepth, phase);
  failed = __any_sync(~0u, failed);
  if (failed && is_replayed_too_early && blockIdx.x == 0 && lane_idx() == 0) raise_abort(p, kLlOpenHook, p.rank, sent, received);
  if constexpr (kHasSlots) {
    if (lane_idx() == 0) static_cast<Members&>(call) = members;
  }
  if (lane_idx() == 0) call.sent = sent, call.received = received, call.tickets_before = tickets_before, call.failed = failed;
}

// Called by one warp, with `differs` true in lanes whose source has another call signature. Rows of that source are on their way already,
// and this rank would misread them. This breaks the Buffer. If two ranks differ, each rank differs from at least one of them, so all ranks
// detect it.
__device__ inline void abort_on_difference(const Params& p, u32 phase, u32 epoch, bool differs, int source, u64 theirs, u32 my_serial = 0,
                                           u32 their_serial = 0) {
  if (lane_idx() != __ffs(__ballot_sync(~0u, differs)) - 1) return;
  report_difference(p, source, p.call_signature, theirs, my_serial, their_serial);
  raise_abort(p, phase, source, epoch, epoch);
}

// Called by one thread of each block, after all threads of the block have read `progress`, and before the thread writes to another rank.
// Its release waits for its earlier writes, and those over NVLink take a round trip behind all rows. The last block writes the numbers of
// the next kernel. `num_tickets`: claims of this kernel from progress->tickets. Numbers only grow, so the kernel resets nothing when it
// ends.
__device__ inline void advance(const Params& p, LlProgress* progress, const Call& call, u32 num_tickets) {
  if (add_acq_rel_gpu(&progress->starts, 1) != gridDim.x - 1) return;
  progress->starts = 0;
  if (p.phases & kLlSend) progress->sent = call.sent, progress->tickets_before = call.tickets_before + num_tickets;
  if (p.phases & kLlReceive) progress->received = call.received, count_call(p);
}

// Warps that share an item: some warps of a block, or all warps of several blocks. An SM issues few instructions at a time. A row is
// therefore finished earlier if several SMs each have a part of it.
struct WarpGroup {
  int log2_blocks, log2_warps;  // logarithms of the number of blocks, and of warps in each block
  int idx, per_block;           // number of the group in its block, and groups of a block

  __device__ __forceinline__ explicit WarpGroup(int log2_all_warps)
      : log2_blocks(max(log2_all_warps - kLog2Warps, 0)),
        log2_warps(log2_all_warps - log2_blocks),
        idx(warp_idx() >> log2_warps),
        per_block(kWarps >> log2_warps) {}

  __device__ __forceinline__ int num_threads() const { return 32 << (log2_blocks + log2_warps); }

  // Neighbouring warps belong to different blocks. With less work than threads, all blocks then have the same share.
  __device__ __forceinline__ int thread(int block) const {
    const int warp = warp_idx() & ((1 << log2_warps) - 1);
    return (warp << log2_blocks | block) * 32 + lane_idx();
  }

  // Whether this is the first thread of the group in this block.
  __device__ __forceinline__ bool is_leader() const { return (threadIdx.x & ((32 << log2_warps) - 1)) == 0; }

  // For blocks that are bound to groups: this block's number in its group, the first item of the group, and the distance to its next item.
  // This is only right for the number of items that log2_warps_per_item got. With other numbers, blocks past the last whole group would
  // repeat items.
  __device__ __forceinline__ int block() const { return blockIdx.x & ((1 << log2_blocks) - 1); }
  __device__ __forceinline__ int first() const { return (blockIdx.x >> log2_blocks) + idx * (gridDim.x >> log2_blocks); }
  __device__ __forceinline__ int step() const { return per_block * (gridDim.x >> log2_blocks); }

  // Waits for all warps of the group in this block.
  __device__ __forceinline__ void sync() const {
    __syncwarp();
    if (log2_warps > 0) asm volatile("bar.sync %0, %1;" ::"r"(1 + idx), "r"(32 << log2_warps) : "memory");
  }

  // The same, and returns whether `vote` is true in all threads.
  __device__ __forceinline__ bool all(bool vote) const {
    vote = __all_sync(~0u, vote);  // barriers need whole warps
    if (log2_warps == 0) return vote;
    u32 result;
    asm volatile("{\n .reg .pred p, q;\n setp.ne.u32 p, %3, 0;\n bar.red.and.pred q, %1, %2, p;\n selp.u32 %0, 1, 0, q;\n}"
                 : "=r"(result)
                 : "r"(1 + idx), "r"(32 << log2_warps), "r"(static_cast<u32>(vote))
                 : "memory");
    return result;
  }
};

// The logarithm of the group size with which the warps work on all items at once. It divides only by constants, because other divisions are
// slow.
__device__ __forceinline__ int log2_warps_per_item(int num_items, int max_log2) {
  const int num_warps = kWarps * gridDim.x, items = max(num_items, 1);
  const int log2 = max(__clz(items) - __clz(num_warps), 0);
  return min(max(log2 - (items << log2 > num_warps), 0), max_log2);
}

// Where time-outs mask, or rows are staged for the network, all warps of a group must meet at barriers. A group then fits in a block.
constexpr int kMaxLog2WarpsPerItem = kMasksOnTimeout || kHasScaleOut ? kLog2Warps : kLog2Warps + 2;

// In each lane with the first of the token's choices on a rank: that rank. In other lanes: -1. `expert`: in lane k, the expert of choice k,
// or -1.
__device__ __forceinline__ int first_choice_of(int expert, const bool* excluded) {
  const int rank = expert >= 0 ? expert / kNumLocalExperts : -1;
  const bool is_first = __ffs(__match_any_sync(~0u, rank)) - 1 == lane_idx();
  return is_first && rank >= 0 && !excluded[rank] ? rank : -1;
}
