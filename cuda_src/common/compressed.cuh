// Compressed rows: kHidden channels as FP8 or as 10-bit logarithms. deepep_rt/arrays/compressed_rows.py describes both formats; the host
// backend computes the same bits.
//
// A row has three parts: 16 bytes for each 16 channels, with logarithms a word for each 16 channels, and a scale for each group of 128
// channels. A warp converts 512 channels at a time. Each lane has 16 neighbouring channels, and 8 neighbouring lanes have a group. No row
// contains a word with all bits set, which marks empty memory in low-latency calls.
//
// Scales are powers of two, so products with them are exact. Sums therefore use one instruction for a product and its addition.
#pragma once
#include "common/fp8.cuh"

constexpr bool kIsLog10 = kCompression == kCompressionLog10;
constexpr int kLaneChannels = 16, kPassChannels = 32 * kLaneChannels, kLanePairs = kLaneChannels / 2;
constexpr int kFifthWordsOffset = kHidden;
constexpr int kScalesOffset = kHidden + (kIsLog10 ? kHidden / 4 : 0);
constexpr u32 kNanBits = 0x7fc00000;
constexpr u32 kTwos = 0x40004000, kOnes = 0x3f803f80;  // pairs of bfloat16

// Channels of a lane as they travel, and the scale of their group.
struct Compressed {
  Vec16 first;  // four words
  u32 fifth;    // a fifth word, of logarithms
  u32 scale;
};

struct GroupScale {
  u32 scale, inverse;  // the bits of floats; NaN if a channel is NaN, infinite or too large
};

// `most`: the bits of the largest channel of the group, without sign.
__device__ __forceinline__ GroupScale scale_of_group(u32 most) {
  const u32 exponent = max(most, kLeastAmaxBits) + kScaleRoundUp & 0xff800000;  // NaN reaches the sign
  const bool fits = exponent < 0x7f800000;
  const u32 scale = exponent + (static_cast<u32>(kScaleExponent) << 23);
  return {fits ? scale : kNanBits, fits ? (254u << 23) - scale : kNanBits};
}

// The largest channel of a lane's group as the bits of a float, without sign, for each of some passes. NaN is the largest. Lanes exchange
// two passes in a word, if they can.
template <int kFrom, int kCount>
__device__ __forceinline__ void largest_of_groups(const Vec16 (&held)[kCount][kLaneChannels / kPerVec<kFrom>], u32 (&most)[kCount]) {
  constexpr int kPerWord = kFrom == kFloat32 ? 1 : 2, kWords = (kCount + kPerWord - 1) / kPerWord;
  u32 words[kWords] = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    u32 own = 0;
#pragma unroll
    for (int v = 0; v < kLaneChannels / kPerVec<kFrom>; ++v) {
#pragma unroll
      for (int word = 0; word < 4; ++word) own = larger_sizes<kFrom>(own, sizes_of<kFrom>(held[i][v].word[word]));
    }
    if constexpr (kPerWord == 2) own = larger_sizes<kFrom>(own, own << 16) & 0xffff0000u;
    words[i / kPerWord] |= i % kPerWord == 0 ? own : own >> 16;
  }
#pragma unroll
  for (int step = 1; step < 8; step *= 2) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = larger_sizes<kFrom>(words[i], __shfl_xor_sync(~0u, words[i], step));
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) most[i] = size_bits<kFrom>(i % kPerWord == 0 ? words[i / kPerWord] : words[i / kPerWord] << 16);
}

// The bits of `a` that are set in `bits` in each half, and the other bits of `b`.
__device__ __forceinline__ u32 chosen(u32 bits, u32 a, u32 b) {
  const u32 both = bits << 16 | bits;
  return a & both | b & ~both;
}

// `pair`: two numbers each, a sign in bit 15 and a code in bits 0 to 8. The first five lie as they are in five words. The other three, with
// their signs in bit 9, fill the bits that the five leave free.
__device__ __forceinline__ void pack_log10(const u32 (&pair)[kLanePairs], Compressed& c) {
  auto close = [&](int i) { return chosen(0x01ff, pair[i], pair[i] >> 6); };
  const u32 r = close(5), s = close(6), t = close(7);
  c.first.word[0] = chosen(0x81ff, pair[0], r << 9);
  c.first.word[1] = chosen(0x81ff, pair[1], chosen(0x7800, r << 5, s << 9));
  c.first.word[2] = chosen(0x81ff, pair[2], s << 7);
  c.first.word[3] = chosen(0x81ff, pair[3], chosen(0x6000, s << 5, t << 9));
  c.fifth = chosen(0x81ff, pair[4], t << 5);
}

// The other bits of `pair` are undefined.
__device__ __forceinline__ void unpack_log10(const Compressed& c, u32 (&pair)[kLanePairs]) {
  const u32(&w)[4] = c.first.word;
#pragma unroll
  for (int i = 0; i < 4; ++i) pair[i] = w[i];
  pair[4] = c.fifth;
  const u32 r = chosen(0x003f, w[0] >> 9, w[1] >> 5), s = chosen(0x0003, w[1] >> 9, chosen(0x00ff, w[2] >> 7, w[3] >> 5));
  const u32 t = chosen(0x000f, w[3] >> 9, c.fifth >> 5);
  pair[5] = chosen(0x01ff, r, r << 6), pair[6] = chosen(0x01ff, s, s << 6), pair[7] = chosen(0x01ff, t, t << 6);
}

