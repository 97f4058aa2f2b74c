// combine_choices: sends the row of each (token, choice) back to the rank of its token, and adds up a token's rows there in float32 and in
// the order of its choices. The bits of the sum do not depend on where experts live.
//
// A launch serves a window of the tokens of each rank, because the receiver stages a row for each choice. The host launches one kernel for
// each window, in order.
//
// Layout: staging at a token's rank has kNumTopk rows for each token of the window. It also has a weight for each of these rows, and for
// each (token, rank) a bit mask of the choices that the rank sends. Choices that no rank sends have no bit.
//
// Roles of the warps in each block: the first kChoicesCopyWarps warps copy rows, and then all warps add up rows. An item of the copy warps
// is a row by token with all of its choices, or nothing: neighbouring items are for different ranks, as in common/work.cuh.
//
// Protocol:
// 1. Each rank publishes its receive window (throughput/recv_window.cuh).
// 2. Copy warps push rows, weights and masks. They count finished items.
// 3. The copy warp that finishes the last item raises one flag at each rank: combine_flags[sender][0] = epoch. It has acquired the items
//    of all others. Running blocks copy all items, so no block waits for a block that has not started.
// 4. Warps wait for the flags of all ranks, and add up.
// The last block resets the counters and advances State::combine_epoch, which combine uses too.
//
// If the ranks differ in the first window, later windows do nothing: another rank may have made a call with one launch.
//
// Reuse of memory: as in combine.cu. A rank publishes the window of launch k + 1 after its launch k has read all staged rows.
//
// Bytes: a row crosses the link for each choice. The source reads each staged row once and writes each token once.
#include "common/bulk.cuh"
#include "common/work.cuh"
#include "experts/choice_sums.cuh"
#include "throughput/recv_window.cuh"

struct Routes : Members {
  RecvWindow windows[kNumRanks];  // with addresses instead of offsets; `src_idx` is the address of the masks
  int first_row[kNumRanks];       // the first row by token from a source
  int num_rows[kNumRanks];
  int num_items;  // the most rows from a source, times the sources
  bool differs;   // the ranks differ: nothing is sent
  bool idle;      // so it is, or a wait timed out
};

__device__ inline void read_routes(const Params& p, u32 epoch, u32 serial, Routes& routes) {
  const int lane = lane_idx();
  const i32* rows = at<const i32>(p.handle, kHandleNumRows);
  RecvWindow window = {};
  bool ok = true;
  int count = 0;
  if (lane < kNumRanks) {
    ok = await_window(p, kControlCombineWindows, epoch, kPhaseCombineWindow, lane, window);
    int first = 0;
    for (int s = 0; s < lane; ++s) first += rows[s * kNumRanks + p.rank];
    count = clamp_rows(at<const i32>(p.totals, 0)[1] - first, rows[lane * kNumRanks + p.rank]);
    routes.windows[lane] = window;
    routes.first_row[lane] = first;
    routes.num_rows[lane] = count;
  }
  const int most = __reduce_max_sync(~0u, count);
  const bool all_arrived = __all_sync(~0u, ok);
  const bool differs = all_arrived && ranks_differ(p, window, serial);
  if (lane == 0) {
    if constexpr (kHasSlots) static_cast<Members&>(routes) = Members(p);
    routes.num_items = most * routes.count();
    routes.differs = differs;
    routes.idle = !all_arrived || differs || was_aborted(p);
  }
}

// The source rank and token of a row by token.
__device__ __forceinline__ int2 source_at(const Params& p, int row) { return at<const int2>(p.sources, 0)[row]; }

