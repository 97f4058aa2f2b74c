// The common part of combine, combine_fp8 and combine_log10: sends rows back to the ranks of their tokens, and adds up the rows of each
// token while they arrive. The kernels differ in the form of the rows on the way.
//
// Layout: the rows that dispatch received from one source are contiguous here. They become contiguous at the source too, in the order of
// the source's tokens. A transfer is therefore a plain copy of chunks. Staging at the source has one row for each (token, rank) that
// dispatch sent: first the rows of rank 0, then those of rank 1, and so on.
//
// Roles of the warps:
// - Copy warps (num_copy_warps) push chunks of kChunkRows rows.
// - One signal warp raises a flag for each chunk that is written. A flag needs a fence, and a fence takes as long as many rows. The signal
//   warp raises all due flags after each fence, and copy warps wait for no fence. Without TMA, a copy warp writes with its own stores and
//   raises its own flags.
// - Reduce warps take tokens in ascending order and wait for the flags of the chunks with a token's rows. They add up the rows in float32
//   and in rank order.
// Copy warps never wait for reduce warps, and staging holds all rows. The kernel therefore cannot deadlock while the blocks of each rank
// get to run.
//
// Blocks: with few of them, each block has warps of all roles. Otherwise the first kCopyBlocks blocks copy, as many as fill the links, and
// the other blocks reduce. The warps of copy blocks reduce what is left when their copies have been written. With more copy blocks, copies
// would wait in front of the links, and flags behind them. In one block, copies and sums would share what an SM can move.
//
// Protocol:
// 1. Each rank publishes its receive window (recv_window.cuh).
// 2. After a chunk is written, the sender releases combine_flags[sender][chunk] = epoch at the receiver.
// The last block to finish resets State::combine_blocks, combine_items and combine_tokens, and advances State::combine_epoch.
//
// Reuse of memory: flags need no reset. A peer raises epoch k + 1 only after it has read window k + 1 of this rank. This rank publishes
// that window after its kernel k has seen all of its flags. For the same reason, call k + 1 may overwrite the staging of call k.
#pragma once
#include "common/bulk.cuh"
#include "common/number.cuh"
#include "common/work.cuh"
#include "throughput/recv_window.cuh"

// Whether some blocks copy and the others reduce. Compressed rows need all blocks for the conversion.
__device__ __forceinline__ bool has_copy_blocks() { return kCopyBlocks > 0 && kSentRowBytes == kRowBytes && gridDim.x >= kFewBlocks; }

__device__ __forceinline__ bool copies() { return !has_copy_blocks() || blockIdx.x < kCopyBlocks; }
__device__ __forceinline__ int num_copy_blocks() { return has_copy_blocks() ? kCopyBlocks : gridDim.x; }

// Whether rows of the own rank stay where they are, and the sums read them there. That saves a copy where copy blocks or few blocks limit
// the call. Otherwise the copy is faster: it reads ahead, and the sums then find the rows in L2. With many ranks, few rows are of the own
// rank.
__device__ __forceinline__ bool reads_own_rows(const Members& members) {
  if (has_copy_blocks()) return true;
  return kSentRowBytes == kRowBytes && members.count() <= 3 && gridDim.x < kFewBlocks;
}

// Where rows are compressed, few blocks need many copy warps, which convert. Many blocks need many reduce warps, which wait for memory.
__device__ __forceinline__ int num_copy_warps() {
  if constexpr (kCopyWarpsOfManyBlocks == kCombineCopyWarps) return kCombineCopyWarps;
  return gridDim.x < kManyBlocks ? kCombineCopyWarps : kCopyWarpsOfManyBlocks;
}

struct Routes : Members {
  u64 to_x[kNumRanks];  // address of this rank's first row at a source, and of its weights
  u64 to_weights[kNumRanks];
  i64 from_row[kNumRanks];    // the first row of y for a source
  int num_rows[kNumRanks];    // rows of y for a source
  i64 staged_row[kNumRanks];  // first row of this rank's staging from a rank
  int max_rows;               // the most rows that a rank gets copies of
  bool idle;                  // a wait timed out or the ranks differ: the block sends nothing and waits for nothing
};

