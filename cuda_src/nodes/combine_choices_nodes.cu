// combine_choices_nodes: combine_choices over several nodes. It sends the row of each (token, choice) back to the rank of its token, and
// adds up a token's rows there in float32 and in the order of its choices. No node adds up rows of its own, so all rows travel, and the
// bits are those of one node.
//
// A launch serves a window of the tokens of each rank. The host launches list_choices and this kernel for each window, in order.
//
// Layout: as in combine_choices, a token's rank stages the kNumTopk rows of each token of the window, and their weights. A mark for each of
// them says whether the row of this call is there (kControlChoiceMarks). Rows of this rank's own experts are not staged: their mark tells
// where they lie in y.
//
// Roles of the warps in each block, and the three kinds of rows that copy warps move, are those of dispatch_nodes. A chunk of a flow has
// rows for the ranks of its fan, and tells the place of each. Afterwards all warps add up rows.
//
// Protocol:
// 1. Each rank tells the gateway of each of its flows how many rows will come. These words need no agreement, so they travel with hellos.
// 2. The ranks agree on the call (call_start.cuh).
// 3. Rows move. Copy warps count the rows that they have put to a place in this node.
// 4. The copy warp that finishes the last of them raises this rank's flag at each rank of its node. It has acquired the rows of all others.
// 5. Warps wait for the flags of the node's ranks, and add up.
// The last block resets the counters of State, and advances State::nodes_epoch.
//
// If the ranks differ in the first window, later windows do nothing: another rank may have made a call with one launch.
//
// Why no rank waits for ever: see nodes.cuh and copies.cuh. Nothing waits for warps that add up.
//
// Reuse of memory: a rank says hello in launch k + 1 after its launch k has read all staged rows, marks and words. A word with a number of
// rows may arrive before that, and has two ring slots. Marks, flags and words need no reset: they hold the epoch.
//
// Bytes: a row crosses the network, or NVLink, once for each choice. At the gateway it is written and read once more.
#include "common/work.cuh"
#include "experts/choice_sums.cuh"
#include "nodes/call_start.cuh"
#include "nodes/copies.cuh"

constexpr int kCopyWarps = kDispatchNodesCopyWarps;
constexpr int kCopyRows = 8;  // rows of this node that a copy warp claims at once

struct Routes {
  u64 x[kRanksPerNode];  // addresses of the staging of each rank of this node
  u64 weights[kRanksPerNode];
  u64 marks[kRanksPerNode];
  i32 first_sent[kNumFlows];  // the first row of the list that leaves through each flow
  i32 sent[kNumFlows];        // rows that leave through it
  i32 arriving[kNumFlows];    // rows that arrive from its gateway
  i32 num_items;              // rows that copy warps of this rank put to places in this node
  u32 verdict;
};

// The rows for a source begin here in the list.
__device__ __forceinline__ int first_row(const Params& p, int source) { return at<const i32>(p.first_rows, 0)[source]; }

// The first of the sources whose rows leave through a flow.
__device__ __forceinline__ int first_source(const Params& p, int flow) {
  const int other = far_end(p, flow);
  return kDirect ? other : node_of(other) * kRanksPerNode;
}

__device__ __forceinline__ u64 count_word(u32 epoch, int flow) {
  return kNetworkChoiceCounts + (epoch % 2 * kNumFlows + flow) * sizeof(u64);
}

__device__ inline void tell_counts(const Params& p, u32 epoch) {
  for (int flow = 0; flow < kNumFlows; ++flow) {
    const int other = far_end(p, flow), source = first_source(p, flow);
    send_word(p, other, count_word(epoch, flow_from(p, other)), tag_of(epoch, first_row(p, source + kFan) - first_row(p, source)));
  }
}

// Waits for the number of rows that arrive through a flow. False: the wait timed out.
__device__ inline bool await_count(const Params& p, u32 epoch, int flow, i32& count) {
  const u64* word = at<const u64>(network_base(p), count_word(epoch, flow));
  return wait_until(p, epoch, kPhaseNodeHello, far_end(p, flow), [&](u32& seen) {
    const u64 found = ld_relaxed_sys(word);  // it guards no other data
    count = static_cast<i32>(found);
    seen = static_cast<u32>(found >> 32);
    return seen == epoch;
  });
}