// Tells the source which choices of a row by token arrive, and their weights. Returns the choices, or 0 outside of the window.
__device__ inline u32 announce(const Params& p, const Routes& routes, int row) {
  const int lane = lane_idx();
  const int2 source = source_at(p, row);
  const int token = source.y - p.first_token;
  if (static_cast<u32>(source.x) >= kNumRanks || token < 0 || token >= p.window_tokens) return 0;
  const int position = lane < kNumTopk ? at<const i32>(p.positions, 0)[static_cast<i64>(row) * kNumTopk + lane] : -1;
  const u32 choices = __ballot_sync(~0u, position >= 0);
  const RecvWindow& window = routes.windows[source.x];
  if (lane == 0) at<u32>(window.src_idx, 0)[static_cast<i64>(token) * kNumRanks + p.rank] = choices;
  if (p.topk_weights && position >= 0)
    at<float>(window.topk_weights, 0)[static_cast<i64>(token) * kNumTopk + lane] = at<const float>(p.topk_weights, 0)[position];
  if (lane == 0) count_sent(p, __popc(choices), kRowBytes);
  __syncwarp();  // lane 0 releases what all lanes wrote
  return choices;
}

// An item of the pipeline is one choice of a row by token.
__device__ __forceinline__ int entry_of(int row, int choice) { return row * 32 + choice; }

__device__ __forceinline__ char* target_of(const Params& p, const Routes& routes, int entry) {
  const int2 source = source_at(p, entry / 32);
  const i64 slot = static_cast<i64>(source.y - p.first_token) * kNumTopk + entry % 32;
  return at<char>(routes.windows[source.x].x, slot * kRowBytes);
}

__device__ __forceinline__ const char* row_of(const Params& p, int entry) {
  const i64 position = at<const i32>(p.positions, 0)[static_cast<i64>(entry / 32) * kNumTopk + entry % 32];
  return at<const char>(p.y, position * kRowBytes);
}

__device__ inline void raise_flags(const Params& p, u32 epoch) {
  for (int r = 0; r < kNumRanks; ++r) {
    if (!is_absent(p, r)) st_release_sys(at<u32>(p.peers[r], kControlCombineFlags) + p.rank * kMaxCombineChunks, epoch);
  }
}

// One lane calls this, after its warp's items are written.
__device__ inline void finish_items(const Params& p, const Routes& routes, int num_done, u32 epoch) {
  if (num_done == 0) return;
  const u32 before = add_acq_rel_sys(&at<State>(p.state, 0)->combine_copied, num_done);
  if (before + num_done == routes.num_items) raise_flags(p, epoch);
}

__device__ inline void copy_rows(const Params& p, const Routes& routes, u32 epoch, char* stages, u64* barriers) {
  u32* tickets = &at<State>(p.state, 0)->combine_items;
  WorkIterator work(make_work_queue(tickets, routes.num_items, gridDim.x * kChoicesCopyWarps, kCombineItemsPerTicket), [](int) {});
  int row = -1, num_done = 0;
  u32 choices = 0;
  auto next = [&] {
    while (choices == 0) {
      const int j = work.next();
      if (j < 0) return -1;
      ++num_done;
      const Item it = item_at(routes, j, p.rank);
      row = routes.first_row[it.rank] + it.chunk;
      if (it.chunk < routes.num_rows[it.rank]) choices = announce(p, routes, row);
    }
    const int choice = __ffs(choices) - 1;
    choices &= choices - 1;
    return entry_of(row, choice);
  };
  if constexpr (kHasTma) {
    auto target = [&](int entry) { return target_of(p, routes, entry); };
    auto load = [&](int entry, char* stage, u64* barrier) {
      if (lane_idx() == 0) {
        barrier_expect(barrier, kRowBytes);
        bulk_load(stage, row_of(p, entry), kRowBytes, barrier);
      }
      return true;
    };
    auto store = [&](int, int entry, char* stage) { bulk_store(target(entry), stage, kRowBytes); };
    auto written = [&](int, bool all) {
      if (all) finish_items(p, routes, num_done, epoch);
    };
    bulk_pipeline<kChoicesStages, kChoicesStages / 2, 4>(stages, barriers, next, target, load, store, written);
  } else {
    for (int entry = next(); entry >= 0; entry = next()) warp_copy(target_of(p, routes, entry), row_of(p, entry), kRowBytes);
    __syncwarp();
    if (lane_idx() == 0) finish_items(p, routes, num_done, epoch);
  }
}

// The row of a choice: a token's staged rows lie in the order of its choices.
struct StagedRows {
  u64 rows;

  __device__ __forceinline__ u64 operator()(int choice) const { return rows + static_cast<u64>(choice) * kRowBytes; }
};

