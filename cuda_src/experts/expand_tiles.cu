// expand_tiles: sends rows in the order of their experts, copies each row to the rows of its experts as it arrives, and raises a word for
// each tile of rows that is complete. A consumer on other SMs can then start with a tile while later rows travel.
//
// A dispatch before this kernel has sent the small arrays, so all ranks know their windows and positions. Instead of each row it has sent
// 16 bytes, which hold its place. expert_positions, expand_rows and prepare_tiles ran behind it.
//
// Roles of the blocks:
// - The first num_sending blocks push rows to the other ranks. Copy warps take places of `order` in turn. A signal warp raises a word for
//   each row that is written: the place and the row. It raises all due words after each fence.
// - Copy warps expand rows: those of the own rank from x, those of other ranks where they arrived. They claim places in ascending order.
//   The other warps of blocks that do not send fill the padding.
// - Sending blocks expand rows too once they have sent, if all of them have begun to send by then. Otherwise they end: if few SMs are free,
//   a block that waits for rows would keep the SM of one that has to send.
// Sending warps wait for nothing, and the memory for arriving rows holds all of them. So the kernel cannot deadlock while the blocks of
// each rank get to run.
//
// Protocol:
// 1. arrivals[source][place] = (row, epoch) at the receiver, after the row is written. The epoch is that of the dispatch before. A row that
//    does not fit has the word kNoRow.
// 2. tile_left[tile] counts the rows of a tile that are missing, and one more for its padding. A lane counts down with acquire and release
//    after its copy of a row is written. The last one releases tile_ready[tile] = 1.
// If a wait times out or ranks differ, all rows become NaN and all tiles ready, so no consumer waits for ever.
//
// Reuse of memory: a peer raises words of epoch k + 1 after it has read window k + 1 of this rank, which this rank published after this
// kernel. The next call overwrites arriving rows for the same reason. The 16 bytes of a slow rank may lie inside of a row of a fast one.
// They come first: the fast rank sends rows after its dispatch has seen the flag of the slow one, which releases all of its writes. The
// stream of the call has cleared tile_ready before.
//
// Bytes: each row is read once for each other rank and crosses the link once. It is then read once and written for each of its experts.
#include "common/bulk.cuh"
#include "common/work.cuh"
#include "experts/tile_words.cuh"
#include "throughput/recv_window.cuh"

constexpr u32 kNoRow = ~0u;
constexpr u32 kNan = ~0u;  // of every floating-point type
constexpr int kPaddingWarps = kTilesThreads / 32 - kTilesCopyWarps;
static_assert(kPaddingWarps >= 1 && kTilesCopyWarps <= 32);

struct Routes : Members {
  u64 to_x[kNumRanks];           // address of this rank's first row at a receiver
  i64 first_row[kNumRanks];      // of a source here
  int num_listed[kNumRanks];     // rows for a receiver, with those that do not fit
  int num_sent[kNumRanks];       // rows that fit there
  int num_arriving[kNumRanks];   // rows that a source lists for this rank
  int max_listed, max_arriving;  // of the other ranks; of all ranks
  bool idle;                     // a wait timed out or the ranks differ
};

__device__ inline void read_routes(const Params& p, u32 epoch, Routes& routes) {
  const int lane = lane_idx();
  const i32* rows = at<const i32>(p.handle, kHandleNumRows);
  const u32 own_serial = serial_of(p), serial = p.follows_route ? kNoSerial : own_serial;
  RecvWindow window = {};
  bool ok = own_serial != kNoSerial;
  int listed = 0, arriving = 0;
  if (ok && lane < kNumRanks) ok = await_window(p, kControlDispatchWindows, epoch, kPhaseDispatchWindow, lane, window);
  const bool agreed = __all_sync(~0u, ok) && !ranks_differ(p, window, serial, false);
  if (lane < kNumRanks && agreed) {
    i64 there = 0, here = 0;
    for (int s = 0; s < p.rank; ++s) there += rows[s * kNumRanks + lane];
    for (int s = 0; s < lane; ++s) here += rows[s * kNumRanks + p.rank];
    listed = rows[p.rank * kNumRanks + lane];
    arriving = rows[lane * kNumRanks + p.rank];
    routes.to_x[lane] = window.x + there * p.row_bytes;
    routes.first_row[lane] = here;
    routes.num_sent[lane] = clamp_rows(window.capacity - there, listed);
    routes.num_listed[lane] = listed;
    routes.num_arriving[lane] = arriving;
  }
  const int max_listed = __reduce_max_sync(~0u, lane == p.rank ? 0 : listed), max_arriving = __reduce_max_sync(~0u, arriving);
  if (lane == 0) {
    static_cast<Members&>(routes) = Members(p);
    routes.max_listed = max_listed;
    routes.max_arriving = max_arriving;
    routes.idle = !agreed || was_aborted(p);
  }
}

