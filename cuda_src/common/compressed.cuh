// Compressed rows: kHidden channels as FP8 or as 10-bit logarithms. deepep_rt/arrays/compressed_rows.py describes both formats; the host
// backend computes the same bits.
//
// A row has three parts: a byte for each channel, with logarithms two more bits for each channel, and a head for each group of 128
// channels. A warp converts 512 channels at a time. Each lane has 16 neighbouring channels, and 8 neighbouring lanes have a group. No row
// contains a word with all bits set, which marks empty memory in low-latency calls.
#pragma once
#include "common/fp8.cuh"

constexpr bool kIsLog10 = kCompression == kCompressionLog10;
constexpr int kLaneChannels = 16, kPassChannels = 32 * kLaneChannels;
constexpr int kLowBitsOffset = kHidden;
constexpr int kHeadsOffset = kHidden + (kIsLog10 ? kHidden / 4 : 0);
constexpr int kHeadBytes = kIsLog10 ? 8 : 4;
constexpr u32 kInfinityBits = 0x7f800000, kNanBits = 0x7fc00000;

// Channels of a lane as they travel, and the head of their group.
struct Compressed {
  Vec16 high;
  u32 low;
  u32 head[2];  // FP8: the scale. Logarithms: the bits of the largest channel, and the distance of two neighbouring codes
};

// The largest and the least of `most` and `least` in the 8 lanes of a group.
__device__ __forceinline__ void extremes_of_group(u32& most, u32& least) {
#pragma unroll
  for (int step = 1; step < 8; step *= 2) {
    most = max(most, __shfl_xor_sync(~0u, most, step));
    least = min(least, __shfl_xor_sync(~0u, least, step));
  }
}

template <int kFrom>
__device__ __forceinline__ void to_log10(const Vec16 (&held)[kLaneChannels / kPerVec<kFrom>], Compressed& c) {
  constexpr int kEach = kPerVec<kFrom>;
  float values[kLaneChannels / kEach][kEach];
#pragma unroll
  for (int i = 0; i < kLaneChannels / kEach; ++i) to_floats<kFrom>(held[i], values[i]);
  auto bits = [&](int i) { return __float_as_uint(values[i / kEach][i % kEach]); };
  u32 most = 0, least_minus_1 = ~0u;  // a zero, minus 1, is the largest number
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
    const u32 size = bits(i) & 0x7fffffff;
    most = max(most, size), least_minus_1 = min(least_minus_1, size - 1);
  }
  extremes_of_group(most, least_minus_1);
  const bool is_finite = most < kInfinityBits;
  if (most < kLog10Least) most = 0;
  const u32 lowest = most == 0 ? 0 : most - (kLog10Codes - 2);  // all codes stay above zero
  const u32 range = min(min(most - (least_minus_1 + 1), static_cast<u32>(kLog10Range)), lowest);
  const u32 step = max((range + kLog10Codes - 2) / (kLog10Codes - 1), 2u);
  // A product instead of a division. The first bit of step << shift is set, so that its inverse has all bits of a float.
  const int shift = __clz(step);
  const u32 inverse = __float2uint_rz(__fmul_rn(__frcp_rn(static_cast<float>(step << shift)), 4.611686018427387904e18f));
  c.head[0] = is_finite ? most : kNanBits, c.head[1] = is_finite ? step : 0;
  c.low = 0;
#pragma unroll
  for (int word = 0; word < 4; ++word) {
    c.high.word[word] = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 all = bits(4 * word + i), size = all & 0x7fffffff;
      const u32 below = __umulhi(most - size + step / 2, inverse) >> (30 - shift);
      u32 code = size == 0 || below >= kLog10Codes ? 0 : kLog10Codes - below;
      if (!is_finite) code = kLog10Codes;
      c.high.word[word] |= (all >> 24 & 0x80 | code >> 2) << 8 * i;
      c.low |= (code & 3) << 2 * (4 * word + i);
    }
  }
  c.low -= c.low == ~0u;
}

__device__ __forceinline__ void from_log10(const Compressed& c, float (&values)[kLaneChannels]) {
  const u32 step = c.head[1], base = c.head[0] - kLog10Codes * step;
#pragma unroll
  for (int i = 0; i < kLaneChannels; ++i) {
    const u32 high = c.high.word[i / 4] >> 8 * (i % 4);
    const u32 code = (high & 0x7f) << 2 | (c.low >> 2 * i & 3);
    values[i] = __uint_as_float((code == 0 ? 0 : base + code * step) | (high & 0x80) << 24);
  }
}

// Called by all lanes of a warp, with 16 channels in each.
template <int kFrom>
__device__ __forceinline__ Compressed compressed(const Vec16 (&held)[kLaneChannels / kPerVec<kFrom>]) {
  Compressed c = {};
  if constexpr (kIsLog10) {
    to_log10<kFrom>(held, c);
  } else {
    float scale;
    c.high = to_fp8<kFrom>(held, false, scale, __uint_as_float(kLeastFp8AmaxBits));
    c.head[0] = __float_as_uint(scale);
  }
  return c;
}

__device__ __forceinline__ void add_to(float (&sum)[kLaneChannels], const Compressed& c) {
  if constexpr (kIsLog10) {
    float values[kLaneChannels];
    from_log10(c, values);
#pragma unroll
    for (int i = 0; i < kLaneChannels; ++i) sum[i] += values[i];
  } else {
    const float scale = __uint_as_float(c.head[0]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float values[8];
      from_fp8(c.high.word[2 * half] | static_cast<u64>(c.high.word[2 * half + 1]) << 32, values);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum[8 * half + i] = __fadd_rn(sum[8 * half + i], __fmul_rn(values[i], scale));
    }
  }
}

// Writes a lane's channels to a row in any memory. `channel`: the first one.
__device__ __forceinline__ void store_compressed(char* row, int channel, const Compressed& c) {
  *reinterpret_cast<Vec16*>(row + channel) = c.high;
  if constexpr (kIsLog10) *reinterpret_cast<u32*>(row + kLowBitsOffset + channel / 4) = c.low;
  if (lane_idx() % 8 != 0) return;
  u32* head = reinterpret_cast<u32*>(row + kHeadsOffset + channel / kFp8Group * kHeadBytes);
  head[0] = c.head[0];
  if constexpr (kIsLog10) head[1] = c.head[1];
}

// Reads a lane's channels of a row that another GPU wrote. L1 may hold old lines.
__device__ __forceinline__ Compressed load_compressed(const char* row, int channel) {
  Compressed c = {};
  c.high = ld_streaming(reinterpret_cast<const Vec16*>(row + channel));
  const char* head = row + kHeadsOffset + channel / kFp8Group * kHeadBytes;
  if constexpr (kIsLog10) {
    c.low = ld_relaxed_sys(reinterpret_cast<const u32*>(row + kLowBitsOffset + channel / 4));
    const u64 both = ld_relaxed_sys(reinterpret_cast<const u64*>(head));
    c.head[0] = static_cast<u32>(both), c.head[1] = static_cast<u32>(both >> 32);
  } else {
    c.head[0] = ld_relaxed_sys(reinterpret_cast<const u32*>(head));
  }
  return c;
}
