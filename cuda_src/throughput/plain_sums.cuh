// How combines add up rows that travel as they are: combine and combine_tiles.
#pragma once
#include "throughput/combine.cuh"

constexpr int kRowVecs = kRowBytes / 16;

// This loop waits for memory, so each lane has up to 16 vectors in flight. With statistics, code for some members has registers for 12.
template <bool kHasBias, int kBound>
__device__ __forceinline__ void reduce_vectors(const Params& p, const u64 (&rows)[kBound], int token, int begin, int end) {
  constexpr int kInFlight = kHasStatistics && kBound < kNumRanks ? 12 : 16, kAtOnce = kInFlight / kBound < 7 ? kInFlight / kBound : 7;
  const u64 offset = static_cast<u64>(token) * kRowBytes;
  for (int first = begin + lane_idx(); first < end; first += 32 * kAtOnce) {
    Vec16 held[kAtOnce][kBound];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int r = 0; r < kBound; ++r) {
        if (rows[r] && first + i * 32 < end) held[i][r] = ld_streaming(at<const Vec16>(rows[r], 0) + first + i * 32);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int v = first + i * 32;
      if (v >= end) break;
      float sum[kPerVec<kElement>] = {};
#pragma unroll
      for (int r = 0; r < kBound; ++r) {
        if (rows[r]) add_to<kElement>(sum, held[i][r]);
      }
      if (kHasBias && p.bias_0) add_to<kElement>(sum, ld_streaming(at<const Vec16>(p.bias_0, offset) + v));
      if (kHasBias && p.bias_1) add_to<kElement>(sum, ld_streaming(at<const Vec16>(p.bias_1, offset) + v));
      st_vec(at<Vec16>(p.out, offset) + v, rounded<kElement>(sum));
    }
  }
}

// A whole token has code of its own, whose bounds are constants.
template <bool kHasBias, int kBound>
__device__ __forceinline__ void reduce_share(const Params& p, const u64 (&rows)[kBound], const Share& share) {
  if (share.num_parts == 1) return reduce_vectors<kHasBias>(p, rows, share.token, 0, kRowVecs);
  const int vectors = (kRowVecs + share.num_parts - 1) / share.num_parts, begin = share.part * vectors;
  reduce_vectors<kHasBias>(p, rows, share.token, begin, min(begin + vectors, kRowVecs));
}
