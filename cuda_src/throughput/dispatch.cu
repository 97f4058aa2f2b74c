// dispatch: sends the rows of a known routing to their final positions at the receivers.
//
// Roles of the warps in each block:
// - kDispatchCopyWarps copy warps copy rows. With TMA, one thread of each copy warp issues bulk copies. Without TMA, the whole warp copies.
// - Metadata warps copy the small arrays: the source of each row, the expert numbers and weights as the receiver sees them, scales, and
//   this rank's counts.
// Rows for a rank follow the order of send_list. A chunk of them is therefore contiguous at the receiver and leaves as one copy.
//
// Protocol:
// 1. Each rank publishes its receive window and waits for the windows of all peers (recv_window.cuh). A route before this kernel has done
//    both.
// 2. The copy warps push rows.
// 3. The last block of a rank to finish raises one flag at each peer, and waits for the flags of all peers. Its flag releases the writes of
//    all blocks.
// The last block also resets State::dispatch_blocks and State::dispatch_items, and advances State::dispatch_epoch.
//
// Reuse of memory: recv_window.cuh says why rows may overwrite older ones. One flag for each source is enough. A peer raises the flag of
// epoch k + 1 after it has read window k + 1 of this rank. This rank publishes that window after its kernel k has seen flag k.
//
// Bytes: each row is read once from local memory for each destination rank; later reads hit L2. It crosses the link once for each of these
// ranks. Least time: the bytes of all remote rows divided by the copy bandwidth.
#include "common/bulk.cuh"
#include "common/work.cuh"
#include "throughput/recv_window.cuh"
#include "throughput/results.cuh"

constexpr int kMetadataWarps = kDispatchThreads / 32 - kDispatchCopyWarps;
constexpr int kMetadataRows = 32;

struct Routes : Members {
  RecvWindow windows[kNumRanks];  // with addresses instead of offsets
  i64 first[kNumRanks];           // the first row of this rank at the receiver
  int num_rows[kNumRanks];        // rows to send that fit there
  int num_listed[kNumRanks];      // rows of send_list, with those that do not fit
  int max_rows;                   // the largest of num_rows
  int max_listed;
  i64 num_recv;  // rows that arrive here
  bool differs;  // the ranks differ: nothing is sent
  bool failed;
};

__device__ inline void read_routes(const Params& p, u32 epoch, u32 serial, Routes& routes) {
  const int lane = lane_idx();
  const i32* rows = at<i32>(p.handle, kHandleNumRows);
  RecvWindow window = {};
  bool ok = true;
  int fits = 0, listed = 0;
  i64 first = 0, arriving = 0;
  if (lane < kNumRanks) {  // while the windows are on the way
    for (int s = 0; s < p.rank; ++s) first += rows[s * kNumRanks + lane];
    listed = rows[p.rank * kNumRanks + lane];
    for (int s = 0; s < kNumRanks; ++s) arriving += rows[s * kNumRanks + p.rank];
    ok = await_window(p, kControlDispatchWindows, epoch, kPhaseDispatchWindow, lane, window);
  }
  const bool all_arrived = __all_sync(~0u, ok);
  const bool sends = all_arrived && !ranks_differ(p, window, serial, !p.follows_route);
  if (lane < kNumRanks) {
    if (!sends) listed = arriving = 0;
    fits = clamp_rows(window.capacity - first, listed);
    routes.windows[lane] = window;
    routes.first[lane] = first;
    routes.num_rows[lane] = fits;
    routes.num_listed[lane] = listed;
  }
  const int max_rows = __reduce_max_sync(~0u, fits), max_listed = __reduce_max_sync(~0u, listed);
  if (lane == 0) {
    if constexpr (kHasSlots) static_cast<Members&>(routes) = Members(p);
    routes.max_rows = max_rows;
    routes.max_listed = max_listed;
    routes.num_recv = arriving;
    routes.differs = all_arrived && !sends;
    routes.failed = !all_arrived || was_aborted(p);
    if (blockIdx.x == 0 && arriving > p.capacity) report_event(p, &Report::no_room, static_cast<u64>(arriving) << 32 | p.capacity);
  }
}

