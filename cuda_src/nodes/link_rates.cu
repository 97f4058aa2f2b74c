// link_rates: moves bytes, or words alone, between ranks of this node or between nodes, to measure their bandwidth and latency.
//
// What it moves (p.kind):
// - kNearBytes: each rank writes num_bytes to each other rank of its node, num_chunks times.
// - kFarBytes: each rank sends num_chunks chunks of num_bytes through each flow, with credits, as dispatch_nodes does: with the copy engine
//   where this GPU reaches the other end, otherwise by puts. Nothing else is copied at the two ends.
// - kNearWords, kFarWords: num_chunks steps. In a step each rank sends one word to the others, and waits for theirs. A step takes the time
//   of one message.
//
// Reuse of memory: the hosts of all ranks synchronize between launches. In a step of words, a rank sends word i + kNumSlots after it has
// received word i + 1 of its peer, which the peer sent after word i of this rank. kNumSlots is at least 2. Near words have a place each.
#include "common/bulk.cuh"
#include "common/work.cuh"
#include "nodes/nodes.cuh"

constexpr int kNearBytes = 0, kFarBytes = 1, kNearWords = 2, kFarWords = 3;
constexpr int kWarps = kNodesThreads / 32;
constexpr int kCopyBytes = 16 * 1024;  // that a warp claims at once
constexpr int kStages = 4;
constexpr u32 kPieceBytes = kLinkRatesStageBytes;

__device__ inline void write_near(const Params& p) {
  const int pieces = (p.num_bytes + kCopyBytes - 1) / kCopyBytes, others = kRanksPerNode > 1 ? kRanksPerNode - 1 : 1;
  const int end = p.num_chunks * pieces * others;
  u32* tickets = &at<State>(p.state, 0)->nodes_copied;
  for (int item = claim(tickets); item < end; item = claim(tickets)) {
    const int rank = near_rank(p, (near_index(p.rank) + 1 + item % others) % kRanksPerNode);
    const u64 begin = static_cast<u64>(item / others % pieces) * kCopyBytes;
    const u64 to = p.recv_offset + near_index(p.rank) * static_cast<u64>(p.num_bytes) + begin;
    warp_copy(at<char>(p.peers[rank], to), at<const char>(p.src, begin), min(kCopyBytes, static_cast<int>(p.num_bytes - begin)));
  }
}

// Sends chunks of slots. Each warp has one.
struct Sender {
  char* stages;
  u64* barriers;
  u32 turn = 0;

  __device__ Sender(char* stages, u64* barriers) : stages(stages), barriers(barriers) {
    if (kHasTma && lane_idx() == 0) {
      for (int i = 0; i < kStages; ++i) barrier_init(barriers + i);
      barrier_init_fence();
    }
    __syncwarp();
  }

  // Called by a whole warp.
  __device__ __forceinline__ void send(const Params& p, u32 epoch, int flow, int chunk) {
    const u64 from = network_base(p) + send_slot(slot_of(flow, chunk)), to = slot_to_fill(p, flow, chunk);
    if (to != from) {
      if (!kHasTma) {
        warp_copy(at<void>(to, 0), at<const void>(from, 0), p.num_bytes);
      } else if (lane_idx() == 0) {
        bulk_copy<kPieceBytes, kStages>(to, from, p.num_bytes, stages, barriers, turn);
      }
    }
    fence_release_sys();  // as in the calls, where the transport reads what all lanes wrote
    __syncwarp();
    send_chunk(p, epoch, flow, chunk, p.num_bytes);
  }
};

__device__ inline void fill(const Params& p, u32 epoch, Sender sender) {
  u32* tickets = &at<State>(p.state, 0)->nodes_filled;
  for (int item = claim(tickets); item < p.num_chunks * kNumFlows; item = claim(tickets)) {
    const int flow = item % kNumFlows, chunk = item / kNumFlows;
    if (!await_credit(p, epoch, flow, chunk)) return;
    sender.send(p, epoch, flow, chunk);
  }
}

__device__ inline void empty(const Params& p, u32 epoch) {
  u32* tickets = &at<State>(p.state, 0)->nodes_emptied;
  for (int item = claim(tickets); item < p.num_chunks * kNumFlows; item = claim(tickets)) {
    const int flow = item % kNumFlows, chunk = item / kNumFlows;
    if (!await_chunk(p, epoch, flow, chunk, kPhaseNodeRows)) return;
    if (!needs_credit(chunk, p.num_chunks)) continue;
    fence_release_sys();
    __syncwarp();
    send_credit(p, epoch, flow, chunk);
  }
}

// One warp. The number of steps is at most kMaxExposedChunks.
__device__ inline void exchange_near_words(const Params& p, u32 epoch) {
  const int lane = lane_idx();
  for (int step = 0; step < p.num_chunks; ++step) {
    bool ok = true;
    if (lane < kRanksPerNode) {
      st_release_sys(at<u32>(p.peers[near_rank(p, lane)], kControlExposedFlags) + near_index(p.rank) * kMaxExposedChunks + step, epoch);
      ok = wait_epoch(p, at<u32>(p.peers[p.rank], kControlExposedFlags) + lane * kMaxExposedChunks + step, epoch, kPhaseExposedRows,
                      near_rank(p, lane));
    }
    if (!__all_sync(~0u, ok)) return;
  }
}

__device__ inline void exchange_far_words(const Params& p, u32 epoch, Sender sender) {
  for (int step = 0; step < p.num_chunks; ++step) {
    for (int flow = 0; flow < kNumFlows; ++flow) sender.send(p, epoch, flow, step);
    for (int flow = 0; flow < kNumFlows; ++flow) {
      if (!await_chunk(p, epoch, flow, step, kPhaseNodeRows)) return;
    }
  }
}

extern "C" __global__ void __launch_bounds__(kNodesThreads, 1) link_rates(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) char memory[];
  __shared__ u64 barriers[kWarps * kStages];
  State* state = at<State>(p.state, 0);
  const u32 epoch = state->nodes_epoch + 1;
  clear_next_waits_of_nodes(p, epoch);
  const int warp = warp_idx();
  const Sender sender(first_line(memory) + warp * kStages * kPieceBytes, barriers + warp * kStages);
  const bool is_first_warp = blockIdx.x == 0 && warp == 0;
  if (kRanksPerNode > 1 && p.kind == kNearBytes) {
    write_near(p);
  } else if (p.kind == kFarBytes) {
    if (warp < kWarps / 2) {
      fill(p, epoch, sender);
    } else {
      empty(p, epoch);
    }
  } else if (is_first_warp && p.kind == kNearWords) {
    exchange_near_words(p, epoch);
  } else if (is_first_warp && p.kind == kFarWords) {
    exchange_far_words(p, epoch, sender);
  }
  __syncthreads();
  if (threadIdx.x == 0 && is_last_block(&state->nodes_blocks)) {
    state->nodes_blocks = state->nodes_copied = state->nodes_filled = state->nodes_emptied = 0;
    state->nodes_epoch = epoch;
  }
}