__device__ inline void read_routes(const Params& p, u32 epoch, u32 serial, Routes& routes) {
  const int lane = lane_idx();
  if (blockIdx.x == 0 && !__any_sync(~0u, was_aborted(p))) tell_counts(p, epoch);
  NodeWindow mine;
  mine.x = p.recv_x_offset;
  mine.topk_weights = p.recv_topk_weights_offset;
  mine.scales = mine.topk_idx = mine.src_idx = 0;
  mine.capacity = mine.missing_rows = 0;
  mine.call_signature = p.call_signature;
  mine.serial = serial;
  u32 verdict = agree(p, epoch, serial, kPhaseCombineWindow, mine);
  if (verdict == kAgreed) {
    if (lane < kRanksPerNode) {
      const NodeWindow* window = window_at(p.peers[p.rank], epoch, lane);
      const u64 base = p.peers[near_rank(p, lane)];
      routes.x[lane] = base + window->x;
      routes.weights[lane] = base + window->topk_weights;
      routes.marks[lane] = base + kControlChoiceMarks;
    }
    int arriving = 0;
    bool ok = true;
    for (int flow = lane; flow < kNumFlows && ok; flow += 32) {
      const int source = first_source(p, flow);
      routes.first_sent[flow] = first_row(p, source);
      routes.sent[flow] = first_row(p, source + kFan) - first_row(p, source);
      i32 count = 0;
      ok = await_count(p, epoch, flow, count);
      routes.arriving[flow] = count;
      arriving += count;
    }
    arriving = __reduce_add_sync(~0u, arriving);
    if (lane == 0) routes.num_items = arriving + first_row(p, near_rank(p, 0) + kRanksPerNode) - first_row(p, near_rank(p, 0));
    if (!__all_sync(~0u, ok)) verdict = kFailed;
  }
  if (lane == 0) routes.verdict = verdict;
}

// Tells the rank of a row's token where the row is. `in_y`: 0 if it is staged there; otherwise 1 more than its position in that rank's own
// y. One lane calls it for each row.
__device__ __forceinline__ void mark_row(const Params& p, const Routes& routes, u32 epoch, int index, int place, u32 in_y, float weight) {
  at<u64>(routes.marks[index], 0)[place] = tag_of(epoch, in_y);
  if (p.topk_weights) at<float>(routes.weights[index], 0)[place] = weight;
}

__device__ __forceinline__ u64 staged_row(const Routes& routes, int index, int place) {
  return routes.x[index] + static_cast<u64>(place) * kRowBytes;
}

__device__ __forceinline__ u64 row_of_y(const Params& p, int position) { return p.y + static_cast<u64>(position) * kRowBytes; }

// Rows for ranks of this node. A warp takes kCopyRows of them at a time.
struct NearChoices {
  const Params& p;
  const Routes& routes;
  u32 epoch;
  int& num_done;
  int num_rows = 0, end;  // rows for this rank itself stay where they are, and do not count

  __device__ NearChoices(const Params& p, const Routes& routes, u32 epoch, int& num_done)
      : p(p), routes(routes), epoch(epoch), num_done(num_done) {
    int most = 0;
    for (int i = 0; i < kRanksPerNode; ++i) {
      if (i != near_index(p.rank)) num_rows += num_for(i);
      most = max(most, num_for(i));
    }
    end = (most + kCopyRows - 1) / kCopyRows * kRanksPerNode;
  }

  __device__ __forceinline__ int num_for(int index) const {
    return first_row(p, near_rank(p, index) + 1) - first_row(p, near_rank(p, index));
  }

  __device__ __forceinline__ bool take(Rows<1>& rows) {
    const int item = claim(&at<State>(p.state, 0)->nodes_copied), lane = lane_idx();
    if (item >= end) return false;
    const int chunk = item / kRanksPerNode, index = (item + chunk + p.rank) % kRanksPerNode;
    const bool is_own = index == near_index(p.rank);
    const int first = chunk * kCopyRows, count = max(0, min(kCopyRows, num_for(index) - first));
    ChoiceRow row = {};
    if (lane < count) {
      row = at<const ChoiceRow>(p.rows, 0)[first_row(p, near_rank(p, index)) + first + lane];
      mark_row(p, routes, epoch, index, row.place, is_own ? row.position + 1 : 0, row.weight);
    }
    num_done += count;
    rows.count = is_own ? 0 : count;
    rows.from = row_of_y(p, row.position);
    rows.to[0] = staged_row(routes, index, row.place);
    rows.when_read = rows.when_written = kNoSignal;
    return true;
  }
};

// Gathers rows for other nodes in slots. It knows the rows of a chunk when it comes to it.
struct SentChoices : Chunks {
  const Params& p;
  const Routes& routes;
  u32 epoch;
  int num_rows;
  ChoiceRow row;  // lane j: row j of the chunk

  __device__ SentChoices(const Params& p, const Routes& routes, u32 epoch)
      : Chunks(&at<State>(p.state, 0)->nodes_filled, routes.sent, p.chunk_tokens, first_flow_to_send(p)),
        p(p),
        routes(routes),
        epoch(epoch),
        num_rows(all_tokens()) {
    load_row();
  }

