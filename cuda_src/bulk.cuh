// Bulk asynchronous copies (sm_90's copy engine), and the pipeline that keeps one warp's ring of stages full of them.
#pragma once
#include "memory.cuh"

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

__device__ __forceinline__ void barrier_init(u64* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

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

// One warp moves `num_items` items through its ring of stages, half of them being filled while the others are being emptied.
//   load(item, stage, barrier)  all lanes: expect the item's bytes on the barrier (one lane, even if there are none) and start loading
//   store(item, stage)          one lane: start storing
//   written(count)              one lane: so many of the first items are written at their targets; not called unless kTellWritten
// A stage can be refilled once it has been read; that its bytes are written is known later, and nobody waits for it before kUnwritten
// more items are on their way.
template <int kStages, bool kTellWritten, class Load, class Store, class Written>
__device__ __forceinline__ void bulk_pipeline(char* stages, u64* barriers, int num_items, Load load, Store store, Written written) {
  constexpr int kFilling = kStages / 2, kEmptying = kStages - kFilling, kUnwritten = 4;
  static_assert(kStages >= 2);
  const bool leader = lane_idx() == 0;
  if (leader) {
    for (int i = 0; i < kStages; ++i) barrier_init(barriers + i);
    barrier_init_fence();
  }
  __syncwarp();
  auto start = [&](int item) { load(item, stages + (item % kStages) * kStageBytes, barriers + item % kStages); };
  for (int item = 0; item < kFilling && item < num_items; ++item) start(item);
  for (int item = 0; item < num_items; ++item) {
    if (leader) {
      barrier_wait(barriers + item % kStages, (item / kStages) % 2);
      store(item, stages + (item % kStages) * kStageBytes);
      bulk_commit();
      if (kTellWritten && item >= kUnwritten) {
        bulk_wait_written<kUnwritten>();
        written(item + 1 - kUnwritten);
      }
      bulk_wait_read<kEmptying>();
    }
    __syncwarp();
    if (item + kFilling < num_items) start(item + kFilling);  // into the stage of item - kEmptying
  }
  if (leader) {
    bulk_wait_written<0>();
    if (kTellWritten) written(num_items);
  }
  __syncwarp();
}
