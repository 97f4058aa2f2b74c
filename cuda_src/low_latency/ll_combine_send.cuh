// The send half of the low-latency combines. ll_combine.cuh describes the protocol.
#pragma once
#include "low_latency/ll_combine_offsets.cuh"

// Called by one warp. If ranks combined the results of different dispatches or sent different kinds of rows, sums would be wrong or waits
// would not end. The headers detect this.
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

// Called by all threads of block 0. A scale-out rank gets weights only if it has a row of this rank. Otherwise it would not wait for them,
// and they could arrive after those of a later call.
__device__ inline void send_weights(const Params& p, const Call& call) {
  __shared__ bool has_row[kHasScaleOut ? kNumRanks : 1];
  if constexpr (kHasScaleOut) {
    for (int r = threadIdx.x; r < kNumRanks; r += kLlThreads) has_row[r] = false;
    __syncthreads();
  }
  const u32 epoch = call.sent;
  const u64 there = weights_offset(epoch, p.rank);
  const u64 staged = kLlStagedWeights + static_cast<u64>(epoch % kRingDepth) * kNumMaxTokens * kNumTopk * sizeof(u64);
  for (int i = threadIdx.x; i < p.num_tokens * kNumTopk; i += kLlThreads) {
    const u64 word = tagged_word(__float_as_uint(at<const float>(p.topk_weights, 0)[i]), epoch);
    for (int r = 0; r < kNumRanks; ++r) {
      if (!call.excluded[r] && !is_scale_out(p, r)) st_relaxed_sys(at<u64>(p.peers[r], there) + i, word);
    }
    if constexpr (kHasScaleOut) {
      at<u64>(network_base(p), staged)[i] = word;
      const int expert = at<const short>(p.handle, kLlHandleChoices)[i];
      if (expert >= 0) has_row[expert / kNumLocalExperts] = true;
    }
  }
  if (!kHasScaleOut || p.num_tokens == 0) return;
  __syncthreads();
  for (int r = warp_idx(); r < kNumRanks; r += kWarps) {
    const u64 num_bytes = static_cast<u64>(p.num_tokens) * kNumTopk * sizeof(u64);
    if (!call.excluded[r] && is_scale_out(p, r) && has_row[r])
      put(p, r, there, staged, num_bytes, weight_flag_offset(epoch, p.rank), epoch);
  }
}

// Called by one warp. In lane k, returns the weight of the token's choice k, which did not come with the row. `ok`: whether it arrived.
__device__ inline float late_weight(const Params& p, u32 epoch, int source, int token, bool& ok) {
  const int lane = lane_idx();
  if (lane >= kNumTopk) return 0.f;
  const u64 mine = inbox_base(p, source);
  u64 word = 0;
  if (is_scale_out(p, source)) ok = wait_epoch(p, at<const u64>(mine, weight_flag_offset(epoch, source)), epoch, kPhaseLlWeights, source);
  const u64* words = at<const u64>(mine, weights_offset(epoch, source)) + token * kNumTopk;
  ok = ok && wait_word(p, words + lane, epoch, kPhaseLlWeights, source, word);
  return __uint_as_float(word >> 32);
}

// Adds up rows, each times its weight, in the order of the bits of `which`. from(i) returns row i, and lane i holds its weight in `weight`.
// Whole warps call this. A thread computes the columns first, first + stride, ... before `end`. It computes kVecsPerThread columns at a
// time, and loads them of kRows rows at once. write(i, v) gets vector i of the sum.
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

// Like `reduce`, but for at most kRows rows, and one column at a time. As soon as a thread has added a vector, it starts to load the same
// row's vector of its next column. So it has loads in flight while it computes and writes.
template <int kRows, class From, class Write>
__device__ __forceinline__ void reduce_in_flight(int first, int stride, int end, u32 which, float weight, From from, Write write) {
  if (first - lane_idx() >= end) return;
  const int count = __popc(which);
  u64 rows[kRows];
  float w[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r, which &= which - 1) {
    const int i = which ? __ffs(which) - 1 : 0;
    rows[r] = reinterpret_cast<u64>(from(i)), w[r] = __shfl_sync(~0u, weight, i);
  }
  Vec16 held[kRows];
  // Lanes without a column load the last one.
  auto load = [&](int r, int column) { held[r] = ld_streaming(at<const Vec16>(rows[r], static_cast<u32>(min(column, end - 1)) * 16u)); };
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= count) break;
    load(r, first);
  }
  for (; first - lane_idx() + stride < end; first += stride) {
    float sum[8] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (r >= count) break;
      add_scaled_to<kBfloat16>(sum, held[r], w[r]);
      load(r, first + stride);
    }
    write(first, rounded<kBfloat16>(sum));
  }
  float sum[8] = {};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (r >= count) break;
    add_scaled_to<kBfloat16>(sum, held[r], w[r]);
  }
  if (first < end) write(first, rounded<kBfloat16>(sum));
}

