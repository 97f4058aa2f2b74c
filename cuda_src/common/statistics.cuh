// Statistics of a Buffer's calls, where it keeps them (kHasStatistics). Kernels add to numbers in local memory, and the host reads them at
// any time.
//
// Waits: a call has steps, one after another. Many threads may wait for one source in a step, and only the longest of these waits counts.
// The sum over the steps is therefore never longer than the call. The longest wait lies in one of two slots, by the parity of the epoch
// that the step waits for. A call clears the slots of the next call, so no thread of the same call uses them. Waits for parts of this rank
// itself do not count.
#pragma once
#include "common/memory.cuh"

constexpr bool kCountsWaits = kHasStatistics && kCallKind >= 0;

// Raises *longest to `value`, and adds the difference to *sum(). The sum grows by the largest value of a call.
template <class Sum>
__device__ __forceinline__ void add_longest(u64* longest, u64 value, Sum sum) {
  const u64 before = max_relaxed_gpu(longest, value);
  if (before < value) add_relaxed_gpu(sum(), value - before);
}

// Of the calls that this kernel belongs to.
__device__ __forceinline__ CallStatistics* statistics_of(const Params& p) {
  return at<CallStatistics>(p.state, kLocalStatistics) + kCallKind;
}

// The step that a phase of reports belongs to, named by one of its phases. Threads may be in all phases of a step at the same time.
__device__ constexpr u32 step_of(u32 phase) {
  if (phase == kPhaseNodeCounts) return kPhaseRoute;
  if (phase == kPhaseNodeRoom || phase == kPhaseNodeSums || phase == kPhaseExposedRows) return kPhaseNodeRows;
  return phase == kPhaseLlWeights ? kPhaseLlCombineRows : phase;
}

// The longest wait of a step for a source.
__device__ __forceinline__ u64* longest_wait(const Params& p, u32 phase, u32 epoch, u32 source) {
  return at<u64>(p.state, kLocalLongestWaits + ((step_of(phase) * 2 + epoch % 2) * kNumRanks + source) * static_cast<u32>(sizeof(u64)));
}

__device__ inline void count_wait(const Params& p, u32 phase, u32 epoch, int source, u64 waited_ns) {
  if (source == p.rank) return;
  u64* longest = longest_wait(p, phase, epoch, source);
  // Most threads end here: a load of one word by many threads is cheaper than their atomics.
  if (ld_relaxed_sys(longest) < waited_ns) add_longest(longest, waited_ns, [&] { return statistics_of(p)->waits + source; });
}

// Called by all threads of the grid, in each call of these steps. `epoch`: as their waits get it.
template <class... Phases>
__device__ __forceinline__ void clear_next_waits(const Params& p, u32 epoch, Phases... phases) {
  if constexpr (kHasStatistics) {
    if (blockIdx.x > 0 || threadIdx.x >= 32) return;
    for (int s = lane_idx(); s < kNumRanks; s += 32) ((*longest_wait(p, phases, epoch + 1, s) = 0), ...);
  }
}

// Called by one thread for each call.
__device__ __forceinline__ void count_call(const Params& p) {
  if constexpr (kHasStatistics) add_relaxed_gpu(&statistics_of(p)->calls, 1);
}

__device__ __forceinline__ void count_sent(const Params& p, u64 num_rows, u64 row_bytes) {
  if constexpr (kHasStatistics) {
    add_relaxed_gpu(&statistics_of(p)->rows_sent, num_rows);
    add_relaxed_gpu(&statistics_of(p)->bytes_sent, num_rows * row_bytes);
  }
}

__device__ __forceinline__ void count_received(const Params& p, u64 num_rows, u64 row_bytes) {
  if constexpr (kHasStatistics) {
    add_relaxed_gpu(&statistics_of(p)->rows_received, num_rows);
    add_relaxed_gpu(&statistics_of(p)->bytes_received, num_rows * row_bytes);
  }
}

// `num_choices`: choices of a local expert by the tokens of a call.
__device__ __forceinline__ void count_expert(const Params& p, int expert, u64 num_choices) {
  if constexpr (kHasStatistics) add_relaxed_gpu(at<u64>(p.state, kLocalExpertRows) + expert, num_choices);
}
