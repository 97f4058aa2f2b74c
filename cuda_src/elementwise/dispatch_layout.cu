// dispatch_layout: counts the tokens for each rank and the choices of each expert, and marks the ranks of each token. Programs of DeepEP V1
// ask for these before each dispatch. The dispatch itself counts in `route`.
//
// A warp takes a token. Its lanes read the choices, and then each lane stands for a rank. Blocks count up to kCountedExperts experts at a
// time in shared memory. They add the counts to counters that the caller has cleared.
#include "common/memory.cuh"

__device__ inline void add_relaxed(i32* p, i32 v) { asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory"); }

__device__ inline int choice_of(const Params& p, i64 at_choice) {
  const i64 expert = p.idx_bytes == 4 ? at<i32>(p.topk_idx, 0)[at_choice] : at<i64>(p.topk_idx, 0)[at_choice];
  return expert >= 0 && expert < p.num_experts ? static_cast<int>(expert) : -1;
}

extern "C" __global__ void __launch_bounds__(kLocalThreads) dispatch_layout(const __grid_constant__ Params p) {
  constexpr int kWarps = kLocalThreads / 32;
  __shared__ i32 counts[kCountedExperts];
  const int lane = lane_idx(), each = p.num_experts / p.num_ranks, first_warp = blockIdx.x * kWarps + warp_idx();
  for (int base = 0; base < p.num_experts; base += kCountedExperts) {
    for (int i = threadIdx.x; i < kCountedExperts; i += kLocalThreads) counts[i] = 0;
    __syncthreads();
    const i64 num_choices = static_cast<i64>(p.num_tokens) * p.num_topk;
    for (i64 i = static_cast<i64>(blockIdx.x) * kLocalThreads + threadIdx.x; i < num_choices; i += gridDim.x * kLocalThreads) {
      const int expert = choice_of(p, i) - base;
      if (expert >= 0 && expert < kCountedExperts) atomicAdd(&counts[expert], 1);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kCountedExperts; i += kLocalThreads) {
      if (counts[i]) add_relaxed(at<i32>(p.per_expert, 0) + base + i, counts[i]);
    }
    __syncthreads();
  }
  for (int rank = lane; rank - lane < p.num_ranks; rank += 32) {
    int sum = 0;
    for (int token = first_warp; token < p.num_tokens; token += gridDim.x * kWarps) {
      bool is_in_rank = false;
      for (int k = 0; k < p.num_topk; k += 32) {
        const int expert = k + lane < p.num_topk ? choice_of(p, static_cast<i64>(token) * p.num_topk + k + lane) : -1;
        const int to = expert < 0 ? -1 : expert / each;
        const int count = p.num_topk - k < 32 ? p.num_topk - k : 32;
        for (int j = 0; j < count; ++j) is_in_rank |= __shfl_sync(~0u, to, j) == rank;
      }
      if (rank < p.num_ranks) at<u8>(p.is_in_rank, 0)[static_cast<i64>(token) * p.num_ranks + rank] = is_in_rank;
      sum += is_in_rank;
    }
    if (rank < p.num_ranks && sum) add_relaxed(at<i32>(p.per_rank, 0) + rank, sum);
  }
}
