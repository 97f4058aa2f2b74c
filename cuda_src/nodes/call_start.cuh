// The start of a throughput call over several nodes: all ranks agree on the call.
//
// Ranks of a node tell each other their receive windows. The ranks with one index on all nodes then exchange a hello with
// what all ranks of their nodes have said. So all ranks know the same, and before that no byte of a row moves. The ranks of a node that
// says hello in call k + 1 have ended call k. They have taken all chunks of call k out of their slots, so the first chunks need no credits.
// They have also read what this rank exposed in call k, and the sums that it sent them.
//
// Reuse of windows and hellos: as recv_window.cuh says, with two ring slots.
#pragma once
#include "nodes/nodes.cuh"

constexpr u32 kAgreed = 1, kDiffers = 2, kNoRoom = 3, kFailed = 4;  // verdicts of the ranks on a call

// Whether the first dispatch of a routing sent rows. If it did not, all ranks know it. A rank that has raised has no handle and makes no
// other call along this routing, so no rank takes part in such calls: they only fill their results with NaN.
__device__ __forceinline__ bool was_dispatched(const Params& p, u32 serial) {
  return *at<const u32>(p.handle, kHandleDispatched) == serial;
}

__device__ __forceinline__ NodeWindow* window_at(u64 base, u32 epoch, int index) {
  return at<NodeWindow>(base, kControlNodeWindows) + (epoch % 2) * kRanksPerNode + index;
}

// Tells a rank of the node where this rank receives rows. One lane for each rank calls it.
__device__ inline void publish(const Params& p, u32 epoch, int index, const NodeWindow& mine) {
  NodeWindow* theirs = window_at(p.peers[near_rank(p, index)], epoch, near_index(p.rank));
  const i32* first_row = at<const i32>(p.handle, kHandleFirstRow);
  st_relaxed_sys(&theirs->x, mine.x);
  st_relaxed_sys(&theirs->scales, mine.scales);
  st_relaxed_sys(&theirs->topk_idx, mine.topk_idx);
  st_relaxed_sys(&theirs->topk_weights, mine.topk_weights);
  st_relaxed_sys(&theirs->src_idx, mine.src_idx);
  st_relaxed_sys(&theirs->capacity, mine.capacity);
  st_relaxed_sys(&theirs->call_signature, mine.call_signature);
  st_relaxed_sys(&theirs->serial, mine.serial);
  st_relaxed_sys(&theirs->missing_rows, mine.missing_rows);
  for (int n = 0; n < kNumNodes; ++n) st_relaxed_sys(theirs->first + n, first_row[n * kRanksPerNode + index]);
  st_release_sys(&theirs->flag, epoch);
}

// Waits for the windows of the node's ranks, and sums them up. All lanes get the same.
__device__ inline bool hear_node(const Params& p, u32 epoch, u32 phase, Hello& hello) {
  const int lane = lane_idx();
  const bool is_rank = lane < kRanksPerNode;
  const NodeWindow* window = window_at(p.peers[p.rank], epoch, is_rank ? lane : 0);
  const bool ok = !is_rank || wait_epoch(p, &window->flag, epoch, phase, near_rank(p, lane));
  if (!__all_sync(~0u, ok)) return false;
  const u64 signature = window->call_signature;
  const u32 serial = window->serial;
  const i32 missing = is_rank ? window->missing_rows : 0;
  const u64 first_signature = __shfl_sync(~0u, signature, 0);
  const u32 first_serial = __shfl_sync(~0u, serial, 0);
  const u32 differing = __ballot_sync(~0u, signature != first_signature || serial != first_serial);
  const int other = differing ? __ffs(differing) - 1 : 0;
  const i32 most_missing = __reduce_max_sync(~0u, missing);
  const int missing_index = __ffs(__ballot_sync(~0u, missing == most_missing)) - 1;
  hello.call_signature[0] = first_signature;
  hello.call_signature[1] = __shfl_sync(~0u, signature, other);
  hello.serial[0] = first_serial;
  hello.serial[1] = __shfl_sync(~0u, serial, other);
  hello.missing_rows = most_missing;
  hello.missing_rank = near_rank(p, missing_index);
  hello.rank[0] = near_rank(p, 0);
  hello.rank[1] = near_rank(p, other);
  return true;
}

