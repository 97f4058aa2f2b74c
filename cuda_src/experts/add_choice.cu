// add_choice: adds the row of one choice of each token to the token's sum in float32. The last choice also adds the biases and rounds once.
//
// The host launches it for each choice, in order. Sums begin at +0. So they are never -0, and the zeros of a missing choice change no bit.
//
// Bytes: each row is read once. A sum is read and written once for each choice but the last, which writes a row.
#include "common/number.cuh"

extern "C" __global__ void __launch_bounds__(kLocalThreads) add_choice(const __grid_constant__ Params p) {
  constexpr int kNumbers = kPerVec<kElement>, kSumVecs = kNumbers / 4;
  const int num_vecs = static_cast<int>(p.row_bytes / 16);
  for (i64 token = blockIdx.x; token < p.num_tokens; token += gridDim.x) {
    const float weight = p.weights ? at<const float>(p.weights, 0)[token * p.num_topk + p.choice] : 0.f;
    for (int v = threadIdx.x; v < num_vecs; v += kLocalThreads) {
      const i64 at_vec = token * num_vecs + v;
      Vec16* sums = at<Vec16>(p.sums, 0) + at_vec * kSumVecs;
      float sum[kNumbers] = {};
#pragma unroll
      for (int i = 0; i < kSumVecs; ++i) {
        if (p.choice == 0) break;
        const Vec16 held = ld_vec(sums + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[4 * i + j] = __uint_as_float(held.word[j]);
      }
      const Vec16 row = ld_streaming(at<const Vec16>(p.x, 0) + at_vec);
      if (p.weights) {
        add_scaled_to<kElement>(sum, row, weight);
      } else {
        add_to<kElement>(sum, row);
      }
      if (p.out) {
        if (p.bias_0) add_to<kElement>(sum, ld_streaming(at<const Vec16>(p.bias_0, 0) + at_vec));
        if (p.bias_1) add_to<kElement>(sum, ld_streaming(at<const Vec16>(p.bias_1, 0) + at_vec));
        st_vec(at<Vec16>(p.out, 0) + at_vec, rounded<kElement>(sum));
        continue;
      }
#pragma unroll
      for (int i = 0; i < kSumVecs; ++i) {
        Vec16 part;
#pragma unroll
        for (int j = 0; j < 4; ++j) part.word[j] = __float_as_uint(sum[4 * i + j]);
        st_vec(sums + i, part);
      }
    }
  }
}
