// Receive windows: the receiver chooses the addresses. At the start of a call each rank publishes to each peer where it receives rows, as
// offsets in its symmetric memory. It reads the windows of all peers. If a dispatch has a new routing, its route publishes the windows.
//
// Reuse of the inbox: two ring slots, selected by the parity of the epoch, are enough. A peer publishes epoch k + 2 after its call k + 1
// has ended. That call began with a wait for this rank's window k + 1. This rank published window k + 1 after its own call k. No thread
// reads slot k at that time.
//
// Reuse of the window's memory: it needs no barrier. The stream of the call publishes the window, after all earlier kernels of that stream
// that read the memory. Peers write only after they have read the window.
#pragma once
#include "common/wait.cuh"

static_assert(kNumRanks <= 32);  // one lane for each rank

__device__ __forceinline__ RecvWindow* window_at(u64 base, u64 inbox, u32 epoch, int source) {
  return at<RecvWindow>(base, inbox) + (epoch % 2) * kNumRanks + source;
}

// One lane writes the inbox of one peer.
__device__ __forceinline__ void publish(const Params& p, u64 inbox, u32 epoch, int peer, const RecvWindow& mine) {
  if constexpr (kHasSlots) {  // without slots, a return would change the order of the loads
    if (is_absent(p, peer)) return;
  }
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

// The serial in the window of a dispatch whose routing the ranks compute in this call, and in a handle whose dispatch moved no rows,
// because the ranks made different calls. A call with such a handle takes part in nothing: the ranks that have heard of the difference do
// not make it.
constexpr u32 kNoSerial = 0;

// The serial of the handle of a call with a known routing. The routing of another generation counts as kNoSerial: its rows may belong to
// slots that are absent now.
__device__ inline u32 serial_of(const Params& p) {
  if constexpr (kHasSlots) {
    const u32 now = at<const State>(p.state, 0)->generation, then = *at<const u32>(p.handle, kHandleGeneration);
    if (now != then) {
      if (blockIdx.x == 0 && threadIdx.x == 0) report_event(p, &Report::old_routing, static_cast<u64>(then + 1) << 32 | now);
      return kNoSerial;
    }
  }
  return *at<const u32>(p.handle, kHandleSerial);
}

// One lane tells one peer where this rank receives the rows of a dispatch.
template <class DispatchParams>
__device__ __forceinline__ void publish_results(const DispatchParams& p, u32 epoch, int peer, u32 serial) {
  publish(p, kControlDispatchWindows, epoch, peer,
          {p.recv_x_offset, p.recv_scales_offset, p.recv_topk_idx_offset, p.recv_topk_weights_offset, p.recv_src_idx_offset, p.capacity,
           p.call_signature, serial, epoch});
}

// Waits for the window of a peer, and turns its offsets into addresses in the peer's memory. A slot that is absent has none.
__device__ __forceinline__ bool await_window(const Params& p, u64 inbox, u32 epoch, u32 phase, int peer, RecvWindow& window) {
  if (is_absent(p, peer)) return true;
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

// Lane r of warp 0 holds the window of rank r. Returns whether the call signature or routing of a rank differs from this rank's. If two
// ranks differ, each rank differs from at least one of them. All ranks therefore agree that they differ, and no rank sends rows. The rest
// of the call proceeds, so that the Buffer stays usable. `reports`: no kernel of this call has told the host yet.
__device__ inline bool ranks_differ(const Params& p, const RecvWindow& window, u32 serial, bool reports = true) {
  const int lane = lane_idx();
  const bool differs = lane < kNumRanks && !is_absent(p, lane) && (window.call_signature != p.call_signature || window.serial != serial);
  const u32 differing = __ballot_sync(~0u, differs);
  if (reports && blockIdx.x == 0 && lane == __ffs(differing) - 1)
    report_difference(p, lane, p.call_signature, window.call_signature, serial, window.serial);
  return differing != 0;
}
