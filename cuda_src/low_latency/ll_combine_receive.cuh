// The receive half of the low-latency combines. ll_combine.cuh describes the protocol.
#pragma once
#include "low_latency/ll_combine_offsets.cuh"

// Called by one warp. False: the wait timed out, or a rank differs.
__device__ inline bool compare_headers(const Params& p, const Call& call, u32 dispatch_epoch) {
  bool ok = true;
  for (int first = 0; first < kNumRanks; first += 32) {
    const int rank = first + lane_idx();
    u64 call_signature = 0, theirs = 0;
    bool differs = false;
    if (rank < kNumRanks && !call.excluded[rank]) {
      const LlCombineHeader* header = at<const LlCombineHeader>(inbox_base(p, rank), header_offset(call.received, rank));
      const bool arrived = wait_word(p, &header->call_signature, call.received, kPhaseLlCombineRows, rank, call_signature) &&
                           wait_word(p, &header->dispatch_epoch, call.received, kPhaseLlCombineRows, rank, theirs);
      differs = arrived && (call_signature >> 32 != p.call_signature || theirs >> 32 != dispatch_epoch);
      ok &= !differs && (arrived || kMasksOnTimeout);
    }
    abort_on_difference(p, kPhaseLlCombineRows, call.received, differs, rank, call_signature >> 32, dispatch_epoch, theirs >> 32);
  }
  return __all_sync(~0u, ok);
}

// A lane's data of the token's choice `lane`. The constructor starts the loads early, and the first use waits for them. The handle
// keeps the choices that the dispatch got. Their rows arrive, and the kernel must read them. The choices that combine gets can leave some
// of these rows out of the sum.
struct Choice {
  int expert = -1;            // as dispatch got it; -1 for none
  u32 low = ~0u, high = ~0u;  // the expert's number, as combine gets it

  __device__ __forceinline__ Choice(const Params& p, int token) {
    if (token >= p.num_tokens || lane_idx() >= kNumTopk) return;
    const i64 i = static_cast<i64>(token) * kNumTopk + lane_idx();
    const u32* words = at<const u32>(p.topk_idx, 0) + i * (p.idx_bytes / 4);
    expert = at<const short>(p.handle, kLlHandleChoices)[i];
    low = words[0], high = p.idx_bytes == 8 ? words[1] : 0;
  }

  // Whether combine gets a number other than -1 here. The expert may not exist.
  __device__ __forceinline__ bool is_named() const { return low != ~0u; }

  // The expert that combine gets: -1 for none, kNumExperts for one that does not exist.
  __device__ __forceinline__ int named() const {
    if (!is_named()) return -1;
    return high == 0 && low < kNumExperts ? static_cast<int>(low) : kNumExperts;
  }
};

// Whether the sum includes the row of choice `lane`. With p.reduce_early one row stands for all of a token's choices on a rank. The sum
// omits it if combine names none of these choices. Any other difference from the dispatch is reported, and the sum stays as it is.
__device__ __forceinline__ bool is_added(const Params& p, const Call& call, int token, const Choice& choice, bool reports) {
  const int rank = choice.expert >= 0 ? choice.expert / kNumLocalExperts : -1;
  const u32 same_row = p.reduce_early ? __match_any_sync(~0u, rank) : 1u << lane_idx();
  const bool added = __ballot_sync(~0u, choice.is_named()) & same_row;
  const int named = choice.named();
  bool differs = named != choice.expert && (choice.is_named() || added);
  if (choice.expert < 0) differs = named >= 0 && named < kNumExperts;  // the dispatch has reported and skipped experts that do not exist
  if (rank >= 0 && call.excluded[rank]) differs = false;               // no row arrives from there
  if (reports && differs) {
    const u64 choice_idx = static_cast<u64>(token) * kNumTopk + lane_idx();
    report_event(p, &Report::other_choice,
                 1ull << 63 | choice_idx << 32 | static_cast<u64>(named + 1) << 16 | static_cast<u64>(choice.expert + 1));
  }
  return added;
}

