// Rows of ll_dispatch: bfloat16, or FP8 that the sender converts them to, with scales.
#pragma once
#include "common/fp8.cuh"
#include "low_latency/ll_dispatch.cuh"

constexpr int kScalesPerRow = kHidden / kFp8Group;

// The row of a token. A thread has two vectors at a time. It starts to load the first ones before it knows the receivers.
struct ConvertedOutgoing {
  const Params& p;
  const bool fp8;
  const Vec16* row;
  int first = threadIdx.x;  // a vector, or a pair of vectors that becomes one FP8 vector
  Vec16 held[2] = {};

  __device__ __forceinline__ ConvertedOutgoing(const Params& p, int token)
      : p(p), fp8(kHasFp8 && p.use_fp8), row(at<const Vec16>(p.x, static_cast<u64>(token) * kHidden * 2)) {
    load();
  }

  __device__ __forceinline__ int step() const { return fp8 ? kRowThreads : 2 * kRowThreads; }
  __device__ __forceinline__ int count() const { return fp8 ? kHidden / 16 : kHidden / 8; }

  __device__ __forceinline__ void load() {
    if (first < count()) held[0] = ld_streaming(row + (fp8 ? 2 * first : first));
    const int second = fp8 ? 2 * first + 1 : first + kRowThreads;
    if (second < kHidden / 8) held[1] = ld_streaming(row + second);
  }

  __device__ __forceinline__ void send(const Receivers& receivers) {
    for (;; load()) {
      const int i = first;
      if (fp8) {
        float scale;
        const Vec16 bytes = to_fp8<kBfloat16>(held, p.round_scale, scale);  // called by all lanes together
        receivers.each([&](LlMessage* message) {
          char* body = body_of(message);
          if (i < count()) st_relaxed_sys(reinterpret_cast<Vec16*>(body) + i, bytes);
          if (i < count() && i % 8 == 0) st_relaxed_sys(reinterpret_cast<u32*>(body + kHidden) + i / 8, __float_as_uint(scale));
        });
      } else {
        held[0] = avoid_sentinel(held[0]), held[1] = avoid_sentinel(held[1]);
        receivers.each([&](LlMessage* message) {
          Vec16* body = reinterpret_cast<Vec16*>(body_of(message));
          if (i < count()) st_relaxed_sys(body + i, held[0]);
          if (i + kRowThreads < count()) st_relaxed_sys(body + i + kRowThreads, held[1]);
        });
      }
      first += step();
      if (first - lane_idx() >= count()) return;
    }
  }
};

struct ConvertedRows {
  using Outgoing = ConvertedOutgoing;

  // Bytes of a row of x.
  __device__ __forceinline__ static u32 given_bytes(const Params&) { return kHidden * 2; }

  // Bytes of a row with its scales.
  __device__ __forceinline__ static u32 row_bytes(const Params& p) { return p.use_fp8 ? kHidden + kScalesPerRow * 4 : kHidden * 2; }

  // Bytes of a message after its head.
  __device__ __forceinline__ static u32 body_bytes(const Params& p) { return row_bytes(p); }

  // Fills all results with NaN after a time-out; `num_threads` threads share the work.
  __device__ __noinline__ static void poison(const Params& p, u64 thread, u64 num_threads) {
    const u64 num_rows = static_cast<u64>(kNumLocalExperts) * p.capacity;
    ::poison(p.recv_x, num_rows * kHidden * (p.use_fp8 ? 1 : 2), thread, num_threads);
    if (p.use_fp8) ::poison(p.recv_scales, num_rows * kScalesPerRow * (p.use_ue8m0 ? 1 : 4), thread, num_threads);
  }
};

// One warp's part of a row between the inbox and the experts. Each thread loads kAtOnce vectors and a scale at a time. It starts the loads
// before it knows the destination. With more vectors at a time, the longer code costs calls of few tokens more than it gains in large ones.
template <int kVecs>
struct ConvertedPart {
  using Rows = ConvertedRows;
  static constexpr int kAtOnce = 2;
  static constexpr bool kScales = kVecs == kHidden / 16;  // FP8 rows have scales
  static_assert(!kScales || kScalesPerRow * kAtOnce <= kVecs);
  Vec16* row;
  u32* scales;
  int thread, step;
  Vec16 held[kAtOnce];
  u32 scale;

  __device__ __forceinline__ ConvertedPart(const Params&, const LlMessage* message, const WarpGroup& group)
      : row(reinterpret_cast<Vec16*>(body_of(message))),
        scales(reinterpret_cast<u32*>(body_of(message) + kHidden)),
        thread(group.thread(group.block())),
        step(group.num_threads()) {}

  __device__ __forceinline__ bool exists(int first, int j) const { return first + j * step < kVecs; }
  __device__ __forceinline__ bool has_scale(int i) const { return kScales && i < kScalesPerRow; }

  // Loads the vectors `first`, `first` + step, ..., and the scale `i`.
  __device__ __forceinline__ void load(int first, int i) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (exists(first, j)) held[j] = ld_relaxed_sys(row + first + j * step);
    }
    if (has_scale(i)) scale = ld_relaxed_sys(scales + i);
  }

  // Loads the first vectors of this thread, or says whether they have arrived.
  __device__ __forceinline__ void start() { load(thread, thread); }
  __device__ __forceinline__ bool has_arrived() const { return all_arrived(thread, thread); }

  __device__ __forceinline__ bool all_arrived(int first, int i) const {
    bool arrived = !has_scale(i) || scale != kEmptySentinel;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (exists(first, j)) arrived &= is_written(held[j]);
    }
    return arrived;
  }

  // Called once the first vectors have arrived, or where to_row is negative in all lanes. `to_row`: in lane k, the output row of the
  // token's choice k, or negative. False: a wait timed out.
  __device__ __forceinline__ bool finish(const Params& p, u32 epoch, int source, int to_row) {
    const u32 choices = __ballot_sync(~0u, to_row >= 0);
    bool ok = true;
    for (int first = thread, i = thread; first - lane_idx() < kVecs; first += step * kAtOnce, i += step) {
      if (first != thread) {
        load(first, i);
        ok &= wait_until(p, epoch, kPhaseLlRows, source, [&](u32&) {
          if (all_arrived(first, i)) return true;
          load(first, i);
          return false;
        });
      }
      __syncwarp();
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (exists(first, j)) st_vec(row + first + j * step, empty_vec());
      }
      if (has_scale(i)) st_relaxed_sys(scales + i, kEmptySentinel);
      for (u32 left = choices; left; left &= left - 1) {
        const u64 to = __shfl_sync(~0u, to_row, __ffs(left) - 1);
        Vec16* vecs = at<Vec16>(p.recv_x, 0) + to * kVecs;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          if (exists(first, j)) st_vec(vecs + first + j * step, held[j]);
        }
        if (!has_scale(i)) continue;
        if (p.use_ue8m0) {
          at<u8>(p.recv_scales, 0)[to * kScalesPerRow + i] = scale >> 23;
        } else {
          at<u32>(p.recv_scales, 0)[to * kScalesPerRow + i] = scale;
        }
      }
    }
    return __all_sync(~0u, ok);
  }
};
