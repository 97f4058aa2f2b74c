// combine_nodes, and combine_nodes_fp8 and combine_nodes_log10 for sums that are compressed between nodes: sends rows back to the ranks of
// their tokens over several nodes, and adds up the rows of each token.
//
// Each rank exposes the rows that dispatch brought to it and that another rank of its node reads: it copies them to symmetric memory.
// A gateway adds up the rows of a token in its node, and sends one sum to the source of the flow. The source adds up the sums of the other
// nodes and the rows in its own node. All sums are in float32.
//
// Bits: s_n is the sum of node n's rows of a token in rank order. For another node than the token's own it is rounded once to the type of
// the rows. The result is the rounded sum of all s_n in node order, and of the biases. On the direct path each rank of another node sends
// its row, and the source computes and rounds s_n. Both paths therefore give the same bits. Where sums are compressed, s_n is rounded and
// then compressed. On the direct path, each row is compressed, and the source does not round their sum.
//
// Roles of the warps in each block:
// - Copy warps (copies.cuh) expose rows, kExposedRows for each flag. Where each sum is a row (kSendsRows), they send those too.
// - Fill warps make the sums of a chunk, and send it. Copy warps do so too, when no row is left to expose.
// - Reduce warps add up this rank's tokens. So do all others, when they have nothing else to do.
//
// A sum goes to its last place at the rank of its token (kNetworkArrivals). The routing has told the gateway where the sums of each flow
// begin there. If this GPU reaches that place, it writes there. Otherwise it writes to a slot of its own, and a put carries the chunk. A
// word for each chunk says that its sums are there. Then the slot is free: the last warp of each block returns credits for such chunks
// before it reduces.
//
// Why no rank waits for ever: nodes.cuh tells it for slots; here the warp that returns credits is the emptier. It waits for nothing but
// chunks. Fillers also wait for exposed rows. A warp exposes all its rows before it fills, and waits for nothing meanwhile. Reduce warps
// wait for exposed rows and sums, and nothing waits for them.
//
// Reuse of memory: the ranks of a node read the exposed rows of call k, and then say hello in call k + 1. This rank exposes rows of call
// k + 1 after it has heard all of them. For the same reason, other nodes may then write sums of call k + 1 here, where
// sums or chunks of call k lay. Words and flags need no reset: they hold the epoch.
//
// Rows in place: if y lies in the pool, the node's ranks read it there. The caller may overwrite y after the end of this kernel. So the
// last block of each rank raises a flag at all ranks of its node: its rank reads no more rows. A rank whose rows stay in place waits for
// these flags at its end. Before that it has done all that others wait for, so no rank waits for ever. They are the flags of
// dispatch_nodes, which says why one for each rank is enough. A rank that has timed out raises none. A rank that waits for it times out
// too. After that its caller may overwrite rows that a slow rank still reads.
//
// Bytes: a row that another rank reads is copied once here, unless it stays in place. It crosses NVLink once to a gateway or to its token's
// rank. A sum crosses the network once for each flow of its token, and is read once there. A put reads and writes it once more here.
#pragma once
#include "nodes/combine_nodes_send.cuh"

// --- sums of this rank's tokens -----------------------------------------------------------------------------------------------------

// Adds up rows in rank order, node by node.
struct NodeSums {
  float all[kPerVec<kElement>] = {}, of_node[kPerVec<kElement>] = {};
  int node = -1;  // of the rows in `of_node`

  __device__ __forceinline__ void end_node(const Params& p) {
    if (node < 0) return;
    if (kDirect && node != node_of(p.rank)) to_floats<kElement>(rounded<kElement>(of_node), of_node);
#pragma unroll
    for (int i = 0; i < kPerVec<kElement>; ++i) {
      all[i] += of_node[i];
      of_node[i] = 0;
    }
    node = -1;
  }

  // On the hierarchical path another node sends one row, which is rounded already.
  __device__ __forceinline__ void add(const Params& p, int next_node, const Vec16& row) {
    if (node >= 0 && next_node != node) end_node(p);
    if (!kDirect && (kRanksPerNode == 1 || next_node != node_of(p.rank))) {
      add_to<kElement>(all, row);
    } else {
      node = next_node;
      add_to<kElement>(of_node, row);
    }
  }
};

// The most rows that are added up for a token: from each rank of this node, and through each flow.
constexpr int kMostParts = kNumTopk < kRanksPerNode + kNumFlows ? kNumTopk : kRanksPerNode + kNumFlows;

// The rows of a token in rank order, in shared memory of its warp.
struct Parts {
  u64 row[kMostParts];
  u64 weights[kMostParts];
  int node[kMostParts];
};

// What the handle says of a choice. Lane k has choice k of a token.
struct Entry {
  int rank = -1;
  int pos = -1;
  int flow_pos = -1;
};

