// combine_fp8 and combine_log10: a combine whose rows travel as FP8, with a scale for 128 channels, or as 10-bit logarithms. combine.cuh
// describes the roles of the warps and the protocol.
//
// With TMA, a copy warp has memory for one row as it lies in y, in parts, and two stages for compressed chunks. Bulk loads fill a part
// while the warp converts other parts, and a bulk store empties a stage while the warp fills the other one. Without TMA, a copy warp reads
// y and writes to the peer itself. Reduce warps convert back and add up in float32. Rows of the own rank are converted too, so that the
// result does not depend on the rank of an expert.
//
// Bytes: each row is read once, crosses the link once with kSentRowBytes, and is read once from staging. Each token is written once. The
// conversions take most of the time where few SMs work.
#include "common/compressed.cuh"
#include "throughput/combine.cuh"

constexpr int kVecsPerLane = kLaneChannels / kPerVec<kElement>;
constexpr int kPasses = (kHidden + kPassChannels - 1) / kPassChannels;

// Passes that a warp converts together: 3 to 5, so that the last part converts few that a row lacks. With float32, registers allow 2.
__device__ constexpr int part_passes() {
  int best = 4;
  for (int n = 5; n >= 3; n -= 2) {
    if ((kPasses + n - 1) / n * n < (kPasses + best - 1) / best * best) best = n;
  }
  return kElement == kFloat32 ? 2 : best;
}
constexpr int kPartPasses = part_passes(), kParts = (kPasses + kPartPasses - 1) / kPartPasses;
constexpr int kPassBytes = kPassChannels * (kRowBytes / kHidden), kPartBytes = kPartPasses * kPassBytes;
static_assert(kHidden % 128 == 0);

// Called by a warp: converts passes [first, first + kPartPasses) of a row. `part`: their channels.
__device__ __forceinline__ void compress_part(const char* part, int first, char* to) {
  const int lane = lane_idx();
  auto exists = [&](int pass) {
    return kHidden % kPassChannels == 0 ? pass < kPasses : pass * kPassChannels + lane * kLaneChannels < kHidden;
  };
  Vec16 held[kPartPasses][kVecsPerLane] = {};
#pragma unroll
  for (int i = 0; i < kPartPasses; ++i) {
    if (!exists(first + i)) continue;
#pragma unroll
    for (int v = 0; v < kVecsPerLane; ++v) {
      held[i][v] = *(reinterpret_cast<const Vec16*>(part + i * kPassBytes) + lane * kVecsPerLane + v);
    }
  }
  Compressed made[kPartPasses];
  compress<kElement>(held, made);
#pragma unroll
  for (int i = 0; i < kPartPasses; ++i) {
    if (exists(first + i)) store_compressed(to, (first + i) * kPassChannels + lane * kLaneChannels, made[i]);
  }
}

// A row on its way, or no row after the last one.
struct Place {
  int item = -1;
  Chunk chunk = {};
  int row = 0;  // of the chunk

  __device__ __forceinline__ const char* source(const Params& p, const Routes& routes) const {
    return source_of(p, routes, chunk) + static_cast<i64>(row) * kRowBytes;
  }

  template <class Work>
  __device__ __forceinline__ void advance(const Params& p, const Routes& routes, Work& work) {
    if (++row < chunk.num_rows) return;
    row = 0;
    do {
      item = work.next();
      if (item >= 0) chunk = chunk_at(p, routes, item);
    } while (item >= 0 && chunk.num_rows == 0);
  }
};

// Called by one lane. `row`: in y.
__device__ __forceinline__ void load_part(const char* row, int part, char* input, u64* barriers) {
  const int num_bytes = min(kPartBytes, kRowBytes - part * kPartBytes);
  barrier_expect(barriers + part, num_bytes);
  bulk_load(input + part * kPartBytes, row + part * kPartBytes, num_bytes, barriers + part);
}

