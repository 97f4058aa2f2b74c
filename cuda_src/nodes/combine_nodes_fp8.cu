// combine_nodes_fp8: a combine over several nodes, whose sums travel between nodes as FP8.
#include "nodes/combine_nodes_compressed.cuh"

extern "C" __global__ void __launch_bounds__(kCombineNodesThreads, 1) combine_nodes_fp8(const __grid_constant__ Params p) {
  __shared__ Routes routes;
  __shared__ Parts parts[kWarps];
  combine_over_nodes<CompressedSums>(p, routes, parts);
}
