// dispatch_nodes: sends the rows of a known routing over several nodes to their final positions at the receivers.
//
// Copy warps (copies.cuh) move three kinds of rows:
// - Rows for this node go to their final positions at the receivers.
// - A chunk of a flow is gathered in a slot. It lies at the gateway if this GPU reaches that memory. Otherwise it lies here, and a put
//   carries it. A token crosses the network once for each flow. The chunk says where its rows belong at each rank of the fan.
// - A chunk that has arrived leaves its slot: each row goes to its final position at the ranks of the fan. The warp keeps the positions for
//   combine.
// move_rows says in which order. The warp that moves rows also writes their small arrays.
//
// Protocol:
// 1. The ranks agree on the call (call_start.cuh). Before that no byte of a row moves.
// 2. Rows move.
// 3. The last block of a rank to finish raises a flag at each rank of its node, and waits for their flags. Its flag releases the writes of
//    all blocks: this rank's own rows for that rank, and those that it took out of its flows.
// The last block also resets the counters of State, and advances State::nodes_epoch.
//
// Why no rank waits for ever, and why memory may be used again: see nodes.cuh, copies.cuh and call_start.cuh. One flag for each rank of the
// node is enough: a rank raises the flag of epoch k + 1 after it has read window k + 1 of this rank, which this rank published after its
// kernel k saw flag k.
//
// Bytes: a row crosses the network once for each flow of its token, and NVLink once for each receiver. It is written to memory once more at
// the gateway, and read once more there. A put reads and writes it once more here.
#include "common/work.cuh"
#include "nodes/call_start.cuh"
#include "nodes/copies.cuh"
#include "throughput/results.cuh"

constexpr int kCopyWarps = kDispatchNodesCopyWarps;
constexpr int kCopyRows = 8;     // rows of this node that a copy warp claims at once
constexpr int kWordsAtOnce = 8;  // words of small arrays that a lane loads before it stores them
using Group = Rows<kFan>;

