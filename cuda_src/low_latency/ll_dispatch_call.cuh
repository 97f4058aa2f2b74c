// A launch of a low-latency dispatch. ll_dispatch.cu describes the protocol.
#pragma once
#include "low_latency/ll_dispatch_receive.cuh"
#include "low_latency/ll_dispatch_send.cuh"

// Runs the halves that p.phases names. `receive_rows`: receives rows of the call's format; false: a wait timed out, or a source differs.
template <class Rows, class Receive>
__device__ __forceinline__ void dispatch(const Params& p, Table& table, Receive receive_rows) {
  __shared__ Shared shared;
  overlap_kernels();
  for (int e = threadIdx.x; e < kNumExperts; e += kLlThreads) shared.choices[e] = 0;
  __syncthreads();
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