// Rows follow the order of send_list. A ticket stands for a few copies of rows_per_copy rows.
__device__ inline WorkQueue queue_of(const Params& p, const Routes& routes, int num_workers) {
  const int max_chunks = (routes.max_rows + p.rows_per_copy - 1) / p.rows_per_copy;
  return make_work_queue(&at<State>(p.state, 0)->dispatch_items, max_chunks * routes.count(), num_workers,
                         min(kDispatchItemsPerTicket, 32 / p.rows_per_copy));
}

// For sm_90. Lanes read the tokens of a ticket one ticket early, so that no copy waits for the list.
__device__ inline void copy_rows_bulk(const Params& p, const Routes& routes, char* stages, u64* barriers) {
  const int lane = lane_idx(), rows_per_copy = p.rows_per_copy;
  const int num_workers = gridDim.x * kDispatchCopyWarps;
  const WorkQueue queue = queue_of(p, routes, num_workers);
  const i32* send_list = at<i32>(p.handle, kHandleSendList);

  // Lane l holds the token of row l % rows_per_copy of copy l / rows_per_copy of a ticket; -1: that row does not exist.
  const int my_copy = lane / rows_per_copy, my_row = lane % rows_per_copy;
  int token = -1, next_token = -1;
  auto prefetch = [&](int first) {
    token = next_token;
    next_token = -1;
    if (my_copy >= queue.per_ticket || first + my_copy >= queue.num_items) return;
    const Item it = item_at(routes, first + my_copy, p.rank);
    const int position = it.chunk * rows_per_copy + my_row;
    if (position < routes.num_rows[it.rank]) next_token = send_list[it.rank * kNumMaxTokens + position];
  };
  WorkIterator work(queue, prefetch);

  auto target = [&](int item) {
    const Item it = item_at(routes, item, p.rank);
    const u64 row = routes.first[it.rank] + it.chunk * rows_per_copy;
    return at<char>(routes.windows[it.rank].x, row * p.row_bytes);
  };
  auto load = [&](int item, char* stage, u64* barrier) {
    const bool mine = my_copy == item % queue.per_ticket && token >= 0;
    const int num_rows = __popc(__ballot_sync(~0u, mine));
    if (num_rows == 0) return false;
    if (lane == 0) barrier_expect(barrier, num_rows * p.row_bytes);
    __syncwarp();
    if (mine) bulk_load(stage + my_row * p.row_bytes, at<char>(p.x, static_cast<u64>(token) * p.row_bytes), p.row_bytes, barrier);
    return true;
  };
  auto store = [&](int, int item, char* stage) {
    const Item it = item_at(routes, item, p.rank);
    const int num_rows = rows_in_chunk(routes.num_rows[it.rank], it.chunk, rows_per_copy);
    bulk_store(target(item), stage, num_rows * p.row_bytes);
  };
  bulk_pipeline<kDispatchStages, kDispatchStages / 2, 4>(
      stages, barriers, [&] { return work.next(); }, target, load, store, [](int, bool) {});
}

// Without TMA, a copy is one row.
__device__ inline void copy_rows_by_warp(const Params& p, const Routes& routes) {
  const int num_workers = gridDim.x * kDispatchCopyWarps;
  const i32* send_list = at<i32>(p.handle, kHandleSendList);
  WorkIterator work(queue_of(p, routes, num_workers), [](int) {});
  for (int item = work.next(); item >= 0; item = work.next()) {
    const Item it = item_at(routes, item, p.rank);
    const int end = min((it.chunk + 1) * p.rows_per_copy, routes.num_rows[it.rank]);
    for (int position = it.chunk * p.rows_per_copy; position < end; ++position) {
      const u64 token = send_list[it.rank * kNumMaxTokens + position];
      const u64 row = routes.first[it.rank] + position;
      warp_copy(at<char>(routes.windows[it.rank].x, row * p.row_bytes), at<char>(p.x, token * p.row_bytes), p.row_bytes);
    }
  }
}

