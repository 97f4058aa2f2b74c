// expert_positions: finds the row of each (token, choice) where rows lie expert by expert, in the order of the rows by token and of their
// choices.
//
// The blocks share topk_idx: each warp has a segment.
// 1. Each warp counts the choices of each expert in its segment. A sum over the warps gives the counts of the block.
// 2. Each block publishes its counts as tagged words, and adds up the counts of the blocks before it. Blocks start in order, and a block
//    publishes before it waits. So this wait ends without help of other ranks, and has no limit.
// 3. Each warp reads its segment again, and gives each choice its row.
// The last block knows all counts. It writes the tables of the experts.
//
// A call that failed has counts, but no expert numbers, or those of an earlier call. Then the numbers of choices do not match the counts,
// and `ends` says so. The last block then waits for the other blocks, and takes back the positions of these experts. Nothing is written
// outside of the arrays, whatever the numbers are.
//
// Reuse of memory: `epoch` counts the launches of a Buffer, and kernels of one Buffer run one after another. A block reads the epoch before
// it publishes. The last block advances the epoch after it has read the counts of all other blocks. Words of earlier launches have other
// epochs.
//
// Bytes: topk_idx twice, the second time from L1. Each block reads 8 bytes for each expert of each earlier block, from L2.
#include "common/memory.cuh"

constexpr int kWarps = kPositionThreads / 32;
constexpr int kTileExperts = 1024;  // experts whose counts are in shared memory at a time
static_assert(kTileExperts <= kPositionCounts, "a warp has room for a count of each expert");

struct Shared {
  i32 counts[kPositionCounts];    // [warp][expert]: choices; later, of the warps before it
  i32 num_choices[kTileExperts];  // of this block
  i32 num_earlier[kTileExperts];  // of the blocks before it
  i32 first_row[kTileExperts];    // of each expert
  i32 num_rows;                   // of all experts, with padding
  bool is_incomplete;             // choices of an expert did not arrive
};

struct Progress {
  u32 epoch;
  u32 has_written[kPositionBlocks];  // the epoch, after a block has written its positions
};

// The choices of a warp, in steps of 32.
struct Segment {
  int begin, end;
};

__device__ __forceinline__ int within(int row, int num_rows) { return row < 0 ? 0 : min(row, num_rows); }

__device__ __forceinline__ int aligned(int count, int alignment) { return (count + alignment - 1) / alignment * alignment; }

// -1: no expert of this rank.
__device__ __forceinline__ int expert_at(const Params& p, int i) {
  const i64 expert = p.idx_bytes == 8 ? at<const i64>(p.topk_idx, 0)[i] : at<const i32>(p.topk_idx, 0)[i];
  return expert >= 0 && expert < p.num_experts ? static_cast<int>(expert) : -1;
}

// Warps past `num_warps` have no room for counts, and get no choices.
__device__ __forceinline__ Segment segment_of(const Params& p, int num_entries, int num_warps) {
  const int step = gridDim.x * num_warps * 32, steps = (num_entries + step - 1) / step;
  const int begin = warp_idx() < num_warps ? (blockIdx.x * num_warps + warp_idx()) * steps * 32 : num_entries;
  return {min(begin, num_entries), min(begin + steps * 32, num_entries)};
}

// Calls visit(i, expert) for 32 choices of the segment at a time. Several loads are in flight.
template <class Visit>
__device__ __forceinline__ void for_each_step(const Params& p, const Segment& segment, Visit visit) {
  constexpr int kInFlight = 4;
  for (int first = segment.begin + lane_idx(); first - lane_idx() < segment.end; first += kInFlight * 32) {
    int experts[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) experts[j] = first + j * 32 < segment.end ? expert_at(p, first + j * 32) : -1;
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (first - lane_idx() + j * 32 < segment.end) visit(first + j * 32, experts[j]);  // the same for all lanes
    }
  }
}

// One warp replaces the counts of a tile's experts by their first rows. Returns the row after them.
__device__ inline int scan_rows(i32* rows, int num_experts, int first_row) {
  const int lane = lane_idx();
  for (int begin = 0; begin < num_experts; begin += 32) {
    const int e = begin + lane, own = e < num_experts ? rows[e] : 0;
    const int sum = sum_to_lane(own);
    if (e < num_experts) rows[e] = first_row + sum - own;
    first_row += __shfl_sync(~0u, sum, 31);
  }
  return first_row;
}

