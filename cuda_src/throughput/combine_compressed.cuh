// A combine whose rows travel as FP8 (combine_fp8) or as 10-bit logarithms (combine_log10). combine.cuh describes the roles of the warps
// and the protocol.
//
// A copy warp reads a chunk of rows, converts it, and writes it to the peer: with TMA into a stage of its own, which a bulk copy empties
// while the warp fills its other stage; without TMA straight to the peer. Reduce warps convert back and add up in float32. Rows of the own
// rank are converted too, so that the result does not depend on the rank of an expert.
//
// Bytes: each row is read once, crosses the link once with kSentRowBytes, and is read once from staging. Each token is written once.
#pragma once
#include "common/compressed.cuh"
#include "throughput/combine.cuh"

constexpr int kVecsPerLane = kLaneChannels / kPerVec<kElement>;
constexpr int kPasses = (kHidden + kPassChannels - 1) / kPassChannels;
static_assert(kHidden % 128 == 0);

// Called by a warp. A lane has up to 8 vectors in flight; more would spill registers.
__device__ __forceinline__ void compress_row(const char* from, char* to) {
  constexpr int kAtOnce = (kIsLog10 ? 6 : 8) / kVecsPerLane;
  const int lane = lane_idx();
  for (int first = 0; first < kPasses; first += kAtOnce) {
    Vec16 held[kAtOnce][kVecsPerLane] = {};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int channel = (first + i) * kPassChannels + lane * kLaneChannels;
      if (channel >= kHidden) continue;
#pragma unroll
      for (int v = 0; v < kVecsPerLane; ++v) {
        held[i][v] = ld_vec(reinterpret_cast<const Vec16*>(from) + channel / kPerVec<kElement> + v);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i >= kPasses) break;  // the same for all lanes
      const int channel = (first + i) * kPassChannels + lane * kLaneChannels;
      const Compressed c = compressed<kElement>(held[i]);
      if (channel >= kHidden) continue;
      store_compressed(to, channel, c);
    }
  }
}

__device__ __forceinline__ void compress_chunk(const Params& p, const Routes& routes, const Chunk& c, char* to) {
  copy_weights(p, routes, c);
  for (int row = 0; row < c.num_rows; ++row) {
    compress_row(source_of(p, routes, c) + static_cast<i64>(row) * kRowBytes, to + static_cast<i64>(row) * kSentRowBytes);
  }
}

// With TMA. Reuse of memory: a warp refills a stage when at most the copy of its other stage still reads.
__device__ inline void copy_rows_bulk(const Params& p, const Routes& routes, char* stages, CopyProgress& progress) {
  constexpr int kUnwritten = 2;
  WorkIterator work(queue_of(p, routes, gridDim.x * kCombineCopyWarps), [](int) {});
  const int lane = lane_idx();
  fence_bulk_copies();  // the block has acquired the targets' addresses and the permission to write
  int turn = 0;
  for (int item = work.next(); item >= 0; item = work.next()) {
    const Chunk c = chunk_at(p, routes, item);
    if (c.num_rows == 0) continue;
    char* target = target_of(routes, c);
    char* stage = stages + turn % 2 * kStageBytes + reinterpret_cast<u64>(target) % 128;
    if (lane == 0) bulk_wait_read<1>();
    __syncwarp();
    compress_chunk(p, routes, c, stage);
    fence_bulk_copies();  // each lane's own stores to the stage
    __syncwarp();
    if (lane == 0) {
      bulk_store(target, stage, c.num_rows * kSentRowBytes);
      bulk_commit();
      while (turn - static_cast<int>(ld_acquire_block(&progress.signalled)) >= CopyProgress::kRingEntries)
        continue;  // the signal warp waits for nothing, so this ends
      progress.items[turn % CopyProgress::kRingEntries] = item;
      if (turn >= kUnwritten) {
        bulk_wait_written<kUnwritten>();
        st_release_block(&progress.written, turn + 1 - kUnwritten);
      }
    }
    ++turn;
  }
  if (lane == 0) {
    bulk_wait_written<0>();
    st_release_block(&progress.written, turn);
    st_release_block(&progress.done, 1);
  }
  __syncwarp();
}

__device__ inline void copy_rows_by_warp(const Params& p, const Routes& routes, u32 epoch) {
  WorkIterator work(queue_of(p, routes, gridDim.x * kCombineCopyWarps), [](int) {});
  for (int item = work.next(); item >= 0; item = work.next()) {
    const Chunk c = chunk_at(p, routes, item);
    if (c.num_rows == 0) continue;
    compress_chunk(p, routes, c, target_of(routes, c));
    __syncwarp();
    if (lane_idx() == 0) {
      fence_release_sys();
      raise_flag(p, c, epoch);
    }
  }
}

// This loop waits for memory. A lane has the channels of up to kAtOnce rows in flight.
__device__ inline void reduce_token(const Params& p, const u64 (&rows)[kNumRanks], int token) {
  constexpr int kAtOnce = kNumRanks < 3 ? kNumRanks : 3, kEach = kPerVec<kElement>;
  const u64 offset = static_cast<u64>(token) * kRowBytes;
  for (int channel = lane_idx() * kLaneChannels; channel < kHidden; channel += kPassChannels) {
    float sum[kLaneChannels] = {};
#pragma unroll
    for (int first = 0; first < kNumRanks; first += kAtOnce) {
      Compressed held[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i < kNumRanks && rows[first + i]) held[i] = load_compressed(at<const char>(rows[first + i], 0), channel);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i < kNumRanks && rows[first + i]) add_to(sum, held[i]);
      }
    }
#pragma unroll
    for (int v = 0; v < kVecsPerLane; ++v) {
      float part[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) part[i] = sum[v * kEach + i];
      const int vec = channel / kEach + v;
      if (p.bias_0) add_to<kElement>(part, ld_streaming(at<const Vec16>(p.bias_0, offset) + vec));
      if (p.bias_1) add_to<kElement>(part, ld_streaming(at<const Vec16>(p.bias_1, offset) + vec));
      st_vec(at<Vec16>(p.out, offset) + vec, rounded<kElement>(part));
    }
  }
}

// The whole kernel. `stages`: two stages for each copy warp, with TMA.
__device__ __forceinline__ void combine_compressed(const Params& p, char* stages) {
  __shared__ Routes routes;
  __shared__ CopyProgress progress[kCombineCopyWarps];
  auto copy_rows = [&](u32 epoch) {
    const int warp = warp_idx();
    if constexpr (kHasTma) {
      copy_rows_bulk(p, routes, stages + warp * 2 * kStageBytes, progress[warp]);
    } else {
      copy_rows_by_warp(p, routes, epoch);
    }
  };
  combine_rows(p, routes, progress, copy_rows, reduce_token);
}
