// route_nodes: computes a new routing over several nodes and tells all ranks. It does what route does for one node.
//
// Buckets: a token has a place among the rows for each of its ranks. On the hierarchical path it also has a place in the flow to each of
// its nodes. Ranks and flows together are the buckets. On the direct path a flow has the tokens of its rank.
//
// 1. Each block counts the tokens for each bucket and the choices of each expert in its run of tokens.
// 2. Each block waits for the counts of the blocks before it, and so knows the position of its first token in each bucket. Blocks start in
//    order, so a block waits only for running blocks.
// 3. The last block knows all counts. It writes those for each rank of its node to that rank's inbox, and puts those for each gateway.
// 4. Each block writes its part of the handle.
// 5. The last block forwards the counts that arrive through its flows to the inboxes of their fans. It waits for the counts of all ranks in
//    its own inbox, and adds them up in the order of the sources. If asked, it writes the counts for the host too.
//
// Reuse of memory: inboxes and network memory have two ring slots, selected by the parity of the epoch. A rank sends counts k + 2 after its
// call k + 1. That call waited for the counts k + 1 of all ranks, and each of them sent those after its call k, which read counts k.
//
// Bytes: topk_idx once; 12 bytes of the handle for each choice, and 4 for each place in a list. To each gateway 8 bytes, 4 for each rank
// of its fan, and 4 for each of their experts.
#include "nodes/nodes.cuh"
#include "throughput/routing.cuh"

static_assert(kWarps <= 32 && kRouteBlocks <= 32, "one lane for each warp, one lane for each block");

struct Shared {
  i32 choices[kNumExperts];
  i32 rows_before[kNumBuckets][kWarps];  // tokens of each warp in each bucket; later, the position of its next token
  i32 num_rows[kNumBuckets];             // of this block
  i32 first_row[kNumBuckets];            // tokens of the blocks before it
  bool failed;                           // the counts of another block did not arrive, or an earlier wait timed out
  bool is_incomplete;                    // the counts of a rank did not arrive; its own word, because warps may still read `failed`
};

// Finds the rank of each choice, or -1 if an earlier choice has the same rank. Counts the choices.
__device__ inline void ranks_of(const Params& p, int token, i32* choices, i32 (&ranks)[kNumTopk]) {
  i32 experts[kNumTopk];
  read_experts(p, token, experts);
#pragma unroll
  for (int k = 0; k < kNumTopk; ++k) {
    ranks[k] = -1;
    if (experts[k] >= 0) {
      atomicAdd(choices + experts[k], 1);
      const i32 rank = experts[k] / kNumLocalExperts;
      bool is_new = true;
#pragma unroll
      for (int j = 0; j < kNumTopk; ++j) {
        if (j < k && ranks[j] == rank) is_new = false;
      }
      if (is_new) ranks[k] = rank;
    } else if (p.check && experts[k] == -2) {
      report_choice(p, token, k);
    }
  }
}

__device__ __forceinline__ bool is_in(const Params& p, const i32 (&ranks)[kNumTopk], int bucket) {
  bool found = false;
#pragma unroll
  for (int k = 0; k < kNumTopk; ++k) {
    if (bucket < kNumRanks) {
      found |= ranks[k] == bucket;
    } else {
      found |= ranks[k] >= 0 && node_of(ranks[k]) != node_of(p.rank) && flow_to(p, ranks[k]) == bucket - kNumRanks;
    }
  }
  return found;
}

// Step 1. It leaves the ranks of each token in the handle. The same lane reads them in step 4.
__device__ inline void count(const Params& p, Shared& shared) {
  i32* entry_rank = at<i32>(p.handle, kHandleEntryRank);
  const int warp = warp_idx(), lane = lane_idx();
  const Run run = run_of(p, blockIdx.x, gridDim.x);
  for (int first = run.begin; first < run.end; first += 32) {
    const int token = first + lane;
    i32 ranks[kNumTopk];
#pragma unroll
    for (int k = 0; k < kNumTopk; ++k) ranks[k] = -1;
    if (token < run.end) ranks_of(p, token, shared.choices, ranks);
#pragma unroll
    for (int k = 0; k < kNumTopk; ++k) {
      if (token < run.end) entry_rank[static_cast<i64>(token) * kNumTopk + k] = ranks[k];
    }
    for (int b = 0; b < kNumBuckets; ++b) {
      const u32 tokens = __ballot_sync(~0u, is_in(p, ranks, b));
      if (lane == 0) shared.rows_before[b][warp] += __popc(tokens);
    }
  }
  __syncthreads();
  for (int b = threadIdx.x; b < kNumBuckets; b += kRouteThreads) {
    int sum = 0;
    for (int w = 0; w < kWarps; ++w) {
      const int own = shared.rows_before[b][w];
      shared.rows_before[b][w] = sum;
      sum += own;
    }
    shared.num_rows[b] = sum;
  }
  __syncthreads();
}

