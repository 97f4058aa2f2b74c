// ll_combine: the experts' outputs back to the ranks of their tokens, weighted and added up. Launched for sending, for receiving, or both.
//
// Sending. What arrived in ll_dispatch is sent back entry by entry: a group of p.send_warps warps adds up the outputs of this rank's
// experts for the token, times their weights, and writes one bfloat16 row to the token's rank (p.reduce_early; otherwise one unweighted row
// for each expert), then raises its flag. Unless the weights came with the dispatch, block 0 of every rank first sends its tokens' weights
// around.
//
// Receiving. Each warp takes a part of a token's row (p.receive_warps share it), waits for the flags of the token's rows, and adds them up
// in float32: in rank order (p.reduce_early), or in the order of the choices, times their weights. Every sum starts at zero and every
// product is rounded before it is added: the result is the same in each run, and on the host backend.
//
// Reuse of the inbox, kNumSides sides by the epoch, and the counters: as in ll_dispatch. Weights of a side are read by the sending part,
// which comes before the receiving part and its acknowledgement.
// No block waits for another one of its grid: entries are taken by whoever runs.
//
// Bytes: each entry's rows read once, one row over the link for each entry, rows of a token read once.
#include "number.cuh"
#include "wait.cuh"
#include "work.cuh"

constexpr int kWarps = kLlThreads / 32, kRowVecs = kHidden / 8;
constexpr int kRowsOfToken = kNumRanks > kNumTopk ? kNumRanks : kNumTopk;
constexpr int kAtOnce = 4;

// `which`: the sending rank, or the choice.
__device__ __forceinline__ u64 place_of(u32 epoch, int which, int token) {
  return static_cast<u64>(epoch % kNumSides * kRowsOfToken + which) * kNumMaxTokens + token;
}

__device__ __forceinline__ Vec16* row_at(const Params& p, u32 epoch, int receiver, int which, int token) {
  return at<Vec16>(p.peers[receiver], kLlRows) + place_of(epoch, which, token) * kRowVecs;
}

__device__ __forceinline__ u32* flag_at(const Params& p, u32 epoch, int receiver, int which, int token) {
  return at<u32>(p.peers[receiver], kLlRowFlags) + place_of(epoch, which, token);
}

__device__ __forceinline__ float* weights_at(const Params& p, u32 epoch, int receiver, int source) {
  return at<float>(p.peers[receiver], kLlWeights) + static_cast<u64>(epoch % kNumSides * kNumRanks + source) * kNumMaxTokens * kNumTopk;
}

__device__ __forceinline__ u32* weight_flag_at(const Params& p, u32 epoch, int receiver, int source) {
  return at<u32>(p.peers[receiver], kLlWeightFlags) + epoch % kNumSides * kNumRanks + source;
}

// Some warps of a block that work on one item together.
struct Group {
  int num_warps;  // a power of two
  int idx;        // of the group in the block
  int thread;     // in the group

  __device__ explicit Group(int num_warps) : num_warps(num_warps), idx(warp_idx() / num_warps), thread(threadIdx.x % (num_warps * 32)) {}

  __device__ __forceinline__ void sync() const {
    __syncwarp();
    if (num_warps > 1) asm volatile("bar.sync %0, %1;" ::"r"(1 + idx), "r"(num_warps * 32) : "memory");
  }

  // The same; whether all threads say yes.
  __device__ __forceinline__ bool all(bool yes) const {
    if (num_warps == 1) return __all_sync(~0u, yes);
    u32 result;
    asm volatile("{\n .reg .pred p, q;\n setp.ne.u32 p, %3, 0;\n bar.red.and.pred q, %1, %2, p;\n selp.u32 %0, 1, 0, q;\n}"
                 : "=r"(result)
                 : "r"(1 + idx), "r"(num_warps * 32), "r"(static_cast<u32>(yes))
                 : "memory");
    return result;
  }
};

__device__ inline void send_weights(const Params& p, u32 epoch) {
  const int warp = warp_idx(), lane = lane_idx();
  if (warp >= kNumRanks) return;
  float* to = weights_at(p, epoch, warp, p.rank);
  for (int i = lane; i < p.num_tokens * kNumTopk; i += 32) to[i] = at<const float>(p.topk_weights, 0)[i];
  __syncwarp();
  if (lane == 0) st_release_sys(weight_flag_at(p, epoch, warp, p.rank), epoch);
}

