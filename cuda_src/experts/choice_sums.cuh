// What combines with reduce="topk" do with the rows of a token's choices, once they are here.
#pragma once
#include "common/number.cuh"
#include "common/wait.cuh"

// Adds up the rows of a token whose choices have a bit in `choices`, in the order of the choices, and the biases. Rounds once. All lanes
// call row_at(choice), which returns the row's address. Lane k holds the weight of choice k.
template <class RowAt>
__device__ inline void reduce_choices(const Params& p, const RowAt& row_at, u32 choices, float weight, int token) {
  constexpr int kRowVecs = kRowBytes / 16, kVecs = 2, kRows = 4;
  const u64 offset = static_cast<u64>(token) * kRowBytes;
  for (int begin = 0; begin < kRowVecs; begin += 32 * kVecs) {  // the same for all lanes, because they shuffle
    const int first = begin + lane_idx();
    float sum[kVecs][kPerVec<kElement>] = {};
    for (u32 rest = choices; rest;) {
      Vec16 held[kRows][kVecs];
      float factors[kRows];
      bool has[kRows];
      const Vec16* from[kRows];
      u32 left = rest;
      // Find all rows before the loads start. With shuffles between the loads, the compiler for sm_90 waited for every second load.
#pragma unroll
      for (int j = 0; j < kRows; ++j, left &= left - 1) {
        has[j] = left != 0;
        const int choice = left ? __ffs(left) - 1 : 0;
        factors[j] = __shfl_sync(~0u, weight, choice);
        from[j] = at<const Vec16>(row_at(choice), 0) + first;
      }
#pragma unroll
      for (int j = 0; j < kRows; ++j) {
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
          if (has[j] && first + i * 32 < kRowVecs) held[j][i] = ld_streaming(from[j] + i * 32);
        }
      }
#pragma unroll
      for (int j = 0; j < kRows; ++j, rest &= rest - 1) {
        if (rest == 0) break;
#pragma unroll
        for (int i = 0; i < kVecs; ++i) {
          if (first + i * 32 >= kRowVecs) break;
          if (p.is_weighted) {
            add_scaled_to<kElement>(sum[i], held[j][i], factors[j]);
          } else {
            add_to<kElement>(sum[i], held[j][i]);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kVecs; ++i) {
      const int v = first + i * 32;
      if (v >= kRowVecs) break;
      if (p.bias_0) add_to<kElement>(sum[i], ld_streaming(at<const Vec16>(p.bias_0, offset) + v));
      if (p.bias_1) add_to<kElement>(sum[i], ld_streaming(at<const Vec16>(p.bias_1, offset) + v));
      st_vec(at<Vec16>(p.out, offset) + v, rounded<kElement>(sum[i]));
    }
  }
}

__device__ inline void poison_sums(const Params& p, u64 thread, u64 num_threads) {
  poison(p.out, static_cast<u64>(p.num_tokens) * kRowBytes, thread, num_threads);
  if (p.out_topk_weights) poison(p.out_topk_weights, static_cast<u64>(p.num_tokens) * kNumTopk * sizeof(float), thread, num_threads);
}