// Step 2.
__device__ inline void exchange_block_counts(const Params& p, u32 epoch, Shared& shared) {
  RouteNodesBlock* blocks = at<RouteNodesBlock>(p.state, kLocalRouteNodesBlocks);
  const int block = blockIdx.x;
  const bool last = block == gridDim.x - 1;
  if (!last) {
    for (int b = threadIdx.x; b < kNumBuckets; b += kRouteThreads) blocks[block].num_rows[b] = shared.num_rows[b];
    for (int e = threadIdx.x; e < kNumExperts; e += kRouteThreads) blocks[block].num_choices[e] = shared.choices[e];
    __syncthreads();
    if (threadIdx.x == 0) st_release_sys(&blocks[block].flag, epoch);
  }
  if (threadIdx.x < block && !wait_epoch(p, &blocks[threadIdx.x].flag, epoch, kPhaseRouteBlocks, p.rank)) shared.failed = true;
  __syncthreads();
  if (shared.failed) return;
  for (int b = threadIdx.x; b < kNumBuckets; b += kRouteThreads) {
    int before = 0;
#pragma unroll
    for (int i = 0; i < kRouteBlocks - 1; ++i) before += i < block ? blocks[i].num_rows[b] : 0;
    shared.first_row[b] = before;
    for (int w = 0; w < kWarps; ++w) shared.rows_before[b][w] += before;
  }
  if (last) {
    for (int e = threadIdx.x; e < kNumExperts; e += kRouteThreads) {
      int sum = shared.choices[e];
#pragma unroll  // all loads are in flight together
      for (int i = 0; i < kRouteBlocks - 1; ++i) sum += i < block ? blocks[i].num_choices[e] : 0;
      shared.choices[e] = sum;
    }
  }
  __syncthreads();
}

__device__ __forceinline__ SourceCounts* inbox_at(const Params& p, u32 epoch, int receiver, int source) {
  const u64 inbox = kControlCountInbox + static_cast<u64>(epoch % 2) * kNumRanks * kSourceCountsStride;
  return at<SourceCounts>(p.peers[receiver], inbox + static_cast<u64>(source) * kSourceCountsStride);
}

// Tells a rank of this node what a source sends to it. Called by a whole warp.
template <class Choices>
__device__ inline void tell(const Params& p, u32 epoch, int receiver, int source, i32 num_rows, Choices choices) {
  SourceCounts* counts = inbox_at(p, epoch, receiver, source);
  for (int e = lane_idx(); e < kNumLocalExperts; e += 32) st_relaxed_sys(counts->num_choices + e, choices(e));
  __syncwarp();
  if (lane_idx() == 0) {
    st_relaxed_sys(&counts->num_rows, num_rows);
    st_release_sys(&counts->flag, epoch);
  }
}

__device__ __forceinline__ int total_of(const Shared& shared, int bucket) { return shared.first_row[bucket] + shared.num_rows[bucket]; }

__device__ __forceinline__ int tokens_of_flow(const Params& p, const Shared& shared, int flow) {
  return total_of(shared, kDirect ? far_end(p, flow) : kNumRanks + flow);
}

// The first rank of the fan of a gateway.
__device__ __forceinline__ int fan_begin(int gateway) { return kDirect ? gateway : node_of(gateway) * kRanksPerNode; }

__device__ __forceinline__ u64 flow_counts_at(u64 region, u32 epoch, int flow) {
  return region + static_cast<u64>((epoch % 2) * kNumFlows + flow) * kFlowCountsStride;
}

__device__ __forceinline__ u64 count_word(u32 epoch, int flow) {
  return kNetworkCountWords + ((epoch % 2) * kNumFlows + flow) * sizeof(u64);
}