// Copies the scales of `num_rows` rows in units of T. They are contiguous at the receiver.
template <class T>
__device__ inline void copy_scales(const Params& p, u64 to, int my_token, int num_rows) {
  const int pieces = p.scale_bytes / sizeof(T), total = num_rows * pieces;
  for (int first = 0; first < total; first += 32) {
    const int i = first + lane_idx(), row = i / pieces;
    const u64 token = __shfl_sync(~0u, my_token, row % 32);
    if (i < total) at<T>(to, 0)[i] = at<const T>(p.scales, token * p.scale_bytes)[i - row * pieces];
  }
}

// Copies the expert numbers and weights of `num_rows` rows, as rank `to_rank` sees them. Lanes without a row write nothing.
template <class Index>
__device__ inline void copy_topk(const Params& p, const RecvWindow& window, int to_rank, i64 first_row, int my_token, int num_rows) {
  const int first_expert = to_rank * kNumLocalExperts, total = num_rows * kNumTopk;
  Index* to_idx = at<Index>(window.topk_idx, 0) + first_row * kNumTopk;
  float* to_weights = at<float>(window.topk_weights, 0) + first_row * kNumTopk;
  for (int first = 0; first < total; first += 32) {
    const int i = first + lane_idx(), row = i / kNumTopk;
    const i64 token = __shfl_sync(~0u, my_token, row % 32);
    if (i >= total) continue;
    const i64 from = token * kNumTopk + (i - row * kNumTopk);
    const i64 expert = static_cast<i64>(at<const Index>(p.topk_idx, 0)[from]) - first_expert;
    const bool lives_there = expert >= 0 && expert < kNumLocalExperts;
    to_idx[i] = lives_there ? static_cast<Index>(expert) : static_cast<Index>(-1);
    if (p.topk_weights) to_weights[i] = lives_there ? at<const float>(p.topk_weights, 0)[from] : 0.f;
  }
}

__device__ inline void copy_metadata(const Params& p, const Routes& routes) {
  const int worker = blockIdx.x * kMetadataWarps + warp_idx() - kDispatchCopyWarps, num_workers = gridDim.x * kMetadataWarps;
  const int num_items = (routes.max_listed + kMetadataRows - 1) / kMetadataRows * routes.count();
  for (int item = worker; item < num_items; item += num_workers) {
    const Item it = item_at(routes, item, p.rank);
    const RecvWindow& window = routes.windows[it.rank];
    const int position = it.chunk * kMetadataRows + lane_idx();
    const int token =
        position < routes.num_listed[it.rank] ? at<const i32>(p.handle, kHandleSendList)[it.rank * kNumMaxTokens + position] : -1;
    const int num_rows = rows_in_chunk(routes.num_rows[it.rank], it.chunk, kMetadataRows);
    const i64 first_row = routes.first[it.rank] + it.chunk * kMetadataRows;
    if (lane_idx() < num_rows) at<int2>(window.src_idx, 0)[first_row + lane_idx()] = make_int2(p.rank, token);
    if (token >= 0 && lane_idx() >= num_rows)
      at<i32>(p.handle, kHandleSendPos)[token * kNumRanks + it.rank] = -1;  // the receiver has no room; combine skips this row
    if (p.topk_idx) {
      if (p.idx_bytes == 8) {
        copy_topk<i64>(p, window, it.rank, first_row, token, num_rows);
      } else {
        copy_topk<i32>(p, window, it.rank, first_row, token, num_rows);
      }
    }
    if (p.scales) {
      const u64 to = window.scales + first_row * p.scale_bytes;
      if ((p.scale_bytes | p.scales) % 16 == 0) {
        copy_scales<Vec16>(p, to, token, num_rows);
      } else {
        copy_scales<u32>(p, to, token, num_rows);
      }
    }
  }
}