__device__ inline void reduce_tokens(const Params& p, u32 epoch) {
  const int lane = lane_idx();
  const u64 base = p.peers[p.rank];
  const u32* flags = at<const u32>(base, kControlCombineFlags);
  bool ok = true;
  if (lane < kNumRanks && !is_absent(p, lane)) ok = wait_epoch(p, flags + lane * kMaxCombineChunks, epoch, kPhaseCombineRows, lane);
  const bool all_ok = __all_sync(~0u, ok);
  __syncwarp();  // all lanes may read what lanes 0 .. kNumRanks-1 acquired
  if (!all_ok) return;
  const int in_window = clamp_rows(p.num_tokens - p.first_token, p.window_tokens);
  WorkIterator work({&at<State>(p.state, 0)->combine_tokens, in_window, 1}, [](int) {});
  for (int i = work.next(); i >= 0; i = work.next()) {
    const int token = p.first_token + i;
    u32 sent = 0;
    if (lane < kNumRanks && at<const i32>(p.handle, kHandleSendPos)[static_cast<i64>(token) * kNumRanks + lane] >= 0)
      sent = ld_relaxed_sys(at<const u32>(base, p.recv_masks_offset) + static_cast<i64>(i) * kNumRanks + lane);
    const u32 choices = __reduce_or_sync(~0u, sent);
    if (lane == 0) count_received(p, __popc(choices), kRowBytes);
    const bool is_mine = lane < kNumTopk && (choices >> lane & 1);
    float weight = 0;
    if (p.topk_weights && is_mine)
      weight = ld_relaxed_sys(at<const float>(base, p.recv_topk_weights_offset) + static_cast<i64>(i) * kNumTopk + lane);
    if (p.topk_weights && !p.is_weighted && lane < kNumTopk)
      at<float>(p.out_topk_weights, 0)[static_cast<i64>(token) * kNumTopk + lane] = weight;
    reduce_choices(p, StagedRows{base + p.recv_x_offset + static_cast<u64>(i) * kNumTopk * kRowBytes}, choices, weight, token);
  }
}

extern "C" __global__ void __launch_bounds__(kChoicesThreads, 1) combine_choices(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char stages[];
  __shared__ Routes routes;
  __shared__ u64 barriers[kChoicesCopyWarps * kChoicesStages];
  State* state = at<State>(p.state, 0);
  const int warp = warp_idx(), lane = lane_idx();
  if (p.first_token > 0 && state->combine_differs) return;  // the first window has said so
  const u32 epoch = state->combine_epoch + 1;
  const u32 serial = serial_of(p);
  if (serial == kNoSerial) {  // see recv_window.cuh
    poison_sums(p, blockIdx.x * kChoicesThreads + threadIdx.x, gridDim.x * kChoicesThreads);
    return;
  }
  clear_next_waits(p, epoch, kPhaseCombineWindow, kPhaseCombineRows);

  if (blockIdx.x == 0 && warp == 1 && lane < kNumRanks) {
    publish(p, kControlCombineWindows, epoch, lane,
            {p.recv_x_offset, 0, 0, p.recv_topk_weights_offset, p.recv_masks_offset, 0, p.call_signature, serial});
  }
  if (warp == 0) read_routes(p, epoch, serial, routes);
  __syncthreads();

  if (!routes.idle) {
    if (blockIdx.x == 0 && threadIdx.x == 0 && routes.num_items == 0) raise_flags(p, epoch);
    if (warp < kChoicesCopyWarps) {
      copy_rows(p, routes, epoch, stages + warp * kChoicesStages * kStageBytes, barriers + warp * kChoicesStages);
    }
    reduce_tokens(p, epoch);
  }
  __syncthreads();

  if (warp != 0 || !is_warp_of_last_block(&state->combine_blocks)) return;
  if (__any_sync(~0u, routes.idle || was_aborted(p))) poison_sums(p, lane, 32);
  if (lane == 0) {
    if (p.first_token == 0) count_call(p);  // the other windows belong to the same call
    state->combine_blocks = state->combine_items = state->combine_tokens = state->combine_copied = 0;
    state->combine_differs = routes.differs;
    state->combine_epoch = epoch;
  }
}
