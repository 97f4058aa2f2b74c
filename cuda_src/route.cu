// route: works out a new routing and tells everybody. One block.
//
//   1. each warp takes a run of tokens and counts, for each rank, how many of them go there (a token goes to a rank at most once);
//   2. warps 0 .. kNumRanks-1 send one message each: the row counts of this rank, and how often each expert of the receiver was chosen;
//   3. meanwhile all warps write the handle: each token's position among the rows for a rank (send_pos), and the tokens in that order
//      (send_list);
//   4. the same warps wait for the messages of the peers, and complete the handle with the matrix of row counts, and, if asked, the host.
//
// Bytes: topk_idx twice (the second time from L2), 8 * kNumRanks a token of handle. Reuse of the inbox, two sides by parity of the epoch: a
// peer sends message k + 2 after its call k + 1, which waited for this rank's message k + 1, which came after this rank's call k.
// State::route_epoch counts finished calls; thread 0 advances it.
#include "wait.cuh"

constexpr int kWarps = kRouteThreads / 32;
static_assert(kWarps == 32, "one lane for each warp in the scan");

// A token's experts; -2 for a number that is no expert and not -1. All loads are on their way before the first one is used.
template <class Index>
__device__ inline void read_experts(const Params& p, int token, i32 (&experts)[kNumTopk]) {
  const Index* from = at<const Index>(p.topk_idx, 0) + static_cast<i64>(token) * kNumTopk;
#pragma unroll
  for (int k = 0; k < kNumTopk; ++k) {
    const Index expert = from[k];
    experts[k] = expert >= -1 && expert < kNumExperts ? static_cast<i32>(expert) : -2;
  }
}

__device__ inline void report_bad_expert(const Params& p, int token, int k) {
  const i64 i = static_cast<i64>(token) * kNumTopk + k;
  Report* report = at<Report>(p.page, kPageReport);
  st_relaxed_sys(&report->bad_token, token);
  st_relaxed_sys(&report->bad_expert, p.idx_bytes == 8 ? at<const i64>(p.topk_idx, 0)[i] : at<const i32>(p.topk_idx, 0)[i]);
  st_release_sys(&report->bad_flag, 1);
}

// The ranks that a token goes to, as a bit mask; its choices are counted.
__device__ inline u32 ranks_of(const Params& p, int token, i32* choices) {
  i32 experts[kNumTopk];
  if (p.idx_bytes == 8) {
    read_experts<i64>(p, token, experts);
  } else {
    read_experts<i32>(p, token, experts);
  }
  u32 ranks = 0;
#pragma unroll
  for (int k = 0; k < kNumTopk; ++k) {
    if (experts[k] >= 0) {
      ranks |= 1u << (static_cast<u32>(experts[k]) / kNumLocalExperts);
      atomicAdd(choices + experts[k], 1);
    } else if (p.check && experts[k] == -2) {
      report_bad_expert(p, token, k);
    }
  }
  return ranks;
}