// Writes the sum of some rows, each times its weight, in the order of the bits of `which`. from(i): row i; `weight`: in lane i, its weight.
// Called by all warps of a group; each does its part of the columns.
template <class From>
__device__ __forceinline__ void write_sum(const Group& group, Vec16* to, u32 which, float weight, From from) {
  const int step = group.num_warps * 32;
  for (int first = group.thread; first - lane_idx() < kRowVecs; first += step * kAtOnce) {
    float sum[kAtOnce][8] = {};
    for (u32 left = which; left; left &= left - 1) {
      const int i = __ffs(left) - 1;
      const Vec16* row = from(i);
      const float w = __shfl_sync(~0u, weight, i);
      Vec16 held[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (first + j * step < kRowVecs) held[j] = ld_streaming(row + first + j * step);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (first + j * step < kRowVecs) add_scaled_to<kBfloat16>(sum[j], held[j], w);
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (first + j * step < kRowVecs) st_vec(to + first + j * step, rounded<kBfloat16>(sum[j]));
    }
  }
}

__device__ inline void send_entry(const Params& p, u32 epoch, const Group& group, const LlEntry* entry) {
  const int lane = lane_idx(), source = entry->source, token = entry->token;
  const int row = lane < kNumTopk ? entry->row[lane] : kLlElsewhere;
  if (p.reduce_early) {
    float weight = lane < kNumTopk ? entry->weight[lane] : 0.f;
    bool ok = true;
    if (!p.has_weights) {
      if (lane == 0) ok = wait_epoch(make_waiter(p), weight_flag_at(p, epoch, p.rank, source), epoch, kPhaseLlWeights, source);
      ok = __shfl_sync(~0u, ok, 0);
      __syncwarp();  // all lanes may read what lane 0 acquired
      if (ok && lane < kNumTopk) weight = ld_relaxed_sys(weights_at(p, epoch, p.rank, source) + token * kNumTopk + lane);
    }
    const u32 here = __ballot_sync(~0u, row >= 0);
    auto from = [&](int k) { return at<const Vec16>(p.y, 0) + static_cast<u64>(__shfl_sync(~0u, row, k)) * kRowVecs; };
    write_sum(group, row_at(p, epoch, source, p.rank, token), here, weight, from);
    const bool all_ok = group.all(ok);
    __syncwarp();
    if (all_ok && group.thread == 0) st_release_sys(flag_at(p, epoch, source, p.rank, token), epoch);
    return;
  }
  for (int k = 0; k < kNumTopk; ++k) {
    const i64 from = __shfl_sync(~0u, row, k);
    if (from == kLlElsewhere) continue;
    Vec16* to = row_at(p, epoch, source, k, token);
    for (int i = group.thread; i < kRowVecs; i += group.num_warps * 32) {
      st_vec(to + i, from == kLlNoRoom ? Vec16{} : ld_streaming(at<const Vec16>(p.y, 0) + from * kRowVecs + i));
    }
  }
  group.sync();
  if (group.thread < kNumTopk && row != kLlElsewhere) st_release_sys(flag_at(p, epoch, source, group.thread, token), epoch);
}

// Groups never leave early: their warps meet at barriers. After a time-out flags stay down.
__device__ inline void send(const Params& p, u32 epoch) {
  __shared__ i32 items[2][kWarps];  // the item of each group, by turns
  __shared__ bool failed;
  u32* taken = &at<State>(p.state, 0)->ll_combine_items;
  const Group group(p.send_warps);
  u32 next = 0;
  if (group.thread == 0) next = add_relaxed_gpu(taken, 1);  // comes while others are waited for
  const int num_entries = *at<const i32>(p.handle, kLlHandleNumEntries);
  const LlEntry* entries = at<const LlEntry>(p.handle, kLlHandleEntries);
  if (threadIdx.x == 0) failed = false;
  __syncthreads();
  if (threadIdx.x < kNumRanks) {
    const u32* acks = at<const u32>(p.peers[p.rank], kLlCombineAcks);
    if (!wait_epoch(make_waiter(p), acks + threadIdx.x, epoch - kNumSides, kPhaseLlCombineRoom, threadIdx.x) || was_aborted(p))
      failed = true;
  }
  if (group.thread == 0) items[0][group.idx] = next;
  __syncthreads();
  if (failed) return;
  if (blockIdx.x == 0 && p.reduce_early && !p.has_weights) send_weights(p, epoch);
  for (int turn = 0;; ++turn) {
    const int item = items[turn % 2][group.idx];
    if (item >= num_entries) break;
    if (group.thread == 0) next = add_relaxed_gpu(taken, 1);
    send_entry(p, epoch, group, entries + item);
    if (group.thread == 0) items[(turn + 1) % 2][group.idx] = next;
    group.sync();
  }
}

// What a lane knows of a token's choice `lane`: its expert, -1 for none.
__device__ __forceinline__ int choice_of(const Params& p, int token) {
  if (token >= p.num_tokens || lane_idx() >= kNumTopk) return -1;
  const i64 i = static_cast<i64>(token) * kNumTopk + lane_idx();
  const i64 expert = p.idx_bytes == 8 ? at<const i64>(p.topk_idx, 0)[i] : at<const i32>(p.topk_idx, 0)[i];
  return expert >= 0 && expert < kNumExperts ? static_cast<int>(expert) : -1;
}

// One warp's part of a token.
__device__ inline void receive_token(const Params& p, u32 epoch, const Group& group, int token, int expert) {
  const int lane = lane_idx();
  const i64 place = static_cast<i64>(token) * kNumTopk + lane;
  const bool valid = expert >= 0;
  const int holder = valid ? expert / kNumLocalExperts : 0;
  const u32 ranks = __reduce_or_sync(~0u, valid ? 1u << holder : 0), choices = __ballot_sync(~0u, valid);
  const u32 rows = p.reduce_early ? ranks : choices;
  const int sender = p.reduce_early ? lane : holder;
  bool ok = true;
  if (rows >> lane & 1) ok = wait_epoch(make_waiter(p), flag_at(p, epoch, p.rank, lane, token), epoch, kPhaseLlCombineRows, sender);
  const bool all_ok = __all_sync(~0u, ok);
  __syncwarp();
  if (!all_ok) return;
  const float weight = !p.reduce_early && valid ? at<const float>(p.topk_weights, 0)[place] : 1.f;
  Vec16* out = at<Vec16>(p.out, 0) + static_cast<u64>(token) * kRowVecs;
  write_sum(group, out, rows, weight, [&](int which) { return row_at(p, epoch, p.rank, which, token); });
}

// Which tokens a warp receives.
struct Share {
  Group group;
  int first, step;

  __device__ explicit Share(const Params& p)
      : group(p.receive_warps), first(blockIdx.x + group.idx * gridDim.x), step(kWarps / group.num_warps * gridDim.x) {}
};

extern "C" __global__ void __launch_bounds__(kLlThreads, 1) ll_combine(const __grid_constant__ Params p) {
  overlap_kernels();
  State* state = at<State>(p.state, 0);
  const u32 sent = state->ll_combine_sent + 1, received = state->ll_combine_received + 1;
  if (blockIdx.x == 0 && threadIdx.x < kNumRanks) {
    st_relaxed_sys(at<u32>(p.peers[threadIdx.x], kLlCombineAcks) + p.rank, received - 1);  // earlier kernels have ended: no fence
  }
  const Share share(p);
  int expert = choice_of(p, share.first);  // comes while rows are sent
  if (p.phases & kLlSend) send(p, sent);
  __syncthreads();
  if (p.phases & kLlReceive) {
    for (int token = share.first; token < p.num_tokens; token += share.step) {
      receive_token(p, received, share.group, token, expert);
      expert = choice_of(p, token + share.step);
    }
  }
  __syncthreads();

  if (threadIdx.x != 0 || !is_last_block_here(&state->ll_combine_blocks)) return;
  state->ll_combine_blocks = 0;
  if (p.phases & kLlSend) {
    state->ll_combine_items = 0;
    state->ll_combine_sent = sent;
  }
  if (p.phases & kLlReceive) state->ll_combine_received = received;
}
