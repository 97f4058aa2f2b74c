// prepare_tiles: what expand_tiles needs of a routing. Block r finds the order in which rows leave for rank r: by the first of their
// experts there, so that tiles of the first experts are complete early. Rows with the same first expert have any order. The last block
// counts the rows of each tile.
//
// Without topk_idx, rows leave in any order. After a call that failed, counts and tokens may be any numbers. Nothing is written or read
// outside of the arrays then.
//
// Bytes: the choices of each row, twice, the second time from L1 or L2.
#include "experts/counting_sort.cuh"

// The bin of the first expert of a token on a rank. With many experts, a few of them share one.
__device__ __forceinline__ int bin_of(const Params& p, int token, int rank) {
  if (!p.topk_idx || token < 0 || token >= p.num_tokens) return 0;
  const int first = rank * p.num_experts;
  int least = p.num_experts - 1;
  for (int k = 0; k < p.num_topk; ++k) {
    const i64 i = static_cast<i64>(token) * p.num_topk + k;
    const i64 expert = (p.idx_bytes == 8 ? at<const i64>(p.topk_idx, 0)[i] : at<const i32>(p.topk_idx, 0)[i]) - first;
    if (expert >= 0 && expert < least) least = static_cast<int>(expert);
  }
  return p.num_experts <= kBins ? least : static_cast<int>(static_cast<i64>(least) * kBins / p.num_experts);
}

__device__ inline void find_order(const Params& p, int rank, Shared& shared) {
  const int num_rows = min(max(at<const i32>(p.num_rows, 0)[p.rank * p.num_ranks + rank], 0), p.max_tokens);
  const i32* list = at<const i32>(p.send_list, 0) + static_cast<i64>(rank) * p.max_tokens;
  int2* order = at<int2>(p.order, 0) + static_cast<i64>(rank) * p.max_tokens;
  sort_by_bin(
      num_rows, shared, [&](int row) { return bin_of(p, list[row], rank); },
      [&](int row, int place) { order[place] = make_int2(row, list[row]); });
}

// One for each row of a tile, and one for its padding. Experts begin at whole tiles.
__device__ inline void count_tiles(const Params& p) {
  const i32* offsets = at<const i32>(p.offsets, 0);
  for (int e = threadIdx.x; e <= p.num_experts; e += kPositionThreads) {
    const bool is_tail = e == p.num_experts;
    const int begin = offsets[e], end = is_tail ? p.num_expert_rows : offsets[e + 1];
    const int filled = is_tail ? begin : max(at<const i32>(p.ends, 0)[e], begin);  // -1: none of them arrived
    for (int first = begin; first < end; first += p.tile_rows)
      at<i32>(p.tile_left, 0)[first / p.tile_rows] = max(min(filled - first, p.tile_rows), 0) + 1;
  }
}

extern "C" __global__ void __launch_bounds__(kPositionThreads, 1) prepare_tiles(const __grid_constant__ Params p) {
  __shared__ Shared shared;
  overlap_kernels();
  if (blockIdx.x == p.num_ranks) {
    count_tiles(p);
  } else if (p.finds_order) {
    find_order(p, blockIdx.x, shared);
  }
}
