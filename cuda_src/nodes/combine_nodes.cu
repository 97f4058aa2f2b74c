// combine_nodes: a combine over several nodes, whose rows travel as they are.
#include "nodes/combine_nodes.cuh"

constexpr int kCopyWarps = kCombineNodesCopyWarps, kStages = kCombineNodesStages;

extern "C" __global__ void __launch_bounds__(kCombineNodesThreads, 1) combine_nodes(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) char memory[];
  __shared__ Routes routes;
  __shared__ Parts parts[kWarps];
  __shared__ SignalRing ring;
  __shared__ Staged staged[kCopyWarps * kStages];
  __shared__ u64 barriers[kCopyWarps * kStages];
  const int warp = warp_idx();
  ring.clear();
  combine_over_nodes<PlainSums, kCopyWarps>(p, routes, parts, [&](u32 epoch) {
    const RaiseOne raise = {p, epoch};
    if constexpr (kHasTma) {
      const int first = warp * kStages;
      if (warp < kCopyWarps) {
        copy_rows<PlainSums>(
            p, routes, epoch,
            BulkCopies<1, kStages>(first_line(memory) + first * kNodesStageBytes, barriers + first, staged + first, &ring, kRowBytes));
      }
      if (warp == kCopyWarps) raise_signals<kCopyWarps>(ring, raise);
    } else {
      if (warp < kCopyWarps) copy_rows<PlainSums>(p, routes, epoch, WarpCopies<1, RaiseOne>{raise, kRowBytes});
    }
  });
}
