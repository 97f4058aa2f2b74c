// The one bounded wait, and the reports of a kernel to the host.
//
// A missing peer leads to a report for the host and not to a hang. The first wait that times out writes the report to pinned host memory
// and raises State::abort. All other waits, in this kernel and in later ones, then end at once. With kMasksOnTimeout, low-latency kernels
// mask the missing peer instead and continue.
#pragma once
#include "common/network.cuh"
#include "common/statistics.cuh"

__device__ __forceinline__ u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// After a time-out, in this kernel or an earlier one, a kernel sends nothing. Peers would accept it as valid data.
__device__ __forceinline__ bool was_aborted(const Params& p) { return ld_relaxed_gpu(&at<State>(p.state, 0)->abort) != 0; }

// After a time-out this fills results with NaN in each type that a row or a scale can have. A replay of a CUDA graph then shows no results
// of an earlier replay. Up to 3 last bytes stay as they are. `num_threads` threads share the work.
__device__ inline void poison(u64 results, u64 num_bytes, u64 thread, u64 num_threads) {
  for (u64 i = thread; i < num_bytes / sizeof(u32); i += num_threads) at<u32>(results, 0)[i] = ~0u;
}

// Raises State::abort and writes the report, unless another thread has raised it before.
__device__ inline void raise_abort(const Params& p, u32 phase, int peer, u32 expected, u32 seen) {
  if (exchange_relaxed_gpu(&at<State>(p.state, 0)->abort, 1) != 0) return;
  Report* report = at<Report>(p.status_page, kStatusPageReport);
  st_relaxed_sys(&report->phase, phase);
  st_relaxed_sys(&report->rank, p.rank);
  st_relaxed_sys(&report->peer, peer);
  st_relaxed_sys(&report->expected, expected);
  st_relaxed_sys(&report->seen, seen);
  st_release_sys(&report->flag, 1);
}

constexpr u32 kLostPauseTicks = 20;  // of 1024 ns, between two readings of the host's word about lost ranks

// Buffers with slots (kHasSlots): whether a slot has no process. A kernel sends nothing there, and waits for nothing from there.
__device__ __forceinline__ bool is_absent(const Params& p, int rank) {
  return kHasSlots && (at<const State>(p.state, 0)->absent >> rank & 1);
}

// Reads the host's word about lost ranks for all threads, unless another thread has been faster.
__device__ __forceinline__ void read_lost(const Params& p, u32 tick, u32 before) {
  LostRanks* known = at<LostRanks>(p.state, kLocalLost);
  if (compare_exchange_relaxed_gpu(&known->read_at, before, tick) == before)
    st_relaxed_sys(&known->ranks, ld_relaxed_sys(at<const u32>(p.status_page, kStatusPageLost)));
}

// Low-latency kernels for sm_80 that mask have no registers left for it. The others have none for a call.
static __device__ __noinline__ void read_lost_out_of_line(const Params& p, u32 tick, u32 before) { read_lost(p, tick, before); }

// A bit for each slot whose end stops a wait for `peer`. Where time-outs mask, that is the peer. Otherwise any loss ends the call, because
// the peer may have given it up. Their last data may be here all the same, so only waits look at this. The word is in memory of the host,
// because a thread writes it that may make no call of CUDA: such a call could wait for the kernel that waits here. Thousands of threads
// wait at once. If each of them read the word, calls would take milliseconds. So one of them reads it for all, from time to time.
__device__ __forceinline__ u32 lost_for(const Params& p, int peer, u64 now) {
  if constexpr (!kHasSlots) return 0;
  const LostRanks* known = at<const LostRanks>(p.state, kLocalLost);
  const u32 tick = now >> 10, before = ld_relaxed_gpu(&known->read_at);  // another SM may be a tick ahead
  if (tick - before + 4 > kLostPauseTicks) (kIsLowLatency && kMasksOnTimeout ? read_lost_out_of_line : read_lost)(p, tick, before);
  const u32 lost = ld_relaxed_gpu(&known->ranks);
  return kMasksOnTimeout ? lost & 1u << peer : lost;
}

// The rank that a report about a wait for `peer` names.
__device__ __forceinline__ int silent_rank(u32 lost, int peer) { return lost ? __ffs(lost) - 1 : peer; }

