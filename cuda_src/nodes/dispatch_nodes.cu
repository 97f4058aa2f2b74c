// dispatch_nodes: sends the rows of a known routing over several nodes to their final positions at the receivers.
//
// Roles of the warps in each block:
// - Copy warps write the rows for the ranks of this node, with their small arrays, to their final positions.
// - Fillers gather the tokens of a flow in a slot, a chunk at a time, and put the chunk to the gateway. A token crosses the network once
// for
//   each flow. The chunk says where its rows belong at each rank of the fan.
// - Emptiers take chunks out of slots. They write each row to its final position at the ranks of the fan, and keep the positions for
// combine.
//
// Protocol:
// 1. The ranks agree on the call (call_start.cuh). Before that no byte of a row moves.
// 2. Rows move.
// 3. The last block of a rank to finish raises a flag at each rank of its node, and waits for their flags. Its flag releases the writes of
// all
//    blocks: this rank's own rows for that rank, and those that it took out of its flows.
// The last block also resets the counters of State, and advances State::nodes_epoch.
//
// Why no rank waits for ever, and why memory may be used again: see nodes.cuh and call_start.cuh. One flag for each rank of the node is
// enough: a rank raises the flag of epoch k + 1 after it has read window k + 1 of this rank, which this rank published after its kernel k
// saw flag k.
//
// Bytes: a row crosses the network once for each flow of its token, and NVLink once for each receiver. It is written to memory once more at
// each end of a flow, and read once more.
#include "common/work.cuh"
#include "nodes/call_start.cuh"

constexpr int kWarps = kNodesThreads / 32;
static_assert(kFillWarps + kEmptyWarps < kWarps);
constexpr int kCopyRows = 8;  // rows that a copy warp claims at once

struct Routes {
  u64 x[kRanksPerNode];  // addresses of the arrays of each rank of this node
  u64 scales[kRanksPerNode];
  u64 topk_idx[kRanksPerNode];
  u64 topk_weights[kRanksPerNode];
  u64 src_idx[kRanksPerNode];
  i64 capacity[kRanksPerNode];  // rows that fit there
  u32 verdict;
};

__device__ inline void read_routes(const Params& p, u32 epoch, u32 serial, Routes& routes) {
  const int lane = lane_idx();
  NodeWindow mine;
  mine.x = p.recv_x_offset;
  mine.scales = p.recv_scales_offset;
  mine.topk_idx = p.recv_topk_idx_offset;
  mine.topk_weights = p.recv_topk_weights_offset;
  mine.src_idx = p.recv_src_idx_offset;
  mine.capacity = p.capacity;
  mine.call_signature = p.call_signature;
  mine.serial = serial;
  mine.missing_rows = p.missing_rows;
  const u32 verdict = agree(p, epoch, serial, kPhaseDispatchWindow, mine);
  if (lane < kRanksPerNode && verdict == kAgreed) {
    const NodeWindow* window = window_at(p.peers[p.rank], epoch, lane);
    const u64 base = p.peers[near_rank(p, lane)];
    routes.x[lane] = base + window->x;
    routes.scales[lane] = base + window->scales;
    routes.topk_idx[lane] = base + window->topk_idx;
    routes.topk_weights[lane] = base + window->topk_weights;
    routes.src_idx[lane] = base + window->src_idx;
    routes.capacity[lane] = window->capacity;
  }
  if (lane == 0) {
    routes.verdict = verdict;
    const i64 arriving = *at<const i32>(p.handle, kHandleNumRecv);
    if (blockIdx.x == 0 && verdict == kAgreed && arriving > p.capacity)
      report_event(p, &Report::no_room, static_cast<u64>(arriving) << 32 | p.capacity);
  }
}

// --- small arrays of a row ----------------------------------------------------------------------------------------------------------

// Writes the expert numbers and weights of a row as the receiver sees them. Lane k has choice k.
template <class Index>
__device__ __forceinline__ void write_topk(const Params& p, const Routes& routes, int index, i64 row, const void* idx,
                                           const void* weights) {
  const int k = lane_idx();
  if (k >= kNumTopk) return;
  const i64 expert = static_cast<i64>(static_cast<const Index*>(idx)[k]) - near_rank(p, index) * kNumLocalExperts;
  const bool lives_there = expert >= 0 && expert < kNumLocalExperts;
  at<Index>(routes.topk_idx[index], 0)[row * kNumTopk + k] = lives_there ? static_cast<Index>(expert) : static_cast<Index>(-1);
  if (weights) at<float>(routes.topk_weights[index], 0)[row * kNumTopk + k] = lives_there ? static_cast<const float*>(weights)[k] : 0.f;
}

