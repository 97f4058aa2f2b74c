// zero_padding: rows from *num_kept on become zeros; the others are not touched. A block takes a row at a time.
#include "memory.cuh"

extern "C" __global__ void __launch_bounds__(kLocalThreads) zero_padding(const __grid_constant__ Params p) {
  for (i64 row = *at<i32>(p.num_kept, 0) + static_cast<i64>(blockIdx.x); row < p.num_rows; row += gridDim.x) {
    Vec16* x = at<Vec16>(p.x, row * p.row_bytes);
    for (int i = threadIdx.x; i < p.row_bytes / 16; i += kLocalThreads) x[i] = Vec16{};
  }
}
