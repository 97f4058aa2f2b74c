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
// put, take one with the smallest number c. Its filler has put the chunk that it held before, so it comes to this one. It waits at most for
// the credit of chunk c - kNumSlots, which has been put. The emptier of that chunk has only chunks with smaller numbers before it, and all
// of them have been put. So it empties them, and returns the credit.
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

// The first rank of the fan that this gateway serves, within its node.
__device__ __forceinline__ int first_of_fan(const Params& p) { return kDirect ? near_index(p.rank) : 0; }

__device__ __forceinline__ u64 tag_of(u32 epoch, u32 number) { return static_cast<u64>(epoch) << 32 | number; }

// Whether a word of network memory has a tag. Then the caller may read what was put with it. `seen`: the epoch there. Many warps poll at
// once, and an acquire empties the L1 cache of its SM. So only a load that finds the tag is followed by one.
__device__ __forceinline__ bool has_tag(const Params& p, u64 word, u32 epoch, u32 number, u32& seen) {
  const u64* found = at<const u64>(network_base(p), word);
  const u64 tag = tag_of(epoch, number), value = ld_relaxed_sys(found);
  seen = static_cast<u32>(value >> 32);
  return value == tag && ld_acquire_sys(found) == tag;
}

__device__ inline bool wait_tag(const Params& p, u64 word, u32 epoch, u32 number, u32 phase, int peer) {
  return wait_until(p, epoch, phase, peer, [&](u32& seen) { return has_tag(p, word, epoch, number, seen); });
}

// Throughput kernels over several nodes count their epochs together, so each of them clears the slots of all their steps.
__device__ __forceinline__ void clear_next_waits_of_nodes(const Params& p, u32 epoch) {
  clear_next_waits(p, epoch, kPhaseDispatchWindow, kPhaseDispatchRows, kPhaseCombineWindow, kPhaseNodeHello, kPhaseNodeRows);
}

// --- slots --------------------------------------------------------------------------------------------------------------------------

__device__ __forceinline__ int slot_of(int flow, int chunk) { return flow * kNumSlots + chunk % kNumSlots; }
__device__ __forceinline__ u64 send_slot(int slot) { return kNetworkSent + static_cast<u64>(slot) * kSlotBytes; }
__device__ __forceinline__ u64 recv_slot(int slot) { return kNetworkArrivals + static_cast<u64>(slot) * kSlotBytes; }

// Whether a slot at the other end is free for a chunk. The caller may then write there.
__device__ __forceinline__ bool has_credit(const Params& p, u32 epoch, int flow, int chunk, u32& seen) {
  if (chunk < kNumSlots) return true;
  return has_tag(p, kNetworkCredits + slot_of(flow, chunk) * sizeof(u64), epoch, chunk - kNumSlots + 1, seen);
}

// Whether a chunk has arrived. The caller may then read its slot.
__device__ __forceinline__ bool has_arrived(const Params& p, u32 epoch, int flow, int chunk, u32& seen) {
  return has_tag(p, kNetworkArrived + slot_of(flow, chunk) * sizeof(u64), epoch, chunk + 1, seen);
}

// Waits for a credit. Called by a whole warp.
__device__ inline bool await_credit(const Params& p, u32 epoch, int flow, int chunk) {
  bool ok = true;
  if (lane_idx() == 0 && chunk >= kNumSlots) {
    ok = wait_until(p, epoch, kPhaseNodeRoom, far_end(p, flow), [&](u32& seen) { return has_credit(p, epoch, flow, chunk, seen); });
  }
  __syncwarp();  // all lanes write after what lane 0 acquired
  return __shfl_sync(~0u, ok, 0);
}

// Waits for a chunk. Called by a whole warp, which may then read the slot.
__device__ inline bool await_chunk(const Params& p, u32 epoch, int flow, int chunk, u32 phase) {
  bool ok = true;
  if (lane_idx() == 0)
    ok = wait_until(p, epoch, phase, far_end(p, flow), [&](u32& seen) { return has_arrived(p, epoch, flow, chunk, seen); });
  __syncwarp();  // all lanes read after what lane 0 acquired
  return __shfl_sync(~0u, ok, 0);
}

// The address of offset 0 of a rank's network memory, if this GPU reaches it over NVLink. 0: a put has to carry what goes there.
__device__ __forceinline__ u64 network_of(const Params& p, int rank) {
  if constexpr (kHasRelay) return 0;
  return at<const u64>(p.state, kLocalNetworkPeers)[rank];
}

// Where this rank writes a chunk: in the slot at the other end if it reaches that, otherwise in its own slot.
__device__ __forceinline__ u64 slot_to_fill(const Params& p, int flow, int chunk) {
  const int other = far_end(p, flow);
  const u64 theirs = network_of(p, other);
  return theirs ? theirs + recv_slot(slot_of(flow_from(p, other), chunk)) : network_base(p) + send_slot(slot_of(flow, chunk));
}

