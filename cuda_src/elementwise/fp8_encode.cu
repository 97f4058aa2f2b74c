// fp8_encode: converts elements to FP8 (e4m3), with a scale for each 128 of them. dtypes.py has the same rules.
//
// 8 neighbouring lanes take a group, 16 elements each, as in ll_dispatch. The kernel reads and writes each byte once, and threads share
// nothing else.
#include "common/fp8.cuh"

extern "C" __global__ void __launch_bounds__(kLocalThreads) fp8_encode(const __grid_constant__ Params p) {
  constexpr int kVecs = 16 / kPerVec<kElement>;
  const Vec16* x = at<Vec16>(p.x, 0);
  const i64 count = p.num_groups * 8, step = static_cast<i64>(gridDim.x) * kLocalThreads;
  for (i64 first = static_cast<i64>(blockIdx.x) * kLocalThreads; first < count;
       first += step) {  // the same for all lanes, because they shuffle
    const i64 i = first + threadIdx.x;
    Vec16 held[kVecs] = {};
#pragma unroll
    for (int v = 0; v < kVecs; ++v) {
      if (i < count) held[v] = x[i * kVecs + v];
    }
    float scale;
    const Vec16 bytes = to_fp8<kElement>(held, p.round_scale, scale);
    if (i < count) at<Vec16>(p.out, 0)[i] = bytes;
    if (i >= count || i % 8 != 0) continue;
    if (p.use_ue8m0) {
      at<unsigned char>(p.scales, 0)[i / 8] = static_cast<unsigned char>(__float_as_uint(scale) >> 23);
    } else {
      at<float>(p.scales, 0)[i / 8] = scale;
    }
  }
}
