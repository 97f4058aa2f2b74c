// order_chunks: the order in which combine_tiles sends chunks back. Block r sorts the chunks of the rows that came from rank r by the last
// row of y that they need, because a product writes the rows of y in about ascending order. Chunks whose last rows are close have any
// order.
//
// After a call that failed, counts and positions may be any numbers. Nothing is written or read outside of the arrays then.
//
// Bytes: the positions of each row, twice, the second time from L1 or L2.
#include "experts/counting_sort.cuh"

extern "C" __global__ void __launch_bounds__(kPositionThreads, 1) order_chunks(const __grid_constant__ Params p) {
  __shared__ Shared shared;
  const int source = blockIdx.x;
  const i32* rows = at<const i32>(p.num_rows, 0);
  i64 first = 0;
  for (int s = 0; s < source; ++s) first += max(rows[s * p.num_ranks + p.rank], 0);
  const i64 most = min(static_cast<i64>(p.capacity) - first, static_cast<i64>(p.max_chunks) * p.chunk_rows);
  const int count = static_cast<int>(max(min(most, static_cast<i64>(rows[source * p.num_ranks + p.rank])), static_cast<i64>(0)));
  const i32* positions = at<const i32>(p.positions, 0) + first * p.num_topk;
  i32* order = at<i32>(p.order, 0) + static_cast<i64>(source) * p.max_chunks;
  auto bin_of = [&](int chunk) {
    int last = 0;
    const int end = min((chunk + 1) * p.chunk_rows, count) * p.num_topk;
    for (int i = chunk * p.chunk_rows * p.num_topk; i < end; ++i) last = max(last, positions[i]);
    return static_cast<int>(static_cast<i64>(min(last, p.num_expert_rows - 1)) * kBins / p.num_expert_rows);
  };
  sort_by_bin((count + p.chunk_rows - 1) / p.chunk_rows, shared, bin_of, [&](int chunk, int place) { order[place] = chunk; });
}
