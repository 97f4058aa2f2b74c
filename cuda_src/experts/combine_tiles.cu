// combine_tiles: a combine of rows by expert that a product on other SMs still writes, tile by tile. A word for each tile tells that its
// rows are written (y_ready). combine.cuh describes the other roles of the warps and the protocol. Rows on their way, windows and flags are
// those of combine, so other ranks may run combine in the same call.
//
// A copy warp takes the chunks in `order`: by the last row of y that a chunk needs, so that chunks of early tiles leave first
// (order_chunks). For each row of a chunk it waits for the tiles of the row's choices. Then it adds up these rows, as sum_expert_rows does.
// With TMA the sums go to a stage, and a bulk store takes them to the peer.
//
// A wait for a tile has the time limit of all waits. If it ends without success, the warp sends no more chunks, and the sums of all ranks
// that wait for those become NaN.
//
// Reduce warps take tokens in ascending order, as in combine. Most of them soon wait for a late tile, so copies overlap with the product
// more than sums do.
//
// Reuse of memory: a warp refills a stage once its bulk store has read it. The words belong to the program. Nothing here clears them.
//
// Bytes: each row of y is read once. The sum of a token's rows crosses the link once, or goes to the own staging.
#include "experts/sum_choices.cuh"
#include "experts/tile_words.cuh"
#include "throughput/plain_sums.cuh"

static_assert(kCopyBlocks == 0 && kFewBlocks == 0);  // rows of the own rank are sums too, so no rank reads them from y

// A chunk of the queue: chunks of a rank leave in another order than that of its rows.
__device__ __forceinline__ Chunk ordered_chunk(const Params& p, const Routes& routes, int item) {
  Chunk c = chunk_at(p, routes, item);
  if (c.num_rows == 0) return c;
  c.idx = at<const i32>(p.order, 0)[c.rank * kMaxCombineChunks + c.idx];
  c.first = static_cast<i64>(c.idx) * kChunkRows;
  c.num_rows = rows_in_chunk(routes.num_rows[c.rank], c.idx, kChunkRows);
  return c;
}

// Called by one warp. `row`: of y. Calls before_wait() if a tile is not ready yet. False: the wait for a lane's row ended without success.
template <class BeforeWait>
__device__ __forceinline__ bool await_tile(const Params& p, u32 epoch, i32 row, BeforeWait before_wait) {
  const u32* word = at<const u32>(p.tile_ready, 0) + max(row, 0) / p.tile_rows;
  bool ok = row < 0 || is_ready(word);
  if (!__all_sync(~0u, ok)) {
    before_wait();
    ok = ok || await_product(p, epoch, word);
    ok = __all_sync(~0u, ok);
  }
  __syncwarp();  // all lanes may read what one lane has acquired
  return ok;
}

// Called by one warp: writes the sums of a chunk to `to`, and its weights to the peer. False: a wait ended without success.
template <class BeforeWait>
__device__ __forceinline__ bool write_sums(const Params& p, const Routes& routes, u32 epoch, const Chunk& c, char* to,
                                           BeforeWait before_wait) {
  const int lane = lane_idx();
  for (int i = 0; i < c.num_rows; ++i) {
    const i64 row = routes.from_row[c.rank] + c.first + i;
    const i32 mine = lane < kNumTopk ? at<const i32>(p.positions, 0)[row * kNumTopk + lane] : -1;
    if (!await_tile(p, epoch, mine, before_wait)) return false;
    const float weight = p.expert_weights && mine >= 0 ? at<const float>(p.expert_weights, 0)[mine] : 0.f;
    if (p.topk_weights && lane < kNumTopk) at<float>(routes.to_weights[c.rank], 0)[(c.first + i) * kNumTopk + lane] = weight;
    const u32 choices = __ballot_sync(~0u, mine >= 0);
    sum_choices<32>(
        kRowVecs, lane, choices, mine, weight, p.expert_weights && !p.topk_weights,
        [&](i64 row) { return at<const Vec16>(p.y, row * kRowBytes); },
        [&] { return reinterpret_cast<Vec16*>(to + static_cast<i64>(i) * kRowBytes); },
        [](Vec16* sum, const Vec16& v) {
          if constexpr (kHasTma) {
            *sum = v;  // in shared memory
          } else {
            st_vec(sum, v);
          }
        });
  }
  return true;
}

__device__ inline void send_sums_bulk(const Params& p, const Routes& routes, u32 epoch, char* stages, CopyProgress& progress) {
  constexpr int kUnwritten = 2;
  WorkIterator work(queue_of(p, routes), [](int) {});
  const int lane = lane_idx();
  fence_bulk_copies();         // the block has acquired the targets' addresses and the permission to write
  int turn = 0, num_told = 0;  // chunks that are stored, and those that the signal warp knows
  auto tell = [&](int written) {
    if (written > num_told) st_release_block(&progress.written, num_told = written);
  };
  auto tell_all = [&] {  // a warp that waits keeps no chunk back
    if (lane == 0 && turn > 0) {
      bulk_wait_written<0>();
      tell(turn);
    }
  };
  for (int item = work.next(); item >= 0; item = work.next()) {
    const Chunk c = ordered_chunk(p, routes, item);
    if (c.num_rows == 0) continue;
    char* target = target_of(routes, c);
    char* stage = stages + turn % kCombineStages * kStageBytes + reinterpret_cast<u64>(target) % 128;
    if (lane == 0) bulk_wait_read<kCombineStages - 1>();
    __syncwarp();
    if (!write_sums(p, routes, epoch, c, stage, tell_all)) break;
    fence_bulk_copies_of_shared();
    __syncwarp();  // all lanes have written their parts
    if (lane == 0) {
      bulk_store(target, stage, c.num_rows * kRowBytes);
      bulk_commit();
      while (turn - static_cast<int>(ld_acquire_block(&progress.signalled)) >= CopyProgress::kRingEntries)
        continue;  // the signal warp waits for nothing, so this ends
      progress.items[turn % CopyProgress::kRingEntries] = item;
      if (turn >= kUnwritten) {
        bulk_wait_written<kUnwritten>();
        tell(turn + 1 - kUnwritten);
      }
    }
    ++turn;
  }
  if (lane == 0) {
    bulk_wait_written<0>();  // of the last chunks
    tell(turn);
    st_release_block(&progress.done, 1);
  }
  __syncwarp();
}

__device__ inline void send_sums_by_warp(const Params& p, const Routes& routes, u32 epoch) {
  WorkIterator work(queue_of(p, routes), [](int) {});
  for (int item = work.next(); item >= 0; item = work.next()) {
    const Chunk c = ordered_chunk(p, routes, item);
    if (c.num_rows == 0) continue;
    if (!write_sums(p, routes, epoch, c, target_of(routes, c), [] {})) return;
    __syncwarp();
    if (lane_idx() == 0) {
      fence_release_sys();
      raise_flag(p, c, epoch);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kCombineThreads, 1) combine_tiles(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char stages[];
  __shared__ Routes routes;
  __shared__ CopyProgress progress[kCombineCopyWarps];
  auto send_sums = [&](u32 epoch) {
    const int warp = warp_idx();
    if constexpr (kHasTma) {
      send_sums_bulk(p, routes, epoch, stages + warp * kCombineStages * kStageBytes, progress[warp]);
    } else {
      send_sums_by_warp(p, routes, epoch);
    }
  };
  combine_rows(p, routes, progress, send_sums, [&](int item) { return ordered_chunk(p, routes, item); });
}
