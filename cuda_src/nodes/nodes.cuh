// Throughput calls over several nodes: flows and slots.
//
// Flows: a flow leads from a source rank to a gateway on another node, which serves the ranks of its fan. On the hierarchical path a rank
// has a flow to each other node: its gateway is the rank with this rank's index there, and the fan are all ranks of that node. On the
// direct path (kDirect) it has a flow to each rank of other nodes, whose fan is that rank alone. Rows go from the source to the gateway in
// dispatch, and sums go back in combine. Each rank is the source of kNumFlows flows, and the gateway of as many.
//
// Slots: the tokens of a flow cross the network in chunks. Chunk c uses slot c % kNumSlots, of kNumSlots at each end. A filler fills the
// slot at its end and puts it. An emptier waits for it, takes the chunk out, and returns a credit if another chunk follows in this slot.
// The filler of that chunk waits for the credit. Words have the epoch and the number of the chunk, because chunks arrive in any order.
//
// Liveness: fillers and emptiers claim chunks in ascending order, over all flows. Every block has warps of both roles. A filler waits for
// credits, and an emptier for chunks. Neither of them waits for anything else that comes through a slot. Of all chunks that have not been
// put, take one with the smallest number c. Its filler waits at most for the credit of chunk c - kNumSlots, which has been put. The emptier
// of that chunk has only chunks with smaller numbers before it, and all of them have been put. So it empties them, and returns the credit.
#pragma once
#include "common/wait.cuh"

static_assert(kRanksPerNode <= 8 && kNumNodes <= 32, "one lane for each rank of a node, one lane for each node");

__device__ __forceinline__ int node_of(int rank) { return rank / kRanksPerNode; }
__device__ __forceinline__ int near_rank(const Params& p, int index) { return node_of(p.rank) * kRanksPerNode + index; }
__device__ __forceinline__ int near_index(int rank) { return rank % kRanksPerNode; }

// The rank at the other end of a flow.
__device__ __forceinline__ int far_end(const Params& p, int flow) {
  const int node = node_of(p.rank);
  if (kDirect) return flow < node * kRanksPerNode ? flow : flow + kRanksPerNode;
  return (flow < node ? flow : flow + 1) * kRanksPerNode + near_index(p.rank);
}

// The flow that leads to a rank of another node.
__device__ __forceinline__ int flow_to(const Params& p, int rank) {
  const int node = node_of(p.rank), other = node_of(rank);
  if (kDirect) return other < node ? rank : rank - kRanksPerNode;
  return other < node ? other : other - 1;
}

// The number of the flow between this rank and `other`, as `other` counts.
__device__ __forceinline__ int flow_from(const Params& p, int other) {
  const int node = node_of(p.rank), theirs = node_of(other);
  if (kDirect) return node < theirs ? p.rank : p.rank - kRanksPerNode;
  return node < theirs ? node : node - 1;
}

__device__ __forceinline__ u64 tag_of(u32 epoch, u32 number) { return static_cast<u64>(epoch) << 32 | number; }

// Waits until a word of network memory has a tag. Then the caller may read what was put with it.
__device__ inline bool wait_tag(const Params& p, u64 word, u32 epoch, u32 number, u32 phase, int peer) {
  const u64* found_at = at<const u64>(network_base(p), word);
  return wait_until(p, epoch, phase, peer, [&](u32& seen) {
    const u64 found = ld_acquire_sys(found_at);
    seen = static_cast<u32>(found >> 32);
    return found == tag_of(epoch, number);
  });
}

// Throughput kernels over several nodes count their epochs together, so each of them clears the slots of all their steps.
__device__ __forceinline__ void clear_next_waits_of_nodes(const Params& p, u32 epoch) {
  clear_next_waits(p, epoch, kPhaseDispatchWindow, kPhaseDispatchRows, kPhaseCombineWindow, kPhaseNodeHello, kPhaseNodeRows);
}