__device__ inline void read_routes(const Params& p, u32 epoch, u32 serial, Routes& routes) {
  const int lane = lane_idx();
  const i32* rows = at<const i32>(p.handle, kHandleNumRows);
  const Members members(p);
  RecvWindow window = {};
  bool ok = true;
  int count = 0;
  if (lane < kNumRanks) {
    i64 from_row = 0, to_row = 0, staged_row = 0;  // while the window is on the way
    for (int s = 0; s < lane; ++s) from_row += rows[s * kNumRanks + p.rank];
    for (int r = 0; r < p.rank; ++r) to_row += rows[lane * kNumRanks + r];
    for (int r = 0; r < lane; ++r) staged_row += rows[p.rank * kNumRanks + r];
    count = clamp_rows(p.capacity - from_row, rows[lane * kNumRanks + p.rank]);
    routes.from_row[lane] = from_row;
    routes.num_rows[lane] = count;
    routes.staged_row[lane] = staged_row;
    ok = await_window(p, kControlCombineWindows, epoch, kPhaseCombineWindow, lane, window);
    routes.to_x[lane] = window.x + to_row * kSentRowBytes;
    routes.to_weights[lane] = window.topk_weights + to_row * kNumTopk * sizeof(float);
  }
  const bool all_arrived = __all_sync(~0u, ok);
  const bool agreed = all_arrived && !ranks_differ(p, window, serial);
  const int max_rows = __reduce_max_sync(~0u, lane == p.rank && reads_own_rows(members) ? 0 : count);
  if (lane == 0) {
    if constexpr (kHasSlots) static_cast<Members&>(routes) = members;
    routes.max_rows = max_rows;
    routes.idle = !agreed || was_aborted(p);
  }
}

struct Chunk {
  int rank;
  int idx;
  int num_rows;
  i64 first;  // row among the rows for that rank
};

// Neighbouring items are for different ranks, as those of item_at.
__device__ __forceinline__ Item copy_at(const Members& members, int j, int my_rank) {
  if (!reads_own_rows(members)) return item_at(members, j, my_rank);
  const int others = members.count() > 1 ? members.count() - 1 : 1, chunk = j / others;
  return {members.at(members.modulo(members.place(my_rank) + 1 + (j + chunk) % others)), chunk};
}

__device__ __forceinline__ Chunk chunk_at(const Params& p, const Routes& routes, int j) {
  const Item it = copy_at(routes, j, p.rank);
  return {it.rank, it.chunk, rows_in_chunk(routes.num_rows[it.rank], it.chunk, kChunkRows), static_cast<i64>(it.chunk) * kChunkRows};
}

__device__ __forceinline__ const char* source_of(const Params& p, const Routes& routes, const Chunk& c) {
  return at<const char>(p.y, (routes.from_row[c.rank] + c.first) * kRowBytes);
}

__device__ __forceinline__ char* target_of(const Routes& routes, const Chunk& c) {
  return at<char>(routes.to_x[c.rank], c.first * kSentRowBytes);
}

__device__ __forceinline__ void copy_weights(const Params& p, const Routes& routes, const Chunk& c) {
  if (!p.topk_weights) return;
  const float* from = at<const float>(p.topk_weights, 0) + (routes.from_row[c.rank] + c.first) * kNumTopk;
  float* to = at<float>(routes.to_weights[c.rank], 0) + c.first * kNumTopk;
  for (int i = lane_idx(); i < c.num_rows * kNumTopk; i += 32) to[i] = from[i];
}

// The caller has released the chunk.
__device__ __forceinline__ void raise_flag(const Params& p, const Chunk& c, u32 epoch) {
  st_relaxed_sys(at<u32>(p.peers[c.rank], kControlCombineFlags) + p.rank * kMaxCombineChunks + c.idx, epoch);
}

__device__ inline WorkQueue queue_of(const Params& p, const Routes& routes) {
  const int num_workers = num_copy_blocks() * num_copy_warps();
  const int max_chunks = (routes.max_rows + kChunkRows - 1) / kChunkRows, num_targets = routes.count() - (reads_own_rows(routes) ? 1 : 0);
  return make_work_queue(&at<State>(p.state, 0)->combine_items, max_chunks * num_targets, num_workers, kCombineItemsPerTicket);
}

// A copy warp's message to the signal warp: the number of its written chunks, and the items.
struct CopyProgress {
  static constexpr int kRingEntries = 32;
  u32 written;
  u32 signalled;  // the signal warp's answer: entries of the ring that are free again
  u32 done;       // 1: no more items follow
  i32 items[kRingEntries];
};

