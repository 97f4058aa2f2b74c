// Rows of combine_fp8: conversion of a row in shared memory, and sums of converted rows. common/compressed.cuh describes the format.
//
// Where few SMs work, instructions limit the call. Conversions and integer operations take two to four times as long as products and sums.
#pragma once
#include "common/compressed.cuh"
#include "throughput/combine.cuh"

constexpr int kFp8Vecs = kLaneChannels / kPerVec<kElement>;  // of a lane in a pass
constexpr int kElementBytes = kRowBytes / kHidden;

// The number of larger size at each place of two words. NaN is the largest. The signs of the result are undefined.
__device__ __forceinline__ u32 larger_of(u32 a, u32 b) {
  if constexpr (kElement == kFloat32) return larger_sizes<kElement>(sizes_of<kElement>(a), sizes_of<kElement>(b));
  u32 larger;
  if constexpr (kElement == kBfloat16) {
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  }
  return larger;
}

__device__ constexpr int power_of_two(int n) { return n <= 1 ? 1 : 2 * power_of_two((n + 1) / 2); }

// The scales of a lane's groups in some passes, as scale_of_group computes them. Called by all lanes of a warp.
//
// Two passes share a word, if their numbers have 16 bits. While lanes have several words, two lanes share them: each gives half of its
// words to the other. At the end, a lane has the largest channel of one group, computes the scale, and gives it to the other lanes.
template <int kCount>
__device__ __forceinline__ void scales_of_groups(const Vec16 (&held)[kCount][kFp8Vecs], u32 (&scale)[kCount]) {
  constexpr int kLanes = kFp8Group / kLaneChannels, kPerWord = kElement == kFloat32 ? 1 : 2;
  constexpr int kWords = power_of_two((kCount + kPerWord - 1) / kPerWord), kPlaces = kWords * kPerWord;
  static_assert(kPlaces <= kLanes);
  const int lane = lane_idx();
  u32 own[kPlaces] = {}, words[kWords];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    own[i] = held[i][0].word[0];
#pragma unroll
    for (int w = 1; w < 4 * kFp8Vecs; ++w) own[i] = larger_of(own[i], held[i][w / 4].word[w % 4]);
  }
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    if constexpr (kPerWord == 1) {
      words[i] = sizes_of<kElement>(own[i]);
    } else {
      const u32 first = own[2 * i], second = own[2 * i + 1];
      words[i] = sizes_of<kElement>(larger_of(first & 0xffff | second << 16, first >> 16 | second & 0xffff0000u));
    }
  }
  int count = kWords;
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    const bool upper = lane & step;
    const int half = count / 2;
#pragma unroll
    for (int i = 0; i < (half > 0 ? half : 1); ++i) {
      const u32 kept = half > 0 && upper ? words[half + i] : words[i], given = half > 0 && !upper ? words[half + i] : words[i];
      words[i] = larger_sizes<kElement>(kept, __shfl_xor_sync(~0u, given, step));
    }
    if (half > 0) count = half;
  }
  constexpr int kLanesOfPlace = kLanes / kPlaces;
  const int place = lane % kLanes / kLanesOfPlace;
  const u32 mine = scale_of_group(size_bits<kElement>(kPerWord == 2 && place % 2 == 0 ? words[0] << 16 : words[0])).scale;
#pragma unroll
  for (int i = 0; i < kCount; ++i) scale[i] = __shfl_sync(~0u, mine, lane / kLanes * kLanes + i * kLanesOfPlace);
}

// The lower of two bfloat16 numbers times `factor`, both as the bits of floats. -0 becomes 0. One instruction does it, because the
// processor multiplies the lower number with both halves of the factor, of which the lower one is 0.
__device__ __forceinline__ u32 scaled_low(u32 both, u32 factor) {
  u32 product;
  asm("{\n .reg .b16 l, h;\n .reg .b32 d, z;\n mov.b32 {l, h}, %1;\n mov.b32 d, {l, l};\n mov.b32 z, 0;\n fma.rn.bf16x2 %0, d, %2, z;\n}"
      : "=r"(product)
      : "r"(both), "r"(factor));
  return product;
}

// The same for the upper number.
__device__ __forceinline__ u32 scaled_high(u32 both, u32 factor) { return fma_bf16x2(both, factor, 0); }