// Called by a whole warp. Addresses of absent arrays are null.
__device__ inline void write_small(const Params& p, const Routes& routes, int index, i64 row, int source, int token, const void* idx,
                                   const void* weights, const void* scales) {
  if (lane_idx() == 0) at<int2>(routes.src_idx[index], 0)[row] = make_int2(source, token);
  if (idx) {
    if (p.idx_bytes == 8) {
      write_topk<i64>(p, routes, index, row, idx, weights);
    } else {
      write_topk<i32>(p, routes, index, row, idx, weights);
    }
  }
  if (scales) {
    u32* to = at<u32>(routes.scales[index], row * p.scale_bytes);
    for (int i = lane_idx(); i < p.scale_bytes / 4; i += 32) to[i] = static_cast<const u32*>(scales)[i];
  }
}

// The element `i` of an array with `stride` bytes for each, or null.
__device__ __forceinline__ const void* element(u64 array, i64 i, int stride) { return array ? at<const void>(array, i * stride) : nullptr; }

// --- rows for this node -------------------------------------------------------------------------------------------------------------

__device__ inline void copy_near_rows(const Params& p, const Routes& routes, u32 epoch) {
  const i32 *near_list = at<const i32>(p.handle, kHandleNearList), *num_sent = at<const i32>(p.handle, kHandleNumSent);
  const int begin = near_rank(p, 0);
  int most = 0;
  for (int i = 0; i < kRanksPerNode; ++i) most = max(most, num_sent[begin + i]);
  const int end = (most + kCopyRows - 1) / kCopyRows * kRanksPerNode;
  u32* tickets = &at<State>(p.state, 0)->nodes_copied;
  for (int item = claim(tickets); item < end; item = claim(tickets)) {
    const int chunk = item / kRanksPerNode, index = (item + chunk + p.rank) % kRanksPerNode;
    const i64 first = first_row_at(p, epoch, index, p.rank);
    const int last = min((chunk + 1) * kCopyRows, num_sent[begin + index]);
    for (int position = chunk * kCopyRows; position < last; ++position) {
      const i64 row = first + position;
      if (row >= routes.capacity[index]) break;
      const i64 token = near_list[index * kNumMaxTokens + position];
      warp_copy(at<char>(routes.x[index], row * p.row_bytes), at<const char>(p.x, token * p.row_bytes), p.row_bytes);
      write_small(p, routes, index, row, p.rank, token, element(p.topk_idx, token * kNumTopk, p.idx_bytes),
                  element(p.topk_weights, token * kNumTopk, sizeof(float)), element(p.scales, token, p.scale_bytes));
    }
  }
}

// --- rows for other nodes -----------------------------------------------------------------------------------------------------------

// Copies the small arrays of a chunk's tokens to a slot. Lane j holds token j.
__device__ inline void fill_small(const Params& p, u64 slot, int my_token, int num_tokens) {
  for (int j = 0; j < num_tokens; ++j) {
    const i64 token = __shfl_sync(~0u, my_token, j);
    if (p.topk_idx) {
      const u32* from = at<const u32>(p.topk_idx, token * kNumTopk * p.idx_bytes);
      u32* to = at<u32>(slot, p.chunk_topk_idx + j * kNumTopk * p.idx_bytes);
      for (int i = lane_idx(); i < kNumTopk * p.idx_bytes / 4; i += 32) to[i] = from[i];
    }
    if (p.topk_weights && lane_idx() < kNumTopk)
      at<float>(slot, p.chunk_weights)[j * kNumTopk + lane_idx()] = at<const float>(p.topk_weights, 0)[token * kNumTopk + lane_idx()];
    if (p.scales) {
      const u32* from = at<const u32>(p.scales, token * p.scale_bytes);
      u32* to = at<u32>(slot, p.chunk_scales + j * p.scale_bytes);
      for (int i = lane_idx(); i < p.scale_bytes / 4; i += 32) to[i] = from[i];
    }
  }
}

