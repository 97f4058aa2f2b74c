// The sending half of a combine over several nodes (combine_nodes.cuh): the rows that this rank exposes to its node, and the sums that it
// makes for other nodes.
#pragma once
#include "common/number.cuh"
#include "common/work.cuh"
#include "nodes/call_start.cuh"
#include "nodes/copies.cuh"

constexpr int kWarps = kCombineNodesThreads / 32;
constexpr int kRowVecs = kRowBytes / 16;
constexpr int kMostHeld = kHasTma ? 8 : 4;  // vectors that a lane loads before it compresses them

// The vectors of each row that a lane loads before it adds them up. A row of DeepSeek's models has 28 for each lane, so 7 leave no rest.
template <int kNumRows>
constexpr int kVectorsAtOnce = kNumRows > 2 ? 12 / kNumRows : 7;

struct Routes {
  u64 x[kRanksPerNode];  // addresses of the rows that each rank of this node exposes; here: of y
  u64 weights[kRanksPerNode];
  i64 capacity[kRanksPerNode];  // rows of dispatch that fit there
  FirstRows first;
  i32 first_sum[kNumFlows];  // the first of the sums that arrive through each flow
  bool returns_credits;      // this GPU does not reach the memory of all ranks that send sums
  u32 verdict;
};

__device__ inline void read_routes(const Params& p, u32 epoch, u32 serial, Routes& routes) {
  const int lane = lane_idx();
  NodeWindow mine;
  mine.x = p.exposed_offset;
  mine.topk_weights = p.exposed_weights_offset;
  mine.scales = mine.topk_idx = mine.src_idx = 0;
  mine.capacity = p.capacity;
  mine.call_signature = p.call_signature;
  mine.serial = serial;
  mine.missing_rows = 0;
  const u32 verdict = agree(p, epoch, serial, kPhaseCombineWindow, mine);
  if (lane < kRanksPerNode && verdict == kAgreed) {
    const NodeWindow* window = window_at(p.peers[p.rank], epoch, lane);
    const bool is_own = lane == near_index(p.rank);
    const u64 base = p.peers[near_rank(p, lane)];
    routes.x[lane] = is_own ? p.y : base + window->x;
    routes.weights[lane] = is_own ? p.topk_weights : base + window->topk_weights;
    routes.capacity[lane] = window->capacity;
  }
  if (verdict == kAgreed) routes.first.read(p, epoch);
  if (lane == 0) {
    i32 sums = 0;
    routes.returns_credits = false;
    for (int f = 0; f < kNumFlows; ++f) {
      routes.first_sum[f] = sums;
      sums += at<const i32>(p.handle, kHandleFlowTokens)[f];
      if (!network_of(p, far_end(p, f))) routes.returns_credits = true;
    }
    routes.verdict = verdict;
  }
}

__device__ __forceinline__ const float* weights_at(u64 array, i64 row) { return at<const float>(array, 0) + row * kNumTopk; }

// --- rows of this node --------------------------------------------------------------------------------------------------------------

// Whether the rows of y lie where this rank exposes them, so that only their weights are copied. Other ranks need not know.
__device__ __forceinline__ bool exposes_in_place(const Params& p) { return p.y == p.peers[p.rank] + p.exposed_offset; }

// Exposes rows to ranks of this node, kExposedRows for each flag. Rows that only this rank reads stay where they are: those of its own
// tokens, and those whose sums it makes.
struct ExposedRows {
  const Params& p;
  i64 begin = 0, end = 0;
  int num_rows;

  __device__ explicit ExposedRows(const Params& p) : p(p) {
    if (kRanksPerNode > 1) {
      const i64 num_recv = min(static_cast<i64>(*at<const i32>(p.handle, kHandleNumRecv)), p.capacity);
      const int next_node = near_rank(p, 0) + kRanksPerNode;
      // On the direct path this rank sends the rows of other nodes itself.
      begin = kDirect ? min(first_row(near_rank(p, 0)), num_recv) : 0;
      end = kDirect && next_node < kNumRanks ? min(first_row(next_node), num_recv) : num_recv;
    }
    num_rows = static_cast<int>(end - begin);
  }

  __device__ __forceinline__ i64 first_row(int source) const { return at<const i32>(p.handle, kHandleFirstRow)[source]; }

  // Whether no other rank reads a row.
  __device__ __forceinline__ bool is_own(i64 row) const {
    bool found = false;
    for (int source = kDirect ? p.rank : near_index(p.rank); source < kNumRanks; source += kRanksPerNode) {
      found |= row >= first_row(source) && (source + 1 == kNumRanks || row < first_row(source + 1));
      if (kDirect) break;
    }
    return found;
  }

