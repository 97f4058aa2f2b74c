// ll_combine_large: a low-latency combine for so many entries that warps need not share one. A warp takes a tile of a row at a time. A row
// is the sum of one to kNumTopk rows. A warp with the whole of a large sum would finish long after all others. This kernel needs
// p.reduce_early and a single scale-up domain.
#include "low_latency/ll_combine.cuh"

constexpr int kTilesPerRow = (kRowVecs + kTileVecs - 1) / kTileVecs;
static_assert(!kHasScaleOut);

// `item`: the first item of the warp.
__device__ inline void send_tiles(const Params& p, const Call& call, int item, int num_items, int num_entries) {
  const u32 epoch = call.sent;
  u32 next = 0;
  for (; item < num_items; item = __shfl_sync(~0u, next, 0) - call.tickets_before) {
    if (lane_idx() == 0) next = fetch_add_relaxed_gpu(&progress_of(p)->tickets);
    const int idx = entry_at(item / kTilesPerRow, p.rank, num_entries);
    if (idx >= num_entries) continue;
    Entry entry(p, idx);
    if (call.excluded[entry.source] || !__all_sync(~0u, entry.await_weight(p, epoch))) continue;
    Vec16* to = at<Vec16>(p.peers[entry.source], row_offset(epoch, p.rank, entry.token));
    const int start = item % kTilesPerRow * kTileVecs;
    auto write = [&](int i, const Vec16& v) { st_relaxed_sys(to + i, v); };
    entry.reduce<kMaxVecsPerThread, 2>(p, start + lane_idx(), 32, min(start + kTileVecs, kRowVecs), write);
  }
}

extern "C" __global__ void __launch_bounds__(kLlThreads, 1) ll_combine_large(const __grid_constant__ Params p) {
  overlap_kernels();
  combine<true>(p, WarpGroup(0), kTilesPerRow,
                [&](const Call& call, int item, int num_items, int num_entries) { send_tiles(p, call, item, num_items, num_entries); });
}
