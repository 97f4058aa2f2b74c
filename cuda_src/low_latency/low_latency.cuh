// What the two low-latency kernels share: how a call begins and ends, and words that say themselves whether they have come.
//
// Nothing that travels over NVLink needs a fence or a flag. Numbers travel as 8-byte words with the call's epoch in their lower half. Rows
// travel bare, into memory that holds kEmptySentinel in each 4-byte word; no row has such a word (`avoid_sentinel` sees to it where it
// could), and who has read a word writes kEmptySentinel there again. (Memory that no call has used holds kEmptySentinel or 0, which are
// epochs too: of the last call before they wrap around, and of the first after it. All is used by then, 2^32 calls later, unless calls
// never were as large.) What is put over the network comes with a signal; rows are read only after it.
//
// Sides. Inboxes have kRingDepth sides, by the epoch. When a kernel starts, it acknowledges to every rank what this rank has received
// before (and so has read, and has written kEmptySentinel to); a sender first waits for the acknowledgement of kRingDepth calls ago. Hence
// the two parts of a call may be far apart, and what is staged to be put may be overwritten by then too (weights for a rank that got no
// tokens may still be on their way; nobody reads them).
//
// Masked ranks are neither sent to nor waited for, nor acknowledged to; who is masked is read when the kernel starts.
#pragma once
#include "common/number.cuh"
#include "common/wait.cuh"
#include "common/work.cuh"

constexpr int kWarps = kLlThreads / 32, kLastWarp = kWarps - 1;
constexpr int kLog2Warps = kWarps == 16 ? 4 : 3;
static_assert(1 << kLog2Warps == kWarps);
constexpr u32 kEmptySentinel = 0xffffffff;

// A call as a block sees it, in shared memory.
struct Call {
  u32 sent, received;  // epochs of the parts
  u32 tickets_before;  // items that earlier calls took
  bool failed;
  bool excluded[kNumRanks];  // ranks that are left out
};

__device__ __forceinline__ bool is_written(const Vec16& v) {
  return v.word[0] != kEmptySentinel && v.word[1] != kEmptySentinel && v.word[2] != kEmptySentinel && v.word[3] != kEmptySentinel;
}

__device__ __forceinline__ Vec16 empty_vec() { return {kEmptySentinel, kEmptySentinel, kEmptySentinel, kEmptySentinel}; }

// Two bfloat16 NaNs that look like kEmptySentinel become another two NaNs. What this library rounds to FP8 or bfloat16 never looks so.
__device__ __forceinline__ Vec16 avoid_sentinel(Vec16 v) {
#pragma unroll
  for (u32& word : v.word) word -= word == kEmptySentinel;
  return v;
}

__device__ __forceinline__ u64 tagged_word(u32 value, u32 epoch) { return static_cast<u64>(value) << 32 | epoch; }

// Of what there is for each rank on each side.
__device__ __forceinline__ u64 ring_slot(u32 epoch, int rank) { return static_cast<u64>(epoch % kRingDepth) * kNumRanks + rank; }

