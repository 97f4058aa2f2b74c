// expert_positions: finds the row of each (token, choice) where rows lie expert by expert, in the order of the rows by token and of their
// choices.
//
// A block takes a few experts at a time. Their first rows follow from the counts of the experts before them. Each warp counts them in a
// segment of topk_idx. A scan over the warps then gives each warp the position of its first row, and it reads its segment again.
//
// A call that failed has counts, but no expert numbers, or those of an earlier call. Then the numbers of choices do not match the counts,
// and `ends` says so. Nothing is written outside of the arrays, whatever the numbers are.
//
// Bytes: each block reads topk_idx twice, from L2. For 8160 rows of top-8 and 128 experts these are 67 MB.
#include "common/memory.cuh"

constexpr int kWarps = kPositionThreads / 32;
static_assert(kWarps == 32, "a lane for each warp");

struct Shared {
  int choices[kExpertsPerBlock][kWarps];  // of each warp; later, of the warps before it
  int num_choices[kExpertsPerBlock];
  int first_row;  // of the block's first expert
  int num_recv;
};

// -1: no expert of this rank.
__device__ __forceinline__ int expert_at(const Params& p, int i) {
  const i64 expert = p.idx_bytes == 8 ? at<const i64>(p.topk_idx, 0)[i] : at<const i32>(p.topk_idx, 0)[i];
  return expert >= 0 && expert < p.num_experts ? static_cast<int>(expert) : -1;
}

__device__ __forceinline__ int aligned(int count, int alignment) { return (count + alignment - 1) / alignment * alignment; }

__device__ __forceinline__ int within(int row, int num_rows) { return row < 0 ? 0 : min(row, num_rows); }

// One warp adds up the counts of all experts, and of those before `first`.
__device__ inline void add_up_counts(const Params& p, int first, Shared& shared) {
  const i32* num_per_expert = at<const i32>(p.num_per_expert, 0);
  int earlier = 0, all = 0;
  for (int e = lane_idx(); e < p.num_experts; e += 32) {
    all += num_per_expert[e];
    if (e < first) earlier += num_per_expert[e];
  }
  shared.first_row = __reduce_add_sync(~0u, earlier);
  shared.num_recv = __reduce_add_sync(~0u, all);
}

extern "C" __global__ void __launch_bounds__(kPositionThreads, 1) expert_positions(const __grid_constant__ Params p) {
  __shared__ Shared shared;
  const int warp = warp_idx(), lane = lane_idx(), num_arrived = *at<const i32>(p.num_recv, 0);
  const int num_tokens = within(num_arrived, p.capacity);
  const int num_entries = num_tokens * p.num_topk, steps = (num_entries + kPositionThreads - 1) / kPositionThreads;
  const int begin = min(warp * steps * 32, num_entries), end = min(begin + steps * 32, num_entries);
  const i32* num_per_expert = at<const i32>(p.num_per_expert, 0);
  i32* positions = at<i32>(p.positions, 0);

  for (int i = blockIdx.x * kPositionThreads + threadIdx.x; i < num_tokens; i += gridDim.x * kPositionThreads)
    at<int2>(p.sources, 0)[i] = at<const int2>(p.src_idx, 0)[i];
  for (int first = blockIdx.x * kExpertsPerBlock; first < p.num_experts; first += gridDim.x * kExpertsPerBlock) {
    int choices[kExpertsPerBlock] = {};
#pragma unroll 4
    for (int i = begin; i < end; i += 32) {
      const int expert = i + lane < end ? expert_at(p, i + lane) : -1;
#pragma unroll
      for (int e = 0; e < kExpertsPerBlock; ++e) choices[e] += __popc(__ballot_sync(~0u, expert == first + e));
    }
    __syncthreads();  // the experts before these have read `shared`
#pragma unroll
    for (int e = 0; e < kExpertsPerBlock; ++e) {
      if (lane == e) shared.choices[e][warp] = choices[e];
    }
    if (warp == 0) add_up_counts(p, first, shared);
    __syncthreads();
    if (warp < kExpertsPerBlock) {
      const int own = shared.choices[warp][lane];
      int sum = own;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += before;
      }
      shared.choices[warp][lane] = sum - own;
      if (lane == 31) shared.num_choices[warp] = sum;
    }
    __syncthreads();

    int first_row = shared.first_row, next[kExpertsPerBlock];
    bool is_complete[kExpertsPerBlock];
#pragma unroll
    for (int e = 0; e < kExpertsPerBlock; ++e) {
      const int expert = first + e, count = expert < p.num_experts ? num_per_expert[expert] : 0, found = shared.num_choices[e];
      // Rows by token that did not fit are missing on purpose.
      is_complete[e] = aligned(found, p.alignment) == count || num_arrived > p.capacity;
      next[e] = first_row + shared.choices[e][warp];
      if (warp == 0 && lane == 0 && expert < p.num_experts) {
        at<i32>(p.offsets, 0)[expert] = within(first_row, p.num_rows);
        at<i32>(p.ends, 0)[expert] = is_complete[e] ? within(first_row + found, p.num_rows) : -1;
      }
      first_row += count;
    }
#pragma unroll 2
    for (int i = begin; i < end; i += 32) {
      const int expert = i + lane < end ? expert_at(p, i + lane) : -1;
      if (first == 0 && expert < 0 && i + lane < end) positions[i + lane] = -1;
#pragma unroll
      for (int e = 0; e < kExpertsPerBlock; ++e) {
        const u32 chosen = __ballot_sync(~0u, expert == first + e);
        const int row = next[e] + __popc(chosen & ((1u << lane) - 1));
        if (expert == first + e) positions[i + lane] = is_complete[e] && row >= 0 && row < p.num_rows ? row : -1;
        next[e] += __popc(chosen);
      }
    }
  }
  if (blockIdx.x > 0) return;
  const int last = p.capacity * p.num_topk;  // rows by token that are padding have no position
  for (int i = num_entries + threadIdx.x; i < last; i += kPositionThreads) positions[i] = -1;
  if (threadIdx.x == 0) {
    at<i32>(p.offsets, 0)[p.num_experts] = within(shared.num_recv, p.num_rows);
    at<i32>(p.totals, 0)[0] = shared.num_recv;
    at<i32>(p.totals, 0)[1] = num_tokens;
  }
}
