// The PTX instructions of the kernels, with the names that translate.py gives them. Operands come in the order of their numbers.
#pragma once
#include "cuda.h"

namespace ptx {

using cpu_gpu::Order;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned u32;
typedef unsigned long long u64;

// --- loads and stores ---------------------------------------------------------------------------------------------------------------

template <class T>
T load(const void* p) {
  T v;
  cpu_gpu::read(p, &v, sizeof v);
  return v;
}

template <class T>
void store(void* p, T v, Order order = Order::kRelaxed) {
  cpu_gpu::write(p, &v, sizeof v, order);
}

// Four words. Each word is loaded as a whole.
inline void load4(u32& a, u32& b, u32& c, u32& d, const void* p) {
  const u32* words = static_cast<const u32*>(p);
  a = load<u32>(words), b = load<u32>(words + 1), c = load<u32>(words + 2), d = load<u32>(words + 3);
}

inline void store4(void* p, u32 a, u32 b, u32 c, u32 d) {
  u32* words = static_cast<u32*>(p);
  store(words, a), store(words + 1, b), store(words + 2, c), store(words + 3, d);
}

inline void ld_acquire_sys_global_u32(u32& v, const void* p) { v = load<u32>(p); }
inline void ld_acquire_sys_global_u64(u64& v, const void* p) { v = load<u64>(p); }
inline void ld_acquire_cta_u32(u32& v, const void* p) { v = load<u32>(p); }
inline void ld_acquire_cta_u64(u64& v, const void* p) { v = load<u64>(p); }
inline void ld_acquire_gpu_global_u32(u32& v, const void* p) { v = load<u32>(p); }
inline void ld_relaxed_gpu_global_u32(u32& v, const void* p) { v = load<u32>(p); }
inline void ld_relaxed_sys_global_u32(u32& v, const void* p) { v = load<u32>(p); }
inline void ld_relaxed_sys_global_u64(u64& v, const void* p) { v = load<u64>(p); }
inline void ld_relaxed_sys_global_v2_u64(u64& a, u64& b, const void* p) { a = load<u64>(p), b = load<u64>(static_cast<const u64*>(p) + 1); }
inline void ld_relaxed_sys_global_f32(float& v, const void* p) { v = load<float>(p); }
inline void ld_relaxed_sys_global_v4_u32(u32& a, u32& b, u32& c, u32& d, const void* p) { load4(a, b, c, d, p); }
inline void ld_global_v4_u32(u32& a, u32& b, u32& c, u32& d, const void* p) { load4(a, b, c, d, p); }
inline void ld_global_L1__no_allocate_v4_u32(u32& a, u32& b, u32& c, u32& d, const void* p) { load4(a, b, c, d, p); }

inline void ld_relaxed_sys_global_v4_u32(u32& a, u32& b, u32& c, u32& d, const void* p, u32 wanted) {
  if (wanted) load4(a, b, c, d, p);
}
inline void prefetch_global_L2(u64) {}

inline void st_release_cta_u32(void* p, u32 v) { store(p, v, Order::kReleaseBlock); }
inline void st_release_cta_u64(void* p, u64 v) { store(p, v, Order::kReleaseBlock); }
inline void st_release_gpu_global_u32(void* p, u32 v) { store(p, v, Order::kRelease); }
inline void st_release_sys_global_u32(void* p, u32 v) { store(p, v, Order::kRelease); }
inline void st_relaxed_sys_global_u32(void* p, u32 v) { store(p, v); }
inline void st_relaxed_sys_global_s32(void* p, int v) { store(p, v); }
inline void st_relaxed_sys_global_u64(void* p, u64 v) { store(p, v); }
inline void st_relaxed_sys_global_s64(void* p, long long v) { store(p, v); }
inline void st_relaxed_sys_global_v4_u32(void* p, u32 a, u32 b, u32 c, u32 d) { store4(p, a, b, c, d); }
inline void st_global_v4_u32(void* p, u32 a, u32 b, u32 c, u32 d) { store4(p, a, b, c, d); }
inline void st_global_cs_v4_u32(void* p, u32 a, u32 b, u32 c, u32 d) { store4(p, a, b, c, d); }
inline void fence_acq_rel_sys() { cpu_gpu::fence(); }

// --- atomics ------------------------------------------------------------------------------------------------------------------------

template <class T, class Combine>
AT_ONCE T update(T* p, T v, Order order, Combine combine) {
  if (order == Order::kRelease) cpu_gpu::fence();
  cpu_gpu::step(!cpu_gpu::keeps_time(p));
  const T old = *p;
  *p = combine(old, v);
  return old;
}

template <class T>
T add(T* p, T v, Order order = Order::kRelaxed) {
  return update(p, v, order, [](T a, T b) { return a + b; });
}

inline void atom_acq_rel_sys_global_add_u32(u32& old, u32* p, u32 v) { old = add(p, v, Order::kRelease); }
inline void atom_acq_rel_gpu_global_add_u32(u32& old, u32* p, u32 v) { old = add(p, v, Order::kRelease); }
inline void atom_relaxed_gpu_global_add_u32(u32& old, u32* p, u32 v) { old = add(p, v); }
inline void atom_relaxed_gpu_global_add_u64(u64& old, u64* p, u64 v) { old = add(p, v); }
inline void red_relaxed_gpu_global_add_u64(u64* p, u64 v) { add(p, v); }
inline void red_relaxed_gpu_global_add_s32(int* p, int v) { add(p, v); }
inline void atom_relaxed_gpu_global_max_u64(u64& old, u64* p, u64 v) {
  old = update(p, v, Order::kRelaxed, [](u64 a, u64 b) { return a < b ? b : a; });
}
inline void atom_relaxed_gpu_global_exch_b32(u32& old, u32* p, u32 v) {
  old = update(p, v, Order::kRelaxed, [](u32, u32 b) { return b; });
}
inline void atom_relaxed_gpu_global_cas_b32(u32& old, u32* p, u32 expected, u32 v) {
  old = update(p, v, Order::kRelaxed, [expected](u32 a, u32 b) { return a == expected ? b : a; });
}

// --- threads and barriers -----------------------------------------------------------------------------------------------------------

inline void mov_u32_laneid(u32& v) { v = cpu_gpu::running->lane; }
inline void mov_u64_globaltimer(u64& v) { v = cpu_gpu::clock_ns(); }
inline void griddepcontrol_wait() { cpu_gpu::wait_for_predecessor(); }
inline void griddepcontrol_launch_dependents() { cpu_gpu::launch_dependents(); }
inline void bar_sync(u32 barrier, u32 num_threads) { cpu_gpu::sync_block(barrier, num_threads, true); }
inline void bar_red_and_pred(u32& all, u32 barrier, u32 num_threads, u32 yes) { all = cpu_gpu::sync_block(barrier, num_threads, yes); }

// --- bulk copies --------------------------------------------------------------------------------------------------------------------

inline void mbarrier_init_shared__cta_b64(u32 barrier) { cpu_gpu::mbarrier_init(barrier, 1); }
inline void fence_mbarrier_init_release_cluster() {}
inline void fence_proxy_async() { cpu_gpu::fence_proxies(); }
inline void fence_proxy_async_shared__cta() { cpu_gpu::fence_proxies(); }
inline void mbarrier_arrive_expect_tx_shared__cta_b64(u32 barrier, u32 num_bytes) { cpu_gpu::mbarrier_arrive(barrier, num_bytes); }
inline void mbarrier_try_wait_parity_shared__cta_b64(u32& done, u32 barrier, u32 parity) {
  done = cpu_gpu::mbarrier_is_past(barrier, parity);
}
inline void cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes(u32 to, const void* from, u32 num_bytes, u32 barrier) {
  cpu_gpu::bulk_load(to, from, num_bytes, barrier);
}
inline void cp_async_bulk_global_shared__cta_bulk_group(void* to, u32 from, u32 num_bytes) { cpu_gpu::bulk_store(to, from, num_bytes); }
inline void cp_async_bulk_commit_group() { cpu_gpu::bulk_commit(); }
inline void cp_async_bulk_wait_group_read(int num_groups) { cpu_gpu::bulk_wait(num_groups, true); }
inline void cp_async_bulk_wait_group(int num_groups) { cpu_gpu::bulk_wait(num_groups, false); }

// --- conversions --------------------------------------------------------------------------------------------------------------------

// The first operand becomes the upper half.
inline void cvt_rn_bf16x2_f32(u32& both, float high, float low) { both = cpu_gpu::to_bfloat16(high) << 16 | cpu_gpu::to_bfloat16(low); }
inline void cvt_rn_f16x2_f32(u32& both, float high, float low) { both = cpu_gpu::to_half(high) << 16 | cpu_gpu::to_half(low); }
inline void cvt_rn_satfinite_e4m3x2_f32(u16& both, float high, float low) { both = cpu_gpu::to_e4m3(high) << 8 | cpu_gpu::to_e4m3(low); }
inline void cvt_f32_f16(float& low, float& high, u32 both) {
  low = cpu_gpu::from_half(both & 0xffff), high = cpu_gpu::from_half(both >> 16);
}
inline void cvt_rn_f16x2_e4m3x2(u32& low, u32& high, u32 four) {
  auto half = [&](int i) { return cpu_gpu::to_half(cpu_gpu::from_e4m3(four >> 8 * i & 0xff)); };
  low = half(1) << 16 | half(0), high = half(3) << 16 | half(2);
}

// For numbers without signs. `infinity`: its bits.
inline u32 larger_sizes(u32 a, u32 b, u32 infinity) {
  auto larger = [=](u32 a, u32 b) { return a > infinity || b > infinity ? 0x7fffu : a > b ? a : b; };
  return larger(a >> 16, b >> 16) << 16 | larger(a & 0xffff, b & 0xffff);
}
inline void max_NaN_bf16x2(u32& both, u32 a, u32 b) { both = larger_sizes(a, b, 0x7f80); }
inline void max_NaN_f16x2(u32& both, u32 a, u32 b) { both = larger_sizes(a, b, 0x7c00); }
inline void fma_rn_bf16x2(u32& both, u32 a, u32 b, u32 c) {
  auto one = [](u32 a, u32 b, u32 c) {
    return cpu_gpu::to_bfloat16(cpu_gpu::from_bfloat16(a) * cpu_gpu::from_bfloat16(b) + cpu_gpu::from_bfloat16(c));
  };
  both = one(a >> 16, b >> 16, c >> 16) << 16 | one(a & 0xffff, b & 0xffff, c & 0xffff);
}

}  // namespace ptx
