// Communication between scale-up domains. A domain is a group of kRanksPerNode ranks with consecutive numbers. The ranks of a domain
// address each other's memory. Rows for ranks of other domains (scale-out) go through a transport: NVSHMEM, or a relay that
// takes descriptors from a ring (kHasRelay): a thread of the host, or the kernel `wire`.
//
// Offsets are those of symmetric memory. The bytes of a put lie in network memory at both ends, and stay there until the receiver has them.
// Network memory is NVSHMEM's, or with a relay of the host pinned host memory. Its offsets are those of the last part of symmetric memory.
// A word arrives after all bytes that were put with it, and after nothing else. One lane may wait for the word with an acquiring wait, and
// then its warp may read.
#pragma once
#include "common/memory.cuh"
#include "common/nvshmem_calls.cuh"

constexpr bool kHasScaleOut = kRanksPerNode < kNumRanks;

__device__ __forceinline__ bool is_scale_out(const Params& p, int rank) {
  return kHasScaleOut && rank / kRanksPerNode != p.rank / kRanksPerNode;
}

// The address of offset 0, for offsets of network memory of this rank.
__device__ __forceinline__ u64 network_base(const Params& p) {
  if constexpr (kHasScaleOut) return at<const NetworkState>(p.state, kLocalNetwork)->base;
  return p.peers[p.rank];
}

// The address of offset 0, for what `source` sends to this rank: symmetric memory, or network memory.
__device__ __forceinline__ u64 inbox_base(const Params& p, int source) {
  return is_scale_out(p, source) ? network_base(p) : p.peers[p.rank];
}

// Hands a put to the relay of this rank. Called by one thread, which orders the writes of its warp before.
//
// The ring needs no test for room: a rank claims an entry again only after the receiver has answered the put that had it, and the ring has
// an entry for each put that may be without an answer.
//
// `is_awaited`: the relay writes Descriptor::sent when it needs the bytes no more. Returns the entry, and its sequence in `sequence`.
__device__ inline const Descriptor* relay(const Params& p, int rank, u64 to, u64 from, u64 num_bytes, u64 flag, u64 value, bool is_awaited,
                                          u32& sequence) {
  NetworkState* network = at<NetworkState>(p.state, kLocalNetwork);
  const u32 number = add_relaxed_gpu(&network->next, 1);
  Descriptor* entry = at<Descriptor>(network->ring, 0) + (number & network->ring_mask);
  st_relaxed_sys(&entry->from, from);
  st_relaxed_sys(&entry->to, to);
  st_relaxed_sys(&entry->word, flag);
  st_relaxed_sys(&entry->value, value);
  st_relaxed_sys(&entry->num_bytes, num_bytes);
  st_relaxed_sys(&entry->rank, rank);
  st_relaxed_sys(&entry->is_awaited, static_cast<u32>(is_awaited));
  sequence = number + 1;
  if (is_awaited) st_relaxed_sys(&entry->sent, sequence - 1);  // an older value could be equal: both are 0 where numbers wrap around
  st_release_sys(&entry->sequence, sequence);
  return entry;
}

// Called by a whole warp; does not wait.
__device__ inline void put(const Params& p, int rank, u64 to, u64 from, u64 num_bytes, u64 flag, u64 value) {
  if constexpr (kHasRelay) {
    __syncwarp();
    u32 sequence;
    if (lane_idx() == 0) relay(p, rank, to, from, num_bytes, flag, value, false, sequence);
    __syncwarp();
  } else if constexpr (kHasScaleOut) {
    const u64 base = network_base(p);
    nvshmem_put(at<void>(base, to), at<void>(base, from), num_bytes, at<u64>(base, flag), value, p.pes[rank]);
  }
}

// Called by one thread.
__device__ inline void signal(const Params& p, int rank, u64 to, u64 value) {
  u32 sequence;
  if constexpr (kHasRelay)
    relay(p, rank, 0, 0, 0, to, value, false, sequence);
  else if constexpr (kHasScaleOut)
    nvshmem_signal(at<u64>(network_base(p), to), value, p.pes[rank]);
}