// Writes a word of another rank. The caller has released what it guards. Called by a whole warp.
__device__ __forceinline__ void send_word(const Params& p, int rank, u64 word, u64 value) {
  if (lane_idx() != 0) return;
  if (const u64 theirs = network_of(p, rank)) {
    st_relaxed_sys(at<u64>(theirs, word), value);
  } else {
    signal(p, rank, word, value);
  }
}

// Sends a chunk that lies in slot_to_fill. Called by a whole warp, which has released its bytes.
__device__ inline void send_chunk(const Params& p, u32 epoch, int flow, int chunk, u64 num_bytes) {
  const int other = far_end(p, flow), their_slot = slot_of(flow_from(p, other), chunk);
  const u64 word = kNetworkArrived + their_slot * sizeof(u64), value = tag_of(epoch, chunk + 1);
  if (network_of(p, other)) return send_word(p, other, word, value);
  put(p, other, recv_slot(their_slot), send_slot(slot_of(flow, chunk)), num_bytes, word, value);
}

// Whether another chunk of the flow waits for the slot of this one.
__device__ __forceinline__ bool needs_credit(int chunk, int num_chunks) { return chunk + kNumSlots < num_chunks; }

// Frees the slot of a chunk. Called by a whole warp, which has released its reads.
__device__ inline void send_credit(const Params& p, u32 epoch, int flow, int chunk) {
  const int other = far_end(p, flow);
  send_word(p, other, kNetworkCredits + slot_of(flow_from(p, other), chunk) * sizeof(u64), tag_of(epoch, chunk + 1));
}

// --- work ---------------------------------------------------------------------------------------------------------------------------

// The flow that a rank begins with. Ranks of a node send to the next node first, and take from the one before. Otherwise all ranks of the
// other nodes would begin with one rank.
__device__ __forceinline__ int first_flow_to_send(const Params& p) { return (kDirect ? p.rank : node_of(p.rank)) % kNumFlows; }
__device__ __forceinline__ int first_flow_to_receive(const Params& p) {
  return (kDirect ? p.rank + kNumFlows - kRanksPerNode : node_of(p.rank) + kNumFlows - 1) % kNumFlows;
}

// Claims the next item of a role. All lanes call it. The last block resets the counter.
__device__ __forceinline__ int claim(u32* tickets) {
  u32 ticket = 0;
  if (lane_idx() == 0) ticket = fetch_add_relaxed_gpu(tickets);
  return static_cast<int>(__shfl_sync(~0u, ticket, 0));
}

__device__ __forceinline__ int num_chunks(int flow_tokens, int chunk_tokens) { return (flow_tokens + chunk_tokens - 1) / chunk_tokens; }

// The tokens of a chunk, within its flow.
struct ChunkTokens {
  int first, count;
};

__device__ __forceinline__ ChunkTokens tokens_of(int chunk, int flow_tokens, int chunk_tokens) {
  return {chunk * chunk_tokens, min(chunk_tokens, flow_tokens - chunk * chunk_tokens)};
}

// Chunks of all flows in ascending order. Warps share them. Each warp has claimed the chunk that it holds and the item after that, whose
// number is on its way meanwhile.
struct Chunks {
  u32* tickets;
  const i32* num_tokens;  // of each flow
  int chunk_tokens, first_flow, end = 0;
  u32 ticket;  // lane 0: the next item
  int flow = 0, chunk = 0;
  ChunkTokens tokens = {};
  bool has = false;  // whether the warp holds a chunk

  __device__ Chunks(u32* tickets, const i32* num_tokens, int chunk_tokens, int first_flow)
      : tickets(tickets), num_tokens(num_tokens), chunk_tokens(chunk_tokens), first_flow(first_flow) {
    for (int f = lane_idx(); f < kNumFlows; f += 32) end = max(end, num_chunks(num_tokens[f], chunk_tokens));
    end = __reduce_max_sync(~0u, end) * kNumFlows;
    take_ticket();
    next();
  }

  // Whether another chunk waits for the slot of this one.
  __device__ __forceinline__ bool needs_credit() const { return ::needs_credit(chunk, num_chunks(num_tokens[flow], chunk_tokens)); }

  // Tokens of all chunks of all warps. All lanes call it.
  __device__ __forceinline__ int all_tokens() const {
    int sum = 0;
    for (int f = lane_idx(); f < kNumFlows; f += 32) sum += num_tokens[f];
    return __reduce_add_sync(~0u, sum);
  }

  __device__ __forceinline__ void next() {
    do {
      const int item = static_cast<int>(__shfl_sync(~0u, ticket, 0));
      has = item < end;
      if (!has) return;
      take_ticket();
      flow = (item + first_flow) % kNumFlows, chunk = item / kNumFlows;
      tokens = tokens_of(chunk, num_tokens[flow], chunk_tokens);
    } while (tokens.count <= 0);
  }

 private:
  __device__ __forceinline__ void take_ticket() {
    ticket = 0;
    if (lane_idx() == 0) ticket = fetch_add_relaxed_gpu(tickets);
  }
};
