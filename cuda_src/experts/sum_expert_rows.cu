// sum_expert_rows: adds up this rank's rows of each token, which lie expert by expert, in float32 and in the order of the token's choices.
//
// A block takes a token at a time. Rows are multiplied by their weights, or the weights return to the places of their choices.
//
// Bytes: each row is read once, and one row is written for each token.
#include "experts/sum_choices.cuh"

extern "C" __global__ void __launch_bounds__(kLocalThreads) sum_expert_rows(const __grid_constant__ Params p) {
  const int lane = lane_idx(), num_vecs = static_cast<int>(p.row_bytes / 16);
  const i64 num_tokens = at<const i32>(p.totals, 0)[1];
  const float* weights = at<const float>(p.weights, 0);
  const bool is_weighted = p.weights && !p.out_weights;
  for (i64 token = blockIdx.x; token < num_tokens; token += gridDim.x) {
    const i32 mine = lane < p.num_topk ? at<const i32>(p.positions, 0)[token * p.num_topk + lane] : -1;
    const u32 choices = __ballot_sync(~0u, mine >= 0);
    const float weight = p.weights && mine >= 0 ? weights[mine] : 0.f;
    if (p.out_weights && warp_idx() == 0 && lane < p.num_topk) at<float>(p.out_weights, 0)[token * p.num_topk + lane] = weight;
    sum_choices<kLocalThreads>(
        num_vecs, threadIdx.x, choices, mine, weight, is_weighted, [&](i64 row) { return at<const Vec16>(p.x, row * p.row_bytes); },
        [&] { return at<Vec16>(p.out, token * p.row_bytes); }, [](Vec16* to, const Vec16& v) { st_vec(to, v); });
  }
}