// --- slots --------------------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ int slot_of(int flow, int chunk) { return flow * kNumSlots + chunk % kNumSlots; }
__device__ __forceinline__ u64 send_slot(int slot) { return kNetworkSendSlots + static_cast<u64>(slot) * kSlotBytes; }
__device__ __forceinline__ u64 recv_slot(int slot) { return kNetworkRecvSlots + static_cast<u64>(slot) * kSlotBytes; }

// Waits until a slot at the other end is free for a chunk. Called by a whole warp.
__device__ inline bool await_credit(const Params& p, u32 epoch, int flow, int chunk) {
  if (chunk < kNumSlots) return true;
  bool ok = true;
  if (lane_idx() == 0) {
    const u64 word = kNetworkCredits + slot_of(flow, chunk) * sizeof(u64);
    ok = wait_tag(p, word, epoch, chunk - kNumSlots + 1, kPhaseNodeRoom, far_end(p, flow));
  }
  __syncwarp();  // all lanes write after what lane 0 acquired
  return __shfl_sync(~0u, ok, 0);
}

// Puts a chunk that this warp has written to its slot.
__device__ inline void put_chunk(const Params& p, u32 epoch, int flow, int chunk, u64 num_bytes) {
  const int other = far_end(p, flow), slot = slot_of(flow, chunk), their_slot = slot_of(flow_from(p, other), chunk);
  fence_release_sys();  // each lane: the transport reads what all lanes wrote
  __syncwarp();
  put(p, other, recv_slot(their_slot), send_slot(slot), num_bytes, kNetworkArrived + their_slot * sizeof(u64), tag_of(epoch, chunk + 1));
}

// Waits for a chunk. Called by a whole warp, which may then read the slot.
__device__ inline bool await_chunk(const Params& p, u32 epoch, int flow, int chunk, u32 phase) {
  bool ok = true;
  if (lane_idx() == 0) {
    ok = wait_tag(p, kNetworkArrived + slot_of(flow, chunk) * sizeof(u64), epoch, chunk + 1, phase, far_end(p, flow));
  }
  __syncwarp();  // all lanes read after what lane 0 acquired
  return __shfl_sync(~0u, ok, 0);
}

// Frees the slot of a chunk, which this warp has read, if another chunk of the flow needs it.
__device__ inline void return_credit(const Params& p, u32 epoch, int flow, int chunk, int num_chunks) {
  if (chunk + kNumSlots >= num_chunks) return;
  __syncwarp();
  if (lane_idx() == 0) {
    const int other = far_end(p, flow);
    fence_release_sys();
    signal(p, other, kNetworkCredits + slot_of(flow_from(p, other), chunk) * sizeof(u64), tag_of(epoch, chunk + 1));
  }
}

// --- work ---------------------------------------------------------------------------------------------------------------------------

// Claims the next item of a role. All lanes call it. The last block resets the counter.
__device__ __forceinline__ int claim(u32* tickets) {
  u32 ticket = 0;
  if (lane_idx() == 0) ticket = fetch_add_relaxed_gpu(tickets);
  return static_cast<int>(__shfl_sync(~0u, ticket, 0));
}

__device__ __forceinline__ int num_chunks(int num_tokens, int chunk_tokens) { return (num_tokens + chunk_tokens - 1) / chunk_tokens; }

__device__ __forceinline__ int max_chunks(const i32* num_tokens, int chunk_tokens) {
  int most = 0;
  for (int f = lane_idx(); f < kNumFlows; f += 32) most = max(most, num_chunks(num_tokens[f], chunk_tokens));
  return __reduce_max_sync(~0u, most);
}

// Calls work(flow, chunk) for chunks of all flows, in ascending order, until no chunk is left or `work` returns false.
template <class Work>
__device__ inline void for_each_chunk(u32* tickets, const i32* num_tokens, int chunk_tokens, Work work) {
  const int end = max_chunks(num_tokens, chunk_tokens) * kNumFlows;
  for (int item = claim(tickets); item < end; item = claim(tickets)) {
    const int flow = item % kNumFlows, chunk = item / kNumFlows;
    if (chunk < num_chunks(num_tokens[flow], chunk_tokens) && !work(flow, chunk)) return;
  }
}
