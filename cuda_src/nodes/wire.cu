// wire: carries what another kernel of this rank puts to other nodes, as a NIC would. It is for tests and benches: all ranks are on one
// host.
//
// Kernels put by descriptors, as with a relay. This kernel runs beside each of them, on SMs of its own. Once the other kernel has ended,
// its stream stops this one. Put i is the work of warp i % (all warps). The bytes of a put occupy the wire of this rank for num_bytes /
// bandwidth. The word arrives a latency after the wire has carried them. Latencies differ by up to a quarter, so words overtake each other.
//
// Ends: after the stop no descriptor is claimed any more. A warp ends when its next put is none of the claimed ones.
#include "common/bulk.cuh"
#include "common/wait.cuh"
#include "common/work.cuh"

constexpr int kWarps = kWireThreads / 32, kStages = 4;
constexpr u32 kPieceBytes = kWireStageBytes;
constexpr u32 kHeadBytes = 64;  // that each message takes on the wire besides its bytes

// The time when the wire has carried a message that comes now.
__device__ inline u64 occupy(const Params& p, WireState* wire, u64 num_bytes) {
  const u64 now = nanoseconds(), duration = (num_bytes + kHeadBytes) * p.fs_per_byte / 1000000;
  max_relaxed_gpu(&wire->free_at, now);
  return fetch_add_relaxed_gpu(&wire->free_at, duration) + duration;
}

__device__ __forceinline__ u64 latency_of(const Params& p, u32 number) {
  const u32 mixed = number * 0x9e3779b1u >> 24;  // 0 to 255
  return p.latency_ns - p.latency_ns / 8 + static_cast<u64>(p.latency_ns) * mixed / 1024;
}

// Called by a whole warp. After it returns, all bytes are written.
__device__ inline void copy_bytes(u64 to, u64 from, u64 num_bytes, char* stages, u64* barriers, u32& turn) {
  const u64 in_vecs = (to | from) % sizeof(Vec16) ? 0 : num_bytes / sizeof(Vec16) * sizeof(Vec16);
  for (u64 i = in_vecs / sizeof(u32) + lane_idx(); i < num_bytes / sizeof(u32); i += 32)
    at<u32>(to, 0)[i] = ld_relaxed_sys(at<const u32>(from, 0) + i);
  if (!kHasTma) {
    warp_copy(at<void>(to, 0), at<const void>(from, 0), in_vecs);
  } else if (lane_idx() == 0) {
    bulk_copy<kPieceBytes, kStages>(to, from, in_vecs, stages, barriers, turn);
  }
  __syncwarp();
}

extern "C" __global__ void __launch_bounds__(kWireThreads, 1) wire(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char stages[];
  __shared__ u64 barriers[kWarps * kStages];
  WireState* wire = at<WireState>(p.state, kLocalWire);
  NetworkState* network = at<NetworkState>(p.state, kLocalNetwork);
  const int warp = warp_idx(), lane = lane_idx();
  u64* my_barriers = barriers + warp * kStages;
  if (kHasTma && lane == 0) {
    for (int i = 0; i < kStages; ++i) barrier_init(my_barriers + i);
    barrier_init_fence();
  }
  __syncwarp();
  u32 turn = 0;                      // in lane 0
  u64 due = 0, word = 0, value = 0;  // each lane holds a word until it is due; 0: none
  for (u32 number = wire->carried + warp * gridDim.x + blockIdx.x;;) {
    const Descriptor* entry = at<const Descriptor>(network->ring, 0) + (number & network->ring_mask);
    const bool holds_words = __any_sync(~0u, word != 0);
    bool found = false, has_ended = false;
    if (lane == 0) {
      do {
        found = ld_acquire_sys(&entry->sequence) == number + 1;
        has_ended = !found && ld_acquire_gpu(&wire->stop) && static_cast<i32>(number - ld_relaxed_gpu(&network->next)) >= 0;
      } while (!holds_words && !found && !has_ended);
    }
    found = __shfl_sync(~0u, found, 0), has_ended = __shfl_sync(~0u, has_ended, 0);
    __syncwarp();  // all lanes read after what lane 0 acquired
    if (word && nanoseconds() >= due) {
      st_relaxed_sys(at<u64>(word, 0), value);
      word = 0;
    }
    const u32 free = ~__ballot_sync(~0u, word != 0);
    if (!found && has_ended && free == ~0u) break;
    if (!found || !free) continue;

    const u64 theirs = at<const u64>(p.state, kLocalNetworkPeers)[ld_relaxed_sys(reinterpret_cast<const u32*>(&entry->rank))];
    const u64 num_bytes = ld_relaxed_sys(&entry->num_bytes);
    u64 carried_at = 0;
    if (lane == 0) carried_at = occupy(p, wire, num_bytes);
    carried_at = __shfl_sync(~0u, carried_at, 0);
    if (num_bytes) {
      copy_bytes(theirs + ld_relaxed_sys(&entry->to), network->base + ld_relaxed_sys(&entry->from), num_bytes,
                 stages + warp * kStages * kPieceBytes, my_barriers, turn);
    }
    fence_release_sys();  // for the word, which may leave later
    if (lane == __ffs(free) - 1) {
      due = carried_at + latency_of(p, number), word = theirs + ld_relaxed_sys(&entry->word), value = ld_relaxed_sys(&entry->value);
    }
    if (lane == 0 && ld_relaxed_sys(&entry->is_awaited)) st_relaxed_sys(const_cast<u32*>(&entry->sent), number + 1);
    __syncwarp();
    number += gridDim.x * kWarps;
  }
  __syncthreads();
  if (threadIdx.x == 0 && is_last_block(&wire->blocks)) {
    wire->carried = network->next;
    wire->stop = wire->blocks = 0;
  }
}
