// What kernels tell the host when something is wrong, and the one bounded wait. A peer that never comes ends in a report for the host, not
// in a hang: the first wait that runs out of time writes it to pinned host memory and raises State::abort; every other wait, in this kernel
// and in later ones, then gives up at once. Low-latency kernels can be made to mask the peer instead, and to go on (kMasksOnTimeout).
#pragma once
#include "common/network.cuh"

__device__ __forceinline__ u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// After a time-out, here or in an earlier kernel, nothing is sent any more: peers would take it for good.
__device__ __forceinline__ bool was_aborted(const Params& p) { return ld_relaxed_gpu(&at<State>(p.state, 0)->abort) != 0; }

// After a time-out: results become NaN, in each type that a row or a scale can have, so that no replay of a CUDA graph serves those of an
// earlier one. `num_bytes`: a multiple of 4. By some of so many threads.
__device__ inline void poison(u64 results, u64 num_bytes, u64 thread, u64 num_threads) {
  for (u64 i = thread; i < num_bytes / sizeof(u32); i += num_threads) at<u32>(results, 0)[i] = ~0u;
}

// Raises State::abort, and reports, unless somebody did before.
__device__ inline void raise_abort(const Params& p, u32 phase, int peer, u32 expected, u32 seen) {
  if (exchange_relaxed_gpu(&at<State>(p.state, 0)->abort, 1) != 0) return;
  Report* report = at<Report>(p.page, kPageReport);
  st_relaxed_sys(&report->phase, phase);
  st_relaxed_sys(&report->rank, p.rank);
  st_relaxed_sys(&report->peer, peer);
  st_relaxed_sys(&report->expected, expected);
  st_relaxed_sys(&report->seen, seen);
  st_release_sys(&report->flag, 1);
}

// Whether a rank is left out of low-latency calls.
__device__ __forceinline__ u32* masked_at(const Params& p, int rank) { return at<u32>(p.state, kLocalMasked) + rank; }

// Leaves a rank out of this call, as far as it has not come, and of those that follow; the host is told.
__device__ inline void mask_rank(const Params& p, int rank) {
  exchange_relaxed_gpu(masked_at(p, rank), 1);
  st_relaxed_sys(at<u32>(p.page, kPageMasked) + rank, 1u);
}

// Signs of life, where time-outs mask. A rank that waits for a dead one, whose last words reached others but not it, must not be taken for
// dead by them: whoever waits gives a sign every now and then, and for whoever has given one is waited twice as long.
constexpr int kHeartbeatsPerTimeout = 8;

__device__ __forceinline__ u64 last_heartbeat(const Params& p, int peer) {
  return ld_relaxed_sys(at<const u64>(p.peers[p.rank], kLlHeartbeats) + peer);
}

// One thread of the GPU at a time gets to give it; to this rank too, which may be waiting for itself.
__device__ inline void send_heartbeat(const Params& p, u64 now) {
  u64* last = at<u64>(p.state, kLocalHeartbeatSent);
  const u64 pause = p.timeout_ns / kHeartbeatsPerTimeout, before = ld_relaxed_sys(last);
  if (now - before < pause || max_relaxed_gpu(last, now) != before) return;
  for (int r = 0; r < kNumRanks; ++r) {
    if (ld_relaxed_gpu(masked_at(p, r))) continue;
    if (is_scale_out(p, r)) {
      signal(p, r, kLlHeartbeats + p.rank * sizeof(u64), now);
    } else {
      st_relaxed_sys(at<u64>(p.peers[r], kLlHeartbeats) + p.rank, now);
    }
  }
}

// Where ranks are far: NVSHMEM's functions within every wait would cost more registers than there are.
__device__ __noinline__ void send_heartbeat_out_of_line(const Params& p, u64 now) { send_heartbeat(p, now); }