// Exchanges the hellos of the nodes. `hello` is this node's, and becomes that of node `lane`.
__device__ inline bool hear_nodes(const Params& p, u32 epoch, Hello& hello) {
  const int lane = lane_idx(), node = node_of(p.rank), parity = epoch % 2;
  const u64 send_at = kNetworkSendHellos + parity * sizeof(Hello), recv_at = kNetworkRecvHellos + parity * kNumNodes * sizeof(Hello),
            words = kNetworkHelloWords + parity * kNumNodes * sizeof(u64), base = network_base(p);
  if (lane == 0) *at<Hello>(base, send_at) = hello;
  fence_release_sys();
  __syncwarp();
  for (int step = 1; step < kNumNodes; ++step) {
    const int rank = (node + step) % kNumNodes * kRanksPerNode + near_index(p.rank);
    put(p, rank, recv_at + node * sizeof(Hello), send_at, sizeof(Hello), words + node * sizeof(u64), tag_of(epoch, 1));
  }
  const bool is_far = lane < kNumNodes && lane != node;
  bool ok = true;
  if (is_far) {
    ok = wait_tag(p, words + lane * sizeof(u64), epoch, 1, kPhaseNodeHello, lane * kRanksPerNode + near_index(p.rank));
    if (ok) hello = *at<const Hello>(base, recv_at + lane * sizeof(Hello));
  }
  return __all_sync(~0u, ok);
}

// Warp 0 of block 0: waits for all ranks, and decides. All ranks decide the same.
__device__ inline u32 decide(const Params& p, u32 epoch, u32 serial, u32 phase) {
  const int lane = lane_idx();
  Hello hello;
  if (!hear_node(p, epoch, phase, hello) || !hear_nodes(p, epoch, hello)) return kFailed;
  const bool exists = lane < kNumNodes;
  const bool first = exists && (hello.call_signature[0] != p.call_signature || hello.serial[0] != serial);
  const bool second = exists && (hello.call_signature[1] != p.call_signature || hello.serial[1] != serial);
  const u32 differing = __ballot_sync(~0u, first || second);
  if (differing) {
    if (lane == __ffs(differing) - 1)
      report_difference(p, first ? hello.rank[0] : hello.rank[1], p.call_signature,
                        first ? hello.call_signature[0] : hello.call_signature[1], serial, first ? hello.serial[0] : hello.serial[1]);
    return kDiffers;
  }
  const i32 missing = exists ? hello.missing_rows : 0;
  const i32 most_missing = __reduce_max_sync(~0u, missing);
  if (most_missing == 0) return kAgreed;
  if (lane == __ffs(__ballot_sync(~0u, missing == most_missing)) - 1)
    report_event(p, &Report::too_many, static_cast<u64>(hello.missing_rank + 1) << 32 | static_cast<u32>(most_missing));
  return kNoRoom;
}

// The start of a call: called by warp 0 of each block. Block 0 decides, and the other blocks wait for its verdict. `phase`: the name of
// the wait for ranks of this node in reports.
__device__ inline u32 agree(const Params& p, u32 epoch, u32 serial, u32 phase, const NodeWindow& mine) {
  const int lane = lane_idx();
  u64* verdict_at = at<u64>(p.state, kLocalNodesVerdict);
  u32 verdict = kFailed;
  if (blockIdx.x == 0) {
    // After a time-out the handle may be incomplete. Other ranks would take its numbers for a difference between the calls.
    if (!__any_sync(~0u, was_aborted(p))) {
      if (lane < kRanksPerNode) publish(p, epoch, lane, mine);
      __syncwarp();
      verdict = decide(p, epoch, serial, phase);
    }
    __syncwarp();
    if (lane == 0) {
      fence_release_sys();
      st_relaxed_sys(verdict_at, static_cast<u64>(verdict) << 32 | epoch);
    }
  } else if (lane == 0) {
    // This wait has no limit: block 0 waits with limits, and always writes a verdict. A limit here would end before that of block 0,
    // and the report would not name the silent rank.
    u64 found;
    do {
      found = ld_acquire_sys(verdict_at);
    } while (static_cast<u32>(found) != epoch);
    verdict = static_cast<u32>(found >> 32);
  }
  __syncwarp();  // all lanes read windows after what lane 0 acquired
  return __shfl_sync(~0u, was_aborted(p) ? kFailed : verdict, 0);
}

// Where rows lie at the ranks of this node, in shared memory.
struct FirstRows {
  i64 own[kRanksPerNode];         // the first row of this rank at each of them
  i64 of_flow[kNumFlows * kFan];  // [flow][rank of the fan]: the first row of the flow's source

  // Called by a whole warp, after the ranks have agreed.
  __device__ __forceinline__ void read(const Params& p, u32 epoch) {
    auto first_at = [&](int index, int source) -> i64 {
      if (kDirect && source != p.rank) return at<const i32>(p.handle, kHandleFirstRow)[source];
      return window_at(p.peers[p.rank], epoch, index)->first[node_of(source)];
    };
    if (lane_idx() < kRanksPerNode) own[lane_idx()] = first_at(lane_idx(), p.rank);
    for (int i = lane_idx(); i < kNumFlows * kFan; i += 32) of_flow[i] = first_at(first_of_fan(p) + i % kFan, far_end(p, i / kFan));
  }
};
