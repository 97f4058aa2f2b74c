// combine_nodes: a combine over several nodes, whose rows travel as they are.
#include "nodes/combine_nodes.cuh"

extern "C" __global__ void __launch_bounds__(kCombineNodesThreads, 1) combine_nodes(const __grid_constant__ Params p) {
  __shared__ Routes routes;
  __shared__ Parts parts[kWarps];
  combine_over_nodes<PlainSums>(p, routes, parts);
}
