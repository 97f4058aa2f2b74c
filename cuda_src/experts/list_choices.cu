// list_choices: lists the rows of a window's choices, in the order of the rows by token and of their choices.
//
// Rows by token lie source by source, and the tokens of a source ascend. So the rows for a source, and for the ranks of a node, follow each
// other in the list. One block walks over the rows by token, a row for each thread. A sum over the threads gives each row its place.
//
// A failed dispatch may leave any numbers in `sources`. Nothing is written outside of the arrays then, and no call reads the list.
//
// Bytes: 8 for each row by token, and for each row of the window 4 for each choice. 16 for each row of the list.
#include "common/memory.cuh"

extern "C" __global__ void __launch_bounds__(kPositionThreads) list_choices(const __grid_constant__ Params p) {
  constexpr int kWarps = kPositionThreads / 32;
  static_assert(kWarps == 32, "one lane for each warp");
  __shared__ i32 sums[kWarps];  // rows of the list that each warp finds
  const int lane = lane_idx(), num_rows = at<const i32>(p.totals, 0)[1];
  const int2* sources = at<const int2>(p.sources, 0);
  i32* first = at<i32>(p.first, 0);
  int found = 0, last_source = -1;  // of the rows so far
  for (int begin = 0; begin < num_rows; begin += kPositionThreads) {
    const int row = begin + threadIdx.x;
    const bool exists = row < num_rows;
    const int2 source = exists ? sources[row] : make_int2(-1, -1);
    const int source_before = exists && row > 0 ? sources[row - 1].x : -1, token = source.y - p.first_token;
    const i32* positions = at<const i32>(p.positions, 0) + static_cast<i64>(row) * p.num_topk;
    u32 choices = 0;
    if (exists && token >= 0 && token < p.window_tokens && static_cast<u32>(source.x) < static_cast<u32>(p.num_ranks)) {
      for (int k = 0; k < p.num_topk; ++k) choices |= static_cast<u32>(positions[k] >= 0) << k;
    }
    const int own = __popc(choices), sum = sum_to_lane(own);
    if (lane == 31) sums[warp_idx()] = sum;
    __syncthreads();
    const int of_warp = sums[lane], of_warps = sum_to_lane(of_warp);
    int index = found + __shfl_sync(~0u, of_warps - of_warp, warp_idx()) + sum - own;
    found += __shfl_sync(~0u, of_warps, 31);
    if (exists) {
      for (int s = max(source_before + 1, 0); s <= min(source.x, p.num_ranks - 1); ++s) first[s] = index;
    }
    for (; choices; choices &= choices - 1, ++index) {
      const int k = __ffs(choices) - 1;
      const i32 position = positions[k];
      const float weight = p.weights ? at<const float>(p.weights, 0)[position] : 0.f;
      at<ChoiceRow>(p.rows, 0)[index] = {position, token * p.num_topk + k, source.x, weight};
    }
    last_source = sources[min(begin + kPositionThreads, num_rows) - 1].x;
    __syncthreads();  // all warps have read `sums`
  }
  for (int s = max(last_source + 1, 0) + threadIdx.x; s <= p.num_ranks; s += kPositionThreads) first[s] = found;
}