extern "C" __global__ void __launch_bounds__(kRouteThreads, 1) route(const __grid_constant__ Params p) {
  __shared__ i32 choices[kNumExperts];
  __shared__ i32 rows_before[kNumRanks][kWarps];  // rows of each warp for each rank, then of the warps before it
  __shared__ i32 num_rows[kNumRanks];
  __shared__ bool failed;
  State* state = at<State>(p.state, 0);
  i32* handle_rows = at<i32>(p.handle, kHandleNumRows);
  i32* send_pos = at<i32>(p.handle, kHandleSendPos);
  i32* send_list = at<i32>(p.handle, kHandleSendList);
  const int warp = warp_idx(), lane = lane_idx();
  const u32 epoch = state->route_epoch + 1;

  for (int e = threadIdx.x; e < kNumExperts; e += kRouteThreads) choices[e] = 0;
  if (threadIdx.x == 0) failed = false;
  __syncthreads();

  // 1. count
  const int tokens_per_warp = (p.num_tokens + kRouteThreads - 1) / kRouteThreads * 32;
  const int begin = warp * tokens_per_warp;
  const int end = min(begin + tokens_per_warp, p.num_tokens);
  int count = 0;  // lane r: rows for rank r
  for (int first = begin; first < end; first += 32) {
    const int token = first + lane;
    const u32 ranks = token < end ? ranks_of(p, token, choices) : 0;
    if (token < end) send_pos[token * kNumRanks] = ranks;  // kept for step 3, where the same lane reads it
#pragma unroll
    for (int r = 0; r < kNumRanks; ++r) {
      const u32 takers = __ballot_sync(~0u, ranks >> r & 1);
      if (lane == r) count += __popc(takers);
    }
  }
  if (lane < kNumRanks) rows_before[lane][warp] = count;
  __syncthreads();
  if (warp < kNumRanks) {
    const int own = rows_before[warp][lane];
    int sum = own;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += before;
    }
    rows_before[warp][lane] = sum - own;
    if (lane == 31) num_rows[warp] = sum;
  }
  __syncthreads();

  // 2. send
  const u64 inbox = kControlRouteInbox + static_cast<u64>(epoch % 2) * kNumRanks * kRouteStride;
  if (warp < kNumRanks) {
    RouteMessage* message = at<RouteMessage>(p.peers[warp], inbox + p.rank * kRouteStride);
    if (lane < kNumRanks) st_relaxed_sys(message->num_rows + lane, num_rows[lane]);
    for (int e = lane; e < kNumLocalExperts; e += 32) st_relaxed_sys(message->num_choices + e, choices[warp * kNumLocalExperts + e]);
    __syncwarp();
    if (lane == 0) st_release_sys(&message->flag, epoch);
  }

  // 3. positions
  int next = lane < kNumRanks ? rows_before[lane][warp] : 0;  // lane r: position of the next row for rank r
  u32 next_ranks = begin + lane < end ? send_pos[(begin + lane) * kNumRanks] : 0;
  for (int first = begin; first < end; first += 32) {
    const int token = first + lane;
    const u32 ranks = next_ranks;
    next_ranks = token + 32 < end ? send_pos[(token + 32) * kNumRanks] : 0;
#pragma unroll
    for (int r = 0; r < kNumRanks; ++r) {
      const u32 takers = __ballot_sync(~0u, ranks >> r & 1);
      const int position = __shfl_sync(~0u, next, r) + __popc(takers & ((1u << lane) - 1));
      const bool takes = ranks >> r & 1;
      if (token < end) send_pos[token * kNumRanks + r] = takes ? position : -1;
      if (takes) send_list[r * kNumMaxTokens + position] = token;
      if (lane == r) next += __popc(takers);
    }
  }

  // 4. receive
  if (warp < kNumRanks) {
    const RouteMessage* message = at<RouteMessage>(p.peers[p.rank], inbox + warp * kRouteStride);
    if (lane == 0 && !wait_epoch(make_waiter(p), &message->flag, epoch, kPhaseRoute, warp)) failed = true;
    __syncwarp();
    if (lane < kNumRanks) handle_rows[warp * kNumRanks + lane] = message->num_rows[lane];
  }
  __syncthreads();
  if (failed) return;
  Mailbox* mailbox = at<Mailbox>(p.page, kPageMailbox);
  for (int e = threadIdx.x; e < kNumLocalExperts; e += kRouteThreads) {
    int sum = 0;
    for (int s = 0; s < kNumRanks; ++s) sum += at<RouteMessage>(p.peers[p.rank], inbox + s * kRouteStride)->num_choices[e];
    sum = (sum + p.expert_alignment - 1) / p.expert_alignment * p.expert_alignment;
    at<i32>(p.handle, kHandleNumRecvPerExpert)[e] = sum;
    if (p.to_host) st_relaxed_sys(mailbox->num_recv_per_expert + e, sum);
  }
  if (threadIdx.x == 0) {
    int sum = 0;
    for (int s = 0; s < kNumRanks; ++s) sum += handle_rows[s * kNumRanks + p.rank];
    *at<i32>(p.handle, kHandleNumRecv) = sum;
    if (p.to_host) st_relaxed_sys(&mailbox->num_recv, sum);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    state->route_epoch = epoch;
    if (p.to_host) st_release_sys(&mailbox->flag, 1);  // the host cleared it before the launch
  }
}
