// A counting sort by one block: items with small bins come first. Items of the same bin have any order.
#pragma once
#include "common/memory.cuh"

constexpr int kBins = 1024;
constexpr int kSortWarps = kPositionThreads / 32;

struct Shared {
  i32 next[kBins];  // items of each bin; later, the next place in it
  i32 sums[kSortWarps];
};

// All threads of a block replace the counts of the bins by the sums of the counts before.
__device__ inline void scan(Shared& shared) {
  constexpr int kEach = (kBins + kPositionThreads - 1) / kPositionThreads;
  const int begin = threadIdx.x * kEach;
  int own = 0;
  for (int b = begin; b < min(begin + kEach, kBins); ++b) own += shared.next[b];
  const int sum = sum_to_lane(own);
  if (lane_idx() == 31) shared.sums[warp_idx()] = sum;
  __syncthreads();
  int place = sum - own;
  for (int w = 0; w < warp_idx(); ++w) place += shared.sums[w];
  for (int b = begin; b < min(begin + kEach, kBins); ++b) {
    const int count = shared.next[b];
    shared.next[b] = place;
    place += count;
  }
  __syncthreads();
}

// Called by all threads of a block. place_of(i, j) is told that item i of num_items has place j.
template <class BinOf, class Place>
__device__ __forceinline__ void sort_by_bin(int num_items, Shared& shared, BinOf bin_of, Place place_of) {
  for (int b = threadIdx.x; b < kBins; b += kPositionThreads) shared.next[b] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < num_items; i += kPositionThreads) atomicAdd(shared.next + bin_of(i), 1);
  __syncthreads();
  scan(shared);
  for (int i = threadIdx.x; i < num_items; i += kPositionThreads) place_of(i, atomicAdd(shared.next + bin_of(i), 1));
}
