// The PTX instructions that the kernels use, under the names that translate.py makes of them; operands come in the order of their numbers.
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

// Four words, each of which is whole.
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
inline void ld_relaxed_gpu_global_u32(u32& v, const void* p) { v = load<u32>(p); }
inline void ld_relaxed_sys_global_u32(u32& v, const void* p) { v = load<u32>(p); }
inline void ld_relaxed_sys_global_u64(u64& v, const void* p) { v = load<u64>(p); }
inline void ld_relaxed_sys_global_f32(float& v, const void* p) { v = load<float>(p); }
inline void ld_relaxed_sys_global_v4_u32(u32& a, u32& b, u32& c, u32& d, const void* p) { load4(a, b, c, d, p); }
inline void ld_global_L1__no_allocate_v4_u32(u32& a, u32& b, u32& c, u32& d, const void* p) { load4(a, b, c, d, p); }

inline void st_release_cta_u32(void* p, u32 v) { store(p, v, Order::kRelease); }
inline void st_release_sys_global_u32(void* p, u32 v) { store(p, v, Order::kRelease); }
inline void st_relaxed_sys_global_u32(void* p, u32 v) { store(p, v); }
inline void st_relaxed_sys_global_s32(void* p, int v) { store(p, v); }
inline void st_relaxed_sys_global_u64(void* p, u64 v) { store(p, v); }
inline void st_relaxed_sys_global_s64(void* p, long long v) { store(p, v); }
inline void st_relaxed_sys_global_v4_u32(void* p, u32 a, u32 b, u32 c, u32 d) { store4(p, a, b, c, d); }
inline void st_global_v4_u32(void* p, u32 a, u32 b, u32 c, u32 d) { store4(p, a, b, c, d); }
inline void fence_acq_rel_sys() { cpu_gpu::fence(); }

// --- atomics ------------------------------------------------------------------------------------------------------------------------

template <class T, class Change>
T update(T* p, Order order, Change change) {
  if (order == Order::kRelease) cpu_gpu::fence();
  cpu_gpu::step(true);
  const T old = *p;
  *p = change(old);
  return old;
}

template <class T>
T add(T* p, T v, Order order = Order::kRelaxed) {
  return update(p, order, [&](T old) { return old + v; });
}

inline void atom_acq_rel_sys_global_add_u32(u32& old, u32* p, u32 v) { old = add(p, v, Order::kRelease); }
inline void atom_acq_rel_gpu_global_add_u32(u32& old, u32* p, u32 v) { old = add(p, v, Order::kRelease); }
inline void atom_relaxed_gpu_global_add_u32(u32& old, u32* p, u32 v) { old = add(p, v); }
inline void red_relaxed_gpu_global_add_u64(u64* p, u64 v) { add(p, v); }
inline void red_relaxed_gpu_global_add_s32(int* p, int v) { add(p, v); }
inline void atom_relaxed_gpu_global_max_u64(u64& old, u64* p, u64 v) {
  old = update(p, Order::kRelaxed, [&](u64 before) { return max(before, v); });
}
inline void atom_relaxed_gpu_global_exch_b32(u32& old, u32* p, u32 v) {
  old = update(p, Order::kRelaxed, [&](u32) { return v; });
}

// --- threads and barriers -----------------------------------------------------------------------------------------------------------

inline void mov_u32_laneid(u32& v) { v = cpu_gpu::running->lane; }
inline void mov_u64_globaltimer(u64& v) { v = cpu_gpu::clock_ns(); }
inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}
inline void bar_sync(u32 barrier, u32 num_threads) { cpu_gpu::meet_block(barrier, num_threads, true); }
inline void bar_red_and_pred(u32& all, u32 barrier, u32 num_threads, u32 yes) { all = cpu_gpu::meet_block(barrier, num_threads, yes); }

// --- bulk copies --------------------------------------------------------------------------------------------------------------------

// An mbarrier as it lies in its 8 bytes. A phase is over when all have arrived and all announced bytes have come.
struct Mbarrier {
  int missing_bytes;
  u8 missing_arrivals, num_arrivals, phase, is_made;

  static Mbarrier& at(u32 address) { return *reinterpret_cast<Mbarrier*>(cpu_gpu::dynamic_shared_memory() + address); }
  void end_phase_if_complete() {
    if (missing_bytes == 0 && missing_arrivals == 0) phase ^= 1, missing_arrivals = num_arrivals;
  }
};

inline void mbarrier_init_shared__cta_b64(u32 barrier, int num_arrivals = 1) {
  cpu_gpu::step(true);
  Mbarrier::at(barrier) = {0, static_cast<u8>(num_arrivals), static_cast<u8>(num_arrivals), 0, 1};
}
inline void fence_mbarrier_init_release_cluster() {}
inline void fence_proxy_async() {}  // copies are done in order here
inline void mbarrier_arrive_expect_tx_shared__cta_b64(u32 barrier, u32 num_bytes) {
  cpu_gpu::step(true);
  Mbarrier& b = Mbarrier::at(barrier);
  b.missing_bytes += num_bytes, --b.missing_arrivals;
  b.end_phase_if_complete();
}
inline void mbarrier_try_wait_parity_shared__cta_b64(u32& done, u32 barrier, u32 parity) {
  cpu_gpu::step(false);
  done = Mbarrier::at(barrier).phase != parity;
}

inline void check_bulk(u64 to, u64 from, u32 num_bytes) {
  if ((to | from | num_bytes) % 16 != 0) cpu_gpu::fail("a bulk copy begins, ends or is long where 16 bytes do not");
}