// The word that says whether low-latency calls exclude a rank.
__device__ __forceinline__ u32* masked_at(const Params& p, int rank) { return at<u32>(p.state, kLocalMasked) + rank; }

// Excludes a rank from later calls, and from this call where the rank has not arrived yet. Tells the host too.
__device__ inline void mask_rank(const Params& p, int rank) {
  exchange_relaxed_gpu(masked_at(p, rank), 1);
  st_relaxed_sys(at<u32>(p.status_page, kStatusPageMasked) + rank, 1u);
}

// Heartbeats, where time-outs mask. A rank may wait for a dead rank whose last data reached other ranks, but not this one. The other ranks
// must not mask the waiting rank too. A rank that waits therefore sends heartbeats. A wait for a rank that has sent one lasts twice as
// long.
constexpr int kHeartbeatsPerTimeout = 8;

__device__ __forceinline__ u64 last_heartbeat(const Params& p, int peer) {
  return ld_relaxed_sys(at<const u64>(inbox_base(p, peer), kLlHeartbeats) + peer);
}

// Only one thread of the GPU sends each heartbeat. This rank gets one too, because it may wait for itself.
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

// With a scale-out domain this is no inline function. NVSHMEM's functions in each wait would need more registers than a thread has.
__device__ __noinline__ void send_heartbeat_out_of_line(const Params& p, u64 now) { send_heartbeat(p, now); }

// Whether a function looks after long waits, which then remember no more than when they began. In low-latency kernels, code that a call
// jumps over costs time. Throughput kernels do not notice it, and have no registers left for a call.
constexpr bool kWaitsAreSimple = kIsLowLatency && !kMasksOnTimeout && !kCountsWaits;

// Called by a simple wait from time to time, with what it returned last, first with 0. It returns when the wait began, or 0 if the wait
// ends without success.
__device__ __noinline__ u64 start_of_wait(const Params& p, u64 start, u32 expected, u32 phase, int peer, u32 seen) {
  if (was_aborted(p)) return 0;
  const u64 now = nanoseconds();
  const u32 lost = lost_for(p, peer, now);
  if (!lost) {
    if (start == 0) return now;
    if (now - start <= p.timeout_ns) return start;
  }
  raise_abort(p, phase, silent_rank(lost, peer), expected, seen);
  return 0;
}

// Polls until condition(seen) is true; it may store the peer's progress in `seen`. False: this wait or another one timed out, and the
// caller may not use the awaited data. Where time-outs mask, this masks the peer, and the caller continues without it.
template <class Condition>
__device__ inline bool wait_until(const Params& p, u32 expected, u32 phase, int peer, Condition condition) {
  const u32* stop = kMasksOnTimeout ? masked_at(p, peer) : &at<State>(p.state, 0)->abort;
  u64 start = 0, heartbeat = 0;  // with statistics, `start` is the time of the first poll without success
  bool again = false;
  for (u32 spins = 1;; ++spins) {
    u32 seen = expected - 1;
    if (condition(seen)) {
      if (kCountsWaits && start != 0) count_wait(p, phase, expected, peer, nanoseconds() - start);
      return true;
    }
    if (kCountsWaits && start == 0) start = nanoseconds();
    if (spins % 64) continue;
    if constexpr (kWaitsAreSimple) {
      start = start_of_wait(p, start, expected, phase, peer, seen);
      if (start == 0) return false;
      continue;
    }
    if (ld_relaxed_gpu(stop)) return false;
    const u64 now = nanoseconds();
    const u32 lost = lost_for(p, peer, now);
    if (!lost && (kCountsWaits ? spins == 64 : start == 0)) {
      if (!kCountsWaits) start = now;
      if (kMasksOnTimeout) heartbeat = last_heartbeat(p, peer);
      continue;
    }
    if (kMasksOnTimeout && now - start > p.timeout_ns / kHeartbeatsPerTimeout)
      (kHasScaleOut ? send_heartbeat_out_of_line : send_heartbeat)(p, now);
    if (!lost && now - start <= (kCountsWaits && again ? 2 * p.timeout_ns : p.timeout_ns)) continue;
    if (!kMasksOnTimeout) {
      raise_abort(p, phase, silent_rank(lost, peer), expected, seen);
      return false;
    }
    if (lost || again || last_heartbeat(p, peer) == heartbeat) {
      if (kCountsWaits) count_wait(p, phase, expected, peer, now - start);
      mask_rank(p, peer);
      return false;
    }
    if (!kCountsWaits) start = now;
    again = true;
  }
}

