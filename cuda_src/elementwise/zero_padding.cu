// zero_padding: copies the rows before *num_kept to `out`, unless x is out. The other rows are padding and become zeros in `out`.
//
// A block takes a row at a time. It does not read padding, and it does not touch rows that stay where they are.
#include "common/memory.cuh"

extern "C" __global__ void __launch_bounds__(kLocalThreads) zero_padding(const __grid_constant__ Params p) {
  constexpr int kInFlight = 4;
  const i64 num_kept = *at<i32>(p.num_kept, 0);
  const int count = static_cast<int>(p.row_bytes / 16);
  for (i64 row = blockIdx.x; row < p.num_rows; row += gridDim.x) {
    const bool is_kept = row < num_kept;
    if (is_kept && p.x == p.out) continue;
    const Vec16* x = at<Vec16>(p.x, row * p.row_bytes);
    Vec16* out = at<Vec16>(p.out, row * p.row_bytes);
    for (int first = threadIdx.x; first < count; first += kInFlight * kLocalThreads) {
      Vec16 held[kInFlight] = {};
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        if (is_kept && first + j * kLocalThreads < count) held[j] = ld_streaming(x + first + j * kLocalThreads);
      }
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        if (first + j * kLocalThreads < count) st_vec(out + first + j * kLocalThreads, held[j]);
      }
    }
  }
}
