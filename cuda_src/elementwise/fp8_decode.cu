// fp8_decode: multiplies FP8 (e4m3) rows by their scales, one for each 128 channels. Rows from *num_kept on are padding and become zeros.
//
// A block takes a row at a time, and each thread 8 channels of it. The kernel reads each byte of the kept rows once and writes each byte of
// all rows once.
#include "common/fp8.cuh"

extern "C" __global__ void __launch_bounds__(kLocalThreads) fp8_decode(const __grid_constant__ Params p) {
  constexpr int kVecs = 8 / kPerVec<kElement>;
  const i64 num_kept = p.num_kept ? *at<i32>(p.num_kept, 0) : p.num_rows;
  const int count = p.num_channels / 8, num_scales = p.num_channels / kFp8Group;
  for (i64 row = blockIdx.x; row < p.num_rows; row += gridDim.x) {
    const u64* x = at<u64>(p.x, row * p.num_channels);
    const float* scales = at<float>(p.scales, 0) + row * num_scales;
    Vec16* out = at<Vec16>(p.out, 0) + row * count * kVecs;
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += kLocalThreads) {
      float values[kVecs][kPerVec<kElement>] = {};
      if (row < num_kept) {
        const float scale = scales[i * 8 / kFp8Group];
        float all[8];
        from_fp8(x[i], all);
#pragma unroll
        for (int j = 0; j < 8; ++j) values[j / kPerVec<kElement>][j % kPerVec<kElement>] = __fmul_rn(all[j], scale);
      }
#pragma unroll
      for (int v = 0; v < kVecs; ++v) out[i * kVecs + v] = rounded<kElement>(values[v]);
    }
  }
}
