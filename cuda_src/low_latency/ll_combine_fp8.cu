// ll_combine_fp8: a low-latency combine, with rows that travel as FP8.
#include "low_latency/ll_combine_entries.cuh"
#include "low_latency/ll_combine_compressed.cuh"

extern "C" __global__ void __launch_bounds__(kLlThreads, 1) ll_combine_fp8(const __grid_constant__ Params p) {
  combine_entries<CompressedRows>(p);
}