// The rows of a token, in the order of the sum.
struct Rows {
  int count;
  u64 row;       // in lane j: the address of row j,
  int sender;    // its sender,
  float weight;  // its weight,
  bool arrived;  // and whether its signal or, where time-outs mask, its first word arrived in time
  u32 added;     // a bit for each row in the sum; the kernel reads and clears the other rows too

  // Called by one warp. `ok`: whether all awaited words arrived. `reports`: whether it reports choices that differ from those of the
  // dispatch.
  __device__ inline Rows(const Params& p, const Call& call, int token, const Choice& choice, bool reports, bool& ok) {
    const int lane = lane_idx(), expert = choice.expert;
    u64 mine = p.peers[p.rank];
    int rank = first_choice_of(expert, call.excluded), key = rank;  // rows are added in the order of their keys
    if (!p.reduce_early) {
      rank = expert >= 0 && !call.excluded[expert / kNumLocalExperts] ? expert / kNumLocalExperts : -1;
      key = rank >= 0 ? lane : -1;
    }
    if constexpr (kHasScaleOut) mine = inbox_base(p, rank);
    int position = 0, from = 0;
    for (int k = 0; k < kNumTopk; ++k) {
      const int other = __shfl_sync(~0u, key, k);
      position += other >= 0 && other < key;
    }
    for (int k = 0; k < kNumTopk; ++k) {
      if (__shfl_sync(~0u, key >= 0 ? position : -1, k) == lane) from = k;
    }
    count = __popc(__ballot_sync(~0u, key >= 0));
    const float mine_weight =
        !p.reduce_early && key >= 0 ? at<const float>(p.topk_weights, 0)[static_cast<i64>(token) * kNumTopk + lane] : 1.f;
    const u64 own_row = mine + row_offset(call.received, max(key, 0), token);
    row = __shfl_sync(~0u, own_row, from);
    sender = __shfl_sync(~0u, rank, from);
    weight = __shfl_sync(~0u, mine_weight, from);
    added = ~0u;
    if (!__all_sync(~0u, choice.named() == expert)) {  // rare
      added = __ballot_sync(~0u, __shfl_sync(~0u, is_added(p, call, token, choice, reports), from));
    }
    // Waits at once for the signals of scale-out rows and, where time-outs mask, for the first words of scale-up rows. One after another,
    // the waits for a slow sender and for a dead one would add up. Ranks that wait for this rank, but not for those two, might then mask
    // it.
    ok = true;
    const bool scale_out = is_scale_out(p, rank);
    if (key >= 0 && (kMasksOnTimeout || scale_out)) {
      const u64 mark = scale_out ? mine + flag_offset(call.received, key, token) : own_row;
      ok = wait_until(p, call.received, kPhaseLlCombineRows, rank, [&](u32& seen) {
        seen = static_cast<u32>(kHasScaleOut ? ld_acquire_sys(at<const u64>(mark, 0)) : ld_relaxed_sys(at<const u64>(mark, 0)));
        return scale_out ? seen == call.received : seen != kEmptySentinel;
      });
    }
    const u32 in_time = __ballot_sync(~0u, ok);
    __syncwarp();  // all lanes may read what one lane has acquired
    arrived = in_time >> from & 1;
    ok = in_time == ~0u;
  }
};

