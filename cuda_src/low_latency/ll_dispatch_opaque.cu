// ll_dispatch_opaque: a low-latency dispatch of rows that the program has quantised, such as FP8 or 4-bit numbers, or of any other bytes.
// Rows and scales arrive as they are. The protocol is that of ll_dispatch.
#include "low_latency/ll_dispatch_call.cuh"
#include "low_latency/ll_opaque_rows.cuh"

extern "C" __global__ void __launch_bounds__(kLlThreads, 1) ll_dispatch_opaque(const __grid_constant__ Params p) {
  extern __shared__ Table table[];
  dispatch<OpaqueRows>(p, *table, [&](u64 start, Shared& shared) { return receive<OpaquePart>(p, start, table->arrival_bitmap, shared); });
}
