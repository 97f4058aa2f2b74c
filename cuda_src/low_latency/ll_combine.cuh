// What the low-latency combines share: ll_combine, and ll_combine_large for calls of many tokens. They differ in how they share the sending
// among warps; a rank takes the one for its own number of tokens, whatever the others take.
//
// Sending. What arrived in ll_dispatch is sent back entry by entry: the outputs of this rank's experts for the token, times their weights,
// are added up and written as one bfloat16 row to the token's rank. Unless the weights came with the dispatch, block 0 of every rank first
// sends its tokens' weights around.
//
// ReceiveContext. A group of warps shares a token. Each thread adds up some columns of the token's rows as they come, in float32: in rank
// order (p.reduce_early), or in the order of the choices, times their weights. Every sum starts at zero and every product is rounded before
// it is added: the result is the same in each run, and on the host backend.
//
// A rank that the dispatch left out is left out here too: whoever was masked then has no rows of the other.
// Words, rows, sides, masked ranks: low_latency.cuh. Counters only grow; the last block to have read them moves them on. Weights of a side
// are read by the sending part, which comes before the receiving part and its acknowledgement.
// No block waits for a certain other one of its grid, but for block 0, which starts first: entries are taken by whoever runs. Each item
// that there is is followed by one more take, also where nothing is sent for it: the next call counts on their number. Where time-outs
// mask, a group first waits for whole rows, so that it adds up all of a row or nothing.
//
// Bytes: each entry's rows read once, one row over the link for each entry, rows of a token read and cleared once.
#pragma once
#include "low_latency/low_latency.cuh"

constexpr int kRowVecs = kHidden / 8;
constexpr int kTileVecs = kLlTileBytes / sizeof(Vec16),
              kMaxVecsPerThread = kTileVecs / 32;  // kMaxVecsPerThread: vectors of a thread at once
constexpr int kRowsOfToken = kNumRanks > kNumTopk ? kNumRanks : kNumTopk;

__device__ __forceinline__ LlProgress* progress_of(const Params& p) { return at<LlProgress>(p.state, kLocalLlCombine); }

// `which`: the sending rank, or the choice.
__device__ __forceinline__ u64 row_index(u32 epoch, int which, int token) {
  return (static_cast<u64>(epoch % kRingDepth) * kRowsOfToken + which) * kNumMaxTokens + token;
}

__device__ __forceinline__ u64 row_offset(u32 epoch, int which, int token) {
  return kLlRows + row_index(epoch, which, token) * sizeof(Vec16) * kRowVecs;
}

__device__ __forceinline__ u64 flag_offset(u32 epoch, int which, int token) {
  return kLlRowFlags + row_index(epoch, which, token) * sizeof(u64);
}

__device__ __forceinline__ u64 weights_offset(u32 epoch, int source) {
  return kLlWeights + ring_slot(epoch, source) * kNumMaxTokens * kNumTopk * sizeof(u64);
}

__device__ __forceinline__ u64 weight_flag_offset(u32 epoch, int source) { return kLlWeightFlags + ring_slot(epoch, source) * sizeof(u64); }

__device__ __forceinline__ u64 staged_offset(u32 epoch, int entry) {
  return kLlStagedRows + (static_cast<u64>(epoch % kRingDepth) * kNumRanks * kNumMaxTokens + entry) * sizeof(Vec16) * kRowVecs;
}

__device__ __forceinline__ u64 header_offset(u32 epoch, int sender) {
  return kLlCombineHeaders + ring_slot(epoch, sender) * sizeof(LlCombineHeader);
}

// One warp. Sums would be wrong, or never come, if ranks combined the results of different dispatches, or sent different rows.
__device__ inline void send_headers(const Params& p, const Call& call, u32 dispatch_epoch) {
  const u64 header = header_offset(call.sent, p.rank);
  auto send = [&](int rank, u64 to, u32 value) {
    const u64 word = tagged_word(value, call.sent);
    if (is_scale_out(p, rank)) {
      signal(p, rank, to, word);
    } else {
      st_relaxed_sys(at<u64>(p.peers[rank], to), word);
    }
  };
  for (int r = lane_idx(); r < kNumRanks; r += 32) {
    if (call.excluded[r]) continue;
    send(r, header, p.call_signature);
    send(r, header + sizeof(u64), dispatch_epoch);
  }
}