// With TMA. Reuse of memory: a part is loaded again when all lanes have read it. A warp refills a stage when at most the copy of its other
// stage still reads.
__device__ inline void copy_rows_bulk(const Params& p, const Routes& routes, char* input, u64* barriers, CopyProgress& progress) {
  constexpr int kUnwritten = 2;
  WorkIterator work(queue_of(p, routes), [](int) {});
  const int lane = lane_idx();
  char* stages = input + kRowBytes;
  fence_bulk_copies();  // the block has acquired the targets' addresses and the permission to write
  if (lane == 0) {
    for (int part = 0; part < kParts; ++part) barrier_init(barriers + part);
    barrier_init_fence();
  }
  __syncwarp();
  Place place;
  place.advance(p, routes, work);
  for (int part = 0; part < kParts && lane == 0 && place.item >= 0; ++part) load_part(place.source(p, routes), part, input, barriers);
  int turn = 0;
  u32 parity = 0;
  while (place.item >= 0) {
    Place next = place;
    next.advance(p, routes, work);
    const char* next_row = next.item >= 0 ? next.source(p, routes) : nullptr;
    char* target = target_of(routes, place.chunk);
    char* stage = stages + turn % 2 * kStageBytes + reinterpret_cast<u64>(target) % 128;
    if (place.row == 0) {
      copy_weights(p, routes, place.chunk);
      if (lane == 0) bulk_wait_read<1>();
      __syncwarp();
    }
    for (int part = 0; part < kParts; ++part) {
      barrier_wait(barriers + part, parity);
      compress_part(input + part * kPartBytes, part * kPartPasses, stage + place.row * kSentRowBytes);
      fence_bulk_copies_of_shared();
      __syncwarp();  // all lanes have read the part and written its channels
      if (lane == 0 && next_row) load_part(next_row, part, input, barriers);
    }
    parity ^= 1;
    if (next.row == 0) {
      if (lane == 0) {
        bulk_store(target, stage, place.chunk.num_rows * kSentRowBytes);
        bulk_commit();
        while (turn - static_cast<int>(ld_acquire_block(&progress.signalled)) >= CopyProgress::kRingEntries)
          continue;  // the signal warp waits for nothing, so this ends
        progress.items[turn % CopyProgress::kRingEntries] = place.item;
        if (turn >= kUnwritten) {
          bulk_wait_written<kUnwritten>();
          st_release_block(&progress.written, turn + 1 - kUnwritten);
        }
      }
      ++turn;
    }
    place = next;
  }
  if (lane == 0) {
    bulk_wait_written<0>();
    st_release_block(&progress.written, turn);
    st_release_block(&progress.done, 1);
  }
  __syncwarp();
}

__device__ inline void copy_rows_by_warp(const Params& p, const Routes& routes, u32 epoch) {
  WorkIterator work(queue_of(p, routes), [](int) {});
  for (int item = work.next(); item >= 0; item = work.next()) {
    const Chunk c = chunk_at(p, routes, item);
    if (c.num_rows == 0) continue;
    copy_weights(p, routes, c);
    for (int row = 0; row < c.num_rows; ++row) {
      const char* from = source_of(p, routes, c) + static_cast<i64>(row) * kRowBytes;
      for (int part = 0; part < kParts; ++part) {
        compress_part(from + part * kPartBytes, part * kPartPasses, target_of(routes, c) + static_cast<i64>(row) * kSentRowBytes);
      }
    }
    __syncwarp();
    if (lane_idx() == 0) {
      fence_release_sys();
      raise_flag(p, c, epoch);
    }
  }
}

// Channels of a lane in some passes of some rows, of a token's kBound rows.
template <int kBound>
struct Batch {
  static constexpr int kMost = kIsLog10 ? 3 : 4, kRanks = kBound < kMost ? kBound : kMost;
  static constexpr int kAtOnce = kRanks < 3 && !kIsLog10 ? 2 : 1;  // passes
  static constexpr int kPerPass = (kBound + kRanks - 1) / kRanks;  // batches with the ranks of a pass
  Compressed held[kAtOnce][kRanks];

