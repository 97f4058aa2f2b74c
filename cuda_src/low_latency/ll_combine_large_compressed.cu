// ll_combine_large_fp8 and ll_combine_large_log10: a low-latency combine of many tokens, with rows that travel as FP8 or as 10-bit
// logarithms.
#include "low_latency/ll_combine_tiles.cuh"
#include "low_latency/ll_combine_compressed.cuh"

extern "C" __global__ void __launch_bounds__(kLlThreads, 1) KERNEL(const __grid_constant__ Params p) { combine_tiles<CompressedRows>(p); }
