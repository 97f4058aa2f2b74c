// A launch of a low-latency dispatch. ll_dispatch.cu describes the protocol.
#pragma once
#include "low_latency/ll_dispatch_receive.cuh"
#include "low_latency/ll_dispatch_send.cuh"

// Called before the kernel awaits its predecessor. Prefetches what the send half reads: each block one row, and block 0 the experts.
template <class Rows>
__device__ __forceinline__ void prefetch_inputs(const Params& p) {
  if (!kHasOverlap || !(p.phases & kLlSend) || p.num_tokens == 0) return;
  if (threadIdx.x == 0) {
    prefetch_numbers(p, progress_of(p), kLlDispatchAcks);
    prefetch(p.topk_weights ? p.topk_weights : p.topk_idx);
  }
  const u32 offset = threadIdx.x * 128, row_bytes = Rows::given_bytes(p);
  if (blockIdx.x < p.num_tokens && offset < row_bytes) prefetch(p.x + static_cast<u64>(blockIdx.x) * row_bytes + offset);
  if (blockIdx.x == 0 && offset < static_cast<u32>(p.num_tokens * kNumTopk * p.idx_bytes)) prefetch(p.topk_idx + offset);
}

// Runs the halves that p.phases names. `receive_rows`: receives rows of the call's format; false: a wait timed out, or a source differs.
template <class Rows, class Receive>
__device__ __forceinline__ void dispatch(const Params& p, Table& table, Receive receive_rows) {
  __shared__ Shared shared;
  prefetch_inputs<Rows>(p);
  for (int e = threadIdx.x; e < kNumExperts; e += kLlThreads) shared.choices[e] = 0;
  __syncthreads();
  overlap_kernels();
  if (p.phases & kLlSend) {
    send<Rows>(p, table.experts, shared);
  } else {
    if (warp_idx() == 0) acquire_credits(p, progress_of(p), kLlDispatchAcks, kPhaseLlDispatchRoom, nullptr, shared.call);
    __syncthreads();
    advance_once(p, shared.call);
  }
  if (!(p.phases & kLlReceive)) return;
  if (shared.call.failed) return Rows::poison(p, blockIdx.x * kLlThreads + threadIdx.x, gridDim.x * kLlThreads);
  const u64 start = p.wait_stats ? nanoseconds() : 0;
  start_receiving(p, start, shared.call);
  if (!receive_rows(start, shared)) Rows::poison(p, lane_idx(), 32);  // all of them: the positions of the missing rows are unknown
}
