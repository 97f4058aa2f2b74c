// dispatch_nodes: sends the rows of a known routing over several nodes to their final positions at the receivers.
//
// Roles of the warps in each block:
// - Copy warps write the rows for the ranks of this node, with their small arrays, to their final positions. Then they fill.
// - Fillers gather the tokens of a flow in a slot, a chunk at a time, and put the chunk to the gateway. A token crosses the network once
//   for each flow. The chunk says where its rows belong at each rank of the fan. When no chunk is left to fill, they empty.
// - Emptiers take chunks out of slots. They write each row to its final position at the ranks of the fan, and keep the positions for
//   combine.
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
#include "throughput/results.cuh"

constexpr int kWarps = kNodesThreads / 32, kFillWarps = kWarps / 4, kEmptyWarps = kWarps / 4;
static_assert(kWarps >= 4);
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
  const i64 arriving = *at<const i32>(p.handle, kHandleNumRecv);
  mine.missing_rows = p.refuses_more && arriving > p.capacity ? static_cast<i32>(arriving) : 0;
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
    if (blockIdx.x == 0 && verdict == kAgreed && arriving > p.capacity)
      report_event(p, &Report::no_room, static_cast<u64>(arriving) << 32 | p.capacity);
  }
}

// --- small arrays of rows -----------------------------------------------------------------------------------------------------------

// Up to 32 tokens of one source, whose rows a warp writes. Lane j has token j, and its row at each of kPlaces ranks; -1: not there.
template <int kPlaces>
struct Tokens {
  int count;
  int source;
  int first_index;  // of the first of the ranks within this node
  i32 token;
  i32 element;  // the token's index in the small arrays
  i64 row[kPlaces];
};

// Addresses; 0: the call has no such array.
struct SmallArrays {
  u64 topk_idx, topk_weights, scales;
};

// Writes the expert numbers and weights as the receivers see them.
template <class Index, int kPlaces>
__device__ inline void write_topk(const Params& p, const Routes& routes, const Tokens<kPlaces>& tokens, const SmallArrays& from) {
  const int num_choices = tokens.count * kNumTopk;
  for (int first = 0; first < num_choices; first += 32) {
    const int i = first + lane_idx(), j = i / kNumTopk % 32, k = i % kNumTopk;
    const i64 choice = static_cast<i64>(__shfl_sync(~0u, tokens.element, j)) * kNumTopk + k;
    const bool exists = i < num_choices;
    const i64 expert = exists ? at<const Index>(from.topk_idx, 0)[choice] : -1;
    const float weight = exists && from.topk_weights ? at<const float>(from.topk_weights, 0)[choice] : 0.f;
#pragma unroll
    for (int d = 0; d < kPlaces; ++d) {
      const i64 row = __shfl_sync(~0u, tokens.row[d], j);
      if (!exists || row < 0) continue;
      const int index = tokens.first_index + d;
      const i64 local = expert - near_rank(p, index) * kNumLocalExperts;
      const bool lives_there = local >= 0 && local < kNumLocalExperts;
      at<Index>(routes.topk_idx[index], 0)[row * kNumTopk + k] = lives_there ? static_cast<Index>(local) : static_cast<Index>(-1);
      if (from.topk_weights) at<float>(routes.topk_weights[index], 0)[row * kNumTopk + k] = lives_there ? weight : 0.f;
    }
  }
}

template <int kPlaces>
__device__ inline void write_scales(const Params& p, const Routes& routes, const Tokens<kPlaces>& tokens, u64 scales) {
  const u32 words = p.scale_bytes / 4, num_words = tokens.count * words;
  for (u32 first = 0; first < num_words; first += 32) {
    const u32 i = first + lane_idx(), j = i / words % 32, word = i % words;
    const i64 element = __shfl_sync(~0u, tokens.element, j);
    const bool exists = i < num_words;
    const u32 value = exists ? at<const u32>(scales, element * p.scale_bytes)[word] : 0;
#pragma unroll
    for (int d = 0; d < kPlaces; ++d) {
      const i64 row = __shfl_sync(~0u, tokens.row[d], j);
      if (exists && row >= 0) at<u32>(routes.scales[tokens.first_index + d], row * p.scale_bytes)[word] = value;
    }
  }
}

