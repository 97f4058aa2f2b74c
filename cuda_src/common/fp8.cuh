// Conversion to FP8 (e4m3). Each lane converts 16 channels, and 8 neighbouring lanes share the scale of their 128 channels.
#pragma once
#include "common/number.cuh"

constexpr float kFp8Max = 448.f, kLeastAmax = 1e-4f;

struct Fp8Scale {
  float scale;  // channel = FP8 value * scale
  float inverse;
};

// All 8 lanes get the same scale. `rounded_up`: up to a power of two.
__device__ __forceinline__ Fp8Scale scale_of(float amax, bool rounded_up) {
#pragma unroll
  for (int step = 1; step < 8; step *= 2) amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, step));
  amax = fmaxf(amax, kLeastAmax);
  if (!rounded_up) return {__fdiv_rn(amax, kFp8Max), __fdiv_rn(kFp8Max, amax)};
  const u32 bits = __float_as_uint(__fdiv_rn(amax, kFp8Max));
  const u32 exponent = (bits >> 23) + ((bits & 0x7fffffu) != 0);
  return {__uint_as_float(exponent << 23), exponent < 254 ? __uint_as_float((254 - exponent) << 23) : 0.f};
}

// Converts two values to two FP8 bytes; `low` becomes the lower byte.
__device__ __forceinline__ u32 to_fp8x2(float low, float high) {
  unsigned short pair = 0;
  if constexpr (kHasFp8) asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// Converts 16 channels to 16 bytes.
template <int kFrom>
__device__ __forceinline__ Vec16 to_fp8(const Vec16 (&held)[16 / kPerVec<kFrom>], bool rounded_up, float& scale) {
  constexpr int kEach = kPerVec<kFrom>;
  float values[16 / kEach][kEach];
#pragma unroll
  for (int i = 0; i < 16 / kEach; ++i) to_floats<kFrom>(held[i], values[i]);
  float amax = 0.f;
#pragma unroll
  for (int i = 0; i < 16; ++i) amax = fmaxf(amax, fabsf(values[i / kEach][i % kEach]));
  const Fp8Scale s = scale_of(amax, rounded_up);
  scale = s.scale;
  Vec16 v;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* four = &values[i * 4 / kEach][i * 4 % kEach];
    const u32 low = to_fp8x2(__fmul_rn(four[0], s.inverse), __fmul_rn(four[1], s.inverse));
    const u32 high = to_fp8x2(__fmul_rn(four[2], s.inverse), __fmul_rn(four[3], s.inverse));
    v.word[i] = low | high << 16;
  }
  return v;
}

// Converts 4 bytes to 4 channels as float16, without their scale. The conversion is exact.
__device__ __forceinline__ void from_fp8x4(u32 bytes, u32& low, u32& high) {
  low = high = 0;
  if constexpr (kHasFp8) {
    asm("{\n .reg .b16 l, h;\n mov.b32 {l, h}, %2;\n cvt.rn.f16x2.e4m3x2 %0, l;\n cvt.rn.f16x2.e4m3x2 %1, h;\n}"
        : "=r"(low), "=r"(high)
        : "r"(bytes));
  }
}

// Converts 8 bytes to 8 channels, without their scale. The conversion is exact.
__device__ __forceinline__ void from_fp8(u64 bytes, float (&values)[8]) {
  Vec16 halves = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) from_fp8x4(static_cast<u32>(bytes >> 32 * i), halves.word[2 * i], halves.word[2 * i + 1]);
  to_floats<kFloat16>(halves, values);
}