struct Routes {
  u64 x[kRanksPerNode];  // addresses of the arrays of each rank of this node
  u64 scales[kRanksPerNode];
  u64 topk_idx[kRanksPerNode];
  u64 topk_weights[kRanksPerNode];
  u64 src_idx[kRanksPerNode];
  i64 capacity[kRanksPerNode];  // rows that fit there
  FirstRows first;
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
  if (verdict == kAgreed) routes.first.read(p, epoch);
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
__device__ __forceinline__ void write_topk(const Params& p, const Routes& routes, const Tokens<kPlaces>& tokens, const SmallArrays& from) {
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
__device__ __forceinline__ void write_scales(const Params& p, const Routes& routes, const Tokens<kPlaces>& tokens, u64 scales) {
  const u32 words = p.scale_bytes / 4, num_words = tokens.count * words;
  for (u32 first = 0; first < num_words; first += 32 * kWordsAtOnce) {
    u32 held[kWordsAtOnce];
#pragma unroll
    for (int n = 0; n < kWordsAtOnce; ++n) {
      const u32 i = first + n * 32 + lane_idx();
      const i64 element = __shfl_sync(~0u, tokens.element, i / words % 32);
      if (i < num_words) held[n] = at<const u32>(scales, element * p.scale_bytes)[i % words];
    }
#pragma unroll
    for (int n = 0; n < kWordsAtOnce; ++n) {
      const u32 i = first + n * 32 + lane_idx();
#pragma unroll
      for (int d = 0; d < kPlaces; ++d) {
        const i64 row = __shfl_sync(~0u, tokens.row[d], i / words % 32);
        if (i < num_words && row >= 0) at<u32>(routes.scales[tokens.first_index + d], row * p.scale_bytes)[i % words] = held[n];
      }
    }
  }
}

// Called by a whole warp.
template <int kPlaces>
__device__ __forceinline__ void write_small(const Params& p, const Routes& routes, const Tokens<kPlaces>& tokens, const SmallArrays& from) {
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

// Rows for ranks of this node. A warp takes kCopyRows of them at a time, and writes their small arrays. The number of the next ones is on
// its way meanwhile.
struct NearRows {
  const Params& p;
  const Routes& routes;
  int num_rows = 0, end;
  u32 ticket = 0;  // lane 0

  __device__ NearRows(const Params& p, const Routes& routes) : p(p), routes(routes) {
    int most = 0;
    for (int i = 0; i < kRanksPerNode; ++i) {
      num_rows += num_for(i);
      most = max(most, num_for(i));
    }
    end = (most + kCopyRows - 1) / kCopyRows * kRanksPerNode;
    take_ticket();
  }

  __device__ __forceinline__ int num_for(int index) const { return at<const i32>(p.handle, kHandleNumSent)[near_rank(p, index)]; }

  __device__ __forceinline__ void take_ticket() {
    if (lane_idx() == 0) ticket = fetch_add_relaxed_gpu(&at<State>(p.state, 0)->nodes_copied);
  }

  __device__ __forceinline__ bool take(Group& rows) {
    const int item = static_cast<int>(__shfl_sync(~0u, ticket, 0)), lane = lane_idx();
    if (item >= end) return false;
    take_ticket();
    const int chunk = item / kRanksPerNode, index = (item + chunk + p.rank) % kRanksPerNode;
    const int position = chunk * kCopyRows + lane;
    Tokens<1> tokens;
    tokens.count = max(0, min(kCopyRows, num_for(index) - chunk * kCopyRows));
    tokens.source = p.rank;
    tokens.first_index = index;
    tokens.token = tokens.element = lane < tokens.count ? at<const i32>(p.handle, kHandleNearList)[index * kNumMaxTokens + position] : 0;
    tokens.row[0] = lane < tokens.count ? routes.first.own[index] + position : -1;
    if (tokens.row[0] >= routes.capacity[index]) tokens.row[0] = -1;
    write_small(p, routes, tokens, {p.topk_idx, p.topk_weights, p.scales});
    rows.count = tokens.count;
    rows.from = p.x + static_cast<u64>(tokens.token) * p.row_bytes;
#pragma unroll
    for (int d = 0; d < kFan; ++d) rows.to[d] = 0;
    if (tokens.row[0] >= 0) rows.to[0] = routes.x[index] + tokens.row[0] * p.row_bytes;
    rows.when_read = rows.when_written = kNoSignal;
    return true;
  }
};

// --- rows for other nodes -----------------------------------------------------------------------------------------------------------

// Copies an array's parts of a chunk's tokens to a slot. Lane j holds token j.
__device__ inline void fill_small(u64 to, u64 from, u32 num_bytes, int my_token, int num_tokens) {
  const u32 words = num_bytes / 4, num_words = num_tokens * words;
  for (u32 first = 0; first < num_words; first += 32 * kWordsAtOnce) {
    u32 held[kWordsAtOnce];
#pragma unroll
    for (int n = 0; n < kWordsAtOnce; ++n) {
      const u32 i = first + n * 32 + lane_idx();
      const i64 token = __shfl_sync(~0u, my_token, i / words % 32);
      if (i < num_words) held[n] = at<const u32>(from, token * num_bytes)[i % words];
    }
#pragma unroll
    for (int n = 0; n < kWordsAtOnce; ++n) {
      const u32 i = first + n * 32 + lane_idx();
      if (i < num_words) at<u32>(to, 0)[i] = held[n];
    }
  }
}

// Gathers rows in slots. It knows the tokens of a chunk when it comes to it.
struct FilledChunks : Chunks {
  const Params& p;
  u32 epoch;
  int num_rows;
  int token;      // lane j: token j of the chunk
  i32 pos[kFan];  // its positions at the ranks of the fan

  __device__ FilledChunks(const Params& p, u32 epoch)
      : Chunks(&at<State>(p.state, 0)->nodes_filled, at<const i32>(p.handle, kHandleFlowTokens), p.chunk_tokens, first_flow_to_send(p)),
        p(p),
        epoch(epoch),
        num_rows(all_tokens()) {
    load_tokens();
  }

  __device__ __forceinline__ void load_tokens() {
    if (!has || lane_idx() >= tokens.count) return;
    const i64 position = static_cast<i64>(flow) * kNumMaxTokens + tokens.first + lane_idx();
    token = at<const i32>(p.handle, kHandleFlowList)[position];
#pragma unroll
    for (int i = 0; i < kFan; ++i) pos[i] = at<const i32>(p.handle, kHandleSentPos)[position * kFan + i];
  }

  __device__ __forceinline__ bool is_ready(u32& seen) const { return has_credit(p, epoch, flow, chunk, seen); }

  // Writes all of the chunk but its rows.
  __device__ __forceinline__ void take(Group& rows) {
    const int lane = lane_idx(), num_tokens = tokens.count;
    const u64 slot = slot_to_fill(p, flow, chunk);
    const int my_token = lane < num_tokens ? token : 0;
    if (lane < num_tokens) {
      ChunkHead* head = at<ChunkHead>(slot, 0);
      head->tokens[lane] = my_token;
#pragma unroll
      for (int i = 0; i < kFan; ++i) head->pos[lane * kFan + i] = pos[i];
    }
    if (p.topk_idx) fill_small(slot + p.chunk_topk_idx, p.topk_idx, kNumTopk * p.idx_bytes, my_token, num_tokens);
    if (p.topk_weights) fill_small(slot + p.chunk_weights, p.topk_weights, kNumTopk * sizeof(float), my_token, num_tokens);
    if (p.scales) fill_small(slot + p.chunk_scales, p.scales, p.scale_bytes, my_token, num_tokens);
    rows.count = num_tokens;
    rows.from = p.x + static_cast<u64>(my_token) * p.row_bytes;
#pragma unroll
    for (int d = 0; d < kFan; ++d) rows.to[d] = 0;
    rows.to[0] = slot + p.chunk_rows + static_cast<u64>(lane) * p.row_bytes;
    rows.when_read = kNoSignal;
    rows.when_written = signal_of(kPutSignal, flow, chunk);
    next();
    load_tokens();
  }
};

// Takes rows out of their slots.
struct EmptiedChunks : Chunks {
  const Params& p;
  const Routes& routes;
  u32 epoch;
  int num_rows;

  __device__ EmptiedChunks(const Params& p, const Routes& routes, u32 epoch)
      : Chunks(&at<State>(p.state, 0)->nodes_emptied, at<const i32>(p.handle, kHandleFlowRecv), p.chunk_tokens, first_flow_to_receive(p)),
        p(p),
        routes(routes),
        epoch(epoch),
        num_rows(all_tokens()) {}

  __device__ __forceinline__ bool is_ready(u32& seen) const { return has_arrived(p, epoch, flow, chunk, seen); }

  // Takes all of the chunk but its rows.
  __device__ __forceinline__ void take(Group& rows) {
    const int lane = lane_idx(), num_tokens = Chunks::tokens.count;
    const u64 slot = network_base(p) + recv_slot(slot_of(flow, chunk));
    const ChunkHead* head = at<const ChunkHead>(slot, 0);
    const bool exists = lane < num_tokens;
    Tokens<kFan> tokens;
    tokens.count = num_tokens;
    tokens.source = far_end(p, flow);
    tokens.first_index = first_of_fan(p);
    tokens.token = exists ? head->tokens[lane] : 0;
    tokens.element = lane;
    i32 pos[kFan];
#pragma unroll
    for (int d = 0; d < kFan; ++d) pos[d] = exists ? head->pos[lane * kFan + d] : -1;
    i32* recv_pos = at<i32>(p.handle, kHandleRecvPos) + (static_cast<i64>(flow) * kNumMaxTokens + Chunks::tokens.first) * kFan;
#pragma unroll
    for (int d = 0; d < kFan; ++d) {
      tokens.row[d] = -1;
      rows.to[d] = 0;
      if (exists) recv_pos[lane * kFan + d] = pos[d];
      const i64 row = routes.first.of_flow[flow * kFan + d] + pos[d];
      if (pos[d] < 0 || row >= routes.capacity[first_of_fan(p) + d]) continue;
      tokens.row[d] = row;
      rows.to[d] = routes.x[first_of_fan(p) + d] + row * p.row_bytes;
    }
    SmallArrays from = {};
    if (p.topk_idx) from.topk_idx = slot + p.chunk_topk_idx;
    if (p.topk_weights) from.topk_weights = slot + p.chunk_weights;
    if (p.scales) from.scales = slot + p.chunk_scales;
    write_small(p, routes, tokens, from);
    rows.count = num_tokens;
    rows.from = slot + p.chunk_rows + static_cast<u64>(lane) * p.row_bytes;
    rows.when_read = needs_credit() ? signal_of(kCreditSignal, flow, chunk) : kNoSignal;
    rows.when_written = kNoSignal;
    next();
  }
};

// --- the rest -----------------------------------------------------------------------------------------------------------------------

// Called by the copy warps.
__device__ inline void write_own_padding(const Params& p) {
  const i64 worker = (blockIdx.x * kCopyWarps + warp_idx()) * 32 + lane_idx();
  write_padding(p, worker, static_cast<i64>(gridDim.x) * kCopyWarps * 32, *at<const i32>(p.handle, kHandleNumRecv));
}

// Called by a whole warp.
__device__ inline void raise(const Params& p, u32 epoch, Signal s) {
  const int flow = flow_of(s), chunk = chunk_of(s);
  if (kind_of(s) == kCreditSignal) return send_credit(p, epoch, flow, chunk);
  const int num_tokens = tokens_of(chunk, at<const i32>(p.handle, kHandleFlowTokens)[flow], p.chunk_tokens).count;
  send_chunk(p, epoch, flow, chunk, p.chunk_rows + static_cast<u64>(num_tokens) * p.row_bytes);
}

template <class Copies>
__device__ __forceinline__ void copy_rows(const Params& p, const Routes& routes, u32 epoch, Copies copies) {
  move_rows<kRanksPerNode == 1, Group>(p, epoch, kPhaseNodeRows, copies, FilledChunks(p, epoch), EmptiedChunks(p, routes, epoch),
                                       NearRows(p, routes));
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

extern "C" __global__ void __launch_bounds__(kDispatchNodesThreads, 1) dispatch_nodes(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) char memory[];
  __shared__ Routes routes;
  State* state = at<State>(p.state, 0);
  const int warp = warp_idx(), lane = lane_idx();
  const u32 epoch = state->nodes_epoch + 1;
  const u32 serial = *at<const u32>(p.handle, kHandleSerial);
  if (p.repeats && !was_dispatched(p, serial)) {
    poison_results<u64>(p, blockIdx.x * kDispatchNodesThreads + threadIdx.x, gridDim.x * kDispatchNodesThreads);
    return;
  }
  clear_next_waits_of_nodes(p, epoch);
  auto raise_one = [&](Signal s) { raise(p, epoch, s); };
  if constexpr (kHasTma) {
    constexpr int kStages = kDispatchNodesStages;
    __shared__ SignalRing ring;
    __shared__ Staged staged[kCopyWarps * kStages];
    __shared__ u64 barriers[kCopyWarps * kStages];
    ring.clear();
    if (warp == 0) read_routes(p, epoch, serial, routes);
    __syncthreads();
    if (routes.verdict == kAgreed && warp < kCopyWarps) {
      const int first = warp * kStages;
      copy_rows(
          p, routes, epoch,
          BulkCopies<kFan, kStages>(first_line(memory) + first * kNodesStageBytes, barriers + first, staged + first, &ring, p.row_bytes));
    }
    if (routes.verdict == kAgreed && warp == kCopyWarps) raise_signals<kCopyWarps>(ring, raise_one);
  } else {
    if (warp == 0) read_routes(p, epoch, serial, routes);
    __syncthreads();
    if (routes.verdict == kAgreed) copy_rows(p, routes, epoch, WarpCopies<kFan, decltype(raise_one)>{raise_one, p.row_bytes});
  }
  if (routes.verdict == kAgreed) {
    if (blockIdx.x == 0 && warp == 0) copy_counts(p);
    if (warp < kCopyWarps && !p.refuses_more) write_own_padding(p);  // a caller that waits for counts gets no such rows
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
