// route: computes a new routing and tells all ranks. Block b counts the b-th run of tokens, and the last block sends the counts of the
// rank.
//
// 1. Each block counts the rows for each rank and the choices of each expert in its run of tokens. A token sends at most one row to a rank.
//    The block writes its counts to local memory.
// 2. Each block waits for the counts of the blocks before it, and so knows the position of its first row. Blocks start in order, so a block
//    waits only for running blocks.
// 3. The last block now knows all counts. It sends one message to each rank: the row counts of this rank, and the choices of each expert of
//    the receiver.
// 4. Each block writes its part of the handle. send_pos has the position of each token among the rows for a rank. send_list has the tokens
//    in that order.
// 5. The last block waits for the windows of the peers, and writes its part of the handle while their messages are on the way. Then it
//    adds the matrix of row counts to the handle. If the call of a rank differs, all ranks see that in the windows.
// Before, block 0 publishes where the dispatch behind this kernel receives rows (recv_window.cuh). All earlier work on that
// memory has ended. dispatch starts when all blocks of this kernel have ended, so its SMs wait for no rank that has not begun the call.
//
// All counts are epoch-tagged words, which need no release: on the way to a peer, a release would take 2 us of the 10 us of this kernel.
// Epochs are those of dispatch, whose kernel follows and advances State::dispatch_epoch.
//
// Reuse of memory: the inbox has two ring slots, selected by the parity of the epoch. A peer sends message k + 2 after its call k + 1. That
// call waited for this rank's window k + 1, which this rank published after its call k. Kernels of one rank run one after another, so the
// counts of a block have been read when the next route writes there.
//
// Bytes: topk_idx once, and 8 * kNumRanks bytes of the handle for each token.
#include "throughput/recv_window.cuh"
#include "throughput/routing.cuh"

static_assert(kWarps >= kNumRanks && kWarps <= 32, "one warp for each rank, one lane for each warp");
static_assert(kRouteBlocks <= 32, "one lane for each block");

struct Shared {
  i32 choices[kNumExperts];
  i32 rows_before[kNumRanks][kWarps];  // rows of each warp for each rank; later, rows of the warps before it
  i32 num_rows[kNumRanks];             // of this block
  i32 first_row[kNumRanks];            // rows of the blocks before it
  i32 arriving[kNumRanks];             // rows from each rank for this one
  bool failed;                         // the counts of another block, or later the message of a peer, did not arrive
  bool is_incomplete;                  // the window of a peer did not arrive; not `failed`, which warps may still read
  bool differs;                        // the call of a rank differs: no rank sends rows
};

// Returns the ranks that receive the token as a bit mask, and counts its choices.
__device__ inline u32 ranks_of(const Params& p, int token, i32* choices) {
  i32 experts[kNumTopk];
  read_experts(p, token, experts);
  u32 ranks = 0;
#pragma unroll
  for (int k = 0; k < kNumTopk; ++k) {
    const u32 rank = static_cast<u32>(experts[k]) / kNumLocalExperts;
    if (experts[k] >= 0) {
      if (is_absent(p, rank)) continue;
      ranks |= 1u << rank;
      atomicAdd(choices + experts[k], 1);
    } else if (p.check && experts[k] == -2) {
      report_choice(p, token, k);
    }
  }
  return ranks;
}

// Step 1. It leaves the mask of each token's ranks in send_pos. The same lane reads the mask in step 4.
__device__ inline void count(const Params& p, Shared& shared) {
  i32* send_pos = at<i32>(p.handle, kHandleSendPos);
  const int warp = warp_idx(), lane = lane_idx();
  const Run run = run_of(p, blockIdx.x, gridDim.x);
  int rows = 0;  // lane r: rows for rank r
  for (int first = run.begin; first < run.end; first += 32) {
    const int token = first + lane;
    const u32 ranks = token < run.end ? ranks_of(p, token, shared.choices) : 0;
    if (token < run.end) send_pos[token * kNumRanks] = ranks;
#pragma unroll
    for (int r = 0; r < kNumRanks; ++r) {
      const u32 tokens_for_rank = __ballot_sync(~0u, ranks >> r & 1);
      if (lane == r) rows += __popc(tokens_for_rank);
    }
  }
  if (lane < kNumRanks) shared.rows_before[lane][warp] = rows;
  __syncthreads();
  if (warp < kNumRanks) {
    const int own = lane < kWarps ? shared.rows_before[warp][lane] : 0;
    const int sum = sum_to_lane(own);
    if (lane < kWarps) shared.rows_before[warp][lane] = sum - own;
    if (lane == 31) shared.num_rows[warp] = sum;
  }
  __syncthreads();
}

constexpr int kQuickReads = 64;  // each takes the time of one load