__device__ inline bool fill_chunk(const Params& p, u32 epoch, int flow, int chunk, int flow_tokens) {
  if (!await_credit(p, epoch, flow, chunk)) return false;
  const int lane = lane_idx(), first = chunk * p.chunk_tokens, num_tokens = min(p.chunk_tokens, flow_tokens - first);
  const u64 slot = network_base(p) + send_slot(slot_of(flow, chunk));
  ChunkHead* head = at<ChunkHead>(slot, 0);
  int my_token = 0;
  if (lane < num_tokens) {
    my_token = at<const i32>(p.handle, kHandleFlowList)[flow * kNumMaxTokens + first + lane];
    head->tokens[lane] = my_token;
    for (int i = 0; i < kFan; ++i) head->pos[lane * kFan + i] = -1;
    const i64 entry = static_cast<i64>(my_token) * kNumTopk;
    for (int k = 0; k < kNumTopk; ++k) {
      const int rank = at<const i32>(p.handle, kHandleEntryRank)[entry + k];
      if (rank < 0 || node_of(rank) == node_of(p.rank) || flow_to(p, rank) != flow) continue;
      head->pos[lane * kFan + (kDirect ? 0 : near_index(rank))] = at<const i32>(p.handle, kHandleEntryPos)[entry + k];
    }
  }
  fill_small(p, slot, my_token, num_tokens);
  for (int j = 0; j < num_tokens; ++j) {
    const i64 token = __shfl_sync(~0u, my_token, j);
    warp_copy(at<char>(slot, p.chunk_rows + j * p.row_bytes), at<const char>(p.x, token * p.row_bytes), p.row_bytes);
  }
  put_chunk(p, epoch, flow, chunk, p.chunk_rows + num_tokens * p.row_bytes);
  return true;
}

// Writes a row to up to kFan places; 0: not there.
__device__ inline void copy_to_fan(const u64 (&to)[kFan], u64 from, int row_bytes) {
  constexpr int kInFlight = 4;
  const int count = row_bytes / 16;
  for (int i = lane_idx(); i < count; i += kInFlight * 32) {
    Vec16 held[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (i + j * 32 < count) held[j] = ld_streaming(at<const Vec16>(from, 0) + i + j * 32);
    }
#pragma unroll
    for (int d = 0; d < kFan; ++d) {
      if (to[d] == 0) continue;
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        if (i + j * 32 < count) st_vec(at<Vec16>(to[d], 0) + i + j * 32, held[j]);
      }
    }
  }
}

__device__ inline bool empty_chunk(const Params& p, const Routes& routes, u32 epoch, int flow, int chunk, int flow_tokens) {
  if (!await_chunk(p, epoch, flow, chunk, kPhaseNodeRows)) return false;
  const int lane = lane_idx(), first = chunk * p.chunk_tokens, num_tokens = min(p.chunk_tokens, flow_tokens - first);
  const int source = far_end(p, flow), fan_begin = kDirect ? near_index(p.rank) : 0;
  const u64 slot = network_base(p) + recv_slot(slot_of(flow, chunk));
  const ChunkHead* head = at<const ChunkHead>(slot, 0);
  i32* recv_pos = at<i32>(p.handle, kHandleRecvPos) + (static_cast<i64>(flow) * kNumMaxTokens + first) * kFan;
  for (int i = lane; i < num_tokens * kFan; i += 32) recv_pos[i] = head->pos[i];
  for (int j = 0; j < num_tokens; ++j) {
    const int token = head->tokens[j];
    u64 to[kFan];
#pragma unroll
    for (int d = 0; d < kFan; ++d) {
      const int index = fan_begin + d, pos = head->pos[j * kFan + d];
      const i64 row = pos < 0 ? 0 : first_row_at(p, epoch, index, source) + pos;
      const bool arrives = pos >= 0 && row < routes.capacity[index];
      to[d] = arrives ? routes.x[index] + row * p.row_bytes : 0;
      if (arrives) {
        write_small(p, routes, index, row, source, token, element(p.topk_idx ? slot + p.chunk_topk_idx : 0, j * kNumTopk, p.idx_bytes),
                    element(p.topk_weights ? slot + p.chunk_weights : 0, j * kNumTopk, sizeof(float)),
                    element(p.scales ? slot + p.chunk_scales : 0, j, p.scale_bytes));
      }
    }
    copy_to_fan(to, slot + p.chunk_rows + static_cast<u64>(j) * p.row_bytes, p.row_bytes);
  }
  return_credit(p, epoch, flow, chunk, num_chunks(flow_tokens, p.chunk_tokens));
  return true;
}

// --- the rest -----------------------------------------------------------------------------------------------------------------------

