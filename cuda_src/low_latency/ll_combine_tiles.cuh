// The low-latency combine for so many entries that warps need not share one: ll_combine_large, and ll_combine_large_fp8 and
// ll_combine_large_log10 for rows that are compressed on the way. A warp takes a tile of a row at a time. A row is the sum of one to
// kNumTopk rows. A warp with the whole of a large sum would finish long after all others. These kernels need p.reduce_early and a single
// scale-up domain.
#pragma once
#include "low_latency/ll_combine.cuh"

constexpr int kTilesPerRow = (kRowVecs + kTileVecs - 1) / kTileVecs;
static_assert(!kHasScaleOut);

// `item`: the first item of the warp.
template <class Form>
__device__ inline void send_tiles(const Params& p, const Call& call, int item, int num_items, int num_entries) {
  const u32 epoch = call.sent;
  u32 next = 0;
  for (; item < num_items; item = __shfl_sync(~0u, next, 0) - call.tickets_before) {
    if (lane_idx() == 0) next = fetch_add_relaxed_gpu(&progress_of(p)->tickets);
    const int idx = entry_at(call, item / kTilesPerRow, p.rank, num_entries);
    if (idx >= num_entries) continue;
    Entry entry(p, idx);
    if (call.excluded[entry.source] || !__all_sync(~0u, entry.await_weight(p, epoch))) continue;
    Vec16* to = at<Vec16>(p.peers[entry.source], row_offset(epoch, p.rank, entry.token));
    if (item % kTilesPerRow == 0 && lane_idx() == 0) count_sent(p, 1, kSentRowBytes);
    Form::send_tile(p, entry, item % kTilesPerRow * kTileVecs, to);
  }
}

// `Form`: of the rows on the way.
template <class Form>
__device__ __forceinline__ void combine_tiles(const Params& p) {
  prefetch_tables(p);
  overlap_kernels();
  combine<true, Form>(p, WarpGroup(0), kTilesPerRow, [&](const Call& call, int item, int num_items, int num_entries) {
    send_tiles<Form>(p, call, item, num_items, num_entries);
  });
}
