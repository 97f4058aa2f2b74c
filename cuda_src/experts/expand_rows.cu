// expand_rows: copies each row by token to the rows of its experts on this rank, and marks the padding between them.
//
// A block takes an item at a time: a row by token, then the rows of an expert, then kTailRows rows after the last expert. Items write to
// different rows: a position belongs to one (token, choice), and the other items write where no position points to.
//
// Rows of an expert that did not arrive become NaN, as in every call that fails (expert_positions finds them).
//
// Bytes: each row by token is read once, and written once for each of its experts. The last rows are read first, while the L2 cache still
// has them, and stores leave the cache early.
#include "common/memory.cuh"

constexpr int kInFlight = 4;
constexpr u32 kNan = 0xffffffffu;  // of every floating-point type

__device__ inline void expand_row(const Params& p, i64 item) {
  const int lane = lane_idx();
  const i32 mine = lane < p.num_topk ? at<const i32>(p.positions, 0)[item * p.num_topk + lane] : -1;
  const u32 choices = __ballot_sync(~0u, mine >= 0);
  const int num_vecs = static_cast<int>(p.row_bytes / 16);
  const Vec16* from = at<const Vec16>(p.x, item * p.row_bytes);
  for (int begin = 0; begin < num_vecs; begin += kInFlight * kLocalThreads) {  // the same for all lanes, because they shuffle
    const int first = begin + threadIdx.x;
    Vec16 held[kInFlight] = {};
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (first + j * kLocalThreads < num_vecs) held[j] = ld_streaming(from + first + j * kLocalThreads);
    }
    for (u32 rest = choices; rest; rest &= rest - 1) {
      const i64 row = __shfl_sync(~0u, mine, __ffs(rest) - 1);
      Vec16* to = at<Vec16>(p.out_x, row * p.row_bytes);
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        if (first + j * kLocalThreads < num_vecs) st_vec_last(to + first + j * kLocalThreads, held[j]);
      }
    }
  }
  for (int begin = 0; begin < p.scale_words; begin += kLocalThreads) {
    const int word = begin + threadIdx.x;
    const u32 scale = word < p.scale_words ? at<const u32>(p.scales, 0)[item * p.scale_words + word] : 0;
    for (u32 rest = choices; rest; rest &= rest - 1) {
      const i64 row = __shfl_sync(~0u, mine, __ffs(rest) - 1);
      const i64 to = p.scale_stride ? static_cast<i64>(word) * p.scale_stride + row : row * p.scale_words + word;
      if (word < p.scale_words) at<u32>(p.out_scales, 0)[to] = scale;
    }
  }
  if (warp_idx() == 0 && mine >= 0) {
    if (p.topk_weights) at<float>(p.out_weights, 0)[mine] = at<const float>(p.topk_weights, 0)[item * p.num_topk + lane];
    i32* source = at<i32>(p.out_src_idx, 0) + static_cast<i64>(mine) * 3;
    source[0] = at<const i32>(p.src_idx, 0)[item * 2];
    source[1] = at<const i32>(p.src_idx, 0)[item * 2 + 1];
    source[2] = lane;
  }
}

// Marks rows as padding, and fills them with `word` if asked.
__device__ inline void pad_rows(const Params& p, int begin, int end, bool fills, u32 word) {
  for (i64 row = begin + static_cast<int>(threadIdx.x); row < end; row += kLocalThreads) {
    at<i32>(p.out_experts, 0)[row] = -1;
    for (int i = 0; i < 3; ++i) at<i32>(p.out_src_idx, 0)[row * 3 + i] = -1;
    if (p.topk_weights) at<float>(p.out_weights, 0)[row] = __uint_as_float(word);
  }
  if (!fills) return;
  const Vec16 vec = {{word, word, word, word}};
  const i64 vecs = p.row_bytes / 16;
  for (i64 i = begin * vecs + threadIdx.x; i < end * vecs; i += kLocalThreads) st_vec(at<Vec16>(p.out_x, 0) + i, vec);
  const int num_rows = end - begin, num_words = num_rows * p.scale_words;
  for (int i = threadIdx.x; i < num_words; i += kLocalThreads) {
    const i64 row = begin + i % num_rows, column = i / num_rows;
    at<u32>(p.out_scales, 0)[p.scale_stride ? column * p.scale_stride + row : row * p.scale_words + column] = word;
  }
}

__device__ inline void finish_expert(const Params& p, int expert) {
  const i32* offsets = at<const i32>(p.offsets, 0);
  const int begin = offsets[expert], last = offsets[expert + 1], end = at<const i32>(p.ends, 0)[expert];
  if (end < 0) {
    pad_rows(p, begin, last, true, kNan);
    return;
  }
  for (int row = begin + static_cast<int>(threadIdx.x); row < end; row += kLocalThreads) at<i32>(p.out_experts, 0)[row] = expert;
  pad_rows(p, end, last, p.zero_padding, 0);
}

extern "C" __global__ void __launch_bounds__(kLocalThreads) expand_rows(const __grid_constant__ Params p) {
  overlap_kernels();
  const i32* totals = at<const i32>(p.totals, 0);
  const i64 num_tokens = totals[1], first_tail = num_tokens + p.num_experts;
  const i64 num_items = first_tail + (p.num_rows + kTailRows - 1) / kTailRows;
  const int filled = at<const i32>(p.offsets, 0)[p.num_experts];
  for (i64 item = blockIdx.x; item < num_items; item += gridDim.x) {
    if (item < num_tokens) {
      expand_row(p, num_tokens - 1 - item);
    } else if (item < first_tail) {
      finish_expert(p, static_cast<int>(item - num_tokens));
    } else {
      const int begin = static_cast<int>(item - first_tail) * kTailRows;
      pad_rows(p, max(begin, filled), min(begin + kTailRows, p.num_rows), p.zero_padding, 0);
    }
  }
  if (blockIdx.x > 0) return;
  for (int e = threadIdx.x; e <= p.num_experts; e += kLocalThreads) at<i32>(p.out_offsets, 0)[e] = at<const i32>(p.offsets, 0)[e];
  if (threadIdx.x == 0) *at<i32>(p.out_num_recv, 0) = totals[0];
}