// Removes the rows that did not arrive whole.
__device__ inline void drop_incomplete_rows(const Params& p, u32 epoch, const WarpGroup& group, Rows& rows) {
  constexpr int kAtOnce = kNumTopk < 4 ? kNumTopk : 4;
  const int lane = lane_idx();
  auto await = [&](const Vec16* vec, int sender) {
    return wait_until(p, epoch, kPhaseLlCombineRows, sender, [&](u32&) { return is_written(ld_relaxed_sys(vec)); });
  };
  u32 lost = ~__ballot_sync(~0u, lane >= rows.count || rows.arrived);
  for (int i = group.thread(0); i - lane < kSentVecs; i += group.num_threads()) {
    u32 late = 0;
    for (int first = 0; first < rows.count; first += kAtOnce) {
      Vec16 held[kAtOnce];
      auto exists = [&](int j) { return i < kSentVecs && first + j < rows.count; };
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const u64 row = __shfl_sync(~0u, rows.row, first + j);
        if (exists(j)) held[j] = ld_relaxed_sys(at<const Vec16>(row, 0) + i);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) late |= (exists(j) && !is_written(held[j]) ? 1u : 0) << (first + j);
    }
    late &= ~lost;
    for (u32 left = __reduce_or_sync(~0u, late); left; left &= left - 1) {
      const int j = __ffs(left) - 1, sender = __shfl_sync(~0u, rows.sender, j);
      const u64 row = __shfl_sync(~0u, rows.row, j);
      if (late >> j & 1 && !await(at<const Vec16>(row, 0) + i, sender)) lost |= 1u << j;
    }
  }
  if (group.all(lost == 0)) return;
  int kept = 0;
  u32 added = 0;
  for (int j = 0; j < rows.count; ++j) {
    const u64 row = __shfl_sync(~0u, rows.row, j);
    const int sender = __shfl_sync(~0u, rows.sender, j);
    const float weight = __shfl_sync(~0u, rows.weight, j);
    if (!group.all(!(lost >> j & 1))) continue;
    if (lane == kept) rows.row = row, rows.sender = sender, rows.weight = weight;
    added |= (rows.added >> j & 1) << kept++;
  }
  rows.count = kept, rows.added = added;
}

// Eight channels of a row, as a thread reads them. The other form of a share is CompressedShare.
struct PlainShare {
  static constexpr int kPerRow = kRowVecs, kChannels = 8,
                       kMaxAtOnce = kMasksOnTimeout ? 3 - kHasStatistics : 8;  // more would spill registers
  static constexpr int kMaxColumns = 2;
  using Place = Vec16*;
  Vec16 held = {};

  __device__ static __forceinline__ Place place(u64 row, int i) { return at<Vec16>(row, 0) + i; }
  __device__ __forceinline__ void load(bool wanted, Place from) { ld_relaxed_sys_if(wanted, held, from); }
  __device__ __forceinline__ bool has_arrived() const { return is_written(held); }
  __device__ __forceinline__ void complete() const {}
  __device__ __forceinline__ void clear(Place from) const { st_vec(from, empty_vec()); }
  __device__ __forceinline__ void add_to(float (&sum)[kChannels], float weight) const { add_scaled_to<kBfloat16>(sum, held, weight); }
  __device__ static __forceinline__ void store(Vec16* out, int i, const float (&sum)[kChannels]) {
    st_vec(out + i, rounded<kBfloat16>(sum));
  }
};