inline void cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes(u32 to, const void* from, u32 num_bytes, u32 barrier) {
  cpu_gpu::step(true);
  char* stage = cpu_gpu::dynamic_shared_memory() + to;
  check_bulk(to, reinterpret_cast<u64>(from), num_bytes);
  cpu_gpu::later([=, b = &Mbarrier::at(barrier)] {
    memcpy(stage, from, num_bytes);
    b->missing_bytes -= num_bytes;
    b->end_phase_if_complete();
  });
}

inline void cp_async_bulk_commit_group() { cpu_gpu::running->bulk_groups.push_back(std::make_shared<cpu_gpu::BulkGroup>()); }

inline void cp_async_bulk_global_shared__cta_bulk_group(void* to, u32 from, u32 num_bytes) {
  cpu_gpu::step(true);
  const char* stage = cpu_gpu::dynamic_shared_memory() + from;
  check_bulk(reinterpret_cast<u64>(to), from, num_bytes);
  if (cpu_gpu::running->bulk_groups.empty()) cp_async_bulk_commit_group();
  const auto group = cpu_gpu::running->bulk_groups.back();
  ++group->unread, ++group->unwritten;
  cpu_gpu::later([=] {
    const std::vector<char> held(stage, stage + num_bytes);
    --group->unread;
    cpu_gpu::later([=] {
      memcpy(to, held.data(), num_bytes);
      --group->unwritten;
    });
  });
}

// Waits until all but the latest `num_groups` committed groups are done, as `left` counts.
inline void wait_for_groups(int num_groups, int cpu_gpu::BulkGroup::* left) {
  const auto& groups = cpu_gpu::running->bulk_groups;
  for (int i = 0; i < static_cast<int>(groups.size()) - 1 - num_groups; ++i) {
    while ((*groups[i]).*left) cpu_gpu::step(false);
  }
}
inline void cp_async_bulk_wait_group_read(int num_groups) { wait_for_groups(num_groups, &cpu_gpu::BulkGroup::unread); }
inline void cp_async_bulk_wait_group(int num_groups) { wait_for_groups(num_groups, &cpu_gpu::BulkGroup::unwritten); }

// --- conversions --------------------------------------------------------------------------------------------------------------------

// A small float of so many bits of exponent and mantissa: the nearest one, ties to even. `largest` stands for all that is larger.
inline u32 to_small(float value, int exponent_bits, int mantissa_bits, u32 largest) {
  const int least = 2 - (1 << (exponent_bits - 1));
  const u32 sign = static_cast<u32>(std::signbit(value)) << (exponent_bits + mantissa_bits);
  const double size = std::fabs(static_cast<double>(value));
  if (size == 0) return sign;
  if (std::isinf(size)) return sign | largest;
  const int exponent = max(std::ilogb(size), least);
  // In units of the last place. With the exponent above them, a carry out of the mantissa does what it should.
  const u32 units = static_cast<u32>(std::nearbyint(std::ldexp(size, mantissa_bits - exponent)));
  return sign | min(units + (static_cast<u32>(exponent - least) << mantissa_bits), largest);
}

// For codes that are numbers.
inline float from_small(u32 bits, int exponent_bits, int mantissa_bits) {
  const int least = 2 - (1 << (exponent_bits - 1));
  const u32 mantissa = bits & ((1u << mantissa_bits) - 1), exponent = bits >> mantissa_bits & ((1u << exponent_bits) - 1);
  const double units = exponent ? mantissa + (1u << mantissa_bits) : mantissa;
  const double size = std::ldexp(units, least - mantissa_bits + (exponent ? static_cast<int>(exponent) - 1 : 0));
  return bits >> (exponent_bits + mantissa_bits) & 1 ? -size : size;
}

inline u32 to_bfloat16(float v) { return std::isnan(v) ? 0x7fff : to_small(v, 8, 7, 0x7f80); }
inline u32 to_half(float v) { return std::isnan(v) ? 0x7fff : to_small(v, 5, 10, 0x7c00); }
inline u32 to_e4m3(float v) { return std::isnan(v) ? 0x7f : to_small(v, 4, 3, 0x7e); }
inline float from_half(u32 bits) {
  if ((bits & 0x7fff) > 0x7c00) return NAN;
  if ((bits & 0x7fff) == 0x7c00) return bits & 0x8000 ? -INFINITY : INFINITY;
  return from_small(bits, 5, 10);
}

// Of two operands the first one becomes the upper half.
inline void cvt_rn_bf16x2_f32(u32& both, float high, float low) { both = to_bfloat16(high) << 16 | to_bfloat16(low); }
inline void cvt_rn_f16x2_f32(u32& both, float high, float low) { both = to_half(high) << 16 | to_half(low); }
inline void cvt_rn_satfinite_e4m3x2_f32(u16& both, float high, float low) { both = to_e4m3(high) << 8 | to_e4m3(low); }
inline void cvt_f32_f16(float& low, float& high, u32 both) { low = from_half(both & 0xffff), high = from_half(both >> 16); }
inline void cvt_rn_f16x2_e4m3x2(u32& halves, u16 both) {
  auto half = [](u32 code) { return (code & 0x7f) == 0x7f ? 0x7fff : to_half(from_small(code, 4, 3)); };
  halves = half(both >> 8) << 16 | half(both & 0xff);
}

}  // namespace ptx
