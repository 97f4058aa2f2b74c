// CUDA C++ for a host compiler: qualifiers, built-in variables and intrinsics. PTX is in ptx.h.
#pragma once
#include "runtime.h"

#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

// Marks a function that other threads must not interrupt, also if the runtime counts each access (memory.cpp).
#define AT_ONCE __attribute__((noinline, no_sanitize("thread")))

#define threadIdx (cpu_gpu::running->thread_idx)
#define blockIdx (cpu_gpu::running->block_idx)
#define blockDim (cpu_gpu::running->block_dim)
#define gridDim (cpu_gpu::running->grid_dim)

template <class A, class B>
constexpr decltype(true ? A() : B()) min(A a, B b) {
  return b < a ? b : a;
}
template <class A, class B>
constexpr decltype(true ? A() : B()) max(A a, B b) {
  return a < b ? b : a;
}

struct int2 {
  int x, y;
};
inline int2 make_int2(int x, int y) { return {x, y}; }

// --- bits and numbers ---------------------------------------------------------------------------------------------------------------

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __clz(int v) { return v ? __builtin_clz(v) : 32; }

template <class To, class From>
To cpu_gpu_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}
inline unsigned __float_as_uint(float v) { return cpu_gpu_bits<unsigned>(v); }
inline float __uint_as_float(unsigned v) { return cpu_gpu_bits<float>(v); }
inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
inline float fabsf(float v) { return __builtin_fabsf(v); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }

// --- a warp -------------------------------------------------------------------------------------------------------------------------

namespace cpu_gpu {

inline void require_full_mask(unsigned mask) {
  if (mask != ~0u) fail("this operation of a warp excludes lanes; only full masks work on the CPU");
}

template <class T>
uint64_t packed(T v) {
  static_assert(sizeof(T) <= 8);
  uint64_t word = 0;
  __builtin_memcpy(&word, &v, sizeof v);
  return word;
}

template <class T>
T unpacked(uint64_t word) {
  T v;
  __builtin_memcpy(&v, &word, sizeof v);
  return v;
}

template <class T, class Combine>
T reduce(const char* kind, unsigned mask, T v, Combine combine) {
  require_full_mask(mask);
  const Exchange& all = sync_warp(kind, packed(v));
  T result = unpacked<T>(all.values[0]);
  for (int i = 1; i < 32; ++i) result = combine(result, unpacked<T>(all.values[i]));
  return result;
}

template <class T>
T shuffle(const char* kind, unsigned mask, T v, int from) {
  require_full_mask(mask);
  return unpacked<T>(sync_warp(kind, packed(v)).values[from]);
}

}  // namespace cpu_gpu

inline void __syncwarp(unsigned mask = ~0u) {
  cpu_gpu::require_full_mask(mask);
  cpu_gpu::sync_warp("__syncwarp", 0);
}

template <class T>
T __shfl_sync(unsigned mask, T v, int from) {
  return cpu_gpu::shuffle("__shfl_sync", mask, v, from & 31);
}

template <class T>
T __shfl_up_sync(unsigned mask, T v, int delta) {
  const int lane = cpu_gpu::running->lane;
  return cpu_gpu::shuffle("__shfl_up_sync", mask, v, lane < delta ? lane : lane - delta);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T v, int bits) {
  return cpu_gpu::shuffle("__shfl_xor_sync", mask, v, (cpu_gpu::running->lane ^ bits) & 31);
}

inline unsigned __ballot_sync(unsigned mask, bool yes) {
  cpu_gpu::require_full_mask(mask);
  return cpu_gpu::sync_warp("__ballot_sync", yes).votes;
}
inline int __any_sync(unsigned mask, bool yes) {
  cpu_gpu::require_full_mask(mask);
  return cpu_gpu::sync_warp("__any_sync", yes).votes != 0;
}
inline int __all_sync(unsigned mask, bool yes) {
  cpu_gpu::require_full_mask(mask);
  return cpu_gpu::sync_warp("__all_sync", yes).votes == ~0u;
}

template <class T>
unsigned __match_any_sync(unsigned mask, T v) {
  cpu_gpu::require_full_mask(mask);
  const cpu_gpu::Exchange& all = cpu_gpu::sync_warp("__match_any_sync", cpu_gpu::packed(v));
  unsigned same = 0;
  for (int i = 0; i < 32; ++i) same |= static_cast<unsigned>(all.values[i] == cpu_gpu::packed(v)) << i;
  return same;
}

template <class T>
T __reduce_add_sync(unsigned mask, T v) {
  return cpu_gpu::reduce("__reduce_add_sync", mask, v, [](T a, T b) { return a + b; });
}
template <class T>
T __reduce_max_sync(unsigned mask, T v) {
  return cpu_gpu::reduce("__reduce_max_sync", mask, v, [](T a, T b) { return max(a, b); });
}
template <class T>
T __reduce_or_sync(unsigned mask, T v) {
  return cpu_gpu::reduce("__reduce_or_sync", mask, v, [](T a, T b) { return a | b; });
}

// --- a block ------------------------------------------------------------------------------------------------------------------------

inline void __syncthreads() { cpu_gpu::sync_block(0, 0, true); }
inline int __syncthreads_and(int yes) { return cpu_gpu::sync_block(0, 0, yes != 0); }

template <class T>
AT_ONCE T atomicAdd(T* p, T v) {
  cpu_gpu::step(true);
  const T old = *p;
  *p = old + v;
  return old;
}

// Addresses of shared memory have 32 bits, as on GPUs.
inline size_t __cvta_generic_to_shared(const void* p) { return static_cast<const char*>(p) - cpu_gpu::dynamic_shared_memory(); }