// Computes one warp's part of a token, in kColumns columns of each thread at once. False: the wait timed out. `all_poll`: every thread that
// misses a share polls it, instead of one thread of the warp.
template <class Share, int kAtOnce, int kColumns>
__device__ __forceinline__ bool receive_columns(const Params& p, const Call& call, const WarpGroup& group, int token, const Rows& rows,
                                                bool all_poll) {
  constexpr int kShares = kAtOnce * kColumns;
  Vec16* out = at<Vec16>(p.out, 0) + static_cast<u64>(token) * kRowVecs;
  const int step = group.num_threads();
  bool ok = true;
  for (int i = group.thread(group.block()); i - lane_idx() < Share::kPerRow; i += kColumns * step) {
    float sum[kColumns][Share::kChannels] = {};
    for (int first = 0; first < rows.count; first += kAtOnce) {
      // Share j is that of row first + j / kColumns in column i + j % kColumns * step.
      auto exists = [&](int j) { return i + j % kColumns * step < Share::kPerRow && first + j / kColumns < rows.count; };
      typename Share::Place from[kShares];
      Share shares[kShares];
      float weights[kAtOnce];
      u32 left = 0;  // shares that this thread misses
#pragma unroll
      for (int j = 0; j < kShares; ++j) {
        from[j] = Share::place(__shfl_sync(~0u, rows.row, first + j / kColumns), i + j % kColumns * step);
        left |= (exists(j) ? 1u : 0) << j;
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) weights[j] = __shfl_sync(~0u, rows.weight, first + j);
      // Loads shares together, so that a round trip to memory serves all of them. Their registers keep what a poll finds.
      auto load = [&](u32 which) {
#pragma unroll
        for (int j = 0; j < kShares; ++j) shares[j].load(which >> j & 1, from[j]);
#pragma unroll
        for (int j = 0; j < kShares; ++j) left &= ~((shares[j].has_arrived() ? 1u : 0) << j);
      };
      load(left);
      for (u32 round = 0; __any_sync(~0u, left) && ok; ++round) {
        if (all_poll || round > 0) {
          const u32 late = __ffs(__reduce_or_sync(~0u, left)) - 1, late_row = ((1u << kColumns) - 1) << late / kColumns * kColumns;
          const int sender = __shfl_sync(~0u, rows.sender, first + late / kColumns);
          if (all_poll ? left & late_row : lane_idx() == 31 - __clz(__ballot_sync(~0u, left & late_row))) {
            u32 polled = ~0u;  // with many rows, first all missing shares, and then only those of the late row
            ok &= wait_until(p, call.received, kPhaseLlCombineRows, sender, [&](u32&) {
              load(left & polled);
              if constexpr (kShares > 4) polled = late_row;
              return !(left & late_row);
            });
          }
          ok = __all_sync(~0u, ok);
        }
        if (!all_poll) load(left);
      }
#pragma unroll
      for (int j = 0; j < kShares; ++j) {
        shares[j].complete();
        if (!exists(j)) continue;
        shares[j].clear(from[j]);
        if (rows.added >> (first + j / kColumns) & 1) shares[j].add_to(sum[j % kColumns], weights[j / kColumns]);
      }
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      if (i + c * step < Share::kPerRow) Share::store(out, i + c * step, sum[c]);
    }
  }
  return kMasksOnTimeout || __all_sync(~0u, ok);
}

// Computes one warp's part of a token. False: the wait timed out.
template <class Share>
__device__ inline bool receive_token(const Params& p, const Call& call, const WarpGroup& group, int token, const Choice& choice) {
  constexpr int kMostRows = kNumRanks < kNumTopk ? kNumRanks : kNumTopk;  // with p.reduce_early
  constexpr int kAtOnce = kMostRows < Share::kMaxAtOnce ? kMostRows : Share::kMaxAtOnce;
  // A second column at once saves a round trip to memory. More rows leave no registers for it, and neither do masks.
  constexpr int kColumns = !kMasksOnTimeout && kAtOnce <= 2 ? Share::kMaxColumns : 1;
  bool ok;
  Rows rows(p, call, token, choice, group.thread(group.block()) < 32, ok);
  if (!ok && !kMasksOnTimeout) return false;
  if constexpr (kMasksOnTimeout) drop_incomplete_rows(p, call.received, group, rows);
  if (group.thread(group.block()) == 0) count_received(p, rows.count, kSentRowBytes);
  // With few tokens, a thread has one column, and what it polls is what it needs. With many, polls by all threads would delay other warps.
  const bool all_poll = group.num_threads() >= Share::kPerRow;
  if (kColumns == 1 || all_poll) return receive_columns<Share, kAtOnce, 1>(p, call, group, token, rows, all_poll);
  return receive_columns<Share, kAtOnce, kColumns>(p, call, group, token, rows, false);
}
