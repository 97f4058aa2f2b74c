// ceiling: what the links can carry. Every rank pushes num_rows rows to every other rank at once (a single rank: to itself), with nothing
// to look up and nobody to wait for; src is [kNumRanks, num_rows, row_bytes], and row i of rank r lands at row r * num_rows + i of land_x.
//
// Roles and work sharing as in dispatch, without its small arrays. The host times it; there is no protocol and nothing to reset.
#include "bulk.cuh"
#include "work.cuh"

extern "C" __global__ void __launch_bounds__(kDispatchThreads, 1) ceiling(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char stages[];
  __shared__ u64 barriers[kDispatchMovers * kDispatchStages];
  const int warp = warp_idx();
  if (warp >= kDispatchMovers) return;
  const int worker = blockIdx.x * kDispatchMovers + warp, num_workers = gridDim.x * kDispatchMovers;
  const int num_items = num_items_of(worker, num_workers, p.num_rows);
  auto source = [&](const Item& it) { return at<char>(p.src, (static_cast<u64>(it.rank) * p.num_rows + it.chunk) * p.row_bytes); };
  auto target = [&](const Item& it) {
    return at<char>(p.peers[it.rank] + p.land_x, (static_cast<u64>(p.rank) * p.num_rows + it.chunk) * p.row_bytes);
  };
  auto counts = [&](const Item& it) { return kNumRanks == 1 || it.rank != p.rank; };
  if constexpr (kHasTma) {
    auto load = [&](int item, char* stage, u64* barrier) {
      const Item it = item_at(worker + item * num_workers, num_workers, p.rank);
      if (lane_idx() != 0) return;
      barrier_expect(barrier, counts(it) ? p.row_bytes : 0);
      if (counts(it)) bulk_load(stage, source(it), p.row_bytes, barrier);
    };
    auto store = [&](int item, char* stage) {
      const Item it = item_at(worker + item * num_workers, num_workers, p.rank);
      if (counts(it)) bulk_store(target(it), stage, p.row_bytes);
    };
    bulk_pipeline<kDispatchStages, false>(stages + warp * kDispatchStages * kStageBytes, barriers + warp * kDispatchStages, num_items, load,
                                          store, [](int) {});
  } else {
    for (int item = 0; item < num_items; ++item) {
      const Item it = item_at(worker + item * num_workers, num_workers, p.rank);
      if (counts(it)) warp_copy(target(it), source(it), p.row_bytes);
    }
  }
}
