// Receive windows: the receiver chooses the addresses. At the start of a call each rank publishes to each peer where it receives rows, as
// offsets in its symmetric memory. It reads the windows of all peers. If a dispatch has a new routing, its route publishes the windows.
//
// A window is a message of epoch-tagged words. It guards no data: peers only write to this memory. So it needs no release, which would wait
// until the first words have reached the peer, and no acquire.
//
// Reuse of the inbox: two ring slots, selected by the parity of the epoch, are enough. A peer publishes epoch k + 2 after its call k + 1
// has ended. That call began with a wait for this rank's window k + 1. This rank published window k + 1 after its own call k. No thread
// reads slot k at that time.
//
// Reuse of the window's memory: it needs no barrier. The stream of the call publishes the window, after all earlier kernels of that stream
// that read the memory. Those kernels have ended (await_predecessor). Peers write only after they have read the window.
#pragma once
#include "common/wait.cuh"

static_assert(kNumRanks <= 32);  // one lane for each rank

struct RecvWindow {
  u64 x;  // offsets from the symmetric base of the receiver, or addresses
  u64 scales;
  u64 topk_idx;
  u64 topk_weights;
  u64 src_idx;
  i64 capacity;  // rows that fit
  u64 call_signature;
  u32 serial;
};

__device__ __forceinline__ WindowMessage* window_at(u64 base, u64 inbox, u32 epoch, int source) {
  return at<WindowMessage>(base, inbox) + (epoch % 2) * kNumRanks + source;
}

// One lane writes the inbox of one peer.
__device__ __forceinline__ void publish(const Params& p, u64 inbox, u32 epoch, int peer, const RecvWindow& mine) {
  if constexpr (kHasSlots) {  // without slots, a return would change the order of the loads
    if (is_absent(p, peer)) return;
  }
  WindowMessage* theirs = window_at(p.peers[peer], inbox, epoch, p.rank);
  st_relaxed_sys(&theirs->x, tagged_word(mine.x / kAlignment, epoch));
  st_relaxed_sys(&theirs->scales, tagged_word(mine.scales / kAlignment, epoch));
  st_relaxed_sys(&theirs->topk_idx, tagged_word(mine.topk_idx / kAlignment, epoch));
  st_relaxed_sys(&theirs->topk_weights, tagged_word(mine.topk_weights / kAlignment, epoch));
  st_relaxed_sys(&theirs->src_idx, tagged_word(mine.src_idx / kAlignment, epoch));
  st_relaxed_sys(&theirs->capacity, tagged_word(mine.capacity, epoch));
  st_relaxed_sys(&theirs->call_signature[0], tagged_word(mine.call_signature, epoch));
  st_relaxed_sys(&theirs->call_signature[1], tagged_word(mine.call_signature >> 32, epoch));
  st_relaxed_sys(&theirs->serial, tagged_word(mine.serial, epoch));
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
           p.call_signature, serial});
}

// Waits for the window of a peer, and turns its offsets into addresses in the peer's memory. A slot that is absent has none.
__device__ __forceinline__ bool await_window(const Params& p, u64 inbox, u32 epoch, u32 phase, int peer, RecvWindow& window) {
  if (is_absent(p, peer)) return true;
  const WindowMessage* mine = window_at(p.peers[p.rank], inbox, epoch, peer);
  WindowMessage read;
  const bool ok = wait_until(p, epoch, phase, peer, [&](u32& seen) {
    u32 others = 0;  // tags that differ from the epoch
    auto take = [&](const u64* words, u64& first, u64& second) {
      ld_relaxed_sys(words, first, second);
      others |= static_cast<u32>(first) ^ epoch;
      if (words != &mine->serial) others |= static_cast<u32>(second) ^ epoch;
    };
    take(&mine->x, read.x, read.scales);
    take(&mine->topk_idx, read.topk_idx, read.topk_weights);
    take(&mine->src_idx, read.src_idx, read.capacity);
    take(&mine->call_signature[0], read.call_signature[0], read.call_signature[1]);
    take(&mine->serial, read.serial, read.unused);
    seen = static_cast<u32>(read.serial);
    return others == 0;
  });
  if (!ok) return false;
  auto address = [&](u64 word) { return p.peers[peer] + (word >> 32) * kAlignment; };
  window.x = address(read.x);
  window.scales = address(read.scales);
  window.topk_idx = address(read.topk_idx);
  window.topk_weights = address(read.topk_weights);
  window.src_idx = address(read.src_idx);
  window.capacity = static_cast<i64>(read.capacity >> 32);
  window.call_signature = read.call_signature[0] >> 32 | read.call_signature[1] & ~0ull << 32;
  window.serial = static_cast<u32>(read.serial >> 32);
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
