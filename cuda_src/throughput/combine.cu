// combine: a combine whose rows travel as they are. combine.cuh describes the roles of the warps and the protocol.
//
// Bytes: each row crosses the link once. The source reads each row once, in staging or where its experts left it, and writes each token
// once.
#include "throughput/plain_sums.cuh"

__device__ inline void copy_rows_bulk(const Params& p, const Routes& routes, char* stages, u64* barriers, CopyProgress& progress) {
  WorkIterator work(queue_of(p, routes), [](int) {});
  auto target = [&](int item) { return target_of(routes, chunk_at(p, routes, item)); };
  auto load = [&](int item, char* stage, u64* barrier) {
    const Chunk c = chunk_at(p, routes, item);
    if (c.num_rows == 0) return false;
    copy_weights(p, routes, c);
    __syncwarp();  // lane 0 signals what all lanes wrote
    if (lane_idx() == 0) {
      barrier_expect(barrier, c.num_rows * kRowBytes);
      bulk_load(stage, source_of(p, routes, c), c.num_rows * kRowBytes, barrier);
    }
    return true;
  };
  auto store = [&](int turn, int item, char* stage) {
    const Chunk c = chunk_at(p, routes, item);
    bulk_store(target_of(routes, c), stage, c.num_rows * kRowBytes);
    while (turn - static_cast<int>(ld_acquire_block(&progress.signalled)) >= CopyProgress::kRingEntries)
      continue;  // the signal warp waits for nothing, so this ends
    progress.items[turn % CopyProgress::kRingEntries] = item;
  };
  auto written = [&](int count, bool all) {
    st_release_block(&progress.written, count);
    if (all) st_release_block(&progress.done, 1);
  };
  bulk_pipeline<kCombineStages, (kCombineStages + 1) / 2, 1>(stages, barriers, [&] { return work.next(); }, target, load, store, written);
}

__device__ inline void copy_rows_by_warp(const Params& p, const Routes& routes, u32 epoch) {
  WorkIterator work(queue_of(p, routes), [](int) {});
  for (int item = work.next(); item >= 0; item = work.next()) {
    const Chunk c = chunk_at(p, routes, item);
    if (c.num_rows == 0) continue;
    copy_weights(p, routes, c);
    warp_copy(target_of(routes, c), source_of(p, routes, c), c.num_rows * kRowBytes);
    __syncwarp();
    if (lane_idx() == 0) {
      fence_release_sys();
      raise_flag(p, c, epoch);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kCombineThreads, 1) combine(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char stages[];
  __shared__ Routes routes;
  __shared__ u64 barriers[kCombineCopyWarps * kCombineStages];
  __shared__ CopyProgress progress[kCombineCopyWarps];
  auto copy_rows = [&](u32 epoch) {
    const int warp = warp_idx();
    if constexpr (kHasTma) {
      copy_rows_bulk(p, routes, stages + warp * kCombineStages * kStageBytes, barriers + warp * kCombineStages, progress[warp]);
    } else {
      copy_rows_by_warp(p, routes, epoch);
    }
  };
  combine_rows(p, routes, progress, copy_rows, [&](int item) { return chunk_at(p, routes, item); });
}