__device__ __forceinline__ Entry load_entry(const Params& p, int token) {
  if (token >= p.num_tokens || lane_idx() >= kNumTopk) return {};
  const i64 i = static_cast<i64>(token) * kNumTopk + lane_idx();
  return {at<const i32>(p.handle, kHandleEntryRank)[i], at<const i32>(p.handle, kHandleEntryPos)[i],
          at<const i32>(p.handle, kHandleEntryFlowPos)[i]};
}

// Finds the rows of a token and waits for them. Returns their number, or -1 if one did not arrive.
__device__ inline int find_parts(const Params& p, const Routes& routes, u32 epoch, const Entry& entry, Parts& parts) {
  constexpr int kNone = 1 << 30;
  const int lane = lane_idx(), rank = entry.rank;
  int key = kNone;
  u64 row = 0, weights = 0;
  bool ok = true;
  if (rank >= 0 && node_of(rank) == node_of(p.rank)) {
    const int index = near_index(rank);
    const i64 at_row = routes.first.own[index] + entry.pos;
    if (at_row < routes.capacity[index]) {
      key = rank;
      ok = await_row(p, epoch, index, at_row);
      row = routes.x[index] + at_row * kRowBytes;
      weights = reinterpret_cast<u64>(weights_at(routes.weights[index], at_row));
    }
  } else if (rank >= 0 && entry.flow_pos >= 0) {
    const int flow = flow_to(p, rank);
    key = rank;
    const int chunk = entry.flow_pos / p.chunk_tokens;
    const ChunkTokens tokens = tokens_of(chunk, at<const i32>(p.handle, kHandleFlowTokens)[flow], p.chunk_tokens);
    const int index = entry.flow_pos - tokens.first;
    ok = await_sums(p, epoch, flow, chunk);
    const u64 sums = network_base(p) + sums_offset(p, routes.first_sum[flow] + tokens.first);
    row = sums + static_cast<u64>(index) * kSentRowBytes;
    weights = reinterpret_cast<u64>(weights_at(sums + static_cast<u64>(tokens.count) * kSentRowBytes, index));
  }
  if (!__all_sync(~0u, ok)) return -1;
  int before = 0;  // rows of smaller ranks
#pragma unroll
  for (int k = 0; k < kNumTopk; ++k) before += __shfl_sync(~0u, key, k) < key;
  if (key != kNone) {
    parts.row[before] = row;
    parts.weights[before] = weights;
    parts.node[before] = node_of(rank);
  }
  __syncwarp();
  return __popc(__ballot_sync(~0u, key != kNone));
}

__device__ inline void reduce_plain_token(const Params& p, const Parts& parts, int num_parts, int token) {
  constexpr int kTogether = kMostParts < 8 ? kMostParts : 8, kAtOnce = kMostParts > kTogether ? 1 : kVectorsAtOnce<kTogether>;
  const u64 offset = static_cast<u64>(token) * kRowBytes;
#pragma unroll 1
  for (int first = lane_idx(); first < kRowVecs; first += 32 * kAtOnce) {
    NodeSums sums;
    int begin = 0;
    do {  // once, unless a token may have more than kTogether parts
      Vec16 held[kAtOnce][kTogether];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          if (begin + k < num_parts && first + i * 32 < kRowVecs)
            held[i][k] = ld_streaming(at<const Vec16>(parts.row[begin + k], 0) + first + i * 32);
        }
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int v = first + i * 32;
        if (v >= kRowVecs) break;
        if (kAtOnce > 1) sums = NodeSums();
#pragma unroll
        for (int k = 0; k < kTogether; ++k) {
          if (begin + k < num_parts) sums.add(p, parts.node[begin + k], held[i][k]);
        }
        if (begin + kTogether < num_parts) continue;
        sums.end_node(p);
        if (p.bias_0) add_to<kElement>(sums.all, ld_streaming(at<const Vec16>(p.bias_0, offset) + v));
        if (p.bias_1) add_to<kElement>(sums.all, ld_streaming(at<const Vec16>(p.bias_1, offset) + v));
        st_vec(at<Vec16>(p.out, offset) + v, rounded<kElement>(sums.all));
      }
      begin += kTogether;
    } while (begin < num_parts);
  }
}

// Adds up the weights of a token: node by node, as rows, but without rounding. Lane k has weight k.
__device__ inline void reduce_weights(const Params& p, const Parts& parts, int num_parts, int token) {
  float all = 0, of_node = 0;
  int node = -1;
  for (int i = 0; i < num_parts; ++i) {
    if (parts.node[i] != node) all += of_node, of_node = 0;
    node = parts.node[i];
    if (lane_idx() < kNumTopk) of_node += ld_relaxed_sys(at<const float>(parts.weights[i], 0) + lane_idx());
  }
  if (lane_idx() < kNumTopk) at<float>(p.out_topk_weights, 0)[static_cast<i64>(token) * kNumTopk + lane_idx()] = all + of_node;
}

