// Element types that combine adds up: a 16-byte vector to floats and back, rounding to nearest even.
#pragma once
#include "memory.cuh"

constexpr int kBfloat16 = 0, kFloat16 = 1, kFloat32 = 2;
constexpr int kPerVec = kElement == kFloat32 ? 4 : 8;  // elements of a 16-byte vector

__device__ __forceinline__ void add_to(float* sum, const Vec16& v) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const u32 w = v.word[i];
    if constexpr (kElement == kFloat32) {
      sum[i] += __uint_as_float(w);
    } else if constexpr (kElement == kBfloat16) {
      sum[2 * i] += __uint_as_float(w << 16);
      sum[2 * i + 1] += __uint_as_float(w & 0xffff0000u);
    } else {
      float low, high;
      asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.f32.f16 %0, l;\n cvt.f32.f16 %1, h;\n}" : "=f"(low), "=f"(high) : "r"(w));
      sum[2 * i] += low;
      sum[2 * i + 1] += high;
    }
  }
}

__device__ __forceinline__ Vec16 rounded(const float* sum) {
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