  __device__ __forceinline__ void load(const u64 (&rows)[kBound], int first_rank, int channel) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        const int at_channel = channel + i * kPassChannels;
        if (first_rank + r < kBound && rows[first_rank + r] && at_channel < kHidden) {
          held[i][r] = load_compressed(at<const char>(rows[first_rank + r], 0), at_channel);
        }
      }
    }
  }
};

template <bool kHasBias>
__device__ __forceinline__ void write_channels(const Params& p, int token, int channel, const float (&sum)[kLaneChannels]) {
  constexpr int kEach = kPerVec<kElement>;
  const u64 offset = static_cast<u64>(token) * kRowBytes;
#pragma unroll
  for (int v = 0; v < kVecsPerLane; ++v) {
    float part[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) part[i] = sum[v * kEach + i];
    const int vec = channel / kEach + v;
    if (kHasBias && p.bias_0) add_to<kElement>(part, ld_streaming(at<const Vec16>(p.bias_0, offset) + vec));
    if (kHasBias && p.bias_1) add_to<kElement>(part, ld_streaming(at<const Vec16>(p.bias_1, offset) + vec));
    st_vec(at<Vec16>(p.out, offset) + vec, rounded<kElement>(part));
  }
}

// This loop waits for memory, so each lane loads a batch while it adds up the one before. Without copy blocks, a share is a whole token.
template <bool kHasBias, int kBound>
__device__ __forceinline__ void reduce_share(const Params& p, const u64 (&rows)[kBound], const Share& share) {
  using Batch = Batch<kBound>;
  constexpr int kStep = Batch::kAtOnce * kPassChannels;
  const int first = lane_idx() * kLaneChannels;
  Batch batch;
  batch.load(rows, 0, first);
#pragma unroll 2
  for (int channel = first; channel < kHidden; channel += kStep) {
    float sum[Batch::kAtOnce][kLaneChannels] = {};
#pragma unroll
    for (int b = 0; b < Batch::kPerPass; ++b) {
      const bool is_last = b == Batch::kPerPass - 1;
      Batch next;
      next.load(rows, is_last ? 0 : (b + 1) * Batch::kRanks, is_last ? channel + kStep : channel);
#pragma unroll
      for (int i = 0; i < Batch::kAtOnce; ++i) {
#pragma unroll
        for (int r = 0; r < Batch::kRanks; ++r) {
          const int rank = b * Batch::kRanks + r;
          if (rank < kBound && rows[rank]) add_to(sum[i], batch.held[i][r]);
        }
      }
      batch = next;
    }
#pragma unroll
    for (int i = 0; i < Batch::kAtOnce; ++i) {
      if (channel + i * kPassChannels < kHidden) write_channels<kHasBias>(p, share.token, channel + i * kPassChannels, sum[i]);
    }
  }
}

// The whole kernel. `memory`: with TMA, a row and two stages for each copy warp.
__device__ __forceinline__ void combine_compressed(const Params& p, char* memory) {
  __shared__ Routes routes;
  __shared__ u64 barriers[kCombineCopyWarps * kParts];
  __shared__ CopyProgress progress[kCombineCopyWarps];
  auto copy_rows = [&](u32 epoch) {
    const int warp = warp_idx();
    if constexpr (kHasTma) {
      copy_rows_bulk(p, routes, memory + warp * (kRowBytes + 2 * kStageBytes), barriers + warp * kParts, progress[warp]);
    } else {
      copy_rows_by_warp(p, routes, epoch);
    }
  };
  combine_rows(p, routes, progress, copy_rows, [&](int item) { return chunk_at(p, routes, item); });
}

extern "C" __global__ void __launch_bounds__(kCombineThreads, 1) KERNEL(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char memory[];
  combine_compressed(p, memory);
}