  __device__ __forceinline__ bool take(Rows<1>& rows) const {
    if (begin >= end) return false;
    const int lane = lane_idx(), chunk = static_cast<int>(begin / kExposedRows) + claim(&at<State>(p.state, 0)->nodes_copied);
    const i64 first = max(begin, static_cast<i64>(chunk) * kExposedRows), last = min(end, static_cast<i64>(chunk + 1) * kExposedRows);
    if (first >= last) return false;
    const u64 base = p.peers[p.rank];
    if (p.topk_weights) {
      float* to = at<float>(base, p.exposed_weights_offset);
      for (i64 i = first * kNumTopk + lane; i < last * kNumTopk; i += 32) to[i] = weights_at(p.topk_weights, 0)[i];
    }
    const bool stays = exposes_in_place(p);
    rows.count = stays ? 1 : static_cast<int>(last - first);  // a row without a place, for the signal
    rows.from = p.y + (first + lane) * kRowBytes;
    rows.to[0] = stays || is_own(first + lane) ? 0 : base + p.exposed_offset + (first + lane) * kRowBytes;
    rows.when_read = kNoSignal;
    rows.when_written = signal_of(kExposedSignal, 0, chunk);
    return true;
  }
};

// Called by a whole warp.
__device__ __forceinline__ void raise_exposed(const Params& p, u32 epoch, int chunk) {
  const int lane = lane_idx();
  if (lane < kRanksPerNode)
    st_relaxed_sys(at<u32>(p.peers[near_rank(p, lane)], kControlExposedFlags) + near_index(p.rank) * kMaxExposedChunks + chunk, epoch);
}

// Waits until a row of a rank of this node may be read.
__device__ inline bool await_row(const Params& p, u32 epoch, int index, i64 row) {
  if (index == near_index(p.rank)) return true;
  const u32* flags = at<const u32>(p.peers[p.rank], kControlExposedFlags) + index * kMaxExposedChunks;
  return wait_epoch(p, flags + row / kExposedRows, epoch, kPhaseExposedRows, near_rank(p, index));
}

// --- sums for other nodes -----------------------------------------------------------------------------------------------------------

// Adds up the rows of a token in this node, and writes the sum as a row. 0: no row.
__device__ inline void write_plain_sum(const u64 (&rows)[kFan], u64 to) {
  constexpr int kAtOnce = kFan == 2 ? 4 : kVectorsAtOnce<kFan>;
#pragma unroll 1
  for (int first = lane_idx(); first < kRowVecs; first += 32 * kAtOnce) {
    Vec16 held[kAtOnce][kFan];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int d = 0; d < kFan; ++d) {
        if (rows[d] && first + i * 32 < kRowVecs) held[i][d] = ld_streaming(at<const Vec16>(rows[d], 0) + first + i * 32);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i * 32 >= kRowVecs) break;
      float sum[kPerVec<kElement>] = {};
#pragma unroll
      for (int d = 0; d < kFan; ++d) {
        if (rows[d]) add_to<kElement>(sum, held[i][d]);
      }
      st_vec(at<Vec16>(to, 0) + first + i * 32, rounded<kElement>(sum));
    }
  }
}

// Adds up the weights of the rows of a chunk's tokens. Lane j has the row of token j at each rank of the fan.
__device__ inline void add_weights(const Params& p, const Routes& routes, const i32 (&row)[kFan], int num_tokens, float* to) {
  const int count = num_tokens * kNumTopk;
  for (int first = 0; first < count; first += 32) {
    const int i = first + lane_idx(), j = i / kNumTopk % 32, k = i % kNumTopk;
    float weight = 0;
#pragma unroll
    for (int d = 0; d < kFan; ++d) {
      const i64 at_row = __shfl_sync(~0u, row[d], j);
      if (i >= count || at_row < 0) continue;
      weight += ld_relaxed_sys(weights_at(routes.weights[first_of_fan(p) + d], at_row) + k);  // L1 may hold an old line
    }
    if (i < count) to[i] = weight;
  }
}

// The offset of the sums of a chunk at the rank of its tokens. `first`: of its sums, over all flows. Their weights follow.
__device__ __forceinline__ u64 sums_offset(const Params& p, int first) { return kNetworkArrivals + static_cast<u64>(first) * p.sum_stride; }

__device__ __forceinline__ u64 sum_word(int flow, int chunk) {
  return kNetworkSumWords + (static_cast<u64>(flow) * kNumMaxTokens + chunk) * sizeof(u64);
}