// Waits until the low half of *flag equals `epoch`. Then the caller may read what the flag guards. A flag is never ahead of the rank that
// waits for it. A flag that some calls do not raise may be any number of calls late, and epochs wrap around. A test for "at least" would
// therefore be wrong.
template <class Flag>
__device__ inline bool wait_epoch(const Params& p, const Flag* flag, u32 epoch, u32 phase, int peer) {
  return wait_until(p, epoch, phase, peer, [&](u32& seen) {
    seen = static_cast<u32>(ld_acquire_sys(flag));
    return seen == epoch;
  });
}

// Whether a count has reached `least`. Each call raises it, and it wraps around.
__device__ __forceinline__ bool has_reached(u32 count, u32 least) { return static_cast<i32>(count - least) >= 0; }

// Waits until the low half of *count has reached `least`. It guards no data that the caller reads.
__device__ inline bool wait_count(const Params& p, const u64* count, u32 least, u32 phase, int peer) {
  return wait_until(p, least, phase, peer, [&](u32& seen) {
    seen = static_cast<u32>(ld_relaxed_sys(count));
    return has_reached(seen, least);
  });
}

// A word that says by itself whether it has arrived: it carries the epoch in its lower half.
__device__ __forceinline__ u64 tagged_word(u32 value, u32 epoch) { return static_cast<u64>(value) << 32 | epoch; }

// Waits until the lower half of *word equals `epoch`, and returns the word. It guards no other data, so a relaxed load is enough.
__device__ inline bool wait_word(const Params& p, const u64* word, u32 epoch, u32 phase, int peer, u64& found) {
  return wait_until(p, epoch, phase, peer, [&](u32& seen) {
    found = ld_relaxed_sys(word);
    seen = static_cast<u32>(found);
    return seen == epoch;
  });
}

// Called by a whole warp. A put; after it returns the caller may write to `from` again. The wait for a relay may time out.
__device__ inline void put_and_wait(const Params& p, int rank, u64 to, u64 from, u64 num_bytes, u64 flag, u64 value) {
  if constexpr (kHasRelay) {
    __syncwarp();
    if (lane_idx() == 0) {
      u32 sequence;
      const Descriptor* entry = relay(p, rank, to, from, num_bytes, flag, value, true, sequence);
      wait_until(p, sequence, kPhaseRelay, p.rank, [&](u32& seen) {
        seen = ld_relaxed_sys(&entry->sent);
        return seen == sequence;
      });
    }
    __syncwarp();
  } else if constexpr (kHasScaleOut) {
    const u64 base = network_base(p);
    nvshmem_put_and_wait(at<void>(base, to), at<void>(base, from), num_bytes, at<u64>(base, flag), value, p.pes[rank]);
  }
}

__device__ __noinline__ void report_bad_expert(const Params& p, int token, i64 expert) {
  Report* report = at<Report>(p.status_page, kStatusPageReport);
  st_relaxed_sys(&report->bad_token, token);
  st_relaxed_sys(&report->bad_expert, expert);
  st_release_sys(&report->bad_flag, 1);
}

// Reports an event that does not end the call. One word holds the whole event, so it is consistent whichever thread wrote last.
__device__ __noinline__ void report_event(const Params& p, u64 Report::* word, u64 value) {
  Report* report = at<Report>(p.status_page, kStatusPageReport);
  st_relaxed_sys(&(report->*word), value);
  st_release_sys(&report->has_events, 1);
}

// Reports that this rank and another rank differ in their call signatures or routings.
__device__ __noinline__ void report_difference(const Params& p, int other, u64 mine, u64 theirs, u32 my_serial, u32 their_serial) {
  Report* report = at<Report>(p.status_page, kStatusPageReport);
  st_relaxed_sys(&report->rank, p.rank);
  st_relaxed_sys(&report->other, other);
  st_relaxed_sys(&report->call_signature[0], mine);
  st_relaxed_sys(&report->call_signature[1], theirs);
  st_relaxed_sys(&report->serial[0], my_serial);
  st_relaxed_sys(&report->serial[1], their_serial);
  st_release_sys(&report->differs, 1);
}