// Like `reduce`, but a thread computes kVecs neighbouring vectors, write(i, vectors) gets all of them, and every thread has a column.
template <int kVecs, int kRows, class From, class Write>
__device__ __forceinline__ void reduce_shares(int first, int stride, int end, u32 which, float weight, From from, Write write) {
  for (; first < end; first += stride) {
    float sum[kVecs][8] = {};
    u32 left = which;
    while (left) {
      Vec16 held[kRows][kVecs];
      float w[kRows];
      bool has[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r, left &= left - 1) {
        has[r] = left;
        const int i = left ? __ffs(left) - 1 : 0;
        const Vec16* row = from(i);
        w[r] = __shfl_sync(~0u, weight, i);
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
          if (has[r]) held[r][j] = ld_vec(row + first * kVecs + j);
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int j = 0; j < kVecs; ++j) {
          if (has[r]) add_scaled_to<kBfloat16>(sum[j], held[r][j], w[r]);
        }
      }
    }
    Vec16 both[kVecs];
#pragma unroll
    for (int j = 0; j < kVecs; ++j) both[j] = rounded<kBfloat16>(sum[j]);
    write(first, both);
  }
}

// An entry of the handle in a warp: a received token and its source. Lane k holds the row of the token's choice k on this rank, and its
// weight.
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

  // Waits for the weight if it did not come with the dispatch. False: the wait timed out.
  __device__ __forceinline__ bool await_weight(const Params& p, u32 epoch) {
    bool ok = true;
    if (!p.has_weights) weight = late_weight(p, epoch, source, token, ok);
    return ok;
  }

  // Computes one warp's part of the sum of the rows.
  template <int kVecsPerThread, int kRows, class Write>
  __device__ __forceinline__ void reduce(const Params& p, int first, int stride, int end, Write write) const {
    auto from = [&](int k) { return at<const Vec16>(p.y, 0) + static_cast<u64>(__shfl_sync(~0u, row, k)) * kRowVecs; };
    ::reduce<kVecsPerThread, kRows>(first, stride, end, __ballot_sync(~0u, row >= 0), weight, from, write);
  }

  template <int kRows, class Write>
  __device__ __forceinline__ void reduce_in_flight(const Params& p, int first, int stride, int end, Write write) const {
    auto from = [&](int k) { return at<const Vec16>(p.y, 0) + static_cast<u64>(__shfl_sync(~0u, row, k)) * kRowVecs; };
    ::reduce_in_flight<kRows>(first, stride, end, __ballot_sync(~0u, row >= 0), weight, from, write);
  }

  template <int kVecs, int kRows, class Write>
  __device__ __forceinline__ void reduce_shares(const Params& p, int first, int stride, int end, Write write) const {
    auto from = [&](int k) { return at<const Vec16>(p.y, 0) + static_cast<u64>(__shfl_sync(~0u, row, k)) * kRowVecs; };
    ::reduce_shares<kVecs, kRows>(first, stride, end, __ballot_sync(~0u, row >= 0), weight, from, write);
  }
};

// Entries are sorted by the rank that they go back to. With many entries, the warps take one for each rank in turn, and ranks start with
// different ones. Otherwise all ranks would send to the same rank at a time. The number of entries of each rank is unknown, so some
// positions lie past the last entry.
__device__ __forceinline__ int per_rank(const Members& members, int num_entries) {
  return members.divide(num_entries + members.count() - 1);
}

__device__ __forceinline__ int entry_at(const Members& members, int turn, int rank, int num_entries) {
  return members.modulo(turn + members.place(rank)) * per_rank(members, num_entries) + members.divide(turn);
}