__device__ inline void report_counts(const Params& p) {
  Mailbox* mailbox = at<Mailbox>(p.status_page, kStatusPageMailbox);
  const i32* per_expert = at<const i32>(p.handle, kHandleNumRecvPerExpert);
  if (lane_idx() == 0) st_relaxed_sys(&mailbox->num_recv, *at<const i32>(p.handle, kHandleNumRecv));
  for (int e = lane_idx(); e < kNumLocalExperts; e += 32) st_relaxed_sys(mailbox->num_recv_per_expert + e, per_expert[e]);
  __syncwarp();
  if (lane_idx() == 0) st_release_sys(&mailbox->flag, 1);  // the host has cleared it before the launch
}

// A host that waits for counts gets them here. If route wrote them, rows would wait until they have crossed PCIe.
__device__ inline void write_counts(const Params& p) {
  if (blockIdx.x > 0 || warp_idx() != kDispatchCopyWarps) return;
  if (p.to_host) report_counts(p);
  copy_counts(p);
}

// Called by one thread.
__device__ inline void count_rows(const Params& p, const Routes& routes) {
  if constexpr (kHasStatistics) {
    int sent = 0;
    for (int r = 0; r < kNumRanks; ++r) sent += routes.num_rows[r];
    count_sent(p, sent, p.row_bytes + p.scale_bytes);
    count_received(p, min(routes.num_recv, p.capacity), p.row_bytes + p.scale_bytes);
    count_call(p);
  }
}

extern "C" __global__ void __launch_bounds__(kDispatchThreads, 1) dispatch(const __grid_constant__ Params p) {
  extern __shared__ __align__(128) char stages[];
  __shared__ Routes routes;
  __shared__ u64 barriers[kDispatchCopyWarps * kDispatchStages];
  await_predecessor();
  State* state = at<State>(p.state, 0);
  const int warp = warp_idx(), lane = lane_idx();
  const u32 epoch = state->dispatch_epoch + 1;

  const u32 serial = p.follows_route ? kNoSerial : serial_of(p);
  if (!p.follows_route && serial == kNoSerial) {  // see recv_window.cuh
    if (blockIdx.x == 0 && warp == 0) poison_results(p, lane, 32);
    write_counts(p);
    return;
  }
  clear_next_waits(p, epoch, kPhaseRoute, kPhaseDispatchWindow, kPhaseDispatchRows);

  if (!p.follows_route && blockIdx.x == 0 && warp == 1 && lane < kNumRanks) publish_results(p, epoch, lane, serial);
  if (warp == 0) read_routes(p, epoch, serial, routes);
  __syncthreads();

  if (!routes.failed) {
    if (warp < kDispatchCopyWarps) {
      if constexpr (kHasTma) {
        copy_rows_bulk(p, routes, stages + warp * kDispatchStages * kStageBytes, barriers + warp * kDispatchStages);
      } else {
        copy_rows_by_warp(p, routes);
      }
    } else {
      write_counts(p);
      copy_metadata(p, routes);
      const i64 worker = (blockIdx.x * kMetadataWarps + warp_idx() - kDispatchCopyWarps) * 32 + lane_idx();
      write_padding(p, worker, gridDim.x * kMetadataWarps * 32, routes.num_recv);
    }
  }
  __syncthreads();

  if (warp != 0 || !is_warp_of_last_block(&state->dispatch_blocks)) return;
  // A block that saw `abort` has not sent its part. It saw `abort` before it counted itself as finished, so this block sees it too.
  if (!routes.failed && !was_aborted(p) && lane < kNumRanks && !is_absent(p, lane)) {
    st_release_sys(at<u32>(p.peers[lane], kControlDispatchFlags) + p.rank, epoch);
    wait_epoch(p, at<u32>(p.peers[p.rank], kControlDispatchFlags) + lane, epoch, kPhaseDispatchRows, lane);
  }
  __syncwarp();
  if (__any_sync(~0u, routes.differs || was_aborted(p))) poison_results(p, lane, 32);
  if (lane == 0) {
    count_rows(p, routes);
    state->dispatch_blocks = state->dispatch_items = 0;
    state->dispatch_epoch = epoch;
  }
}
