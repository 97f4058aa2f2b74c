// What route and route_nodes share: each warp reads the experts of a run of tokens.
#pragma once
#include "common/wait.cuh"

constexpr int kWarps = kRouteThreads / 32;

template <class Index>
__device__ inline void read_experts_as(const Params& p, int token, i32 (&experts)[kNumTopk]) {
  const Index* from = at<const Index>(p.topk_idx, 0) + static_cast<i64>(token) * kNumTopk;
#pragma unroll
  for (int k = 0; k < kNumTopk; ++k) {
    const Index expert = from[k];
    experts[k] = expert >= -1 && expert < kNumExperts ? static_cast<i32>(expert) : -2;
  }
}

// The experts of a token; -2 for a number that is neither -1 nor an expert. All loads are in flight before the first use.
__device__ inline void read_experts(const Params& p, int token, i32 (&experts)[kNumTopk]) {
  if (p.idx_bytes == 8) {
    read_experts_as<i64>(p, token, experts);
  } else {
    read_experts_as<i32>(p, token, experts);
  }
}

// Reports choice k of a token, for which read_experts gave -2.
__device__ inline void report_choice(const Params& p, int token, int k) {
  const i64 i = static_cast<i64>(token) * kNumTopk + k;
  report_bad_expert(p, token, p.idx_bytes == 8 ? at<const i64>(p.topk_idx, 0)[i] : at<const i32>(p.topk_idx, 0)[i]);
}

// The tokens of a warp, in steps of 32.
struct Run {
  int begin, end;
};

// `block`: the number of this block among the `num_blocks` blocks that share the tokens.
template <class Number>
__device__ __forceinline__ Run run_of(const Params& p, Number block, Number num_blocks) {
  const int steps = (p.num_tokens + kRouteThreads * num_blocks - 1) / (kRouteThreads * num_blocks);
  const int begin = (block * kWarps + warp_idx()) * steps * 32;
  return {begin, min(begin + steps * 32, p.num_tokens)};
}