template <class Form>
__device__ inline void reduce_tokens(const Params& p, const Routes& routes, u32 epoch, Parts& parts) {
  u32* tickets = &at<State>(p.state, 0)->nodes_reduced;
  int token = claim(tickets);
  Entry entry = load_entry(p, token);
  while (token < p.num_tokens) {
    u32 ticket = 0;
    if (lane_idx() == 0) ticket = fetch_add_relaxed_gpu(tickets);  // on its way while this token's rows are awaited
    const int num_parts = find_parts(p, routes, epoch, entry, parts);
    if (num_parts < 0) return;
    const int next = static_cast<int>(__shfl_sync(~0u, ticket, 0));
    entry = load_entry(p, next);  // on its way while this token is added up
    if (p.topk_weights) reduce_weights(p, parts, num_parts, token);
    Form::reduce_token(p, parts, num_parts, token);
    __syncwarp();  // all lanes have read `parts`
    token = next;
  }
}

// Called by one thread.
__device__ inline void count_rows(const Params& p, bool failed) {
  if constexpr (kHasStatistics) {
    const i64 arrived = *at<const i32>(p.handle, kHandleNumRecv);
    for (int r = 0; r < kNumRanks && !failed; ++r) count_received(p, at<const i32>(p.handle, kHandleNumSent)[r], kRowBytes);
    count_sent(p, failed ? 0 : min(arrived, p.capacity), kRowBytes);
    count_call(p);
  }
}

// Rows travel as they are. The other form is CompressedSums.
struct PlainSums {
  static constexpr bool kIsPlain = true;
  __device__ static __forceinline__ void write_node_sum(const u64 (&rows)[kFan], u64 to) { write_plain_sum(rows, to); }
  __device__ static __forceinline__ void reduce_token(const Params& p, const Parts& parts, int num_parts, int token) {
    reduce_plain_token(p, parts, num_parts, token);
  }
};

// Called by a warp of the last block: tells the ranks of this node that this rank has read their rows. If they read y itself, waits until
// they have.
__device__ inline void end_reads(const Params& p, u32 epoch) {
  const int lane = lane_idx();
  if (lane >= kRanksPerNode || was_aborted(p)) return;
  st_release_sys(at<u32>(p.peers[near_rank(p, lane)], kControlNodeFlags) + near_index(p.rank), epoch);
  if (exposes_in_place(p))
    wait_epoch(p, at<const u32>(p.peers[p.rank], kControlNodeFlags) + lane, epoch, kPhaseExposedRows, near_rank(p, lane));
}

// `num_threads` threads share the work.
__device__ inline void poison_results(const Params& p, u64 thread, u64 num_threads) {
  poison(p.out, static_cast<u64>(p.num_tokens) * kRowBytes, thread, num_threads);
  if (p.out_topk_weights) poison(p.out_topk_weights, static_cast<u64>(p.num_tokens) * kNumTopk * sizeof(float), thread, num_threads);
}

// The whole kernel. `routes` and `parts`, one for each warp, lie in shared memory. copy(epoch) is the work of the copy warps and of the
// signal warp. It does nothing in the other warps.
template <class Form, int kCopyWarps, class Copy>
__device__ __forceinline__ void combine_over_nodes(const Params& p, Routes& routes, Parts* parts, Copy copy) {
  State* state = at<State>(p.state, 0);
  const int warp = warp_idx(), lane = lane_idx();
  const u32 epoch = state->nodes_epoch + 1;
  const u32 serial = *at<const u32>(p.handle, kHandleSerial);
  if (!was_dispatched(p, serial)) {
    poison_results(p, blockIdx.x * kCombineNodesThreads + threadIdx.x, gridDim.x * kCombineNodesThreads);
    return;
  }
  clear_next_waits_of_nodes(p, epoch);
  if (warp == 0) read_routes(p, epoch, serial, routes);
  __syncthreads();

  if (routes.verdict == kAgreed) {
    const i32* sent = at<const i32>(p.handle, kHandleFlowRecv);
    copy(epoch);
    if (warp == kWarps - 1 && routes.returns_credits) return_credits(p, epoch);
    if constexpr (!kSendsRows<Form>) {
      constexpr int kFillWarps = kWarps / 3;
      if (warp < kCopyWarps + kFillWarps) {
        Chunks chunks(&state->nodes_filled, sent, p.chunk_tokens, first_flow_to_send(p));
        while (chunks.has && fill_chunk<Form>(p, routes, epoch, chunks)) chunks.next();
      }
    }
    reduce_tokens<Form>(p, routes, epoch, parts[warp]);
  }
  __syncthreads();

  if (warp != 0 || !is_warp_of_last_block(&state->nodes_blocks)) return;
  if (kRanksPerNode > 1 && routes.verdict == kAgreed) end_reads(p, epoch);
  if (__any_sync(~0u, routes.verdict != kAgreed || was_aborted(p))) poison_results(p, lane, 32);
  if (lane == 0) {
    count_rows(p, routes.verdict != kAgreed);
    state->nodes_blocks = state->nodes_copied = state->nodes_filled = state->nodes_emptied = state->nodes_reduced = 0;
    state->nodes_differs = routes.verdict == kDiffers;
    state->nodes_epoch = epoch;
  }
}
