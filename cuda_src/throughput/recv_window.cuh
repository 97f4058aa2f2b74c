// Receiver-addressed writing: at the start of a call every rank tells every peer where its rows shall land (offsets in its own symmetric
// memory), and learns the same from every peer.
//
// Why the two sides of the inbox, by parity of the epoch, suffice: a peer publishes epoch k + 2 only after its call k + 1 has ended, and
// that call began by waiting for this rank's publication of k + 1, which came after this rank's call k. So nobody still reads side k.
// Why a landing place may be reused without a barrier: it is published from the stream of the call, hence after every earlier kernel of
// that stream that reads the memory; and peers write only after they have read the publication.
#pragma once
#include "common/wait.cuh"

static_assert(kNumRanks <= 32);  // a lane stands for a rank

__device__ __forceinline__ RecvWindow* window_at(u64 base, u64 inbox, u32 epoch, int source) {
  return at<RecvWindow>(base, inbox) + (epoch % 2) * kNumRanks + source;
}

// One lane writes one peer's inbox.
__device__ __forceinline__ void publish(const Params& p, u64 inbox, u32 epoch, int peer, const RecvWindow& mine) {
  RecvWindow* theirs = window_at(p.peers[peer], inbox, epoch, p.rank);
  st_relaxed_sys(&theirs->x, mine.x);
  st_relaxed_sys(&theirs->scales, mine.scales);
  st_relaxed_sys(&theirs->topk_idx, mine.topk_idx);
  st_relaxed_sys(&theirs->topk_weights, mine.topk_weights);
  st_relaxed_sys(&theirs->src_idx, mine.src_idx);
  st_relaxed_sys(&theirs->capacity, mine.capacity);
  st_relaxed_sys(&theirs->call_signature, mine.call_signature);
  st_relaxed_sys(&theirs->serial, mine.serial);
  st_release_sys(&theirs->flag, epoch);
}

// Waits for a peer's publication; its offsets come back as addresses in the peer's memory.
__device__ __forceinline__ bool await_window(const Params& p, u64 inbox, u32 epoch, u32 phase, int peer, RecvWindow& window) {
  const RecvWindow* mine = window_at(p.peers[p.rank], inbox, epoch, peer);
  if (!wait_epoch(p, &mine->flag, epoch, phase, peer)) return false;
  const u64 base = p.peers[peer];
  window = *mine;
  window.x += base;
  window.scales += base;
  window.topk_idx += base;
  window.topk_weights += base;
  window.src_idx += base;
  return true;
}

// Lane r of warp 0 holds the landing of rank r. Whether a rank gave something else than this one. Then some other rank differs from each:
// all come to the same verdict, and none sends a row. Everything else goes on as usual, so that the Buffer stays usable.
__device__ inline bool ranks_differ(const Params& p, const RecvWindow& window, u32 serial) {
  const int lane = lane_idx();
  const bool differs = lane < kNumRanks && (window.call_signature != p.call_signature || window.serial != serial);
  const u32 those = __ballot_sync(~0u, differs);
  if (blockIdx.x == 0 && lane == __ffs(those) - 1)
    report_difference(p, lane, p.call_signature, window.call_signature, serial, window.serial);
  return those != 0;
}
