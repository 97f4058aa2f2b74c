// What dispatch and dispatch_nodes share: the parts of a result that no rank sends.
#pragma once
#include "common/wait.cuh"

// The caller may write to its counts, and later calls may use the handle again. The handle therefore keeps its own counts. Called by one
// warp.
__device__ inline void copy_counts(const Params& p) {
  if (lane_idx() == 0) *at<i32>(p.num_recv, 0) = *at<const i32>(p.handle, kHandleNumRecv);
  const i32* per_expert = at<const i32>(p.handle, kHandleNumRecvPerExpert);
  for (int e = lane_idx(); e < kNumLocalExperts; e += 32) at<i32>(p.num_recv_per_expert, 0)[e] = per_expert[e];
}

// Rows past the received ones belong to no token. `num_workers` threads share the work. `num_recv` may stay in shared memory, where it
// takes no registers.
__device__ inline void write_padding(const Params& p, i64 worker, i64 num_workers, const i64& num_recv) {
  const u64 base = p.peers[p.rank];
  for (i64 i = num_recv + worker; i < p.capacity; i += num_workers) at<int2>(base, p.recv_src_idx_offset)[i] = make_int2(-1, -1);
  if (!p.topk_idx) return;
  for (i64 i = num_recv * kNumTopk + worker; i < p.capacity * kNumTopk; i += num_workers) {
    if (p.idx_bytes == 8) {
      at<i64>(base, p.recv_topk_idx_offset)[i] = -1;
    } else {
      at<i32>(base, p.recv_topk_idx_offset)[i] = -1;
    }
    if (p.topk_weights) at<float>(base, p.recv_topk_weights_offset)[i] = 0.f;
  }
}

// `num_threads` threads share the work. `Number`: the type of their numbers.
template <class Number>
__device__ inline void poison_results(const Params& p, Number thread, Number num_threads) {
  const u64 base = p.peers[p.rank];
  poison(base + p.recv_x_offset, p.capacity * p.row_bytes, thread, num_threads);
  if (p.scales) poison(base + p.recv_scales_offset, p.capacity * p.scale_bytes, thread, num_threads);
  if (p.topk_weights) poison(base + p.recv_topk_weights_offset, p.capacity * kNumTopk * sizeof(float), thread, num_threads);
}