  __device__ __forceinline__ void load_row() {
    row = {};
    if (has && lane_idx() < tokens.count) row = at<const ChoiceRow>(p.rows, 0)[routes.first_sent[flow] + tokens.first + lane_idx()];
  }

  __device__ __forceinline__ bool is_ready(u32& seen) const { return has_credit(p, epoch, flow, chunk, seen); }

  // Writes all of the chunk but its rows.
  __device__ __forceinline__ void take(Rows<1>& rows) {
    const int lane = lane_idx();
    const u64 slot = slot_to_fill(p, flow, chunk);
    if (lane < tokens.count) {
      ChunkHead* head = at<ChunkHead>(slot, 0);
      head->tokens[lane] = row.place;
      head->pos[lane] = row.source - first_source(p, flow);
      if (p.topk_weights) at<float>(slot + p.chunk_weights, 0)[lane] = row.weight;
    }
    rows.count = tokens.count;
    rows.from = row_of_y(p, row.position);
    rows.to[0] = slot + p.chunk_rows + static_cast<u64>(lane) * kRowBytes;
    rows.when_read = kNoSignal;
    rows.when_written = signal_of(kPutSignal, flow, chunk);
    next();
    load_row();
  }
};

// Takes rows out of their slots.
struct ArrivedChoices : Chunks {
  const Params& p;
  const Routes& routes;
  u32 epoch;
  int& num_done;
  int num_rows;

  __device__ ArrivedChoices(const Params& p, const Routes& routes, u32 epoch, int& num_done)
      : Chunks(&at<State>(p.state, 0)->nodes_emptied, routes.arriving, p.chunk_tokens, first_flow_to_receive(p)),
        p(p),
        routes(routes),
        epoch(epoch),
        num_done(num_done),
        num_rows(all_tokens()) {}

  __device__ __forceinline__ bool is_ready(u32& seen) const { return has_arrived(p, epoch, flow, chunk, seen); }

  // Takes all of the chunk but its rows.
  __device__ __forceinline__ void take(Rows<1>& rows) {
    const int lane = lane_idx();
    const u64 slot = network_base(p) + recv_slot(slot_of(flow, chunk));
    rows.count = tokens.count;
    rows.from = slot + p.chunk_rows + static_cast<u64>(lane) * kRowBytes;
    rows.to[0] = 0;
    if (lane < tokens.count) {
      const ChunkHead* head = at<const ChunkHead>(slot, 0);
      const int place = head->tokens[lane], index = first_of_fan(p) + head->pos[lane];
      const float weight = p.topk_weights ? at<const float>(slot + p.chunk_weights, 0)[lane] : 0.f;
      mark_row(p, routes, epoch, index, place, 0, weight);
      rows.to[0] = staged_row(routes, index, place);
    }
    num_done += tokens.count;
    rows.when_read = needs_credit() ? signal_of(kCreditSignal, flow, chunk) : kNoSignal;
    rows.when_written = kNoSignal;
    next();
  }
};

// Raises what follows a chunk. Called by a whole warp.
struct RaiseOne {
  const Params& p;
  const Routes& routes;
  u32 epoch;

  __device__ __forceinline__ void operator()(Signal s) const {
    const int flow = flow_of(s), chunk = chunk_of(s);
    if (kind_of(s) == kCreditSignal) return send_credit(p, epoch, flow, chunk);
    const int num_rows = tokens_of(chunk, routes.sent[flow], p.chunk_tokens).count;
    send_chunk(p, epoch, flow, chunk, p.chunk_rows + static_cast<u64>(num_rows) * kRowBytes);
  }
};

__device__ inline void raise_flags(const Params& p, u32 epoch) {
  for (int i = 0; i < kRanksPerNode; ++i) st_release_sys(at<u32>(p.peers[near_rank(p, i)], kControlNodeFlags) + near_index(p.rank), epoch);
}

// The work of a copy warp.
template <class Copies>
__device__ __forceinline__ void copy_rows(const Params& p, const Routes& routes, u32 epoch, Copies copies) {
  int num_done = 0;
  move_rows<kRanksPerNode == 1, Rows<1>>(p, epoch, kPhaseNodeSums, copies, SentChoices(p, routes, epoch),
                                         ArrivedChoices(p, routes, epoch, num_done), NearChoices(p, routes, epoch, num_done));
  __syncwarp();  // lane 0 releases what all lanes have written
  if (lane_idx() != 0 || num_done == 0) return;
  const u32 before = add_acq_rel_sys(&at<State>(p.state, 0)->combine_copied, num_done);
  if (before + num_done == routes.num_items) raise_flags(p, epoch);
}