// One warp. False: the time is up, or a rank differs.
__device__ inline bool compare_headers(const Params& p, const Call& call, u32 dispatch_epoch) {
  bool ok = true;
  for (int first = 0; first < kNumRanks; first += 32) {
    const int rank = first + lane_idx();
    u64 call_signature = 0, theirs = 0;
    bool differs = false;
    if (rank < kNumRanks && !call.excluded[rank]) {
      const LlCombineHeader* header = at<const LlCombineHeader>(p.peers[p.rank], header_offset(call.received, rank));
      const bool arrived = wait_word(p, &header->call_signature, call.received, kPhaseLlCombineRows, rank, call_signature) &&
                           wait_word(p, &header->dispatch_epoch, call.received, kPhaseLlCombineRows, rank, theirs);
      differs = arrived && (call_signature >> 32 != p.call_signature || theirs >> 32 != dispatch_epoch);
      ok &= !differs && (arrived || kMasksOnTimeout);
    }
    abort_on_difference(p, kPhaseLlCombineRows, call.received, differs, rank, call_signature >> 32, dispatch_epoch, theirs >> 32);
  }
  return __all_sync(~0u, ok);
}

// All of block 0.
__device__ inline void send_weights(const Params& p, const Call& call) {
  const u32 epoch = call.sent;
  const u64 there = weights_offset(epoch, p.rank);
  const u64 staged = kLlStagedWeights + static_cast<u64>(epoch % kRingDepth) * kNumMaxTokens * kNumTopk * sizeof(u64);
  for (int i = threadIdx.x; i < p.num_tokens * kNumTopk; i += kLlThreads) {
    const u64 word = tagged_word(__float_as_uint(at<const float>(p.topk_weights, 0)[i]), epoch);
    for (int r = 0; r < kNumRanks; ++r) {
      if (!call.excluded[r] && !is_scale_out(p, r)) st_relaxed_sys(at<u64>(p.peers[r], there) + i, word);
    }
    if (kHasScaleOut) at<u64>(p.peers[p.rank], staged)[i] = word;
  }
  if (!kHasScaleOut || p.num_tokens == 0) return;
  __syncthreads();
  for (int r = warp_idx(); r < kNumRanks; r += kWarps) {
    const u64 num_bytes = static_cast<u64>(p.num_tokens) * kNumTopk * sizeof(u64);
    if (!call.excluded[r] && is_scale_out(p, r)) put(p, r, there, staged, num_bytes, weight_flag_offset(epoch, p.rank), epoch);
  }
}

// One warp; in lane k the weight of the token's choice k, which did not come with the row. `ok`: whether it came.
__device__ inline float late_weight(const Params& p, u32 epoch, int source, int token, bool& ok) {
  const int lane = lane_idx();
  if (lane >= kNumTopk) return 0.f;
  const u64 mine = p.peers[p.rank];
  u64 word = 0;
  if (is_scale_out(p, source)) ok = wait_epoch(p, at<const u64>(mine, weight_flag_offset(epoch, source)), epoch, kPhaseLlWeights, source);
  const u64* words = at<const u64>(mine, weights_offset(epoch, source)) + token * kNumTopk;
  ok = ok && wait_word(p, words + lane, epoch, kPhaseLlWeights, source, word);
  return __uint_as_float(word >> 32);
}

// Adds up some rows, each times its weight, in the order of the bits of `which`. from(i): row i; `weight`: in lane i, its weight. Called by
// whole warps, for the columns from `first` on and before `end` that are `apart` from each other; a thread has kVecsPerThread of them at a
// time, and loads those of kRows rows at once. write(i, v): vector i of the sum.
template <int kVecsPerThread, int kRows, class From, class Write>
__device__ __forceinline__ void reduce(int first, int stride, int end, u32 which, float weight, From from, Write write) {
  for (; first - lane_idx() < end; first += kVecsPerThread * stride) {
    auto exists = [&](int j) { return first + j * stride < end; };
    float sum[kVecsPerThread][8] = {};
    u32 left = which;
    while (left) {
      Vec16 held[kRows][kVecsPerThread];
      float w[kRows];
      bool has[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r, left &= left - 1) {
        has[r] = left;
        const int i = left ? __ffs(left) - 1 : 0;
        const Vec16* row = from(i);
        w[r] = __shfl_sync(~0u, weight, i);
#pragma unroll
        for (int j = 0; j < kVecsPerThread; ++j) {
          if (has[r] && exists(j)) held[r][j] = ld_streaming(row + first + j * stride);
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int j = 0; j < kVecsPerThread; ++j) {
          if (has[r] && exists(j)) add_scaled_to<kBfloat16>(sum[j], held[r][j], w[r]);
        }
      }
    }
#pragma unroll
    for (int j = 0; j < kVecsPerThread; ++j) {
      if (exists(j)) write(first + j * stride, rounded<kBfloat16>(sum[j]));
    }
  }
}

