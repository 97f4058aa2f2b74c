// copy_bandwidth: measures what the links can carry. Each rank pushes num_rows rows to each other rank at the same time; a single rank
// pushes to itself. There is no routing to read and no rank to wait for. src is [kNumRanks, num_rows, row_bytes]. Row i of rank r arrives
// at row r * num_rows + i of the window at recv_x_offset.
//
// Warps share the work as in dispatch, without metadata warps. The host measures the time, and there is no protocol. The last block resets
// State::copy_bandwidth_items and State::copy_bandwidth_blocks.
#include "common/bulk.cuh"
#include "common/work.cuh"

__device__ inline void push(const Params& p, char* stages, u64* barriers) {
  const int num_workers = gridDim.x * kDispatchCopyWarps;
  const WorkQueue queue =
      make_work_queue(&at<State>(p.state, 0)->copy_bandwidth_items, kNumRanks * p.num_rows, num_workers, kDispatchItemsPerTicket);
  WorkIterator work(queue, [](int) {});
  auto source = [&](const Item& it) { return at<char>(p.src, (static_cast<u64>(it.rank) * p.num_rows + it.chunk) * p.row_bytes); };
  auto target = [&](int item) {
    const Item it = item_at(AllRanks(), item, p.rank);
    return at<char>(p.peers[it.rank] + p.recv_x_offset, (static_cast<u64>(p.rank) * p.num_rows + it.chunk) * p.row_bytes);
  };
  auto is_measured = [&](const Item& it) { return kNumRanks == 1 || it.rank != p.rank; };
  if constexpr (kHasTma) {
    auto load = [&](int item, char* stage, u64* barrier) {
      const Item it = item_at(AllRanks(), item, p.rank);
      if (!is_measured(it)) return false;
      if (lane_idx() == 0) {
        barrier_expect(barrier, p.row_bytes);
        bulk_load(stage, source(it), p.row_bytes, barrier);
      }
      return true;
    };
    auto store = [&](int, int item, char* stage) { bulk_store(target(item), stage, p.row_bytes); };
    bulk_pipeline<kDispatchStages, kDispatchStages / 2, 4>(
        stages, barriers, [&] { return work.next(); }, target, load, store, [](int, bool) {});
  } else {
    for (int item = work.next(); item >= 0; item = work.next()) {
      const Item it = item_at(AllRanks(), item, p.rank);
      if (is_measured(it)) warp_copy(target(item), source(it), p.row_bytes);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kDispatchThreads, 1) copy_bandwidth(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char stages[];
  __shared__ u64 barriers[kDispatchCopyWarps * kDispatchStages];
  State* state = at<State>(p.state, 0);
  const int warp = warp_idx();
  if (warp < kDispatchCopyWarps) push(p, stages + warp * kDispatchStages * kStageBytes, barriers + warp * kDispatchStages);
  __syncthreads();
  if (threadIdx.x == 0 && is_last_block(&state->copy_bandwidth_blocks)) state->copy_bandwidth_items = state->copy_bandwidth_blocks = 0;
}