// An entry of `order`: a row among those for a rank, and its token.
__device__ __forceinline__ int2 entry_at(const Params& p, int rank, int place) {
  return at<const int2>(p.order, 0)[rank * kNumMaxTokens + place];
}

__device__ __forceinline__ void raise_word(const Params& p, int item, u32 row, u32 epoch) {
  const int rank = item / kNumMaxTokens, place = item % kNumMaxTokens;
  st_relaxed_sys(at<u64>(p.peers[rank], kControlArrivals) + p.rank * kNumMaxTokens + place, tagged_word(row, epoch));
}

// A copy warp's message to the signal warp: the number of its written rows, and the items.
struct Sent {
  static constexpr int kRingEntries = 32;
  u32 written;
  u32 signalled;  // the signal warp's answer: entries of the ring that are free again
  u32 done;       // 1: no more items follow
  i32 items[kRingEntries];
};

// The items of the other ranks. Neighbouring items are for different ranks. An item is a rank and a place: rank * kNumMaxTokens + place.
struct SendQueue {
  const Routes& routes;
  int next_item, step, num_items, others, my_rank;

  __device__ SendQueue(const Params& p, const Routes& routes, int worker, int num_workers)
      : routes(routes), next_item(worker), step(num_workers), others(max(routes.count() - 1, 1)), my_rank(p.rank) {
    num_items = routes.count() > 1 ? routes.max_listed * others : 0;
  }

  // Returns -1 when no item is left.
  __device__ __forceinline__ int next() {
    for (; next_item < num_items; next_item += step) {
      const int place = next_item / others;
      const int rank = routes.at(routes.modulo(routes.place(my_rank) + 1 + (next_item + place) % others));
      if (place >= routes.num_listed[rank]) continue;
      next_item += step;
      return rank * kNumMaxTokens + place;
    }
    return -1;
  }
};

__device__ inline void send_rows_bulk(const Params& p, const Routes& routes, u32 epoch, char* stages, u64* barriers, Sent& sent) {
  const int lane = lane_idx();
  SendQueue queue(p, routes, blockIdx.x * kTilesCopyWarps + warp_idx(), p.num_sending * kTilesCopyWarps);
  auto entry = [&](int item) { return entry_at(p, item / kNumMaxTokens, item % kNumMaxTokens); };
  auto target = [&](int item) { return at<char>(routes.to_x[item / kNumMaxTokens], static_cast<u64>(entry(item).x) * p.row_bytes); };
  auto load = [&](int item, char* stage, u64* barrier) {
    const int2 row = entry(item);
    const bool fits = row.x < routes.num_sent[item / kNumMaxTokens];
    if (lane == 0) {
      if (fits) {
        barrier_expect(barrier, p.row_bytes);
        bulk_load(stage, at<const char>(p.x, static_cast<u64>(row.y) * p.row_bytes), p.row_bytes, barrier);
      } else {
        raise_word(p, item, kNoRow, epoch);
      }
    }
    return fits;
  };
  auto store = [&](int turn, int item, char* stage) {
    bulk_store(target(item), stage, p.row_bytes);
    while (turn - static_cast<int>(ld_acquire_block(&sent.signalled)) >= Sent::kRingEntries)
      continue;  // the signal warp waits for nothing, so this ends
    sent.items[turn % Sent::kRingEntries] = item;
  };
  auto written = [&](int count, bool all) {
    st_release_block(&sent.written, count);
    if (all) st_release_block(&sent.done, 1);
  };
  bulk_pipeline<kTilesStages, (kTilesStages + 1) / 2, 1>(stages, barriers, [&] { return queue.next(); }, target, load, store, written);
}

