// Ranks that NVLink does not reach. Ranks come in groups of kRanksPerNode, neighbours by number, which address each other's memory; what
// goes to another group is put and signalled through NVSHMEM, whatever carries it.
//
// Offsets are those of symmetric memory; what is put comes from symmetric memory too, and stays as it is until the receiver has it.
// A signal arrives after all that was put with it; one lane that has waited for it may let its warp read (is_scale_out, then an acquiring
// wait).
#pragma once
#include "common/memory.cuh"

constexpr bool kHasScaleOut = kRanksPerNode < kNumRanks;

__device__ __forceinline__ bool is_scale_out(const Params& p, int rank) {
  return kHasScaleOut && rank / kRanksPerNode != p.rank / kRanksPerNode;
}

#ifdef NVSHMEM_MAJOR_VERSION  // only Buffers with far ranks have it before their kernels

// A whole warp. Does not wait.
__device__ inline void put(const Params& p, int rank, u64 to, u64 from, u64 num_bytes, u64 flag, u64 value) {
  const u64 base = p.peers[p.rank];
  nvshmemx_putmem_signal_nbi_warp(at<void>(base, to), at<void>(base, from), num_bytes, at<unsigned long>(base, flag), value,
                                  NVSHMEM_SIGNAL_SET, p.pes[rank]);
}

// The same; when it returns, `from` may be written again.
__device__ inline void put_and_wait(const Params& p, int rank, u64 to, u64 from, u64 num_bytes, u64 flag, u64 value) {
  const u64 base = p.peers[p.rank];
  nvshmemx_putmem_signal_warp(at<void>(base, to), at<void>(base, from), num_bytes, at<unsigned long>(base, flag), value, NVSHMEM_SIGNAL_SET,
                              p.pes[rank]);
}

// One thread.
__device__ inline void signal(const Params& p, int rank, u64 to, u64 value) {
  nvshmemx_signal_op(at<unsigned long>(p.peers[p.rank], to), value, NVSHMEM_SIGNAL_SET, p.pes[rank]);
}

#else  // all ranks are near: never called

__device__ inline void put(const Params&, int, u64, u64, u64, u64, u64) {}
__device__ inline void put_and_wait(const Params&, int, u64, u64, u64, u64, u64) {}
__device__ inline void signal(const Params&, int, u64, u64) {}

#endif
