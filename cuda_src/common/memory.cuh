// Loads, stores and atomics that name their memory order and scope, 16-byte vectors, and what the lanes of a warp do together.
#pragma once

struct alignas(16) Vec16 {
  u32 word[4];
};

template <class T>
__device__ __forceinline__ T* at(u64 base, u64 offset) {
  return reinterpret_cast<T*>(base + offset);
}

__device__ __forceinline__ u32 ld_acquire_sys(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ u64 ld_acquire_sys(const u64* p) {
  u64 v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ u32 ld_acquire_block(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.cta.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ u64 ld_acquire_block(const u64* p) {
  u64 v;
  asm volatile("ld.acquire.cta.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void st_release_block(u64* p, u64 v) {
  asm volatile("st.release.cta.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

__device__ __forceinline__ void st_release_block(u32* p, u32 v) {
  asm volatile("st.release.cta.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ u32 ld_acquire_gpu(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void st_release_gpu(u32* p, u32 v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ u32 ld_relaxed_gpu(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ float ld_relaxed_sys(const float* p) {
  float v;
  asm volatile("ld.relaxed.sys.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ u32 ld_relaxed_sys(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ u64 ld_relaxed_sys(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}

// Loads two neighbouring words at once, each of them whole. `p` is a multiple of 16 bytes.
__device__ __forceinline__ void ld_relaxed_sys(const u64* p, u64& first, u64& second) {
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(p) : "memory");
}

__device__ __forceinline__ void st_release_sys(u32* p, u32 v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ void st_relaxed_sys(u32* p, u32 v) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ void st_relaxed_sys(i32* p, i32 v) {
  asm volatile("st.relaxed.sys.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ void st_relaxed_sys(u64* p, u64 v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

__device__ __forceinline__ void st_relaxed_sys(i64* p, i64 v) {
  asm volatile("st.relaxed.sys.global.s64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// Releases all earlier writes to the whole system, for the relaxed stores that follow. One fence serves many flags.
__device__ __forceinline__ void fence_release_sys() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

// Blocks of one GPU count here, but the scope is the system. It orders the blocks' writes to peers before the flag that the last block
// raises.
__device__ __forceinline__ u32 add_acq_rel_sys(u32* p, u32 v) {
  u32 old;
  asm volatile("atom.acq_rel.sys.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}

__device__ __forceinline__ u32 add_acq_rel_gpu(u32* p, u32 v) {
  u32 old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}

// Replaces `expected` by `v`, unless another value stands there. Returns the value of before.
__device__ __forceinline__ u32 compare_exchange_relaxed_gpu(u32* p, u32 expected, u32 v) {
  u32 old;
  asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], %2, %3;" : "=r"(old) : "l"(p), "r"(expected), "r"(v) : "memory");
  return old;
}

__device__ __forceinline__ u64 max_relaxed_gpu(u64* p, u64 v) {
  u64 old;
  asm volatile("atom.relaxed.gpu.global.max.u64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(v) : "memory");
  return old;
}

__device__ __forceinline__ u64 fetch_add_relaxed_gpu(u64* p, u64 v) {
  u64 old;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;" : "=l"(old) : "l"(p), "l"(v) : "memory");
  return old;
}

__device__ __forceinline__ void add_relaxed_gpu(u64* p, u64 v) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

__device__ __forceinline__ u32 add_relaxed_gpu(u32* p, u32 v) {
  u32 old;
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}

// Claims `count` numbers and returns the first one. Only the first lane of a warp calls it. Where lanes may add to the same word, the
// compiler merges their additions into one atomic, and the warp waits for its result at once. The address `p + lane` hides this from the
// compiler, so that the warp continues while the number is on its way.
__device__ __forceinline__ u32 fetch_add_relaxed_gpu(u32* p, u32 count = 1) {
  u32 lane, old;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  asm volatile("atom.relaxed.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p + lane), "r"(count) : "memory");
  return old;
}

__device__ __forceinline__ u32 exchange_relaxed_gpu(u32* p, u32 v) {
  u32 old;
  asm volatile("atom.relaxed.gpu.global.exch.b32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}

// Each of the four words is stored and loaded whole. Nothing orders them with each other.
__device__ __forceinline__ void st_relaxed_sys(Vec16* p, const Vec16& v) {
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]),
               "r"(v.word[3])
               : "memory");
}

__device__ __forceinline__ Vec16 ld_relaxed_sys(const Vec16* p) {
  Vec16 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(p)
               : "memory");
  return v;
}

// Loads to `v` if `wanted`. Where a load stands in a branch, the compiler loads to other registers and copies them. The copies wait for the
// load, and later loads start after the copies.
__device__ __forceinline__ void ld_relaxed_sys_if(bool wanted, Vec16& v, const Vec16* p) {
  asm volatile("{\n .reg .pred p;\n setp.ne.u32 p, %5, 0;\n @p ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
               : "+r"(v.word[0]), "+r"(v.word[1]), "+r"(v.word[2]), "+r"(v.word[3])
               : "l"(p), "r"(static_cast<u32>(wanted))
               : "memory");
}

// Rows are read once, so they should not replace other lines in L1.
__device__ __forceinline__ Vec16 ld_streaming(const Vec16* p) {
  Vec16 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(p)
               : "memory");
  return v;
}

__device__ __forceinline__ Vec16 ld_vec(const Vec16* p) {
  Vec16 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(p)
               : "memory");
  return v;
}

__device__ __forceinline__ void st_vec(Vec16* p, const Vec16& v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}

// The same for data that this kernel does not read again: it leaves the L2 cache before other data.
__device__ __forceinline__ void st_vec_last(Vec16* p, const Vec16& v) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
               : "memory");
}

__device__ __forceinline__ int lane_idx() { return threadIdx.x % 32; }
__device__ __forceinline__ int warp_idx() { return threadIdx.x / 32; }

// Called by all lanes. Returns the sum of the numbers of lanes 0 to this one.
__device__ __forceinline__ int sum_to_lane(int own) {
  int sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(~0u, sum, step);
    if (lane_idx() >= step) sum += before;
  }
  return sum;
}

// A warp copies `num_bytes`, a multiple of 16. Each lane has eight vectors in flight and writes whole 128-byte lines of the destination.
__device__ __forceinline__ void warp_copy(void* to, const void* from, int num_bytes) {
  constexpr int kInFlight = 8;
  const Vec16* source = static_cast<const Vec16*>(from);
  Vec16* target = static_cast<Vec16*>(to);
  const int count = num_bytes / 16, early = reinterpret_cast<u64>(to) % 128 / 16;
  for (int i = lane_idx() - early; i < count; i += kInFlight * 32) {
    Vec16 held[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (static_cast<u32>(i + j * 32) < count) held[j] = ld_streaming(source + i + j * 32);
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (static_cast<u32>(i + j * 32) < count) st_vec(target + i + j * 32, held[j]);
    }
  }
}

// Brings a line to the L2 cache and its translation near this SM. A kernel may call this for any of its memory before it awaits its
// predecessor: later writes of the GPU and of peers reach that line.
__device__ __forceinline__ void prefetch(u64 address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }

// For a kernel that may start while its predecessor in the stream still ends (Kernel.overlaps). After this, the predecessor has ended, and
// all its writes are visible.
__device__ __forceinline__ void await_predecessor() {
  if constexpr (kHasOverlap) asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Once a thread of each block has called this, or the block has ended, the next kernel may start, if it is one of Kernel.overlaps.
__device__ __forceinline__ void start_successor() {
  if constexpr (kHasOverlap) asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Comes before all loads and stores of global memory of a kernel.
__device__ __forceinline__ void overlap_kernels() {
  await_predecessor();
  start_successor();
}
