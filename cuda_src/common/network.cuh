// Communication between scale-up domains. A domain is a group of kRanksPerNode ranks with consecutive numbers. The ranks of a domain
// address each other's memory. NVSHMEM puts and signals to ranks of other domains (scale-out) over the network that it supports.
//
// Offsets are those of symmetric memory. The source of a put lies in symmetric memory too, and keeps its bytes until the receiver has them.
// A signal arrives after all bytes that were put with it. One lane may wait for the signal with an acquiring wait, and then its warp may
// read.
#pragma once
#include "common/memory.cuh"

constexpr bool kHasScaleOut = kRanksPerNode < kNumRanks;

__device__ __forceinline__ bool is_scale_out(const Params& p, int rank) {
  return kHasScaleOut && rank / kRanksPerNode != p.rank / kRanksPerNode;
}

#ifdef NVSHMEM_MAJOR_VERSION  // only the prelude of a Buffer with a scale-out domain includes it

// Called by a whole warp; does not wait.
__device__ inline void put(const Params& p, int rank, u64 to, u64 from, u64 num_bytes, u64 flag, u64 value) {
  const u64 base = p.peers[p.rank];
  nvshmemx_putmem_signal_nbi_warp(at<void>(base, to), at<void>(base, from), num_bytes, at<unsigned long>(base, flag), value,
                                  NVSHMEM_SIGNAL_SET, p.pes[rank]);
}

// The same, but after it returns the caller may write to `from` again.
__device__ inline void put_and_wait(const Params& p, int rank, u64 to, u64 from, u64 num_bytes, u64 flag, u64 value) {
  const u64 base = p.peers[p.rank];
  nvshmemx_putmem_signal_warp(at<void>(base, to), at<void>(base, from), num_bytes, at<unsigned long>(base, flag), value, NVSHMEM_SIGNAL_SET,
                              p.pes[rank]);
}

// Called by one thread.
__device__ inline void signal(const Params& p, int rank, u64 to, u64 value) {
  nvshmemx_signal_op(at<unsigned long>(p.peers[p.rank], to), value, NVSHMEM_SIGNAL_SET, p.pes[rank]);
}

#else  // all ranks are in one scale-up domain; never called

__device__ inline void put(const Params&, int, u64, u64, u64, u64, u64) {}
__device__ inline void put_and_wait(const Params&, int, u64, u64, u64, u64, u64) {}
__device__ inline void signal(const Params&, int, u64, u64) {}

#endif