// Warp 0. Where the call sends, it also waits until the side of this call is free at every rank. `acks`: where ranks acknowledge what they
// have received; `phase`: what a wait for that is called; `also_excluded`: more ranks to leave out, or null.
__device__ inline void acquire_credits(const Params& p, const LlProgress* progress, u64 acks, u32 phase, const u32* also_excluded,
                                       Call& call) {
  constexpr int kPerLane = (kNumRanks + 31) / 32;
  const u64* theirs = at<const u64>(p.peers[p.rank], acks);
  // All is loaded before any of it is looked at, and without a branch in between: one round trip.
  u64 held[kPerLane];
  u32 masked[kPerLane], excluded_too[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int r = min(32 * i + lane_idx(), kNumRanks - 1);
    held[i] = ld_relaxed_sys(theirs + r);
    masked[i] = ld_relaxed_gpu(masked_at(p, r));
    excluded_too[i] = ld_relaxed_gpu((also_excluded ? also_excluded : masked_at(p, 0)) + r);
  }
  const u32 sent = progress->sent + 1, received = progress->received + 1, tickets_before = progress->tickets_before;
  const bool is_replayed_too_early = p.phases == (kLlSend | kLlReceive) && sent != received;  // while a hook is open
  bool failed = was_aborted(p) || is_replayed_too_early;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int r = 32 * i + lane_idx();
    if (blockIdx.x == 0 && r < kNumRanks && !(masked[i] | excluded_too[i])) {
      // Earlier kernels have ended, and with them their reads of rows and their stores of kEmptySentinel: no fence. The peer stores its
      // next rows after it has branched on this word. PTX's memory model gives no order to a relaxed load, a branch and a store; GPUs keep
      // it, since they never store before a branch is decided. To the letter, this were a release, and an acquire where the peer waits.
      const u64 mine = acks + p.rank * sizeof(u64);
      if (is_scale_out(p, r)) {
        signal(p, r, mine, received - 1);
      } else {
        st_relaxed_sys(at<u64>(p.peers[r], mine), received - 1);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {  // all are told before anybody is waited for
    const int r = 32 * i + lane_idx();
    if (r >= kNumRanks) continue;
    bool excluded = (masked[i] | excluded_too[i]) != 0;
    // An acknowledgement guards nothing that is read here, only what is written: relaxed loads will do.
    const bool has_room = !(p.phases & kLlSend) || excluded || has_reached(static_cast<u32>(held[i]), sent - kRingDepth);
    if (!has_room && !wait_count(p, theirs + r, sent - kRingDepth, phase, r)) (kMasksOnTimeout ? excluded : failed) = true;
    call.excluded[r] = excluded;
  }
  failed = __any_sync(~0u, failed);
  if (failed && is_replayed_too_early && blockIdx.x == 0 && lane_idx() == 0) raise_abort(p, kLlOpenHook, p.rank, sent, received);
  if (lane_idx() == 0) call.sent = sent, call.received = received, call.tickets_before = tickets_before, call.failed = failed;
}

// One warp; in lanes where `differs`, a source that gave something else than this rank. What this rank would make of its rows is not what
// it meant, and they are on their way already: the Buffer is broken. Some other rank differs from each, so all find that out.
__device__ inline void abort_on_difference(const Params& p, u32 phase, u32 epoch, bool differs, int source, u32 theirs, u32 my_serial = 0,
                                           u32 their_serial = 0) {
  if (lane_idx() != __ffs(__ballot_sync(~0u, differs)) - 1) return;
  report_difference(p, source, p.call_signature, theirs, my_serial, their_serial);
  raise_abort(p, phase, source, epoch, epoch);
}

// One thread of each block, after all of the block has read `progress`. The last one has the next kernel's numbers written; `takes`: how
// often this kernel takes from progress->taken in all. (Numbers only grow: nothing has to be reset when the kernel ends.)
__device__ inline void advance(const Params& p, LlProgress* progress, const Call& call, u32 num_tickets) {
  if (add_acq_rel_gpu(&progress->starts, 1) != gridDim.x - 1) return;
  progress->starts = 0;
  if (p.phases & kLlSend) progress->sent = call.sent, progress->tickets_before = call.tickets_before + num_tickets;
  if (p.phases & kLlReceive) progress->received = call.received;
}

// Warps that share an item: some of a block, or all of several blocks. An SM issues few instructions at a time: a row is through soonest
// where several SMs have a little of it.
struct WarpGroup {
  int log2_blocks, log2_warps;  // blocks, and warps of each
  int idx, per_block;           // of the group among those of its block

  __device__ __forceinline__ explicit WarpGroup(int log2_all_warps)
      : log2_blocks(max(log2_all_warps - kLog2Warps, 0)),
        log2_warps(log2_all_warps - log2_blocks),
        idx(warp_idx() >> log2_warps),
        per_block(kWarps >> log2_warps) {}

  __device__ __forceinline__ int num_threads() const { return 32 << (log2_blocks + log2_warps); }

  // Neighbours are of different blocks, so that all have as much to do where there is less to do than there are threads.
  __device__ __forceinline__ int thread(int block) const {
    const int warp = warp_idx() & ((1 << log2_warps) - 1);
    return (warp << log2_blocks | block) * 32 + lane_idx();
  }

  // The first thread of the group in this block.
  __device__ __forceinline__ bool is_leader() const { return (threadIdx.x & ((32 << log2_warps) - 1)) == 0; }

  // Where blocks are bound to groups: this one's place in its group, the first item of the group, and how far it is to its next one. Right
  // only for as many items as log2_warps_per_item was given: blocks past the last whole group would come a second time to somebody's item.
  __device__ __forceinline__ int block() const { return blockIdx.x & ((1 << log2_blocks) - 1); }
  __device__ __forceinline__ int first() const { return (blockIdx.x >> log2_blocks) + idx * (gridDim.x >> log2_blocks); }
  __device__ __forceinline__ int step() const { return per_block * (gridDim.x >> log2_blocks); }

  // All warps of the group that are of this block.
  __device__ __forceinline__ void sync() const {
    __syncwarp();
    if (log2_warps > 0) asm volatile("bar.sync %0, %1;" ::"r"(1 + idx), "r"(32 << log2_warps) : "memory");
  }

  // The same; whether all threads say yes.
  __device__ __forceinline__ bool all(bool yes) const {
    yes = __all_sync(~0u, yes);  // barriers want whole warps
    if (log2_warps == 0) return yes;
    u32 result;
    asm volatile("{\n .reg .pred p, q;\n setp.ne.u32 p, %3, 0;\n bar.red.and.pred q, %1, %2, p;\n selp.u32 %0, 1, 0, q;\n}"
                 : "=r"(result)
                 : "r"(1 + idx), "r"(32 << log2_warps), "r"(static_cast<u32>(yes))
                 : "memory");
    return result;
  }
};

// Of how many warps groups are, as a logarithm, when all of so many items are worked on at once. Nothing is divided by what is not
// constant: that takes a while.
__device__ __forceinline__ int log2_warps_per_item(int num_items, int most) {
  const int num_warps = kWarps * gridDim.x, items = max(num_items, 1);
  const int log2 = max(__clz(items) - __clz(num_warps), 0);
  return min(max(log2 - (items << log2 > num_warps), 0), most);
}

// Where time-outs mask, or rows are staged to be put, groups have to meet at barriers.
constexpr int kMaxLog2WarpsPerItem = kMasksOnTimeout || kHasScaleOut ? kLog2Warps : kLog2Warps + 2;

// In each lane that has the first of its token's choices of a rank, that rank; otherwise -1. `expert`: in lane k, the choice k, or -1.
__device__ __forceinline__ int first_choice_of(int expert, const bool* excluded) {
  const int rank = expert >= 0 ? expert / kNumLocalExperts : -1;
  const bool is_first = __ffs(__match_any_sync(~0u, rank)) - 1 == lane_idx();
  return is_first && rank >= 0 && !excluded[rank] ? rank : -1;
}