// The FP8 numbers of a vector. Of NaN, the inverse is a number: the scale alone makes the channels of such a group NaN.
__device__ __forceinline__ void to_fp8_words(const Vec16& held, u32 scale, u32 (&words)[kPerVec<kElement> / 4]) {
  const u32 inverse = (254u << 23) - scale;  // the bits of a float
  float values[kPerVec<kElement>];
  if constexpr (kElement == kBfloat16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 word = held.word[i];
      values[2 * i] = __uint_as_float(scaled_low(word, inverse));
      values[2 * i + 1] = __uint_as_float(scaled_high(word, inverse));
    }
  } else {
    to_scaled_floats<kElement>(held, inverse, values);
  }
#pragma unroll
  for (int i = 0; i < kPerVec<kElement> / 4; ++i) {
    const float* four = &values[4 * i];
    words[i] = to_fp8x2(four[0], four[1]) | to_fp8x2(four[2], four[3]) << 16;
  }
}

template <int kBytes>
struct alignas(kBytes) Words {
  u32 word[kBytes / 4];
};

// Called by a warp: converts passes [first, first + kCount) of a row. `part`: their channels, in shared memory.
//
// A lane's vectors of a pass lie next to each other. If all lanes began with the first of two, they would read each bank twice. So half of
// them begin with the second one.
template <int kCount>
__device__ __forceinline__ void convert_part(const char* part, int first, char* to) {
  constexpr int kPassBytes = kPassChannels * kElementBytes, kVecNumbers = kPerVec<kElement>;
  const int lane = lane_idx(), swap = kFp8Vecs == 2 ? (lane >> 2 ^ lane >> 3) & 1 : 0;
  auto exists = [&](int i) {
    return kHidden % (kCount * kPassChannels) == 0 || (first + i) * kPassChannels + lane * kLaneChannels < kHidden;
  };
  Vec16 held[kCount][kFp8Vecs] = {};
#pragma unroll
  for (int v = 0; v < kFp8Vecs; ++v) {
    const Vec16* from = reinterpret_cast<const Vec16*>(part) + lane * kFp8Vecs + (v ^ swap);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (exists(i)) held[i][v] = from[i * kPassBytes / 16];
    }
  }
  u32 scale[kCount];
  scales_of_groups(held, scale);
  const int channel = first * kPassChannels + lane * kLaneChannels;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int v = 0; v < kFp8Vecs; ++v) {
      Words<kVecNumbers> made;
      to_fp8_words(held[i][v], scale[i], made.word);
      char* numbers = to + (channel + (v ^ swap) * kVecNumbers);
      if (exists(i)) *reinterpret_cast<Words<kVecNumbers>*>(numbers + i * kPassChannels) = made;
    }
    u32* scales = reinterpret_cast<u32*>(to + kScalesOffset + channel / kFp8Group * 4);
    if (exists(i) && lane % 8 == 0) scales[i * (kPassChannels / kFp8Group)] = scale[i];
  }
}

// What a lane reads of a row in staging at a time. The result of 8 channels of 16 bits is a vector, so a warp stores whole lines.
constexpr int kPieceChannels = 8, kStepChannels = 32 * kPieceChannels;

struct Piece {
  u64 numbers;
  u32 scale;

  __device__ __forceinline__ void add_to(float (&sum)[kPieceChannels]) const {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      u32 pair[2];
      from_fp8x4(static_cast<u32>(numbers >> 16 * i), pair[0], pair[1]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float low, high;
        from_halves(pair[j], low, high);
        float* two = &sum[2 * (i + j)];
        two[0] = __fmaf_rn(low, __uint_as_float(scale), two[0]);
        two[1] = __fmaf_rn(high, __uint_as_float(scale), two[1]);
      }
    }
  }
};

// Where a lane reads a row. Distances to later channels are constants, so that loads need no arithmetic.
struct Source {
  u64 numbers, scales;

  Source() = default;
  __device__ __forceinline__ Source(u64 row, int first) : numbers(row + first), scales(row + kScalesOffset + first / kFp8Group * 4) {}
  __device__ __forceinline__ void advance(int channels) { numbers += channels, scales += channels / (kFp8Group / 4); }
  __device__ __forceinline__ void load(Piece& piece, int later) const {
    piece.numbers = ld_streaming(at<const u64>(numbers, later));
    piece.scale = ld_relaxed_sys(at<const u32>(scales, later / (kFp8Group / 4)));  // L1 may hold an old line
  }
};

