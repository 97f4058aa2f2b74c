// Element types of sums: converts a 16-byte vector to floats and back, and rounds to nearest even.
#pragma once
#include "common/memory.cuh"

// Elements of a 16-byte vector.
template <int kElement>
constexpr int kPerVec = kElement == kFloat32 ? 4 : 8;

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
      asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.f32.f16 %0, l;\n cvt.f32.f16 %1, h;\n}"
          : "=f"(values[2 * i]), "=f"(values[2 * i + 1])
          : "r"(w));
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
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v.word[i]) : "f"(sum[2 * i + 1]), "f"(sum[2 * i]));
    } else {
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v.word[i]) : "f"(sum[2 * i + 1]), "f"(sum[2 * i]));
    }
  }
  return v;
}
