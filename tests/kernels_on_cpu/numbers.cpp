// Conversions of small floats.
#include <algorithm>
#include <cmath>

#include "runtime.h"

namespace cpu_gpu {
namespace {

// Rounds to a float with few bits of exponent and mantissa, ties to even. Larger numbers become `largest`.
uint32_t to_small(float value, int exponent_bits, int mantissa_bits, uint32_t largest) {
  const int least = 2 - (1 << (exponent_bits - 1));
  const uint32_t sign = static_cast<uint32_t>(std::signbit(value)) << (exponent_bits + mantissa_bits);
  const double size = std::fabs(static_cast<double>(value));
  if (size == 0) return sign;
  if (std::isinf(size)) return sign | largest;
  const int exponent = std::max(std::ilogb(size), least);
  // In units of the last place. The exponent follows them, so that a carry out of the mantissa raises it.
  const uint32_t units = static_cast<uint32_t>(std::nearbyint(std::ldexp(size, mantissa_bits - exponent)));
  return sign | std::min(units + (static_cast<uint32_t>(exponent - least) << mantissa_bits), largest);
}

// Converts a code that is a number.
float from_small(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const int least = 2 - (1 << (exponent_bits - 1));
  const uint32_t mantissa = bits & ((1u << mantissa_bits) - 1), exponent = bits >> mantissa_bits & ((1u << exponent_bits) - 1);
  const double units = exponent ? mantissa + (1u << mantissa_bits) : mantissa;
  const double size = std::ldexp(units, least - mantissa_bits + (exponent ? static_cast<int>(exponent) - 1 : 0));
  return bits >> (exponent_bits + mantissa_bits) & 1 ? -size : size;
}

}  // namespace

uint32_t to_bfloat16(float v) { return std::isnan(v) ? 0x7fff : to_small(v, 8, 7, 0x7f80); }

float from_bfloat16(uint32_t code) {
  const uint32_t bits = code << 16;
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}
uint32_t to_half(float v) { return std::isnan(v) ? 0x7fff : to_small(v, 5, 10, 0x7c00); }
uint32_t to_e4m3(float v) { return std::isnan(v) ? 0x7f : to_small(v, 4, 3, 0x7e); }
float from_half(uint32_t bits) {
  if ((bits & 0x7fff) > 0x7c00) return NAN;
  if ((bits & 0x7fff) == 0x7c00) return bits & 0x8000 ? -INFINITY : INFINITY;
  return from_small(bits, 5, 10);
}
float from_e4m3(uint32_t bits) { return (bits & 0x7f) == 0x7f ? NAN : from_small(bits, 4, 3); }

}  // namespace cpu_gpu