// `offset`: in bytes, in a result and in a bias.
template <bool kHasBias>
__device__ __forceinline__ void write_piece(const Params& p, u64 offset, const float (&sum)[kPieceChannels]) {
  constexpr int kEach = kPerVec<kElement>;
#pragma unroll
  for (int v = 0; v < kPieceChannels / kEach; ++v) {
    float part[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) part[i] = sum[v * kEach + i];
    if (kHasBias && p.bias_0) add_to<kElement>(part, ld_streaming(at<const Vec16>(p.bias_0, offset) + v));
    if (kHasBias && p.bias_1) add_to<kElement>(part, ld_streaming(at<const Vec16>(p.bias_1, offset) + v));
    st_vec(at<Vec16>(p.out, offset) + v, rounded<kElement>(part));
  }
}

// Steps of a row that are code in a row: up to `most`, and so many that none is left over, if possible.
__device__ constexpr int steps_in_a_row(int most) {
  constexpr int kAll = (kHidden + kStepChannels - 1) / kStepChannels;
  for (int n = most; 2 * n > most; --n) {
    if (kAll % n == 0) return n;
  }
  return most;
}

// Adds up the rows of a token. kAll: none of them is 0. This loop waits for memory, so a lane has several pieces of each row in flight. It
// loads a later piece as soon as it has added up one.
template <bool kHasBias, bool kAll, int kRows>
__device__ __forceinline__ void add_up_rows(const Params& p, const u64 (&rows)[kRows], int token) {
  constexpr int kInFlight = kRows > 4 ? 8 : kHasStatistics || kHasSlots || kElement == kFloat32 ? 12 : 16;  // registers allow no more
  constexpr int kSteps = steps_in_a_row(kInFlight / kRows < 1 ? 1 : kInFlight / kRows < 8 ? kInFlight / kRows : 8);
  constexpr int kBlock = kSteps * kStepChannels, kLast = (kHidden - 1) / kBlock * kBlock;
  constexpr bool kKept = kRows <= 4;  // registers have room for the sources
  const int first = lane_idx() * kPieceChannels;
  u64 out = static_cast<u64>(token) * kRowBytes + first * kElementBytes;
  auto exists = [&](int start, int step) { return kHidden % kBlock == 0 || start + step * kStepChannels + first < kHidden; };
  Source sources[kRows];
  auto source = [&](int r, int start) {
    if (kKept) return sources[r];
    Source made(rows[r], first);
    made.advance(start);
    return made;
  };
  Piece ring[kSteps][kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (kKept) sources[r] = Source(rows[r], first);
  }
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if ((kAll || rows[r]) && exists(0, i)) source(r, 0).load(ring[i][r], i * kStepChannels);
    }
  }
  auto add_up_block = [&](int start, bool is_last) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (!exists(start, i)) break;
      float sum[kPieceChannels] = {};
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (!kAll && !rows[r]) continue;
        ring[i][r].add_to(sum);
        if (!is_last && exists(start, i + kSteps)) source(r, start).load(ring[i][r], (i + kSteps) * kStepChannels);
      }
      write_piece<kHasBias>(p, out + i * kStepChannels * kElementBytes, sum);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (kKept) sources[r].advance(kBlock);
    }
    out += kBlock * kElementBytes;
  };
#pragma unroll 1
  for (int start = 0; start < kLast; start += kBlock) add_up_block(start, false);
  add_up_block(kLast, true);
}

// Two rows, which most tokens of two ranks have, have code without tests.
template <bool kHasBias, int kBound>
__device__ __forceinline__ void add_up_fp8_rows(const Params& p, const u64 (&rows)[kBound], int token) {
  if constexpr (kBound == 2) {
    if (rows[0] && rows[1]) return add_up_rows<kHasBias, true>(p, rows, token);
    const u64 one[1] = {rows[0] ? rows[0] : rows[1]};
    return add_up_rows<kHasBias, false>(p, one, token);
  }
  add_up_rows<kHasBias, false>(p, rows, token);
}