// Lane m follows copy warp m. This loop has no time limit, because copy warps wait only for the copy engine of their SM, or for a limited
// time. chunk_of(item) returns the chunk of an item.
template <class ChunkOf>
__device__ inline void signal_chunks(const Params& p, u32 epoch, CopyProgress* progress, ChunkOf chunk_of) {
  const bool follows = lane_idx() < num_copy_warps();
  CopyProgress& mine = progress[follows ? lane_idx() : 0];
  u32 signalled = 0;
  for (bool done = false; !done;) {
    done = __all_sync(~0u, !follows || ld_acquire_block(&mine.done));  // read before `written`, which is final then
    const u32 now = follows ? ld_acquire_block(&mine.written) : 0;
    if (!__any_sync(~0u, now > signalled)) continue;
    fence_release_sys();
    for (; signalled < now; ++signalled) raise_flag(p, chunk_of(mine.items[signalled % CopyProgress::kRingEntries]), epoch);
    if (follows) st_release_block(&mine.signalled, signalled);
  }
}

// What a reduce warp adds up at a time: a token, or a part of its channels.
struct Share {
  int token, part, num_parts;
};

// The shares of a call. With copy blocks, most reduce warps have nothing to do when the last rows arrive. So kLastParts of them share each
// of the last tokens, which are kLastTokens for each block.
struct Shares {
  static constexpr int kLastParts = 4, kLastTokens = 8;
  int num_whole, count;

  __device__ explicit Shares(int num_tokens) {
    const int blocks = gridDim.x;
    num_whole = has_copy_blocks() ? max(0, num_tokens - kLastTokens * blocks) : num_tokens;
    count = num_whole + kLastParts * (num_tokens - num_whole);
  }

  __device__ __forceinline__ Share at(int item) const {
    if (!has_copy_blocks() || item < num_whole) return {item, 0, 1};
    const int last = item - num_whole;
    return {num_whole + last / kLastParts, last % kLastParts, kLastParts};
  }
};

// Adds up the rows at the given addresses and writes the share of the token. Address 0: no row. With biases it adds those too, in code of
// its own: a call without biases would step over their instructions one by one. Each kernel defines it.
template <bool kHasBias, int kBound>
__device__ __forceinline__ void reduce_share(const Params& p, const u64 (&rows)[kBound], const Share& share);

// There are at most kBound members.
template <bool kHasBias, int kBound>
__device__ __forceinline__ void reduce_tokens(const Params& p, const Routes& routes, u32 epoch) {
  const int lane = lane_idx();
  const u64 base = p.peers[p.rank];
  const u32* flags = at<const u32>(base, kControlCombineFlags);
  constexpr bool kMayReadOwnRows = kSentRowBytes == kRowBytes && (kBound <= 4 || kCopyBlocks > 0);
  int position = -1, next_position = -1;  // of the row from rank `lane`; -1: that rank sends none
  int num_received = 0;                   // for the statistics
  const Shares shares(p.num_tokens);
  auto prefetch = [&](int item) {
    const int token = shares.at(item).token;
    position = next_position;
    const bool exists = lane < kNumRanks && token < p.num_tokens;
    next_position = exists ? at<const i32>(p.handle, kHandleSendPos)[token * kNumRanks + lane] : -1;
  };
  WorkIterator work({&at<State>(p.state, 0)->combine_tokens, shares.count, 1}, prefetch);
  for (int item = work.next(); item >= 0; item = work.next()) {
    const Share share = shares.at(item);
    const bool is_here = kMayReadOwnRows && lane == p.rank && reads_own_rows(routes);
    bool ok = true;
    if (position >= 0 && !is_here)
      ok = wait_epoch(p, flags + lane * kMaxCombineChunks + position / kChunkRows, epoch, kPhaseCombineRows, lane);
    const bool all_ok = __all_sync(~0u, ok);
    __syncwarp();  // all lanes may read what lanes 0 .. kNumRanks-1 acquired
    if (!all_ok) return;
    if (kHasStatistics && share.part == 0) num_received += __popc(__ballot_sync(~0u, position >= 0));
    const i64 my_row = position >= 0 ? position + (is_here ? routes.from_row[lane] : routes.staged_row[lane]) : -1;
    const u64 staged_x = base + p.recv_x_offset, staged_weights = base + p.recv_topk_weights_offset;
    const u64 my_x = is_here ? p.y : staged_x, my_weights = is_here ? p.topk_weights : staged_weights;
    u64 rows[kBound];  // addresses of the token's rows, for each member; 0: that rank sent none
    float weight = 0;
#pragma unroll
    for (int m = 0; m < kBound; ++m) {
      const int r = kBound < kNumRanks ? routes.at(m) : m;  // an absent rank sends none
      const i64 row = __shfl_sync(~0u, my_row, r);
      rows[m] = row >= 0 ? (kMayReadOwnRows ? __shfl_sync(~0u, my_x, r) : staged_x) + row * kSentRowBytes : 0;
      if (p.topk_weights && row >= 0 && share.part == 0) {
        const u64 weights = kMayReadOwnRows ? __shfl_sync(~0u, my_weights, r) : staged_weights;
        if (lane < kNumTopk) weight += ld_relaxed_sys(at<const float>(weights, 0) + row * kNumTopk + lane);  // L1 may hold an old line
      }
    }
    if (p.topk_weights && lane < kNumTopk && share.part == 0)
      at<float>(p.out_topk_weights, 0)[static_cast<i64>(share.token) * kNumTopk + lane] = weight;
    reduce_share<kHasBias>(p, rows, share);
  }
  if (lane == 0) count_received(p, num_received, kSentRowBytes);
}

