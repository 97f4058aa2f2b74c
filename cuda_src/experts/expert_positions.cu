// expert_positions: finds the row of each (token, choice) where rows lie expert by expert, in the order of the rows by token and of their
// choices.
//
// A block takes an expert at a time. Its first rows follow from the counts of the experts before it. Each thread counts the expert in a run
// of rows by token. A scan over the block then gives each thread the position of its first row, and it reads its run again.
//
// A call that failed has counts, but no expert numbers, or those of an earlier call. Then the numbers of choices do not match the counts,
// and `ends` says so. Nothing is written outside of the arrays, whatever the numbers are.
//
// Bytes: each block reads topk_idx twice, from L2. For 8160 rows of top-8 and 128 experts these are 67 MB.
#include "common/memory.cuh"

constexpr int kWarps = kPositionThreads / 32;
static_assert(kWarps <= 32, "one lane for each warp");

// The sum over the threads before this one. `total` is that over all threads.
__device__ inline int sum_before(int own, int (&sums)[kWarps], int& total) {
  int sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(~0u, sum, step);
    if (lane_idx() >= step) sum += before;
  }
  if (lane_idx() == 31) sums[warp_idx()] = sum;
  __syncthreads();
  int before = sum - own;
  total = 0;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp_idx()) before += sums[w];
    total += sums[w];
  }
  __syncthreads();  // the next call writes to `sums`
  return before;
}

// -1: no expert of this rank.
__device__ __forceinline__ int expert_at(const Params& p, i64 i) {
  const i64 expert = p.idx_bytes == 8 ? at<const i64>(p.topk_idx, 0)[i] : at<const i32>(p.topk_idx, 0)[i];
  return expert >= 0 && expert < p.num_experts ? static_cast<int>(expert) : -1;
}

__device__ __forceinline__ int aligned(int count, int alignment) { return (count + alignment - 1) / alignment * alignment; }

__device__ __forceinline__ int within(i64 row, int num_rows) { return static_cast<int>(row < 0 ? 0 : row > num_rows ? num_rows : row); }

extern "C" __global__ void __launch_bounds__(kPositionThreads) expert_positions(const __grid_constant__ Params p) {
  __shared__ int sums[kWarps];
  const int thread = threadIdx.x, num_arrived = *at<const i32>(p.num_recv, 0);
  const int num_tokens = within(num_arrived, p.capacity);
  const int per_thread = (num_tokens + kPositionThreads - 1) / kPositionThreads;
  const i64 begin = static_cast<i64>(min(thread * per_thread, num_tokens)) * p.num_topk;
  const i64 end = static_cast<i64>(min((thread + 1) * per_thread, num_tokens)) * p.num_topk;
  const i32* num_per_expert = at<const i32>(p.num_per_expert, 0);
  i32* positions = at<i32>(p.positions, 0);

  for (int expert = blockIdx.x; expert < p.num_experts; expert += gridDim.x) {
    int earlier = 0, all = 0, first_row, num_recv;
    for (int e = thread; e < p.num_experts; e += kPositionThreads) {
      all += num_per_expert[e];
      if (e < expert) earlier += num_per_expert[e];
    }
    sum_before(earlier, sums, first_row);
    sum_before(all, sums, num_recv);

    int count = 0, num_choices;
    for (i64 i = begin; i < end; ++i) count += expert_at(p, i) == expert;
    const i64 first = static_cast<i64>(first_row) + sum_before(count, sums, num_choices);
    // Rows by token that did not fit are missing on purpose.
    const bool is_complete = aligned(num_choices, p.alignment) == num_per_expert[expert] || num_arrived > p.capacity;

    i64 row = first;
    for (i64 i = begin; i < end; ++i) {
      const int found = expert_at(p, i);
      if (found == expert) {
        positions[i] = is_complete && row >= 0 && row < p.num_rows ? static_cast<i32>(row) : -1;
        ++row;
      }
      if (found < 0 && expert == 0) positions[i] = -1;
    }
    if (expert == 0) {  // rows by token that are padding
      const i64 last = static_cast<i64>(p.capacity) * p.num_topk;
      for (i64 i = static_cast<i64>(num_tokens) * p.num_topk + thread; i < last; i += kPositionThreads) positions[i] = -1;
    }
    if (thread == 0) {
      at<i32>(p.offsets, 0)[expert] = within(first_row, p.num_rows);
      at<i32>(p.ends, 0)[expert] = is_complete ? within(static_cast<i64>(first_row) + num_choices, p.num_rows) : -1;
      if (expert == p.num_experts - 1) {
        at<i32>(p.offsets, 0)[p.num_experts] = within(num_recv, p.num_rows);
        at<i32>(p.totals, 0)[0] = num_recv;
        at<i32>(p.totals, 0)[1] = num_tokens;
      }
    }
  }
}