// Lane m follows copy warp m. This loop has no time limit, because copy warps wait only for the copy engine of their SM.
__device__ inline void signal_rows(const Params& p, u32 epoch, Sent* sent) {
  const bool follows = lane_idx() < kTilesCopyWarps;
  Sent& mine = sent[follows ? lane_idx() : 0];
  u32 signalled = 0;
  for (bool done = false; !done;) {
    done = __all_sync(~0u, !follows || ld_acquire_block(&mine.done));  // read before `written`, which is final then
    const u32 now = follows ? ld_acquire_block(&mine.written) : 0;
    if (!__any_sync(~0u, now > signalled)) continue;
    fence_release_sys();
    for (; signalled < now; ++signalled) {
      const int item = mine.items[signalled % Sent::kRingEntries];
      raise_word(p, item, entry_at(p, item / kNumMaxTokens, item % kNumMaxTokens).x, epoch);
    }
    if (follows) st_release_block(&mine.signalled, signalled);
  }
}

__device__ inline void send_rows_by_warp(const Params& p, const Routes& routes, u32 epoch) {
  SendQueue queue(p, routes, blockIdx.x * kTilesCopyWarps + warp_idx(), p.num_sending * kTilesCopyWarps);
  for (int item = queue.next(); item >= 0; item = queue.next()) {
    const int rank = item / kNumMaxTokens;
    const int2 row = entry_at(p, rank, item % kNumMaxTokens);
    const bool fits = row.x < routes.num_sent[rank];
    if (fits) {
      warp_copy(at<char>(routes.to_x[rank], static_cast<u64>(row.x) * p.row_bytes),
                at<const char>(p.x, static_cast<u64>(row.y) * p.row_bytes), p.row_bytes);
      __syncwarp();  // lane 0 releases what all lanes wrote
    }
    if (lane_idx() == 0) {
      fence_release_sys();
      raise_word(p, item, fits ? row.x : kNoRow, epoch);
    }
  }
}

// Called by all lanes. Whether all sending blocks have begun, so that none of them waits for an SM.
__device__ __forceinline__ bool all_send(const Params& p) {
  const u32 sending = lane_idx() == 0 ? ld_relaxed_gpu(&at<State>(p.state, 0)->tiles_sending) : 0;
  return static_cast<int>(__shfl_sync(~0u, sending, 0)) == p.num_sending;
}

// Counts down the tile of a row whose copy is written, and tells the consumer of the last one.
__device__ __forceinline__ void count_down(const Params& p, int tile) {
  if (add_acq_rel_gpu(at<u32>(p.tile_left, 0) + tile, ~0u) == 1) st_release_sys(at<u32>(p.tile_ready, 0) + tile, kTileReady);
}

// A row that is here.
struct Arrived {
  u64 from;  // where it lies
  i64 row;   // its number among the rows by token; -1: none
};

// Called by all lanes. False: a wait timed out.
__device__ __forceinline__ bool await_row(const Params& p, const Routes& routes, u32 epoch, int source, int place, Arrived& arrived) {
  if (source == p.rank) {
    const int2 entry = entry_at(p, source, place);
    arrived.row = entry.x < routes.num_sent[source] ? routes.first_row[source] + entry.x : -1;
    arrived.from = p.x + static_cast<u64>(entry.y) * p.row_bytes;
    return true;
  }
  u64 word = 0;
  bool ok = true;
  if (lane_idx() == 0) {
    const u64* words = at<const u64>(p.peers[p.rank], kControlArrivals) + source * kNumMaxTokens;
    ok = wait_until(p, epoch, kPhaseDispatchRows, source, [&](u32& seen) {
      word = ld_acquire_sys(words + place);
      seen = static_cast<u32>(word);
      return seen == epoch;
    });
  }
  ok = __shfl_sync(~0u, ok, 0);
  const u32 row = __shfl_sync(~0u, static_cast<u32>(word >> 32), 0);
  arrived.row = row == kNoRow ? -1 : routes.first_row[source] + row;
  arrived.from = p.peers[p.rank] + p.recv_x_offset + static_cast<u64>(arrived.row) * p.row_bytes;
  return ok;
}

__device__ __forceinline__ char* expert_row(const Params& p, i64 row) { return at<char>(p.out_x, row * p.row_bytes); }