__device__ __forceinline__ u64 sums_there(const Params& p, int flow, const ChunkTokens& tokens) {
  return sums_offset(p, at<const i32>(p.handle, kHandleFlowFirstSum)[flow] + tokens.first);
}

// Where this rank writes a chunk of sums: to their last place if it reaches that, otherwise to its own slot.
__device__ __forceinline__ u64 sums_to_fill(const Params& p, int flow, int chunk, const ChunkTokens& tokens) {
  const u64 theirs = network_of(p, far_end(p, flow));
  return theirs ? theirs + sums_there(p, flow, tokens) : network_base(p) + send_slot(slot_of(flow, chunk));
}

// Called by a whole warp, which has released the chunk.
__device__ inline void send_sums(const Params& p, u32 epoch, int flow, int chunk, const ChunkTokens& tokens) {
  const int other = far_end(p, flow);
  const u64 word = sum_word(flow_from(p, other), chunk), value = tag_of(epoch, chunk + 1);
  if (network_of(p, other)) return send_word(p, other, word, value);
  const u64 num_bytes = tokens.count * (kSentRowBytes + (p.topk_weights ? kNumTopk * sizeof(float) : 0));
  put(p, other, sums_there(p, flow, tokens), send_slot(slot_of(flow, chunk)), num_bytes, word, value);
}

// Whether sums of a chunk may be written.
__device__ __forceinline__ bool can_fill(const Params& p, u32 epoch, int flow, int chunk, u32& seen) {
  return network_of(p, far_end(p, flow)) || has_credit(p, epoch, flow, chunk, seen);
}

// The row of each token of a chunk at each rank of the fan: token i / kFan, rank i % kFan. -1: no row.
struct RowsOfChunk {
  const Params& p;
  const Routes& routes;
  int flow;
  const i32* recv_pos;

  __device__ RowsOfChunk(const Params& p, const Routes& routes, int flow, int first_token) : p(p), routes(routes), flow(flow) {
    recv_pos = at<const i32>(p.handle, kHandleRecvPos) + (static_cast<i64>(flow) * kNumMaxTokens + first_token) * kFan;
  }

  __device__ __forceinline__ i32 operator()(int i) const {
    const int d = i % kFan, pos = recv_pos[i];
    const i64 row = pos < 0 ? -1 : routes.first.of_flow[flow * kFan + d] + pos;
    return row < routes.capacity[first_of_fan(p) + d] ? static_cast<i32>(row) : -1;  // dispatch had no room for other rows
  }
};

// Chunks of rows, where a token's only row is its sum. It knows the rows of a chunk when it comes to it.
struct SentRows : Chunks {
  const Params& p;
  const Routes& routes;
  u32 epoch;
  int num_rows;
  i32 row[kFan];  // lane j: of token j

  __device__ SentRows(const Params& p, const Routes& routes, u32 epoch)
      : Chunks(&at<State>(p.state, 0)->nodes_filled, at<const i32>(p.handle, kHandleFlowRecv), p.chunk_tokens, first_flow_to_send(p)),
        p(p),
        routes(routes),
        epoch(epoch),
        num_rows(all_tokens()) {
    load_rows();
  }

  __device__ __forceinline__ void load_rows() {
    row[0] = -1;
    if (has && lane_idx() < tokens.count) row[0] = RowsOfChunk(p, routes, flow, tokens.first)(lane_idx() * kFan);
  }

  __device__ __forceinline__ bool is_ready(u32& seen) const { return can_fill(p, epoch, flow, chunk, seen); }

  // Writes all of the chunk but its rows.
  __device__ __forceinline__ void take(Rows<1>& rows) {
    const int lane = lane_idx(), count = tokens.count;
    const u64 to = sums_to_fill(p, flow, chunk, tokens);
    if (p.topk_weights) add_weights(p, routes, row, count, at<float>(to, count * kSentRowBytes));
    for (u32 missing = __ballot_sync(~0u, lane < count && row[0] < 0); missing; missing &= missing - 1) {
      const u64 place = to + static_cast<u64>(__ffs(missing) - 1) * kRowBytes;
      for (int i = lane; i < kRowVecs; i += 32) st_vec(at<Vec16>(place, 0) + i, {});
    }
    rows.count = count;
    rows.from = p.y + static_cast<i64>(row[0]) * kRowBytes;
    rows.to[0] = row[0] < 0 ? 0 : to + static_cast<u64>(lane) * kRowBytes;
    rows.when_read = kNoSignal;
    rows.when_written = signal_of(kPutSignal, flow, chunk);
    next();
    load_rows();
  }
};

