// Bulk asynchronous copies of sm_90's copy engine, and a pipeline of them for one warp.
#pragma once
#include "common/memory.cuh"

__device__ __forceinline__ u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// The first whole line of 128 bytes. Where a kernel is linked with other code, dynamic shared memory begins right after static shared
// memory, whatever its declaration says. Bulk copies of lines that do not lie in lines take up to twice as long.
__device__ __forceinline__ char* first_line(char* memory) { return memory + (0 - shared_address(memory)) % 128; }

__device__ __forceinline__ void barrier_init(u64* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Orders everything that this thread has acquired before its later bulk copies. Bulk copies reach memory through another proxy than loads
// and stores do. An acquire orders only loads and stores.
__device__ __forceinline__ void fence_bulk_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }

// The same for this thread's own accesses to shared memory: stores before a bulk copy reads them, and loads before a bulk copy writes
// there. It waits for no access to other memory.
__device__ __forceinline__ void fence_bulk_copies_of_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void barrier_expect(u64* barrier, u32 num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(num_bytes) : "memory");
}

// This wait has no time limit. It waits for the copy engine of this SM, not for a peer.
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

// Waits until at most N of this thread's latest groups still read their stages.
template <int N>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// Waits until at most N of this thread's latest groups are not yet written. A release by this thread then covers the written groups.
template <int N>
__device__ __forceinline__ void bulk_wait_written() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// One thread copies bytes through a ring of stages of kPieceBytes, and waits until they are written. Addresses and num_bytes divide by 16.
// `turn` counts the pieces that have gone through the ring.
template <u32 kPieceBytes, int kStages>
__device__ inline void bulk_copy(u64 to, u64 from, u64 num_bytes, char* stages, u64* barriers, u32& turn) {
  constexpr u32 kFilling = kStages / 2;
  const u32 pieces = static_cast<u32>((num_bytes + kPieceBytes - 1) / kPieceBytes);
  auto size = [&](u32 i) { return static_cast<u32>(i + 1 < pieces ? kPieceBytes : num_bytes - static_cast<u64>(i) * kPieceBytes); };
  fence_bulk_copies();  // this thread has acquired the bytes, or the permission to write
  for (u32 loaded = 0, stored = 0; stored < pieces; ++stored) {
    for (; loaded < pieces && loaded < stored + kFilling; ++loaded) {
      const u32 stage = (turn + loaded) % kStages;
      barrier_expect(barriers + stage, size(loaded));
      bulk_load(stages + stage * kPieceBytes, at<const void>(from, static_cast<u64>(loaded) * kPieceBytes), size(loaded), barriers + stage);
    }
    const u32 stage = (turn + stored) % kStages;
    barrier_wait(barriers + stage, (turn + stored) / kStages % 2);
    bulk_store(at<void>(to, static_cast<u64>(stored) * kPieceBytes), stages + stage * kPieceBytes, size(stored));
    bulk_commit();
    bulk_wait_read<kStages - kFilling>();
  }
  turn += pieces;
  bulk_wait_written<0>();
}

// One warp moves items through its ring of stages. It fills kFilling of them while the copy engine empties the others. The caller gives:
//   next()                      all lanes: return the next item, or -1
//   target(item)                all lanes: return the destination of the item's bytes
//   load(item, stage, barrier)  all lanes: start to load the item; one lane expects its bytes on the barrier; false: the item has no bytes
//   store(turn, item, stage)    one lane: start to store the item; `turn` counts the items of this warp
//   written(count, all)         one lane: the first `count` items of this warp are written; `all`: no item follows
//
// Staging keeps the destination's offset within its 128-byte line, so that bytes cross the link in whole lines. Without this, rows whose
// size is no multiple of 128 bytes would lose a fifth of the bandwidth. A stage therefore has one line more than its bytes need.
//
// Reuse of memory: the warp refills a stage once the engine has read it. The warp learns later that the bytes are written. It waits for
// that only when kUnwritten more items are in flight.
template <int kStages, int kFilling, int kUnwritten, class Next, class Target, class Load, class Store, class Written>
__device__ __forceinline__ void bulk_pipeline(char* stages, u64* barriers, Next next, Target target, Load load, Store store,
                                              Written written) {
  constexpr int kEmptying = kStages - kFilling;
  static_assert(kFilling >= 1 && kEmptying >= 1 && kStages <= 32);
  const int lane = lane_idx();
  fence_bulk_copies();  // the block has acquired the targets' addresses and the permission to write
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