// Calls copy(from, mine) for the rows of this warp, as they arrive. `mine` is the row of choice `lane` of each, or -1.
template <class Copy>
__device__ __forceinline__ void for_each_arriving_row(const Params& p, const Routes& routes, u32 epoch, Copy copy) {
  const WorkQueue queue = {&at<State>(p.state, 0)->dispatch_items, routes.max_arriving * routes.count(), 1};
  WorkIterator items(queue, [](int) {});
  for (int item = items.next(); item >= 0; item = items.next()) {
    const Item it = item_at(routes, item, p.rank);
    if (it.chunk >= routes.num_arriving[it.rank]) continue;
    Arrived arrived;
    if (!await_row(p, routes, epoch, it.rank, it.chunk, arrived)) return;
    if (arrived.row < 0) continue;
    const int mine = lane_idx() < kNumTopk ? at<const i32>(p.positions, 0)[arrived.row * kNumTopk + lane_idx()] : -1;
    if (__any_sync(~0u, mine >= 0)) copy(arrived.from, mine);
  }
}

// For sm_90. Lane k copies a row to the row of its choice k, waits for its own copy, and counts it.
__device__ inline void expand_bulk(const Params& p, const Routes& routes, u32 epoch, char* stages, u64* barriers) {
  const int lane = lane_idx();
  if (lane == 0) {
    for (int i = 0; i < kTilesStages; ++i) barrier_init(barriers + i);
    barrier_init_fence();
  }
  __syncwarp();
  int before = -1;  // this lane's row of the item before, whose copy may not be written yet
  u32 turn = 0;
  for_each_arriving_row(p, routes, epoch, [&](u64 from, int mine) {
    const int first = __shfl_sync(~0u, mine, __ffs(__ballot_sync(~0u, mine >= 0)) - 1), stage = turn % kTilesStages;
    char* held = stages + stage * kStageBytes + reinterpret_cast<u64>(expert_row(p, first)) % 128;
    if (lane == 0) {        // all copies out of this stage are written: each lane has waited for its own
      fence_bulk_copies();  // the copy comes after what await_row has acquired
      barrier_expect(barriers + stage, p.row_bytes);
      bulk_load(held, at<const char>(from, 0), p.row_bytes, barriers + stage);
    }
    __syncwarp();
    barrier_wait(barriers + stage, turn / kTilesStages % 2);
    if (mine >= 0) bulk_store(expert_row(p, mine), held, p.row_bytes);
    bulk_commit();
    bulk_wait_written<1>();
    if (before >= 0) count_down(p, before / p.tile_rows);
    before = mine;
    ++turn;
    __syncwarp();
  });
  bulk_wait_written<0>();
  if (before >= 0) count_down(p, before / p.tile_rows);
  __syncwarp();
}

__device__ inline void expand_by_warp(const Params& p, const Routes& routes, u32 epoch) {
  for_each_arriving_row(p, routes, epoch, [&](u64 from, int mine) {
    for (u32 rest = __ballot_sync(~0u, mine >= 0); rest; rest &= rest - 1)
      warp_copy(expert_row(p, __shfl_sync(~0u, mine, __ffs(rest) - 1)), at<const char>(from, 0), p.row_bytes);
    __syncwarp();  // each lane releases what all lanes wrote
    if (mine >= 0) count_down(p, mine / p.tile_rows);
  });
}

__device__ inline void fill_rows(const Params& p, i64 begin, i64 end, u32 word) {
  const Vec16 vec = {{word, word, word, word}};
  const i64 vecs = p.row_bytes / 16;
  for (i64 i = begin * vecs + lane_idx(); i < end * vecs; i += 32) st_vec(at<Vec16>(p.out_x, 0) + i, vec);
}

// Zeros in shared memory, from which bulk copies fill rows. A warp has many of them in flight, and its own stores would wait for memory.
constexpr int kZeroBytes = 4096;

__device__ inline void fill_with_zeros(const Params& p, i64 begin, i64 end, const char* zeros) {
  if constexpr (kHasTma) {
    for (i64 row = begin + lane_idx(); row < end; row += 32) {
      for (int first = 0; first < p.row_bytes; first += kZeroBytes)
        bulk_store(at<char>(p.out_x, row * p.row_bytes + first), zeros, min(kZeroBytes, p.row_bytes - first));
    }
    bulk_commit();
    bulk_wait_written<0>();
  } else {
    fill_rows(p, begin, end, 0);
  }
}