// Adds up one word of each of `num` senders, and names a sender that is silent. All loads are in flight together. Senders are about as fast
// as this block, so their words come one load or two later. Waiting for one word after the other would take a load for each of them.
template <int kMost, class WordAt>
__device__ __forceinline__ bool sum_words(const Params& p, u32 epoch, u32 phase, int num, bool from_peers, WordAt word_at, int& sum) {
  auto read = [&] {
    bool all = true;
    sum = 0;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const u64 word = i < num && !(from_peers && is_absent(p, i)) ? ld_relaxed_sys(word_at(i)) : epoch;
      all &= static_cast<u32>(word) == epoch;
      sum += static_cast<int>(word >> 32);
    }
    return all;
  };
  for (int i = 0; i < kQuickReads; ++i) {
    if (read()) return true;
  }
  for (int i = 0; i < num; ++i) {
    u64 word;
    if (from_peers && is_absent(p, i)) continue;
    if (!wait_word(p, word_at(i), epoch, phase, from_peers ? i : p.rank, word)) return false;
  }
  return read();
}

// Step 2.
__device__ inline void exchange_block_counts(const Params& p, u32 epoch, Shared& shared) {
  RouteBlock* blocks = at<RouteBlock>(p.state, kLocalRouteBlocks);
  const int warp = warp_idx(), lane = lane_idx(), block = blockIdx.x;
  const bool last = block == gridDim.x - 1;
  if (!last) {
    if (threadIdx.x < kNumRanks) st_relaxed_sys(blocks[block].num_rows + threadIdx.x, tagged_word(shared.num_rows[threadIdx.x], epoch));
    for (int e = threadIdx.x; e < kNumExperts; e += kRouteThreads)
      st_relaxed_sys(blocks[block].num_choices + e, tagged_word(shared.choices[e], epoch));
  }
  u64* rows_of = blocks[lane < block ? lane : 0].num_rows + (warp < kNumRanks ? warp : 0);
  const bool reads_rows = warp < kNumRanks && lane < block;
  u64 word = reads_rows ? ld_relaxed_sys(rows_of) : 0;  // in flight together with the choices
  if (last) {
    for (int e = threadIdx.x; e < kNumExperts; e += kRouteThreads) {
      int sum = 0;
      if (!sum_words<kRouteBlocks - 1>(p, epoch, kPhaseRouteBlocks, block, false, [&](int b) { return blocks[b].num_choices + e; }, sum))
        shared.failed = true;
      shared.choices[e] += sum;
    }
  }
  if (warp < kNumRanks) {
    if (reads_rows && static_cast<u32>(word) != epoch && !wait_word(p, rows_of, epoch, kPhaseRouteBlocks, p.rank, word))
      shared.failed = true;
    __syncwarp();
    const int before = __reduce_add_sync(~0u, static_cast<int>(word >> 32));
    if (lane == 0) shared.first_row[warp] = before;
  }
  __syncthreads();
}

__device__ __forceinline__ RouteMessage* message_at(const Params& p, u32 epoch, int receiver, int sender) {
  const u64 inbox = kControlRouteInbox + static_cast<u64>(epoch % 2) * kNumRanks * kRouteStride;
  return at<RouteMessage>(p.peers[receiver], inbox + sender * kRouteStride);
}

// Step 3: one warp for each receiver.
__device__ inline void send(const Params& p, u32 epoch, const Shared& shared) {
  const int warp = warp_idx(), lane = lane_idx();
  if (warp >= kNumRanks || is_absent(p, warp)) return;
  RouteMessage* message = message_at(p, epoch, warp, p.rank);
  for (int e = lane; e < kNumLocalExperts; e += 32)
    st_relaxed_sys(message->num_choices + e, tagged_word(shared.choices[warp * kNumLocalExperts + e], epoch));
  if (lane < kNumRanks) st_relaxed_sys(message->num_rows + lane, tagged_word(shared.first_row[lane] + shared.num_rows[lane], epoch));
}

// Step 4.
__device__ inline void write_positions(const Params& p, const Shared& shared) {
  i32* send_pos = at<i32>(p.handle, kHandleSendPos);
  i32* send_list = at<i32>(p.handle, kHandleSendList);
  const int lane = lane_idx();
  const Run run = run_of(p, blockIdx.x, gridDim.x);
  int next =
      lane < kNumRanks ? shared.first_row[lane] + shared.rows_before[lane][warp_idx()] : 0;  // lane r: position of the next row for rank r
  for (int first = run.begin; first < run.end; first += 32) {
    const int token = first + lane;
    const u32 ranks = token < run.end ? send_pos[token * kNumRanks] : 0;
#pragma unroll
    for (int r = 0; r < kNumRanks; ++r) {
      const u32 tokens_for_rank = __ballot_sync(~0u, ranks >> r & 1);
      const int position = __shfl_sync(~0u, next, r) + __popc(tokens_for_rank & ((1u << lane) - 1));
      const bool is_sent = ranks >> r & 1;
      if (token < run.end) send_pos[token * kNumRanks + r] = is_sent ? position : -1;
      if (is_sent) send_list[r * kNumMaxTokens + position] = token;
      if (lane == r) next += __popc(tokens_for_rank);
    }
  }
}

