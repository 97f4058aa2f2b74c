// ll_combine_large: a low-latency combine of many tokens, with rows of bfloat16.
#include "low_latency/ll_combine_tiles.cuh"

extern "C" __global__ void __launch_bounds__(kLlThreads, 1) ll_combine_large(const __grid_constant__ Params p) {
  combine_tiles<PlainRows>(p);
}