// Called by a whole warp.
template <int kPlaces>
__device__ inline void write_small(const Params& p, const Routes& routes, const Tokens<kPlaces>& tokens, const SmallArrays& from) {
#pragma unroll
  for (int d = 0; d < kPlaces; ++d) {
    if (lane_idx() < tokens.count && tokens.row[d] >= 0)
      at<int2>(routes.src_idx[tokens.first_index + d], 0)[tokens.row[d]] = make_int2(tokens.source, tokens.token);
  }
  if (from.topk_idx) {
    if (p.idx_bytes == 8) {
      write_topk<i64>(p, routes, tokens, from);
    } else {
      write_topk<i32>(p, routes, tokens, from);
    }
  }
  if (from.scales) write_scales(p, routes, tokens, from.scales);
}

// --- rows for this node -------------------------------------------------------------------------------------------------------------

__device__ inline void copy_near_rows(const Params& p, const Routes& routes, u32 epoch) {
  const i32 *near_list = at<const i32>(p.handle, kHandleNearList), *num_sent = at<const i32>(p.handle, kHandleNumSent);
  const int begin = near_rank(p, 0), lane = lane_idx();
  int most = 0;
  for (int i = 0; i < kRanksPerNode; ++i) most = max(most, num_sent[begin + i]);
  const int end = (most + kCopyRows - 1) / kCopyRows * kRanksPerNode;
  u32* tickets = &at<State>(p.state, 0)->nodes_copied;
  for (int item = claim(tickets); item < end; item = claim(tickets)) {
    const int chunk = item / kRanksPerNode, index = (item + chunk + p.rank) % kRanksPerNode;
    const int position = chunk * kCopyRows + lane;
    Tokens<1> tokens;
    tokens.count = max(0, min(kCopyRows, num_sent[begin + index] - chunk * kCopyRows));
    tokens.source = p.rank;
    tokens.first_index = index;
    tokens.token = tokens.element = lane < tokens.count ? near_list[index * kNumMaxTokens + position] : 0;
    tokens.row[0] = lane < tokens.count ? first_row_at(p, epoch, index, p.rank) + position : -1;
    if (tokens.row[0] >= routes.capacity[index]) tokens.row[0] = -1;
    write_small(p, routes, tokens, {p.topk_idx, p.topk_weights, p.scales});
    for (int j = 0; j < tokens.count; ++j) {
      const i64 row = __shfl_sync(~0u, tokens.row[0], j), token = __shfl_sync(~0u, tokens.token, j);
      if (row >= 0) warp_copy(at<char>(routes.x[index], row * p.row_bytes), at<const char>(p.x, token * p.row_bytes), p.row_bytes);
    }
  }
}

// --- rows for other nodes -----------------------------------------------------------------------------------------------------------

