// Element types of sums: converts a 16-byte vector to floats and back, and rounds to nearest even.
#pragma once
#include "common/memory.cuh"

// Elements of a 16-byte vector.
template <int kElement>
constexpr int kPerVec = kElement == kFloat32 ? 4 : 8;

__device__ __forceinline__ u32 to_halves(float low, float high) {
  u32 both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ u32 to_bfloat16x2(float low, float high) {
  u32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ void from_halves(u32 both, float& low, float& high) {
  asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.f32.f16 %0, l;\n cvt.f32.f16 %1, h;\n}" : "=f"(low), "=f"(high) : "r"(both));
}

template <int kElement>
__device__ __forceinline__ void to_floats(const Vec16& v, float (&values)[kPerVec<kElement>]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 w = v.word[i];
    if constexpr (kElement == kFloat32) {
      values[i] = __uint_as_float(w);
    } else if constexpr (kElement == kBfloat16) {
      values[2 * i] = __uint_as_float(w << 16);
      values[2 * i + 1] = __uint_as_float(w & 0xffff0000u);
    } else {
      from_halves(w, values[2 * i], values[2 * i + 1]);
    }
  }
}

template <int kElement>
__device__ __forceinline__ void add_to(float (&sum)[kPerVec<kElement>], const Vec16& v) {
  float values[kPerVec<kElement>];
  to_floats<kElement>(v, values);
#pragma unroll
  for (int i = 0; i < kPerVec<kElement>; ++i) sum[i] += values[i];
}

// Rounds the product before the addition, so that a reference in NumPy gives the same bits.
template <int kElement>
__device__ __forceinline__ void add_scaled_to(float (&sum)[kPerVec<kElement>], const Vec16& v, float weight) {
  float values[kPerVec<kElement>];
  to_floats<kElement>(v, values);
#pragma unroll
  for (int i = 0; i < kPerVec<kElement>; ++i) sum[i] = __fadd_rn(sum[i], __fmul_rn(weight, values[i]));
}

template <int kElement>
__device__ __forceinline__ Vec16 rounded(const float (&sum)[kPerVec<kElement>]) {
  Vec16 v;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kElement == kFloat32) {
      v.word[i] = __float_as_uint(sum[i]);
    } else if constexpr (kElement == kBfloat16) {
      v.word[i] = to_bfloat16x2(sum[2 * i], sum[2 * i + 1]);
    } else {
      v.word[i] = to_halves(sum[2 * i], sum[2 * i + 1]);
    }
  }
  return v;
}

// A word without the signs of its numbers.
template <int kElement>
__device__ __forceinline__ u32 sizes_of(u32 word) {
  return word & (kElement == kFloat32 ? 0x7fffffff : 0x7fff7fff);
}

// The larger size at each place of two words without signs. NaN is the largest.
template <int kElement>
__device__ __forceinline__ u32 larger_sizes(u32 a, u32 b) {
  if constexpr (kElement == kFloat32) return max(a, b);
  u32 larger;
  if constexpr (kElement == kBfloat16) {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  }
  return larger;
}

// The number without sign in the upper half of a word, or in the whole word, as the bits of a float.
template <int kElement>
__device__ __forceinline__ u32 size_bits(u32 word) {
  if constexpr (kElement == kFloat32) return word;
  if constexpr (kElement == kBfloat16) return word & 0xffff0000u;
  float low, high;
  from_halves(word, low, high);
  return __float_as_uint(high);
}

__device__ __forceinline__ u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  u32 both;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(both) : "r"(a), "r"(b), "r"(c));
  return both;
}

// Multiplies by a power of two, given as the bits of a float. The product is exact, but for bfloat16 products below normal numbers.
template <int kElement>
__device__ __forceinline__ void to_scaled_floats(const Vec16& v, u32 factor, float (&values)[kPerVec<kElement>]) {
  if constexpr (kElement == kBfloat16) {
    Vec16 scaled;
#pragma unroll
    for (int i = 0; i < 4; ++i) scaled.word[i] = fma_bf16x2(v.word[i], factor | factor >> 16, 0x80008000);  // -0 changes no product
    to_floats<kElement>(scaled, values);
  } else {
    to_floats<kElement>(v, values);
#pragma unroll
    for (int i = 0; i < kPerVec<kElement>; ++i) values[i] = __fmul_rn(values[i], __uint_as_float(factor));
  }
}

// Pair i of the numbers in `held`, without signs, times a power of two, plus a number, as two bfloat16. `factor`: the bits of a float.
// `more`: the number as two bfloat16. `signs`: gets the signs in bits 15 and 31; its other bits are undefined. The sum is rounded to
// float32 first. That changes nothing unless the numbers are float32.
template <int kElement, int kVecs>
__device__ __forceinline__ u32 scaled_sizes(const Vec16 (&held)[kVecs], int i, u32 factor, u32 more, u32& signs) {
  if constexpr (kElement == kBfloat16) {
    signs = held[i / 4].word[i % 4];
    return fma_bf16x2(sizes_of<kElement>(signs), factor | factor >> 16, more);
  } else {
    float low, high;
    if constexpr (kElement == kFloat16) {
      signs = held[i / 4].word[i % 4];
      from_halves(signs, low, high);
    } else {
      const u32 first = held[i / 2].word[i % 2 * 2], second = held[i / 2].word[i % 2 * 2 + 1];
      signs = first >> 16 & 0xffff | second & 0xffff0000u;
      low = __uint_as_float(first), high = __uint_as_float(second);
    }
    const float by = __uint_as_float(factor), plus = __uint_as_float(more & 0xffff0000u);
    return to_bfloat16x2(__fmaf_rn(fabsf(low), by, plus), __fmaf_rn(fabsf(high), by, plus));
  }
}
