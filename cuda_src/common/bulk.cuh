// Bulk asynchronous copies (sm_90's copy engine), and the pipeline that keeps one warp's ring of stages full of them.
#pragma once
#include "common/memory.cuh"

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void barrier_init(u64* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Orders what this thread has acquired before the bulk copies that it issues from here on. Bulk copies reach memory through another proxy
// than loads and stores do, and an acquire orders only the latter.
__device__ __forceinline__ void fence_bulk_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }

__device__ __forceinline__ void barrier_expect(u64* barrier, u32 num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(num_bytes) : "memory");
}

// No limit here: it waits for this SM's own copy engine, not for a peer.
__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
  u32 done;
  do {
    asm volatile("{\n .reg .pred P;\n mbarrier.try_wait.parity.shared::cta.b64 P, [%1], %2;\n selp.u32 %0, 1, 0, P;\n}"
                 : "=r"(done)
                 : "r"(shared_address(barrier)), "r"(parity)
                 : "memory");
  } while (!done);
}

__device__ __forceinline__ void bulk_load(void* to, const void* from, u32 num_bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
               "l"(from), "r"(num_bytes), "r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ void bulk_store(void* to, const void* from, u32 num_bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared_address(from)), "r"(num_bytes)
               : "memory");
}

__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// At most N of this thread's latest groups still read their stages.
template <int N>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// At most N of this thread's latest groups are not yet written; a release by this thread covers the written ones.
template <int N>
__device__ __forceinline__ void bulk_wait_written() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// One warp moves items through its ring of stages, half of them being filled while the others are being emptied.
//   next()                      all lanes: the next item, or -1
//   target(item)                all lanes: where the item's bytes go
//   load(item, stage, barrier)  all lanes: expect the item's bytes on the barrier (one lane) and start loading; false: there are none
//   store(turn, item, stage)    one lane: start storing; `turn` counts the items that this warp moves
//   written(count, all)         one lane: so many of its first items are written at their targets, and whether they are all
// Bytes lie in a stage where they will lie in a line of 128 bytes at their target, so that they cross the link in whole lines: rows that
// are no multiple of 128 bytes would lose a fifth otherwise. A stage has a line more than what it holds. A stage can be refilled once it
// has been read; that its bytes are written is known later, and nobody waits for it before kUnwritten more items are on their way.
template <int kStages, class Next, class Target, class Load, class Store, class Written>
__device__ __forceinline__ void bulk_pipeline(char* stages, u64* barriers, Next next, Target target, Load load, Store store,
                                              Written written) {
  constexpr int kFilling = kStages / 2, kEmptying = kStages - kFilling, kUnwritten = 4;
  static_assert(kStages >= 2 && kStages <= 32);
  const int lane = lane_idx();
  fence_bulk_copies();  // the block has acquired where the targets are, and that they may be written to
  if (lane == 0) {
    for (int i = 0; i < kStages; ++i) barrier_init(barriers + i);
    barrier_init_fence();
  }
  __syncwarp();
  int held = -1;  // lane s: the item in stage s
  int started = 0;
  bool more = true;
  auto stage_address = [&](int stage, int item) { return stages + stage * kStageBytes + reinterpret_cast<u64>(target(item)) % 128; };
  auto start = [&] {
    const int stage = started % kStages;
    int item;
    do {
      item = next();
    } while (item >= 0 && !load(item, stage_address(stage, item), barriers + stage));
    if (lane == stage) held = item;
    more = item >= 0;
    if (more) ++started;
  };
  while (more && started < kFilling) start();
  for (int turn = 0; turn < started; ++turn) {
    const int stage = turn % kStages, item = __shfl_sync(~0u, held, stage);
    if (lane == 0) {
      barrier_wait(barriers + stage, (turn / kStages) % 2);
      store(turn, item, stage_address(stage, item));
      bulk_commit();
      if (turn >= kUnwritten) {
        bulk_wait_written<kUnwritten>();
        written(turn + 1 - kUnwritten, false);
      }
      bulk_wait_read<kEmptying>();
    }
    __syncwarp();
    if (more) start();  // into the stage of item turn - kEmptying
  }
  if (lane == 0) {
    bulk_wait_written<0>();
    written(started, true);
  }
  __syncwarp();
}