// Step 3: one warp for each receiver.
__device__ inline void send(const Params& p, u32 epoch, const Shared& shared) {
  const int lane = lane_idx();
  for (int i = warp_idx(); i < kRanksPerNode + kNumFlows; i += kWarps) {
    if (i < kRanksPerNode) {
      const int rank = near_rank(p, i);
      tell(p, epoch, rank, p.rank, total_of(shared, rank), [&](int e) { return shared.choices[rank * kNumLocalExperts + e]; });
      continue;
    }
    const int flow = i - kRanksPerNode, gateway = far_end(p, flow), begin = fan_begin(gateway), theirs = flow_from(p, gateway);
    const u64 from = flow_counts_at(kNetworkSendCounts, epoch, flow);
    FlowCounts* counts = at<FlowCounts>(network_base(p), from);
    int before = 0;
    for (int f = lane; f < flow; f += 32) before += tokens_of_flow(p, shared, f);
    before = __reduce_add_sync(~0u, before);
    if (lane == 0) {
      counts->num_tokens = tokens_of_flow(p, shared, flow);
      counts->first_sum = before;
    }
    if (lane < kFan) counts->num_rows[lane] = total_of(shared, begin + lane);
    for (int e = lane; e < kFanExperts; e += 32) counts->num_choices[e] = shared.choices[begin * kNumLocalExperts + e];
    fence_release_sys();
    __syncwarp();
    put(p, gateway, flow_counts_at(kNetworkRecvCounts, epoch, theirs), from, sizeof(FlowCounts), count_word(epoch, theirs),
        tag_of(epoch, 1));
  }
}

// Step 4.
__device__ inline void write_positions(const Params& p, Shared& shared) {
  const i32* entry_rank = at<const i32>(p.handle, kHandleEntryRank);
  i32 *entry_pos = at<i32>(p.handle, kHandleEntryPos), *entry_flow_pos = at<i32>(p.handle, kHandleEntryFlowPos);
  i32 *near_list = at<i32>(p.handle, kHandleNearList), *flow_list = at<i32>(p.handle, kHandleFlowList),
      *sent_pos = at<i32>(p.handle, kHandleSentPos);
  const int warp = warp_idx(), lane = lane_idx();
  const Run run = run_of(p, blockIdx.x, gridDim.x);
  for (int first = run.begin; first < run.end; first += 32) {
    const int token = first + lane;
    i32 ranks[kNumTopk], pos[kNumTopk], flow_pos[kNumTopk];
#pragma unroll
    for (int k = 0; k < kNumTopk; ++k) {
      ranks[k] = token < run.end ? entry_rank[static_cast<i64>(token) * kNumTopk + k] : -1;
      pos[k] = flow_pos[k] = -1;
    }
    for (int b = 0; b < kNumBuckets; ++b) {
      const bool mine = is_in(p, ranks, b);
      const u32 tokens = __ballot_sync(~0u, mine);
      const int next = shared.rows_before[b][warp], position = next + __popc(tokens & ((1u << lane) - 1));
      __syncwarp();
      if (lane == 0) shared.rows_before[b][warp] = next + __popc(tokens);
      if (!mine) continue;
      const bool is_rank = b < kNumRanks, is_near = is_rank && node_of(b) == node_of(p.rank);
      if (is_near) near_list[near_index(b) * kNumMaxTokens + position] = token;
      const bool is_flow = kDirect ? !is_near : !is_rank;  // ranks come before flows, so the token's positions are known
      const i64 in_flow = is_flow ? static_cast<i64>(kDirect ? flow_to(p, b) : b - kNumRanks) * kNumMaxTokens + position : 0;
      if (is_flow) {
        flow_list[in_flow] = token;
        for (int i = 0; i < kFan; ++i) sent_pos[in_flow * kFan + i] = kDirect ? position : -1;
      }
      bool is_first = true;
#pragma unroll
      for (int k = 0; k < kNumTopk; ++k) {
        if (is_rank && ranks[k] == b) {
          pos[k] = position;
          if (kDirect && !is_near) flow_pos[k] = position;
        }
        if (is_rank || ranks[k] < 0 || node_of(ranks[k]) == node_of(p.rank) || flow_to(p, ranks[k]) != b - kNumRanks) continue;
        sent_pos[in_flow * kFan + near_index(ranks[k])] = pos[k];
        if (is_first) flow_pos[k] = position;
        is_first = false;
      }
    }
#pragma unroll
    for (int k = 0; k < kNumTopk; ++k) {
      if (token >= run.end) continue;
      entry_pos[static_cast<i64>(token) * kNumTopk + k] = pos[k];
      entry_flow_pos[static_cast<i64>(token) * kNumTopk + k] = flow_pos[k];
    }
  }
}