// With few members, a lane has few rows to load at once. The compiler then needs to know that, to load more of each. sm_80 has no registers
// left for that.
template <bool kHasBias>
__device__ __forceinline__ void reduce_tokens_of_members(const Params& p, const Routes& routes, u32 epoch) {
  if constexpr (kHasSlots && kHasTma && kNumRanks > 2) {
    if (routes.count() <= 2) return reduce_tokens<kHasBias, 2>(p, routes, epoch);
  }
  if constexpr (kHasSlots && kHasTma && kNumRanks > 4) {
    if (routes.count() <= 4) return reduce_tokens<kHasBias, 4>(p, routes, epoch);
  }
  reduce_tokens<kHasBias, kNumRanks>(p, routes, epoch);
}

__device__ inline void poison_sums(const Params& p, u64 thread, u64 num_threads) {
  poison(p.out, static_cast<u64>(p.num_tokens) * kRowBytes, thread, num_threads);
  if (p.topk_weights) poison(p.out_topk_weights, static_cast<u64>(p.num_tokens) * kNumTopk * sizeof(float), thread, num_threads);
}

// Runs the whole kernel. `routes` and `progress` lie in shared memory. copy_rows(epoch) is the work of a copy warp, on items with the
// chunks chunk_of(item). Without TMA it also raises the flags.
template <class CopyRows, class ChunkOf>
__device__ __forceinline__ void combine_rows(const Params& p, Routes& routes, CopyProgress* progress, CopyRows copy_rows,
                                             ChunkOf chunk_of) {
  State* state = at<State>(p.state, 0);
  const int warp = warp_idx(), lane = lane_idx();
  const u32 epoch = state->combine_epoch + 1;

  const u32 serial = serial_of(p);
  if (serial == kNoSerial) {  // see recv_window.cuh
    poison_sums(p, blockIdx.x * kCombineThreads + threadIdx.x, gridDim.x * kCombineThreads);
    return;
  }
  clear_next_waits(p, epoch, kPhaseCombineWindow, kPhaseCombineRows);

  if (blockIdx.x == 0 && warp == 1 && lane < kNumRanks) {
    publish(p, kControlCombineWindows, epoch, lane, {p.recv_x_offset, 0, 0, p.recv_topk_weights_offset, 0, 0, p.call_signature, serial});
  }
  if (threadIdx.x < kCombineCopyWarps) progress[threadIdx.x].written = progress[threadIdx.x].signalled = progress[threadIdx.x].done = 0;
  if (warp == 0) read_routes(p, epoch, serial, routes);
  __syncthreads();

  if (!routes.idle) {
    const int copy_warps = copies() ? num_copy_warps() : 0, signal_warps = copies() ? kHasTma : 0;
    if (warp < copy_warps) {
      copy_rows(epoch);
    } else if (warp < copy_warps + signal_warps) {
      signal_chunks(p, epoch, progress, chunk_of);
    }
    if (has_copy_blocks() && copies()) __syncthreads();  // all warps of these blocks reduce what is left
    if (has_copy_blocks() || warp >= copy_warps + signal_warps) {
      if (p.bias_0 || p.bias_1) {
        reduce_tokens_of_members<true>(p, routes, epoch);
      } else {
        reduce_tokens_of_members<false>(p, routes, epoch);
      }
    }
  }
  __syncthreads();

  if (warp != 0 || !is_warp_of_last_block(&state->combine_blocks)) return;
  if (__any_sync(~0u, routes.idle || was_aborted(p))) poison_sums(p, lane, 32);
  if (lane == 0) {
    for (int r = 0; kHasStatistics && !routes.idle && r < kNumRanks; ++r) count_sent(p, routes.num_rows[r], kSentRowBytes);
    count_call(p);
    state->combine_blocks = state->combine_items = state->combine_tokens = 0;
    // Without TMA and with compressed rows, there is no register left to keep it.
    constexpr bool kKeepsEpoch = kHasTma && kSentRowBytes == kRowBytes;
    state->combine_epoch = kKeepsEpoch ? epoch : state->combine_epoch + 1;
  }
}
