// Words of tiles of rows by expert: kTileReady once the rows of a tile are complete. A dispatch sets those of `tile_ready`, and a product
// those that a combine waits for (y_ready).
#pragma once
#include "common/wait.cuh"

constexpr u32 kTileReady = 1;

__device__ __forceinline__ bool is_ready(const u32* word) { return ld_acquire_sys(word) == kTileReady; }

// Waits for a product of this rank. `epoch`: of the combine.
__device__ __forceinline__ bool await_product(const Params& p, u32 epoch, const u32* word) {
  return wait_until(p, epoch, kPhaseExpertOutputs, p.rank, [&](u32& seen) { return is_ready(word); });
}