__device__ __forceinline__ bool differs(const Params& p, const RecvWindow& window) {
  return window.call_signature != p.call_signature || window.serial != kNoSerial;
}

// Called by one thread, after the windows of all ranks are here.
__device__ inline void report_first_difference(const Params& p, u32 epoch) {
  for (int other = 0; other < kNumRanks; ++other) {
    RecvWindow window = {};
    if (is_absent(p, other) || !await_window(p, kControlDispatchWindows, epoch, kPhaseRoute, other, window) || !differs(p, window))
      continue;
    return report_difference(p, other, p.call_signature, window.call_signature, kNoSerial, window.serial);
  }
}

// Step 5. One thread for each peer. If the calls of the ranks differ, a rank may send no message, so windows come before messages.
__device__ inline void receive_windows(const Params& p, u32 epoch, Shared& shared) {
  const int peer = warp_idx();
  if (lane_idx() != 0 || peer >= kNumRanks || is_absent(p, peer)) return;
  RecvWindow window = {};
  if (!await_window(p, kControlDispatchWindows, epoch, kPhaseRoute, peer, window)) {
    shared.is_incomplete = true;
  } else if (differs(p, window)) {
    shared.differs = true;
  }
}

// The row counts of one peer, called by a warp.
__device__ inline void receive_rows(const Params& p, u32 epoch, int peer, Shared& shared) {
  const int lane = lane_idx();
  if (lane >= kNumRanks) return;
  u64 word = 0;
  if (!shared.differs && !is_absent(p, peer) &&
      !wait_word(p, message_at(p, epoch, p.rank, peer)->num_rows + lane, epoch, kPhaseRoute, peer, word))
    shared.failed = true;
  const i32 rows = static_cast<i32>(word >> 32);
  at<i32>(p.handle, kHandleNumRows)[peer * kNumRanks + lane] = rows;
  if (lane == p.rank) shared.arriving[peer] = rows;
}

// Step 5, after the windows. Other warps than those of the first experts receive the rows.
__device__ inline void receive(const Params& p, u32 epoch, Shared& shared) {
  if (kWarps - 1 - warp_idx() < kNumRanks) receive_rows(p, epoch, kWarps - 1 - warp_idx(), shared);
  for (int e = threadIdx.x; e < kNumLocalExperts; e += kRouteThreads) {
    int sum = 0;
    const bool all = !shared.differs && sum_words<kNumRanks>(
                                            p, epoch, kPhaseRoute, kNumRanks, true,
                                            [&](int s) { return message_at(p, epoch, p.rank, s)->num_choices + e; }, sum);
    count_expert(p, e, all ? sum : 0);
    at<i32>(p.handle, kHandleNumRecvPerExpert)[e] = (sum + p.expert_alignment - 1) / p.expert_alignment * p.expert_alignment;
  }
  __syncthreads();
  if (threadIdx.x == 0 && !shared.failed) {
    int sum = 0;
    for (int s = 0; s < kNumRanks; ++s) sum += shared.arriving[s];
    *at<i32>(p.handle, kHandleNumRecv) = sum;
    *at<u32>(p.handle, kHandleSerial) = shared.differs ? kNoSerial : epoch;
    if constexpr (kHasSlots) *at<u32>(p.handle, kHandleGeneration) = at<const State>(p.state, 0)->generation;
    if (shared.differs) report_first_difference(p, epoch);
  }
}

extern "C" __global__ void __launch_bounds__(kRouteThreads, 1) route(const __grid_constant__ Params p) {
  __shared__ Shared shared;
  await_predecessor();
  const u32 epoch = at<State>(p.state, 0)->dispatch_epoch + 1;
  if (blockIdx.x == 0) {
    if (threadIdx.x < kNumRanks) publish_results(p, epoch, threadIdx.x, kNoSerial);
    if (p.to_host && threadIdx.x == 0) st_relaxed_sys(&at<Mailbox>(p.status_page, kStatusPageMailbox)->started, 1u);
  }
  const bool last = blockIdx.x == gridDim.x - 1;
  for (int e = threadIdx.x; e < kNumExperts; e += kRouteThreads) shared.choices[e] = 0;
  if (threadIdx.x == 0) shared.failed = shared.is_incomplete = shared.differs = false;
  __syncthreads();

  count(p, shared);
  exchange_block_counts(p, epoch, shared);
  if (shared.failed) return;
  if (last) {
    send(p, epoch, shared);
    receive_windows(p, epoch, shared);
  }
  write_positions(p, shared);
  if (!last) return;
  __syncthreads();
  if (!shared.is_incomplete) receive(p, epoch, shared);
}