// An entry of the handle, as a warp sees it: a token that came, from whom, and in lane k the row of its choice k here, and its weight.
struct Entry {
  int source, token, row;
  float weight;

  __device__ __forceinline__ Entry(const Params& p, int idx) {
    const LlEntry* entry = at<const LlEntry>(p.handle, kLlHandleEntries) + idx;
    const int lane = lane_idx();
    source = entry->source, token = entry->token;
    row = lane < kNumTopk ? entry->row[lane] : kLlElsewhere;
    weight = lane < kNumTopk ? entry->weight[lane] : 0.f;
  }

  // Makes sure of the weight. False: it did not come in time.
  __device__ __forceinline__ bool await_weight(const Params& p, u32 epoch) {
    bool ok = true;
    if (!p.has_weights) weight = late_weight(p, epoch, source, token, ok);
    return ok;
  }

  // One warp's part of the rows' sum.
  template <int kVecsPerThread, int kRows, class Write>
  __device__ __forceinline__ void reduce(const Params& p, int first, int stride, int end, Write write) const {
    auto from = [&](int k) { return at<const Vec16>(p.y, 0) + static_cast<u64>(__shfl_sync(~0u, row, k)) * kRowVecs; };
    ::reduce<kVecsPerThread, kRows>(first, stride, end, __ballot_sync(~0u, row >= 0), weight, from, write);
  }
};

// Entries lie by the rank they go back to. Where they are many, they are taken for each rank in turn, and ranks begin with different ones:
// otherwise all ranks would send to the same one at a time. Nothing is known of how many each rank has; past the last entry there is none.
__device__ __forceinline__ int per_rank(int num_entries) { return (num_entries + kNumRanks - 1) / kNumRanks; }

__device__ __forceinline__ int entry_at(int turn, int rank, int num_entries) {
  return (turn + rank) % kNumRanks * per_rank(num_entries) + turn / kNumRanks;
}

// What a lane knows of a token's choice `lane`. It is loaded before it is needed; whatever is asked of it waits for it. Rows come, and have
// to be read, for what the dispatch was given: the handle has kept that. What combine is given may leave some of them out of the sum.
struct Choice {
  int expert = -1;            // as the dispatch was given it; -1 for none
  u32 low = ~0u, high = ~0u;  // of the expert's number, as combine is given it

  __device__ __forceinline__ Choice(const Params& p, int token) {
    if (token >= p.num_tokens || lane_idx() >= kNumTopk) return;
    const i64 i = static_cast<i64>(token) * kNumTopk + lane_idx();
    const u32* words = at<const u32>(p.topk_idx, 0) + i * (p.idx_bytes / 4);
    expert = at<const short>(p.handle, kLlHandleChoices)[i];
    low = words[0], high = p.idx_bytes == 8 ? words[1] : 0;
  }

  // Whether combine names an expert here, existing or not.
  __device__ __forceinline__ bool is_named() const { return low != ~0u; }

  // The expert that combine names: -1 for none, kNumExperts for one that does not exist.
  __device__ __forceinline__ int named() const {
    if (!is_named()) return -1;
    return high == 0 && low < kNumExperts ? static_cast<int>(low) : kNumExperts;
  }
};

// Whether the row of choice `lane` counts in the sum. One row stands for all of a token's choices of a rank where that rank adds them up
// (p.reduce_early): it is left out if combine names none of them. Whatever else differs from the dispatch is reported, and changes nothing.
__device__ __forceinline__ bool is_added(const Params& p, const Call& call, int token, const Choice& choice, bool reports) {
  const int rank = choice.expert >= 0 ? choice.expert / kNumLocalExperts : -1;
  const u32 same_row = p.reduce_early ? __match_any_sync(~0u, rank) : 1u << lane_idx();
  const bool added = __ballot_sync(~0u, choice.is_named()) & same_row;
  const int named = choice.named();
  bool differs = named != choice.expert && (choice.is_named() || added);
  if (choice.expert < 0) differs = named >= 0 && named < kNumExperts;  // the dispatch has reported, and skipped, what does not exist
  if (rank >= 0 && call.excluded[rank]) differs = false;               // nothing comes from there
  if (reports && differs) {
    const u64 choice_idx = static_cast<u64>(token) * kNumTopk + lane_idx();
    report_event(p, &Report::other_choice,
                 1ull << 63 | choice_idx << 32 | static_cast<u64>(named + 1) << 16 | static_cast<u64>(choice.expert + 1));
  }
  return added;
}