// Fills the padding of the tiles of an expert; of all rows past the last expert, if `expert` is the number of experts. One warp calls it.
__device__ inline void finish_tiles(const Params& p, int expert, const char* zeros) {
  const i32* offsets = at<const i32>(p.offsets, 0);
  const bool is_tail = expert == kNumLocalExperts;
  const int begin = offsets[expert], end = is_tail ? p.num_rows : offsets[expert + 1];
  const int filled = is_tail ? begin : at<const i32>(p.ends, 0)[expert];  // -1: the rows did not arrive
  for (int first = begin; first < end; first += p.tile_rows) {
    const int last = min(first + p.tile_rows, end);
    if (filled < 0) {
      fill_rows(p, first, last, kNan);
    } else if (p.zero_padding) {
      fill_with_zeros(p, max(first, filled), last, zeros);
    }
    __syncwarp();  // lane 0 releases what all lanes wrote
    if (lane_idx() == 0) count_down(p, first / p.tile_rows);
  }
}

// Called by one warp of the last block, if the call failed.
__device__ inline void poison_tiles(const Params& p) {
  poison(p.out_x, static_cast<u64>(p.num_rows) * p.row_bytes, lane_idx(), 32);
  __syncwarp();
  fence_release_sys();
  const int num_tiles = (p.num_rows + p.tile_rows - 1) / p.tile_rows;
  for (int tile = lane_idx(); tile < num_tiles; tile += 32) st_release_sys(at<u32>(p.tile_ready, 0) + tile, kTileReady);
}

__device__ inline void count_bytes(const Params& p, const Routes& routes) {
  if constexpr (kHasStatistics) {
    u64 sent = 0, received = 0;
    for (int r = 0; r < kNumRanks && !routes.idle; ++r) sent += routes.num_sent[r], received += routes.num_arriving[r];
    add_relaxed_gpu(&statistics_of(p)->bytes_sent, sent * (p.row_bytes - p.place_bytes));  // the dispatch has counted the places
    add_relaxed_gpu(&statistics_of(p)->bytes_received, received * (p.row_bytes - p.place_bytes));
  }
}

extern "C" __global__ void __launch_bounds__(kTilesThreads, 1) expand_tiles(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char stages[];
  __shared__ Routes routes;
  __shared__ Sent sent[kTilesCopyWarps];
  __shared__ u64 barriers[2][kTilesCopyWarps * kTilesStages];  // to send, to expand
  __shared__ Vec16 zeros[(kZeroBytes + 128) / sizeof(Vec16)];
  await_predecessor();
  State* state = at<State>(p.state, 0);
  const int warp = warp_idx();
  const u32 epoch = state->dispatch_epoch;  // of the dispatch before
  if (threadIdx.x < kTilesCopyWarps) sent[threadIdx.x].written = sent[threadIdx.x].signalled = sent[threadIdx.x].done = 0;
  if (kHasTma && p.zero_padding) {
    for (int i = threadIdx.x; i < (kZeroBytes + 128) / 16; i += kTilesThreads) zeros[i] = {};
    fence_bulk_copies_of_shared();
  }
  if (warp == 0) read_routes(p, epoch, routes);
  __syncthreads();

  if (!routes.idle) {
    char* my_stages = stages + warp * kTilesStages * kStageBytes;
    u64* my_barriers[2] = {barriers[0] + warp * kTilesStages, barriers[1] + warp * kTilesStages};
    const bool copies = warp < kTilesCopyWarps, sends = blockIdx.x < p.num_sending;
    if (sends && threadIdx.x == 0) add_relaxed_gpu(&state->tiles_sending, 1);
    if (copies) {
      if constexpr (kHasTma) {
        if (sends) send_rows_bulk(p, routes, epoch, my_stages, my_barriers[0], sent[warp]);
        if (!sends || all_send(p)) expand_bulk(p, routes, epoch, my_stages, my_barriers[1]);
      } else {
        if (sends) send_rows_by_warp(p, routes, epoch);
        if (!sends || all_send(p)) expand_by_warp(p, routes, epoch);
      }
    } else if (sends) {
      if (kHasTma && warp == kTilesCopyWarps) signal_rows(p, epoch, sent);
    } else {
      const int worker = (blockIdx.x - p.num_sending) * kPaddingWarps + warp - kTilesCopyWarps;
      for (int e = worker; e <= kNumLocalExperts; e += (gridDim.x - p.num_sending) * kPaddingWarps)
        finish_tiles(p, e, first_line(reinterpret_cast<char*>(zeros)));
    }
  }
  __syncthreads();

  if (warp != 0 || !is_warp_of_last_block(&state->dispatch_blocks)) return;
  if (routes.idle || was_aborted(p)) poison_tiles(p);
  if (lane_idx() == 0) {
    count_bytes(p, routes);
    state->dispatch_blocks = state->dispatch_items = state->tiles_sending = 0;
  }
}