// Waits until all rows of the window are here. Copy warps of this rank wait with limits, and name whom they wait for. So the wait for this
// rank's own flag has none: it ends with the flag, or with their time-out.
__device__ inline bool await_rows(const Params& p, u32 epoch) {
  const int lane = lane_idx();
  const u32* flags = at<const u32>(p.peers[p.rank], kControlNodeFlags);
  bool ok = true;
  if (lane == 0) {
    while (ld_acquire_sys(flags + near_index(p.rank)) != epoch && ok) ok = !was_aborted(p);
  }
  ok = __all_sync(~0u, ok);
  if (ok && lane < kRanksPerNode && lane != near_index(p.rank))
    ok = wait_epoch(p, flags + lane, epoch, kPhaseExposedRows, near_rank(p, lane));
  ok = __all_sync(~0u, ok);
  __syncwarp();  // all lanes may read what these lanes acquired
  return ok;
}

// Where the rows of a token are. Lane k has the address of choice k.
struct RowsOfToken {
  u64 mine;

  __device__ __forceinline__ u64 operator()(int choice) const { return __shfl_sync(~0u, mine, choice); }
};

__device__ inline void reduce_tokens(const Params& p, const Routes& routes, u32 epoch) {
  if (!await_rows(p, epoch)) return;
  const int lane = lane_idx(), index = near_index(p.rank);
  const int in_window = clamp_rows(p.num_tokens - p.first_token, p.window_tokens);
  WorkIterator work({&at<State>(p.state, 0)->nodes_reduced, in_window, 1}, [](int) {});
  for (int i = work.next(); i >= 0; i = work.next()) {
    const int token = p.first_token + i, place = i * kNumTopk + lane;
    const u64 mark = lane < kNumTopk ? ld_relaxed_sys(at<const u64>(routes.marks[index], 0) + place) : 0;
    const bool is_here = static_cast<u32>(mark >> 32) == epoch;
    const u32 choices = __ballot_sync(~0u, is_here), in_y = static_cast<u32>(mark);
    if (lane == 0) count_received(p, __popc(choices), kRowBytes);
    float weight = 0;
    if (p.topk_weights && is_here) weight = ld_relaxed_sys(at<const float>(routes.weights[index], 0) + place);
    if (p.out_topk_weights && lane < kNumTopk) at<float>(p.out_topk_weights, 0)[static_cast<i64>(token) * kNumTopk + lane] = weight;
    const u64 row = in_y ? row_of_y(p, in_y - 1) : staged_row(routes, index, place);
    reduce_choices(p, RowsOfToken{row}, choices, weight, token);
  }
}

extern "C" __global__ void __launch_bounds__(kCombineNodesThreads, 1) combine_choices_nodes(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) char memory[];
  __shared__ Routes routes;
  State* state = at<State>(p.state, 0);
  if (p.first_token > 0 && state->nodes_differs) return;  // the first window has said so
  const int warp = warp_idx(), lane = lane_idx();
  const u32 epoch = state->nodes_epoch + 1;
  const u32 serial = *at<const u32>(p.handle, kHandleSerial);
  if (!was_dispatched(p, serial)) {
    poison_sums(p, blockIdx.x * kCombineNodesThreads + threadIdx.x, gridDim.x * kCombineNodesThreads);
    return;
  }
  clear_next_waits_of_nodes(p, epoch);
  const RaiseOne raise = {p, routes, epoch};
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
      copy_rows(p, routes, epoch,
                BulkCopies<1, kStages>(first_line(memory) + first * kNodesStageBytes, barriers + first, staged + first, &ring, kRowBytes));
    }
    if (routes.verdict == kAgreed && warp == kCopyWarps) raise_signals<kCopyWarps>(ring, raise);
  } else {
    if (warp == 0) read_routes(p, epoch, serial, routes);
    __syncthreads();
    if (routes.verdict == kAgreed && warp < kCopyWarps) copy_rows(p, routes, epoch, WarpCopies<1, RaiseOne>{raise, kRowBytes});
  }
  if (routes.verdict == kAgreed) {
    if (blockIdx.x == 0 && threadIdx.x == 0 && routes.num_items == 0) raise_flags(p, epoch);
    reduce_tokens(p, routes, epoch);
  }
  __syncthreads();

  if (warp != 0 || !is_warp_of_last_block(&state->nodes_blocks)) return;
  const bool failed = __any_sync(~0u, routes.verdict != kAgreed || was_aborted(p));
  if (failed) poison_sums(p, lane, 32);
  if (lane == 0) {
    count_sent(p, failed ? 0 : first_row(p, kNumRanks), kRowBytes);
    if (p.first_token == 0) count_call(p);  // the other windows belong to the same call
    state->nodes_blocks = state->nodes_copied = state->nodes_filled = state->nodes_emptied = state->nodes_reduced = 0;
    state->combine_copied = 0;
    state->nodes_differs = routes.verdict == kDiffers;
    state->nodes_epoch = epoch;
  }
}