// A code is the lower bits of a bfloat16 from 2 to 32: the size divided by the scale, plus 2. Where a group is NaN, its codes have all bits
// set. Signs are zero then, so that no word has all bits set.
template <int kFrom>
__device__ __forceinline__ Compressed to_log10(const Vec16 (&held)[kLaneChannels / kPerVec<kFrom>], const GroupScale& s) {
  u32 pair[kLanePairs];
  const u32 sign = s.scale == kNanBits ? 0 : 0x80008000;
#pragma unroll
  for (int i = 0; i < kLanePairs; ++i) {
    u32 signs;
    const u32 sizes = scaled_sizes<kFrom>(held, i, s.inverse, kTwos, signs);
    pair[i] = signs & sign | sizes & ~sign;
  }
  Compressed c = {};
  pack_log10(pair, c);
  return c;
}

template <int kFrom>
__device__ __forceinline__ Compressed with_scale(const Vec16 (&held)[kLaneChannels / kPerVec<kFrom>], const GroupScale& s) {
  constexpr int kEach = kPerVec<kFrom>;
  Compressed c = {};
  if constexpr (kIsLog10) {
    c = to_log10<kFrom>(held, s);
  } else {
    float values[kLaneChannels / kEach][kEach];
#pragma unroll
    for (int i = 0; i < kLaneChannels / kEach; ++i) to_scaled_floats<kFrom>(held[i], s.inverse, values[i]);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* four = &values[i * 4 / kEach][i * 4 % kEach];
      c.first.word[i] = to_fp8x2(four[0], four[1]) | to_fp8x2(four[2], four[3]) << 16;
    }
  }
  c.scale = s.scale;
  return c;
}

// Called by all lanes of a warp, with 16 channels of each of some passes.
template <int kFrom, int kCount>
__device__ __forceinline__ void compress(const Vec16 (&held)[kCount][kLaneChannels / kPerVec<kFrom>], Compressed (&to)[kCount]) {
  u32 most[kCount];
  largest_of_groups<kFrom>(held, most);
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = with_scale<kFrom>(held[i], scale_of_group(most[i]));
}

// The same for one pass.
template <int kFrom, int kVecs>
__device__ __forceinline__ Compressed compressed(const Vec16 (&held)[kVecs]) {
  Vec16 passes[1][kVecs];
#pragma unroll
  for (int i = 0; i < kVecs; ++i) passes[0][i] = held[i];
  Compressed to[1];
  compress<kFrom>(passes, to);
  return to[0];
}

__device__ __forceinline__ void add_to(float (&sum)[kLaneChannels], const Compressed& c) {
  u32 pair[kLanePairs];
  if constexpr (kIsLog10) {
    unpack_log10(c, pair);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) from_fp8x4(c.first.word[i], pair[2 * i], pair[2 * i + 1]);
  }
  const float scale = __uint_as_float(c.scale);
#pragma unroll
  for (int i = 0; i < kLanePairs; ++i) {
    float low, high;
    if constexpr (kIsLog10) {
      const u32 sizes = fma_bf16x2(pair[i] & 0x01ff01ff | kTwos, kOnes, kTwos | 0x80008000);  // minus 2, which is exact
      const u32 numbers = pair[i] & 0x80008000 | sizes;
      low = __uint_as_float(numbers << 16), high = __uint_as_float(numbers & 0xffff0000u);
    } else {
      from_halves(pair[i], low, high);
    }
    sum[2 * i] = __fmaf_rn(low, scale, sum[2 * i]);
    sum[2 * i + 1] = __fmaf_rn(high, scale, sum[2 * i + 1]);
  }
}

// Writes a lane's channels to a row in any memory. `channel`: the first one.
__device__ __forceinline__ void store_compressed(char* row, int channel, const Compressed& c) {
  *reinterpret_cast<Vec16*>(row + channel) = c.first;
  if constexpr (kIsLog10) *reinterpret_cast<u32*>(row + kFifthWordsOffset + channel / 4) = c.fifth;
  if (lane_idx() % 8 == 0) *reinterpret_cast<u32*>(row + kScalesOffset + channel / kFp8Group * 4) = c.scale;
}

// Reads a lane's channels of a row that another GPU wrote. L1 may hold old lines.
__device__ __forceinline__ Compressed load_compressed(const char* row, int channel) {
  Compressed c = {};
  c.first = ld_streaming(reinterpret_cast<const Vec16*>(row + channel));
  if constexpr (kIsLog10) c.fifth = ld_relaxed_sys(reinterpret_cast<const u32*>(row + kFifthWordsOffset + channel / 4));
  c.scale = ld_relaxed_sys(reinterpret_cast<const u32*>(row + kScalesOffset + channel / kFp8Group * 4));
  return c;
}
