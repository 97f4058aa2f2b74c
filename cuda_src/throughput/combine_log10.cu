// combine_log10: a combine whose rows travel as 10-bit logarithms.
#include "throughput/combine_compressed.cuh"

extern "C" __global__ void __launch_bounds__(kCombineThreads, 1) combine_log10(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char memory[];
  combine_compressed(p, memory);
}