// Copies an array's parts of a chunk's tokens to a slot. Lane j holds token j.
__device__ inline void fill_small(u64 to, u64 from, u32 num_bytes, int my_token, int num_tokens) {
  const u32 words = num_bytes / 4, num_words = num_tokens * words;
  for (u32 first = 0; first < num_words; first += 32) {
    const u32 i = first + lane_idx();
    const i64 token = __shfl_sync(~0u, my_token, i / words % 32);
    if (i < num_words) at<u32>(to, 0)[i] = at<const u32>(from, token * num_bytes)[i % words];
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
  if (p.topk_idx) fill_small(slot + p.chunk_topk_idx, p.topk_idx, kNumTopk * p.idx_bytes, my_token, num_tokens);
  if (p.topk_weights) fill_small(slot + p.chunk_weights, p.topk_weights, kNumTopk * sizeof(float), my_token, num_tokens);
  if (p.scales) fill_small(slot + p.chunk_scales, p.scales, p.scale_bytes, my_token, num_tokens);
  for (int j = 0; j < num_tokens; ++j) {
    const i64 token = __shfl_sync(~0u, my_token, j);
    warp_copy(at<char>(slot, p.chunk_rows + j * p.row_bytes), at<const char>(p.x, token * p.row_bytes), p.row_bytes);
  }
  put_chunk(p, epoch, flow, chunk, p.chunk_rows + num_tokens * p.row_bytes);
  return true;
}

// Writes a row to up to kFan places; 0: not there.
__device__ inline void copy_to_fan(const u64 (&to)[kFan], u64 from, int row_bytes) {
  constexpr int kInFlight = 8;
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
  Tokens<kFan> tokens;
  tokens.count = num_tokens;
  tokens.source = source;
  tokens.first_index = fan_begin;
  tokens.token = lane < num_tokens ? head->tokens[lane] : 0;
  tokens.element = lane;
#pragma unroll
  for (int d = 0; d < kFan; ++d) {
    tokens.row[d] = -1;
    if (lane >= num_tokens) continue;
    const int pos = recv_pos[lane * kFan + d] = head->pos[lane * kFan + d];
    const i64 row = pos < 0 ? -1 : first_row_at(p, epoch, fan_begin + d, source) + pos;
    if (row < routes.capacity[fan_begin + d]) tokens.row[d] = row;
  }
  SmallArrays from = {};
  if (p.topk_idx) from.topk_idx = slot + p.chunk_topk_idx;
  if (p.topk_weights) from.topk_weights = slot + p.chunk_weights;
  if (p.scales) from.scales = slot + p.chunk_scales;
  write_small(p, routes, tokens, from);
  for (int j = 0; j < num_tokens; ++j) {
    u64 to[kFan];
#pragma unroll
    for (int d = 0; d < kFan; ++d) {
      const i64 row = __shfl_sync(~0u, tokens.row[d], j);
      to[d] = row < 0 ? 0 : routes.x[fan_begin + d] + row * p.row_bytes;
    }
    copy_to_fan(to, slot + p.chunk_rows + static_cast<u64>(j) * p.row_bytes, p.row_bytes);
  }
  return_credit(p, epoch, flow, chunk, num_chunks(flow_tokens, p.chunk_tokens));
  return true;
}

// --- the rest -----------------------------------------------------------------------------------------------------------------------

// Called by the copy warps.
__device__ inline void write_own_padding(const Params& p) {
  constexpr int kCopyWarps = kWarps - kFillWarps - kEmptyWarps;
  const i64 worker = (blockIdx.x * kCopyWarps + warp_idx() - kFillWarps - kEmptyWarps) * 32 + lane_idx();
  write_padding(p, worker, static_cast<i64>(gridDim.x) * kCopyWarps * 32, *at<const i32>(p.handle, kHandleNumRecv));
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
  if (p.repeats && !was_dispatched(p, serial)) {
    poison_results<u64>(p, blockIdx.x * kNodesThreads + threadIdx.x, gridDim.x * kNodesThreads);
    return;
  }
  clear_next_waits_of_nodes(p, epoch);
  if (warp == 0) read_routes(p, epoch, serial, routes);
  __syncthreads();

  if (routes.verdict == kAgreed) {
    if (warp >= kFillWarps + kEmptyWarps) {
      if (blockIdx.x == 0 && warp == kWarps - 1) copy_counts(p);
      copy_near_rows(p, routes, epoch);
      if (!p.refuses_more) write_own_padding(p);  // a caller that waits for counts gets no such rows
    }
    if (warp < kFillWarps || warp >= kFillWarps + kEmptyWarps) {
      const i32* sent = at<const i32>(p.handle, kHandleFlowTokens);
      for_each_chunk(&state->nodes_filled, sent, p.chunk_tokens,
                     [&](int flow, int chunk) { return fill_chunk(p, epoch, flow, chunk, sent[flow]); });
    }
    const i32* received = at<const i32>(p.handle, kHandleFlowRecv);
    for_each_chunk(&state->nodes_emptied, received, p.chunk_tokens,
                   [&](int flow, int chunk) { return empty_chunk(p, routes, epoch, flow, chunk, received[flow]); });
  }
  __syncthreads();

  if (warp != 0 || !is_warp_of_last_block(&state->nodes_blocks)) return;
  // A block that saw `abort` has not sent its part. It saw `abort` before it counted itself as finished, so this block sees it too.
  if (routes.verdict == kAgreed && !was_aborted(p) && lane < kRanksPerNode) {
    st_release_sys(at<u32>(p.peers[near_rank(p, lane)], kControlNodeFlags) + near_index(p.rank), epoch);
    wait_epoch(p, at<u32>(p.peers[p.rank], kControlNodeFlags) + lane, epoch, kPhaseDispatchRows, near_rank(p, lane));
  }
  __syncwarp();
  const bool failed = __any_sync(~0u, routes.verdict != kAgreed || was_aborted(p));
  if (failed) poison_results<u64>(p, lane, 32);
  if (lane == 0) {
    if (!failed) *at<u32>(p.handle, kHandleDispatched) = serial;
    count_rows(p, failed);
    state->nodes_blocks = state->nodes_copied = state->nodes_filled = state->nodes_emptied = state->nodes_reduced = 0;
    state->nodes_epoch = epoch;
  }
}
