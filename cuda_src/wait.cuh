// What kernels tell the host when something is wrong, and the one bounded wait. A peer that never comes ends in a report for the host, not
// in a hang: the first wait that runs out of time writes it to pinned host memory and raises State::abort; every other wait, in this kernel
// and in later ones, then gives up at once.
#pragma once
#include "memory.cuh"

struct Waiter {
  State* state;
  Report* report;
  u64 timeout_ns;
  int rank;
};

__device__ __forceinline__ Waiter make_waiter(const Params& p) {
  return {at<State>(p.state, 0), at<Report>(p.page, kPageReport), p.timeout_ns, p.rank};
}

__device__ __forceinline__ u64 nanoseconds() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// After a time-out, here or in an earlier kernel, nothing is sent any more: peers would take it for good.
__device__ __forceinline__ bool was_aborted(const Params& p) { return ld_relaxed_gpu(&at<State>(p.state, 0)->abort) != 0; }

// Raises State::abort, and reports, unless somebody did before.
__device__ inline void give_up(const Waiter& w, u32 phase, int peer, u32 expected, u32 seen) {
  if (exchange_relaxed_gpu(&w.state->abort, 1) != 0) return;
  st_relaxed_sys(&w.report->phase, phase);
  st_relaxed_sys(&w.report->rank, w.rank);
  st_relaxed_sys(&w.report->peer, peer);
  st_relaxed_sys(&w.report->expected, expected);
  st_relaxed_sys(&w.report->seen, seen);
  st_release_sys(&w.report->flag, 1);
}

// Waits until the low half of *flag reaches `expected` (epochs wrap around). False: the time is up, or was up elsewhere, and nothing that
// the flag announces may be used. `found`: what *flag held in the end; a u64 carries a number in its upper half.
template <class Flag>
__device__ inline bool wait_epoch(const Waiter& w, const Flag* flag, u32 expected, u32 phase, int peer, Flag* found = nullptr) {
  u64 start = 0;
  for (u32 spins = 1;; ++spins) {
    const Flag word = ld_acquire_sys(flag);
    const u32 seen = static_cast<u32>(word);
    if (found) *found = word;
    if (static_cast<i32>(seen - expected) >= 0) return true;
    if (spins % 64) continue;
    if (ld_relaxed_gpu(&w.state->abort)) return false;
    const u64 now = nanoseconds();
    if (start == 0) {
      start = now;
    } else if (now - start > w.timeout_ns) {
      give_up(w, phase, peer, expected, seen);
      return false;
    }
  }
}

__device__ inline void report_bad_expert(const Params& p, int token, i64 expert) {
  Report* report = at<Report>(p.page, kPageReport);
  st_relaxed_sys(&report->bad_token, token);
  st_relaxed_sys(&report->bad_expert, expert);
  st_release_sys(&report->bad_flag, 1);
}