// The rows of a token, in the order in which they are added up.
struct Rows {
  int count;
  u64 row;       // in lane j: of row j, the address,
  int sender;    // the rank that sends it,
  float weight;  // its weight,
  bool arrived;  // and whether its signal or, where time-outs mask, its beginning came in time
  u32 added;     // a bit for each row that counts; the others are read, and cleared, all the same

  // One warp. `ok`: whether all that it waited for came. `reports`: whether it tells of choices that differ from those of the dispatch.
  __device__ inline Rows(const Params& p, const Call& call, int token, const Choice& choice, bool reports, bool& ok) {
    const int lane = lane_idx(), expert = choice.expert;
    const u64 mine = p.peers[p.rank];
    int rank = first_choice_of(expert, call.excluded), key = rank;  // rows are added up in the order of their keys
    if (!p.reduce_early) {
      rank = expert >= 0 && !call.excluded[expert / kNumLocalExperts] ? expert / kNumLocalExperts : -1;
      key = rank >= 0 ? lane : -1;
    }
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
    if (!__all_sync(~0u, choice.named() == expert)) {  // rarely
      added = __ballot_sync(~0u, __shfl_sync(~0u, is_added(p, call, token, choice, reports), from));
    }
    // Signals of far rows, and where time-outs mask also beginnings of near ones, are waited for at once: one after another, a slow sender
    // and a dead one would take the time of both, and ranks that wait for this one meanwhile, but not for those, might take it for dead.
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
    __syncwarp();  // all lanes may read what one has acquired
    arrived = in_time >> from & 1;
    ok = in_time == ~0u;
  }
};

