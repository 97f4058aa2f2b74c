// The sum of a rank's rows of a token, which lie expert by expert: in float32, in the order of the token's choices, rounded once.
#pragma once
#include "common/number.cuh"

// Called by kThreads threads, which are whole warps. Lane k has the row of choice k in `mine`, and its weight. `choices` has a bit for each
// choice with a row. With `is_weighted`, rows are multiplied by their weights. from(row) returns a row's address, out() that of the sum,
// and write(to, v) writes a vector.
template <int kThreads, class From, class Out, class Write>
__device__ __forceinline__ void sum_choices(int num_vecs, int thread, u32 choices, i32 mine, float weight, bool is_weighted, From from,
                                            Out out, Write write) {
  constexpr int kInFlight = 4, kNumbers = kPerVec<kElement>;
  for (int begin = 0; begin < num_vecs; begin += kInFlight * kThreads) {  // the same for all lanes, because they shuffle
    const int first = begin + thread;
    float sum[kInFlight][kNumbers] = {};
    for (u32 rest = choices; rest; rest &= rest - 1) {
      const int choice = __ffs(rest) - 1;
      const i64 row = __shfl_sync(~0u, mine, choice);
      const float factor = __shfl_sync(~0u, weight, choice);
      const Vec16* vecs = from(row);
      Vec16 held[kInFlight] = {};
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        if (first + j * kThreads < num_vecs) held[j] = ld_streaming(vecs + first + j * kThreads);
      }
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        if (is_weighted) {
          add_scaled_to<kElement>(sum[j], held[j], factor);
        } else {
          add_to<kElement>(sum[j], held[j]);
        }
      }
    }
    Vec16* to = out();
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (first + j * kThreads < num_vecs) write(to + first + j * kThreads, rounded<kElement>(sum[j]));
    }
  }
}