// Step 5, first part: one warp for each flow. False: the counts of a source did not arrive.
__device__ inline bool forward(const Params& p, u32 epoch) {
  const int lane = lane_idx();
  for (int flow = warp_idx(); flow < kNumFlows; flow += kWarps) {
    const int source = far_end(p, flow);
    bool ok = true;
    if (lane == 0) ok = wait_tag(p, count_word(epoch, flow), epoch, 1, kPhaseNodeCounts, source);
    __syncwarp();  // all lanes read after what lane 0 acquired
    if (!__shfl_sync(~0u, ok, 0)) return false;
    const FlowCounts* counts = at<const FlowCounts>(network_base(p), flow_counts_at(kNetworkRecvCounts, epoch, flow));
    if (lane == 0) {
      at<i32>(p.handle, kHandleFlowRecv)[flow] = counts->num_tokens;
      at<i32>(p.handle, kHandleFlowFirstSum)[flow] = counts->first_sum;
    }
    for (int i = 0; i < kFan; ++i) {
      const int receiver = fan_begin(p.rank) + i;
      tell(p, epoch, receiver, source, counts->num_rows[i], [&](int e) { return counts->num_choices[i * kNumLocalExperts + e]; });
    }
  }
  return true;
}

// Step 5, second part: adds up the rows of all sources in their order. Called by one warp. Returns their number.
__device__ inline int write_first_rows(const Params& p, u32 epoch) {
  i32* first_row = at<i32>(p.handle, kHandleFirstRow);
  const int lane = lane_idx();
  int before = 0;
  for (int first = 0; first < kNumRanks; first += 32) {
    const int source = first + lane;
    const int own = source < kNumRanks ? inbox_at(p, epoch, p.rank, source)->num_rows : 0;
    const int sum = sum_to_lane(own);
    if (source < kNumRanks) first_row[source] = before + sum - own;
    before += __shfl_sync(~0u, sum, 31);
  }
  return before;
}

__device__ inline void receive(const Params& p, u32 epoch, Shared& shared) {
  Mailbox* mailbox = at<Mailbox>(p.status_page, kStatusPageMailbox);
  if (!forward(p, epoch)) shared.is_incomplete = true;
  for (int s = threadIdx.x; s < kNumRanks; s += kRouteThreads) {
    if (!wait_epoch(p, &inbox_at(p, epoch, p.rank, s)->flag, epoch, kPhaseRoute, s)) shared.is_incomplete = true;
  }
  __syncthreads();
  if (shared.is_incomplete) return;
  for (int r = threadIdx.x; r < kNumRanks; r += kRouteThreads) at<i32>(p.handle, kHandleNumSent)[r] = total_of(shared, r);
  for (int f = threadIdx.x; f < kNumFlows; f += kRouteThreads) at<i32>(p.handle, kHandleFlowTokens)[f] = tokens_of_flow(p, shared, f);
  for (int e = threadIdx.x; e < kNumLocalExperts; e += kRouteThreads) {
    int sum = 0;
    for (int s = 0; s < kNumRanks; ++s) sum += inbox_at(p, epoch, p.rank, s)->num_choices[e];
    count_expert(p, e, sum);
    sum = (sum + p.expert_alignment - 1) / p.expert_alignment * p.expert_alignment;
    at<i32>(p.handle, kHandleNumRecvPerExpert)[e] = sum;
    if (p.to_host) st_relaxed_sys(mailbox->num_recv_per_expert + e, sum);
  }
  if (warp_idx() == 0) {
    const int num_recv = write_first_rows(p, epoch);
    if (lane_idx() == 0) {
      *at<i32>(p.handle, kHandleNumRecv) = num_recv;
      *at<u32>(p.handle, kHandleSerial) = epoch;
      if (p.to_host) st_relaxed_sys(&mailbox->num_recv, num_recv);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    at<State>(p.state, 0)->route_epoch = epoch;
    if (p.to_host) st_release_sys(&mailbox->flag, 1);  // the host has cleared it before the launch
  }
}

extern "C" __global__ void __launch_bounds__(kRouteThreads, 1) route_nodes(const __grid_constant__ Params p) {
  __shared__ Shared shared;
  const u32 epoch = at<State>(p.state, 0)->route_epoch + 1;
  const bool last = blockIdx.x == gridDim.x - 1;
  if (p.to_host && blockIdx.x == 0 && threadIdx.x == 0) st_relaxed_sys(&at<Mailbox>(p.status_page, kStatusPageMailbox)->started, 1u);
  clear_next_waits(p, epoch, kPhaseRoute);
  for (int e = threadIdx.x; e < kNumExperts; e += kRouteThreads) shared.choices[e] = 0;
  for (int i = threadIdx.x; i < kNumBuckets * kWarps; i += kRouteThreads) shared.rows_before[i / kWarps][i % kWarps] = 0;
  if (threadIdx.x == 0) {
    shared.failed = was_aborted(p);  // then no rank may take what this rank sends for counts
    shared.is_incomplete = false;
  }
  __syncthreads();

  count(p, shared);
  exchange_block_counts(p, epoch, shared);
  if (shared.failed) return;
  if (last) send(p, epoch, shared);
  write_positions(p, shared);
  if (last) receive(p, epoch, shared);
}