// Polls until has_come(seen), which may put into `seen` how far the peer is. False: the time is up, or was up elsewhere, and nothing that
// was waited for may be used. Where time-outs mask, the peer is masked then, and all goes on without it.
template <class Condition>
__device__ inline bool wait_until(const Params& p, u32 expected, u32 phase, int peer, Condition condition) {
  const u32* stop = kMasksOnTimeout ? masked_at(p, peer) : &at<State>(p.state, 0)->abort;
  u64 start = 0, heartbeat = 0;
  bool again = false;
  for (u32 spins = 1;; ++spins) {
    u32 seen = expected - 1;
    if (condition(seen)) return true;
    if (spins % 64) continue;
    if (ld_relaxed_gpu(stop)) return false;
    const u64 now = nanoseconds();
    if (start == 0) {
      start = now;
      if (kMasksOnTimeout) heartbeat = last_heartbeat(p, peer);
      continue;
    }
    if (kMasksOnTimeout && now - start > p.timeout_ns / kHeartbeatsPerTimeout)
      (kHasScaleOut ? send_heartbeat_out_of_line : send_heartbeat)(p, now);
    if (now - start <= p.timeout_ns) continue;
    if (!kMasksOnTimeout) {
      raise_abort(p, phase, peer, expected, seen);
      return false;
    }
    if (again || last_heartbeat(p, peer) == heartbeat) {
      mask_rank(p, peer);
      return false;
    }
    start = now, again = true;
  }
}

// Waits until the low half of *flag is `epoch`; then what it guards may be read. No flag gets ahead of who waits for it; one that not every
// call raises may be any number of calls behind, and epochs wrap around: "at least" would not do.
template <class Flag>
__device__ inline bool wait_epoch(const Params& p, const Flag* flag, u32 epoch, u32 phase, int peer) {
  return wait_until(p, epoch, phase, peer, [&](u32& seen) {
    seen = static_cast<u32>(ld_acquire_sys(flag));
    return seen == epoch;
  });
}

// Whether a count that every call raises, and that wraps around, is at least so much.
__device__ __forceinline__ bool has_reached(u32 count, u32 least) { return static_cast<i32>(count - least) >= 0; }

// Waits until the low half of *count is at least so much. It guards nothing that is read.
__device__ inline bool wait_count(const Params& p, const u64* count, u32 least, u32 phase, int peer) {
  return wait_until(p, least, phase, peer, [&](u32& seen) {
    seen = static_cast<u32>(ld_relaxed_sys(count));
    return has_reached(seen, least);
  });
}

// Waits until *word carries `epoch` in its lower half, and gives it. It guards nothing else, and so comes sooner.
__device__ inline bool wait_word(const Params& p, const u64* word, u32 epoch, u32 phase, int peer, u64& found) {
  return wait_until(p, epoch, phase, peer, [&](u32& seen) {
    found = ld_relaxed_sys(word);
    seen = static_cast<u32>(found);
    return seen == epoch;
  });
}

__device__ inline void report_bad_expert(const Params& p, int token, i64 expert) {
  Report* report = at<Report>(p.page, kPageReport);
  st_relaxed_sys(&report->bad_token, token);
  st_relaxed_sys(&report->bad_expert, expert);
  st_release_sys(&report->bad_flag, 1);
}

// Tells the host of something that is no reason to give up, by one word: what it says is whole, whichever thread was the last to say it.
__device__ inline void report_event(const Params& p, u64 Report::* word, u64 value) {
  Report* report = at<Report>(p.page, kPageReport);
  st_relaxed_sys(&(report->*word), value);
  st_release_sys(&report->has_events, 1);
}

// What this rank and another one give, where all have to give the same: in the call, and which routing.
__device__ inline void report_difference(const Params& p, int other, u64 mine, u64 theirs, u32 my_serial, u32 their_serial) {
  Report* report = at<Report>(p.page, kPageReport);
  st_relaxed_sys(&report->rank, p.rank);
  st_relaxed_sys(&report->other, other);
  st_relaxed_sys(&report->call_signature[0], mine);
  st_relaxed_sys(&report->call_signature[1], theirs);
  st_relaxed_sys(&report->serial[0], my_serial);
  st_relaxed_sys(&report->serial[1], their_serial);
  st_release_sys(&report->differs, 1);
}
