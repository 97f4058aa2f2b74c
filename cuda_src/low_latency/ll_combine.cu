// ll_combine: a low-latency combine, with rows of bfloat16.
#include "low_latency/ll_combine_entries.cuh"

extern "C" __global__ void __launch_bounds__(kLlThreads, 1) ll_combine(const __grid_constant__ Params p) { combine_entries<PlainRows>(p); }