// Leaves only rows that have come whole.
__device__ inline void drop_incomplete_rows(const Params& p, u32 epoch, const WarpGroup& group, Rows& rows) {
  constexpr int kAtOnce = kNumTopk < 4 ? kNumTopk : 4;
  const int lane = lane_idx();
  auto await = [&](const Vec16* vec, int sender) {
    return wait_until(p, epoch, kPhaseLlCombineRows, sender, [&](u32&) { return is_written(ld_relaxed_sys(vec)); });
  };
  u32 lost = ~__ballot_sync(~0u, lane >= rows.count || rows.arrived);
  for (int i = group.thread(0); i - lane < kRowVecs; i += group.num_threads()) {
    u32 late = 0;
    for (int first = 0; first < rows.count; first += kAtOnce) {
      Vec16 held[kAtOnce];
      auto exists = [&](int j) { return i < kRowVecs && first + j < rows.count; };
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

// One warp's part of a token. False: the time is up.
__device__ inline bool receive_token(const Params& p, const Call& call, const WarpGroup& group, int token, const Choice& choice) {
  constexpr int kMost = kMasksOnTimeout ? 4 : 8, kAtOnce = kNumTopk < kMost ? kNumTopk : kMost;  // more would spill
  bool ok;
  Rows rows(p, call, token, choice, group.thread(group.block()) < 32, ok);
  if (!ok && !kMasksOnTimeout) return false;
  if constexpr (kMasksOnTimeout) drop_incomplete_rows(p, call.received, group, rows);
  Vec16* out = at<Vec16>(p.out, 0) + static_cast<u64>(token) * kRowVecs;
  for (int i = group.thread(group.block()); i - lane_idx() < kRowVecs; i += group.num_threads()) {
    const bool exists = i < kRowVecs;
    float sum[8] = {};
    for (int first = 0; first < rows.count; first += kAtOnce) {
      Vec16* from[kAtOnce];
      Vec16 held[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        from[j] = at<Vec16>(__shfl_sync(~0u, rows.row, first + j), 0) + i;
        if (exists && first + j < rows.count) held[j] = ld_relaxed_sys(from[j]);
      }
      auto missing = [&] {
        u32 which = 0;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) which |= (exists && first + j < rows.count && !is_written(held[j]) ? 1u : 0) << j;
        return which;
      };
      // Rows that have not come are loaded again together: one round trip to memory for all of them, not for each. From the second time on,
      // one is waited for before: polling is cheap.
      for (u32 left, round = 0; __any_sync(~0u, left = missing()) && ok; ++round) {
        const int late = __ffs(__reduce_or_sync(~0u, left)) - 1;
        const int sender = __shfl_sync(~0u, rows.sender, first + late);
        const Vec16* row = at<Vec16>(__shfl_sync(~0u, rows.row, first + late), 0) + i;
        if (round > 0 && left >> late & 1) {
          ok &= wait_until(p, call.received, kPhaseLlCombineRows, sender, [&](u32&) { return is_written(ld_relaxed_sys(row)); });
        }
        ok = __all_sync(~0u, ok);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          if (left >> j & 1) held[j] = ld_relaxed_sys(from[j]);
        }
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const float weight = __shfl_sync(~0u, rows.weight, first + j);
        if (!exists || first + j >= rows.count) continue;
        st_vec(from[j], empty_vec());
        if (rows.added >> (first + j) & 1) add_scaled_to<kBfloat16>(sum, held[j], weight);
      }
    }
    if (exists) st_vec(out + i, rounded<kBfloat16>(sum));
  }
  return kMasksOnTimeout || __all_sync(~0u, ok);
}

// The whole call. Of each entry num_parts items are made, and taken by groups such as `senders`; send(call, item, num_items, num_entries)
// sends, beginning with the group's first item. kInterleaved: entries are found by entry_at.
template <bool kInterleaved, class Send>
__device__ __forceinline__ void combine(const Params& p, const WarpGroup& senders, int num_parts, Send send) {
  __shared__ Call call;
  __shared__ u32 first_item;
  const WarpGroup receivers(log2_warps_per_item(p.num_tokens, kMaxLog2WarpsPerItem));
  // Whatever does not depend on the call's numbers is loaded while they come.
  const bool claims = p.phases & kLlSend && threadIdx.x == 0;
  const u32 ticket = claims ? fetch_add_relaxed_gpu(&progress_of(p)->tickets, senders.per_block) : 0;
  Choice choice(p, receivers.first());
  const int num_entries = *at<const i32>(p.handle, kLlHandleNumEntries);
  const u32 dispatch_epoch = warp_idx() == kLastWarp ? *at<const u32>(p.handle, kLlHandleEpoch) : 0;  // it sends and compares headers
  if (warp_idx() == 0)
    acquire_credits(p, progress_of(p), kLlCombineAcks, kPhaseLlCombineRoom, at<const u32>(p.handle, kLlHandleExcluded), call);
  if (claims) first_item = ticket;
  __syncthreads();
  const u64 out_bytes = p.phases & kLlReceive ? static_cast<u64>(p.num_tokens) * kRowVecs * sizeof(Vec16) : 0;
  if (call.failed) {
    poison(p.out, out_bytes, blockIdx.x * kLlThreads + threadIdx.x, gridDim.x * kLlThreads);
    return;
  }
  const int num_items = (kInterleaved ? per_rank(num_entries) * kNumRanks : num_entries) * num_parts;
  if (p.phases & kLlSend) {
    if (blockIdx.x == 0 && p.reduce_early && !p.has_weights) send_weights(p, call);
    send(call, static_cast<int>(first_item - call.tickets_before) + senders.idx, num_items, num_entries);
    if (blockIdx.x == 0 && warp_idx() == kLastWarp) send_headers(p, call, dispatch_epoch);  // rows are what others wait for
  }
  if (threadIdx.x == 32 * kLastWarp) advance(p, progress_of(p), call, num_items + senders.per_block * gridDim.x);
  if (!(p.phases & kLlReceive)) return;
  if constexpr (kMasksOnTimeout) __syncthreads();  // groups of another size are about to meet at the same barriers
  // The last block has no token where there are few.
  bool ok = blockIdx.x != gridDim.x - 1 || warp_idx() != kLastWarp || compare_headers(p, call, dispatch_epoch);
  for (int token = receivers.first(); ok && token < p.num_tokens; token += receivers.step()) {
    const Choice now = choice;
    choice = Choice(p, token + receivers.step());
    ok = receive_token(p, call, receivers, token, now);
  }
  if (!ok) poison(p.out, out_bytes, lane_idx(), 32);  // all of it: which tokens other warps leave out is not known here
}
