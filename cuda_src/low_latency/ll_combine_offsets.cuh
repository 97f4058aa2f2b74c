// Constants and offsets that both halves of the low-latency combines use.
#pragma once
#include "low_latency/low_latency.cuh"

constexpr int kRowVecs = kHidden / 8;
constexpr int kSentVecs = kSentRowBytes / sizeof(Vec16);  // of a row on its way
constexpr int kTileVecs = kLlTileBytes / sizeof(Vec16);
constexpr int kMaxVecsPerThread = kTileVecs / 32;  // that a thread loads at once
constexpr int kRowsOfToken = kNumRanks > kNumTopk ? kNumRanks : kNumTopk;

__device__ __forceinline__ LlProgress* progress_of(const Params& p) { return at<LlProgress>(p.state, kLocalLlCombine); }

// `which`: the sending rank, or the choice.
__device__ __forceinline__ u64 row_index(u32 epoch, int which, int token) {
  return (static_cast<u64>(epoch % kRingDepth) * kRowsOfToken + which) * kNumMaxTokens + token;
}

__device__ __forceinline__ u64 row_offset(u32 epoch, int which, int token) {
  return kLlRows + row_index(epoch, which, token) * sizeof(Vec16) * kRowVecs;
}

__device__ __forceinline__ u64 flag_offset(u32 epoch, int which, int token) {
  return kLlRowFlags + row_index(epoch, which, token) * sizeof(u64);
}

__device__ __forceinline__ u64 weights_offset(u32 epoch, int source) {
  return kLlWeights + ring_slot(epoch, source) * kNumMaxTokens * kNumTopk * sizeof(u64);
}

__device__ __forceinline__ u64 weight_flag_offset(u32 epoch, int source) { return kLlWeightFlags + ring_slot(epoch, source) * sizeof(u64); }

__device__ __forceinline__ u64 staged_offset(u32 epoch, int entry) {
  return kLlStagedRows + (static_cast<u64>(epoch % kRingDepth) * kNumRanks * kNumMaxTokens + entry) * sizeof(Vec16) * kRowVecs;
}

__device__ __forceinline__ u64 header_offset(u32 epoch, int sender) {
  return kLlCombineHeaders + ring_slot(epoch, sender) * sizeof(LlCombineHeader);
}