// One warp adds up the rows of all experts. Those of the first tile are known.
__device__ inline int all_rows(const Params& p, int of_first_tile) {
  int sum = 0;
  for (int e = kTileExperts + lane_idx(); e < p.num_experts; e += 32) sum += at<const i32>(p.num_per_expert, 0)[e];
  return of_first_tile + __reduce_add_sync(~0u, sum);
}

__device__ __forceinline__ u64* counts_of(const Params& p, int block) {
  return at<u64>(p.block_counts, 0) + static_cast<i64>(block) * p.num_experts;
}

// Adds up the warps' counts of each expert, and publishes the sums for the later blocks.
__device__ inline void publish_counts(const Params& p, u32 epoch, int first, int num_experts, int num_warps, Shared& shared) {
  for (int e = threadIdx.x; e < num_experts; e += kPositionThreads) {
    int sum = 0;
#pragma unroll 8
    for (int w = 0; w < num_warps; ++w) {
      const int own = shared.counts[w * num_experts + e];
      shared.counts[w * num_experts + e] = sum;
      sum += own;
    }
    shared.num_choices[e] = sum;
    if (blockIdx.x + 1 < gridDim.x) st_relaxed_sys(counts_of(p, blockIdx.x) + first + e, static_cast<u64>(sum) << 32 | epoch);
  }
}

// Adds up the counts of the blocks before this one. A warp takes a few blocks, and has the words of all of them in flight.
__device__ inline void add_earlier_counts(const Params& p, u32 epoch, int first, int num_experts, Shared& shared) {
  constexpr int kBlocks = (kPositionBlocks + kWarps - 1) / kWarps, kInFlight = 4;
  const int num_blocks = blockIdx.x;
  if (warp_idx() >= num_blocks) return;
  for (int begin = lane_idx(); begin < num_experts; begin += kInFlight * 32) {
    u64 words[kBlocks][kInFlight];
    auto read = [&](int b, int j) {
      const int block = warp_idx() + b * kWarps, e = begin + j * 32;
      if (block >= num_blocks || e >= num_experts) return false;
      words[b][j] = ld_relaxed_sys(counts_of(p, block) + first + e);
      return true;
    };
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        if (!read(b, j)) words[b][j] = epoch;  // a count of zero
      }
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      i32 sum = 0;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        while (static_cast<u32>(words[b][j]) != epoch) read(b, j);
        sum += static_cast<i32>(words[b][j] >> 32);
      }
      if (begin + j * 32 < num_experts) atomicAdd(shared.num_earlier + begin + j * 32, sum);
    }
  }
}

// Copies the sources of the rows by token. Rows by token that are padding have no position.
__device__ inline void write_other_tables(const Params& p, int num_tokens) {
  const int thread = blockIdx.x * kPositionThreads + threadIdx.x, num_threads = gridDim.x * kPositionThreads;
  for (int i = thread; i < num_tokens; i += num_threads) at<int2>(p.sources, 0)[i] = at<const int2>(p.src_idx, 0)[i];
  for (int i = num_tokens * p.num_topk + thread; i < p.capacity * p.num_topk; i += num_threads) at<i32>(p.positions, 0)[i] = -1;
}

// The last block calls this.
__device__ inline void write_experts(const Params& p, int first, int num_experts, int limit, bool has_dropped, Shared& shared) {
  for (int e = threadIdx.x; e < num_experts; e += kPositionThreads) {
    const int found = shared.num_earlier[e] + shared.num_choices[e], row = shared.first_row[e];
    // Rows by token that did not fit are missing on purpose.
    const bool is_complete = has_dropped || aligned(found, p.alignment) == at<const i32>(p.num_per_expert, 0)[first + e];
    at<i32>(p.offsets, 0)[first + e] = within(row, limit);
    at<i32>(p.ends, 0)[first + e] = is_complete ? within(row + found, limit) : -1;
    if (!is_complete) shared.is_incomplete = true;
  }
}