// Makes the sums of a chunk, and sends it. `Form`: of the rows between nodes. False: a wait timed out.
template <class Form>
__device__ inline bool fill_chunk(const Params& p, const Routes& routes, u32 epoch, const Chunks& chunks) {
  const int lane = lane_idx(), flow = chunks.flow, chunk = chunks.chunk, num_tokens = chunks.tokens.count;
  const RowsOfChunk row_at(p, routes, flow, chunks.tokens.first);
  bool ok = true;
  if (lane == 0) {
    ok = wait_until(p, epoch, kPhaseNodeRoom, far_end(p, flow), [&](u32& seen) { return can_fill(p, epoch, flow, chunk, seen); });
  }
  for (int i = lane; i < num_tokens * kFan && ok; i += 32) {
    const i32 row = row_at(i);
    if (row >= 0) ok = await_row(p, epoch, first_of_fan(p) + i % kFan, row);
  }
  __syncwarp();  // all lanes read and write after what each lane acquired
  if (!__all_sync(~0u, ok)) return false;
  i32 row[kFan];  // of token `lane`
#pragma unroll
  for (int d = 0; d < kFan; ++d) row[d] = lane < num_tokens ? row_at(lane * kFan + d) : -1;
  const u64 to = sums_to_fill(p, flow, chunk, chunks.tokens);
  if (p.topk_weights) add_weights(p, routes, row, num_tokens, at<float>(to, num_tokens * kSentRowBytes));
  for (int j = 0; j < num_tokens; ++j) {
    u64 rows[kFan];
#pragma unroll
    for (int d = 0; d < kFan; ++d) {
      const i64 at_row = __shfl_sync(~0u, row[d], j);
      rows[d] = at_row >= 0 ? routes.x[first_of_fan(p) + d] + at_row * kRowBytes : 0;
    }
    Form::write_node_sum(rows, to + static_cast<u64>(j) * kSentRowBytes);
  }
  fence_release_sys();  // each lane: all that the lanes wrote
  __syncwarp();
  send_sums(p, epoch, flow, chunk, chunks.tokens);
  return true;
}

__device__ inline bool await_sums(const Params& p, u32 epoch, int flow, int chunk) {
  return wait_tag(p, sum_word(flow, chunk), epoch, chunk + 1, kPhaseNodeSums, far_end(p, flow));
}

// Returns credits for the chunks whose sums have arrived by a put. Called by a whole warp.
__device__ inline void return_credits(const Params& p, u32 epoch) {
  const i32* received = at<const i32>(p.handle, kHandleFlowTokens);
  Chunks chunks(&at<State>(p.state, 0)->nodes_emptied, received, p.chunk_tokens, first_flow_to_receive(p));
  for (; chunks.has; chunks.next()) {
    if (!chunks.needs_credit() || network_of(p, far_end(p, chunks.flow))) continue;
    if (!__all_sync(~0u, lane_idx() != 0 || await_sums(p, epoch, chunks.flow, chunks.chunk))) return;
    send_credit(p, epoch, chunks.flow, chunks.chunk);
  }
}

// --- work of the copy warps and of the signal warp -------------------------------------------------------------------------------

// Whether each sum is a row.
template <class Form>
constexpr bool kSendsRows = Form::kIsPlain && kFan == 1;

template <class Form, class Copies>
__device__ __forceinline__ void copy_rows(const Params& p, const Routes& routes, u32 epoch, Copies copies) {
  if constexpr (kSendsRows<Form>) {
    move_rows<true, Rows<1>>(p, epoch, kPhaseNodeRows, copies, SentRows(p, routes, epoch), NoChunks(), ExposedRows(p));
  } else {
    move_rows<true, Rows<1>>(p, epoch, kPhaseNodeRows, copies, NoChunks(), NoChunks(), ExposedRows(p));
  }
}

// Raises what follows rows. Called by a whole warp.
struct RaiseOne {
  const Params& p;
  u32 epoch;

  __device__ __forceinline__ void operator()(Signal s) const {
    if (kind_of(s) == kExposedSignal) return raise_exposed(p, epoch, chunk_of(s));
    const int flow_tokens = at<const i32>(p.handle, kHandleFlowRecv)[flow_of(s)];
    send_sums(p, epoch, flow_of(s), chunk_of(s), tokens_of(chunk_of(s), flow_tokens, p.chunk_tokens));
  }
};