// Rows past the received ones belong to no token. Called by the copy warps.
__device__ inline void write_padding(const Params& p) {
  constexpr int kCopyWarps = kWarps - kFillWarps - kEmptyWarps;
  const i64 worker = (blockIdx.x * kCopyWarps + warp_idx() - kFillWarps - kEmptyWarps) * 32 + lane_idx(),
            num_workers = static_cast<i64>(gridDim.x) * kCopyWarps * 32, num_recv = *at<const i32>(p.handle, kHandleNumRecv);
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

// The caller may write to its counts, and later calls may use the handle again. The handle therefore keeps its own counts.
__device__ inline void copy_counts(const Params& p) {
  if (blockIdx.x > 0 || warp_idx() != kWarps - 1) return;
  if (lane_idx() == 0) *at<i32>(p.num_recv, 0) = *at<const i32>(p.handle, kHandleNumRecv);
  const i32* per_expert = at<const i32>(p.handle, kHandleNumRecvPerExpert);
  for (int e = lane_idx(); e < kNumLocalExperts; e += 32) at<i32>(p.num_recv_per_expert, 0)[e] = per_expert[e];
}

// Called by one warp.
__device__ inline void poison_results(const Params& p) {
  const u64 base = p.peers[p.rank];
  poison(base + p.recv_x_offset, p.capacity * p.row_bytes, lane_idx(), 32);
  if (p.scales) poison(base + p.recv_scales_offset, p.capacity * p.scale_bytes, lane_idx(), 32);
  if (p.topk_weights) poison(base + p.recv_topk_weights_offset, p.capacity * kNumTopk * sizeof(float), lane_idx(), 32);
}

// Called by one thread.
__device__ inline void count_rows(const Params& p, bool failed) {
  if constexpr (kHasStatistics) {
    const i64 arriving = *at<const i32>(p.handle, kHandleNumRecv);
    const u64 row_bytes = p.row_bytes + p.scale_bytes;
    for (int r = 0; r < kNumRanks && !failed; ++r) count_sent(p, at<const i32>(p.handle, kHandleNumSent)[r], row_bytes);
    count_received(p, failed ? 0 : min(arriving, p.capacity), row_bytes);
    count_call(p);
  }
}

extern "C" __global__ void __launch_bounds__(kNodesThreads, 1) dispatch_nodes(const __grid_constant__ Params p) {
  __shared__ Routes routes;
  State* state = at<State>(p.state, 0);
  const int warp = warp_idx(), lane = lane_idx();
  const u32 epoch = state->nodes_epoch + 1;
  const u32 serial = *at<const u32>(p.handle, kHandleSerial);
  clear_next_waits_of_nodes(p, epoch);
  if (warp == 0) read_routes(p, epoch, serial, routes);
  __syncthreads();

  if (routes.verdict == kAgreed) {
    if (warp < kFillWarps) {
      const i32* tokens = at<const i32>(p.handle, kHandleFlowTokens);
      for_each_chunk(&state->nodes_filled, tokens, p.chunk_tokens,
                     [&](int flow, int chunk) { return fill_chunk(p, epoch, flow, chunk, tokens[flow]); });
    } else if (warp < kFillWarps + kEmptyWarps) {
      const i32* tokens = at<const i32>(p.handle, kHandleFlowRecv);
      for_each_chunk(&state->nodes_emptied, tokens, p.chunk_tokens,
                     [&](int flow, int chunk) { return empty_chunk(p, routes, epoch, flow, chunk, tokens[flow]); });
    } else {
      copy_counts(p);
      copy_near_rows(p, routes, epoch);
      write_padding(p);
    }
  }
  __syncthreads();

  if (warp != 0) return;
  bool last = lane == 0 && is_last_block(&state->nodes_blocks);
  last = __shfl_sync(~0u, last, 0);
  if (!last) return;
  __syncwarp();  // all lanes send after what lane 0 acquired
  // A block that saw `abort` has not sent its part. It saw `abort` before it counted itself as finished, so this block sees it too.
  if (routes.verdict == kAgreed && !was_aborted(p) && lane < kRanksPerNode) {
    st_release_sys(at<u32>(p.peers[near_rank(p, lane)], kControlNodeFlags) + near_index(p.rank), epoch);
    wait_epoch(p, at<u32>(p.peers[p.rank], kControlNodeFlags) + lane, epoch, kPhaseDispatchRows, near_rank(p, lane));
  }
  __syncwarp();
  const bool failed = __any_sync(~0u, routes.verdict != kAgreed || was_aborted(p));
  if (failed) poison_results(p);
  if (lane == 0) {
    if (!failed) *at<u32>(p.handle, kHandleDispatched) = serial;
    count_rows(p, failed);
    state->nodes_blocks = state->nodes_copied = state->nodes_filled = state->nodes_emptied = state->nodes_reduced = 0;
    state->nodes_epoch = epoch;
  }
}