// The last block calls this, after it has written `ends`.
__device__ inline void take_back_positions(const Params& p, const Progress* progress, u32 epoch, int num_entries) {
  if (threadIdx.x + 1 < gridDim.x) {
    while (ld_acquire_gpu(progress->has_written + threadIdx.x) != epoch) {
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < num_entries; i += kPositionThreads) {
    const int expert = expert_at(p, i);
    if (expert >= 0 && at<const i32>(p.ends, 0)[expert] < 0) at<i32>(p.positions, 0)[i] = -1;
  }
}

extern "C" __global__ void __launch_bounds__(kPositionThreads, 1) expert_positions(const __grid_constant__ Params p) {
  __shared__ Shared shared;
  overlap_kernels();
  Progress* progress = at<Progress>(p.progress, 0);
  const int warp = warp_idx(), lane = lane_idx();
  const bool is_last = blockIdx.x + 1 == gridDim.x;
  const u32 epoch = progress->epoch + 1;
  const int num_arrived = *at<const i32>(p.num_recv, 0), num_tokens = within(num_arrived, p.capacity);
  const int num_entries = num_tokens * p.num_topk;
  const int num_warps = min(kWarps, kPositionCounts / min(p.num_experts, kTileExperts));
  const Segment segment = segment_of(p, num_entries, num_warps);
  i32* positions = at<i32>(p.positions, 0);
  int next_row = 0;  // of the experts after a tile; the last warp has it
  if (threadIdx.x == 0) shared.is_incomplete = false;

  for (int first = 0; first < p.num_experts; first += kTileExperts) {
    const int num_experts = min(kTileExperts, p.num_experts - first);
    __syncthreads();  // all warps have read the tile before this one
    for (int i = threadIdx.x; i < num_warps * num_experts; i += kPositionThreads) shared.counts[i] = 0;
    for (int e = threadIdx.x; e < num_experts; e += kPositionThreads) {
      shared.first_row[e] = at<const i32>(p.num_per_expert, 0)[first + e];
      shared.num_earlier[e] = 0;
    }
    __syncthreads();

    i32* counts = shared.counts + (warp < num_warps ? warp * num_experts : 0);
    auto in_tile = [&](int expert) { return expert >= first && expert - first < num_experts ? expert - first : -1; };
    for_each_step(p, segment, [&](int, int expert) {
      const int e = in_tile(expert);
      const u32 same = __match_any_sync(~0u, e);
      if (e >= 0 && lane == __ffs(same) - 1) counts[e] += __popc(same);
      __syncwarp();  // the lane of the next step may be another one
    });
    __syncthreads();
    publish_counts(p, epoch, first, num_experts, num_warps, shared);
    if (warp == kWarps - 1) {  // it has the fewest counts to publish
      next_row = scan_rows(shared.first_row, num_experts, next_row);
      if (first == 0) shared.num_rows = all_rows(p, next_row);
    }
    if (first == 0) write_other_tables(p, num_tokens);
    add_earlier_counts(p, epoch, first, num_experts, shared);
    __syncthreads();

    const int limit = p.num_rows < 0 ? shared.num_rows : p.num_rows;
    if (is_last) write_experts(p, first, num_experts, limit, num_arrived > p.capacity, shared);
    for_each_step(p, segment, [&](int i, int expert) {
      const int e = in_tile(expert);
      const u32 same = __match_any_sync(~0u, e);
      if (e >= 0) {
        const int row = shared.first_row[e] + shared.num_earlier[e] + counts[e] + __popc(same & ((1u << lane) - 1));
        positions[i] = row >= 0 && row < limit ? row : -1;
      } else if (first == 0 && expert < 0 && i < segment.end) {
        positions[i] = -1;
      }
      __syncwarp();  // all lanes have read counts[e]
      if (e >= 0 && lane == __ffs(same) - 1) counts[e] += __popc(same);
      __syncwarp();
    });
  }

  __syncthreads();
  if (!is_last) {
    if (threadIdx.x == 0) st_release_gpu(progress->has_written + blockIdx.x, epoch);
    return;
  }
  if (shared.is_incomplete) take_back_positions(p, progress, epoch, num_entries);
  if (threadIdx.x == 0) {
    const int limit = p.num_rows < 0 ? shared.num_rows : p.num_rows;
    at<i32>(p.offsets, 0)[p.num_experts] = within(shared.num_rows, limit);
    at<i32>(p.totals, 0)[0] = shared.num_rows;
    at<i32>(p.totals, 0)[1] = num_tokens;
    progress->epoch = epoch;
  }
}
