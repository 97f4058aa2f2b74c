// Rows of low-latency combines that travel compressed (common/compressed.cuh). A rank adds up its rows of a token, rounds the sum to
// bfloat16 and compresses it. The row begins where a row of bfloat16 would begin, and leaves the end of that memory empty.
//
// A thread has a share of each row: the 16 channels that it compresses. No word of a row equals kEmptySentinel. One thread reads and clears
// each word. The first of the 8 threads of a group has the group's scale, and gives it to the others.
#pragma once
#include "common/compressed.cuh"
#include "low_latency/ll_combine.cuh"

constexpr int kRowShares = kHidden / kLaneChannels, kVecsPerShare = kRowVecs / kRowShares;
static_assert(kHidden % kPassChannels == 0, "every lane of a warp has a share, and a row consists of whole vectors");
static_assert(kScalesOffset + kHidden / kFp8Group * 4 == kSentRowBytes);

__device__ __forceinline__ bool leads_group() { return lane_idx() % 8 == 0; }

struct CompressedShare {
  static constexpr int kPerRow = kRowShares, kChannels = kLaneChannels,
                       kMaxAtOnce = kMasksOnTimeout ? 1
                                    : kIsLog10      ? 2
                                                    : 4;  // more would spill registers
  static constexpr int kMaxColumns = 1;
  struct Place {
    u64 row;
    int share;

    __device__ __forceinline__ Vec16* first() const { return at<Vec16>(row, 0) + share; }
    __device__ __forceinline__ u32* fifth() const { return at<u32>(row, kFifthWordsOffset) + share; }
    __device__ __forceinline__ u32* scale() const { return at<u32>(row, kScalesOffset) + share / 8; }
  };
  Compressed held;

  __device__ static __forceinline__ Place place(u64 row, int i) { return {row, i}; }

  __device__ __forceinline__ void load(bool wanted, const Place& from) {
    if (!wanted) return;
    held.first = ld_relaxed_sys(from.first());
    if constexpr (kIsLog10) held.fifth = ld_relaxed_sys(from.fifth());
    held.scale = leads_group() ? ld_relaxed_sys(from.scale()) : 0;
  }

  __device__ __forceinline__ bool has_arrived() const {
    return is_written(held.first) && held.scale != kEmptySentinel && (!kIsLog10 || held.fifth != kEmptySentinel);
  }

  // Called by all lanes: gets the scale from the first thread of the group.
  __device__ __forceinline__ void complete() { held.scale = __shfl_sync(~0u, held.scale, lane_idx() & ~7); }

  __device__ __forceinline__ void clear(const Place& from) const { write(from, {empty_vec(), kEmptySentinel, kEmptySentinel}); }

  __device__ static __forceinline__ void write(const Place& to, const Compressed& c) {
    st_relaxed_sys(to.first(), c.first);
    if constexpr (kIsLog10) st_relaxed_sys(to.fifth(), c.fifth);
    if (leads_group()) st_relaxed_sys(to.scale(), c.scale);
  }

  // The row has its weights already.
  __device__ __forceinline__ void add_to(float (&sum)[kChannels], float) const { ::add_to(sum, held); }

  __device__ static __forceinline__ void store(Vec16* out, int i, const float (&sum)[kChannels]) {
#pragma unroll
    for (int half = 0; half < kVecsPerShare; ++half) {
      float part[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) part[c] = sum[8 * half + c];
      st_vec(out + kVecsPerShare * i + half, rounded<kBfloat16>(part));
    }
  }
};

struct CompressedRows {
  static constexpr bool kIsCompressed = true;
  using Share = CompressedShare;

  __device__ static __forceinline__ void send_row(const Params& p, const Entry& entry, int thread, int step, Vec16* to) {
    send(p, entry, thread, step, kRowShares, to);
  }

  __device__ static __forceinline__ void send_tile(const Params& p, const Entry& entry, int start, Vec16* to) {
    const int first = start / kVecsPerShare, end = min(first + kTileVecs / kVecsPerShare, kRowShares);
    send(p, entry, first + lane_idx(), 32, end, to);
  }

  // Computes the shares first, first + stride, ... before `end`. Whole warps call this.
  __device__ static __forceinline__ void send(const Params& p, const Entry& entry, int first, int stride, int end, Vec16* to) {
    auto write = [&](int i, const Vec16(&sum)[kVecsPerShare]) {
      CompressedShare::write({reinterpret_cast<u64>(to), i}, compressed<kBfloat16>(sum));
    };
    entry.reduce_shares<kVecsPerShare, kMasksOnTimeout ? 1 : 3>(p, first, stride, end, write);
  }
};
