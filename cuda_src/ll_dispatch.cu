// ll_dispatch: a low-latency dispatch. A token travels once to each rank that holds some of its experts, and is laid out there expert by
// expert. Launched for sending, for receiving, or for both (p.phases).
//
// Sending. Blocks take items as they go. The first item is the header: it tells every rank how many tokens this rank has and how often they
// choose each of its experts. The others are tokens: all warps but one read the row, convert it to FP8 if asked to, and write it to each
// receiver's inbox, and a flag follows it. The last warp works out the token's places among this rank's choices of each expert, and tells
// every rank which of its experts the token chooses.
//
// Receiving. With the headers of all sources every warp knows where a source's rows begin in each expert: the order (source, token, choice)
// needs no counting of what has arrived. Each warp takes a token of a source, learns where its row belongs, waits for the row, and copies
// it to its experts and what combine has to know to the handle.
//
// Headers and choices travel as words that carry the epoch, and so need neither a fence nor a flag; only rows do.
//
// Reuse of the inbox, kNumSides sides by the epoch: when a kernel starts, it acknowledges to every rank what this rank has received before,
// and a sender waits for the acknowledgement of kNumSides calls ago, so the two parts of a call may be far apart. Counters of the running
// kernel (ll_dispatch_blocks, _items, _entries) are reset by its last block, which also advances ll_dispatch_sent and _received.
// No block waits for another one of its grid: tokens are taken by whoever runs, so all rows are sent even if only one block gets an SM.
//
// Bytes: a row, (FP8: half of it and 4 / 128,) once over the link for each rank; at the receiver written, read, and written once for each
// expert.
#include "fp8.cuh"
#include "wait.cuh"
#include "work.cuh"

constexpr int kWarps = kLlThreads / 32, kChoiceWarp = kWarps - 1, kRowThreads = 32 * kChoiceWarp;
constexpr int kCapacity = kNumRanks * kNumMaxTokens;  // rows of an expert
constexpr int kScalesPerRow = kHidden / kFp8Group;
constexpr int kPlaceBits = 17;  // of a choice; the expert is in the bits above
static_assert(kNumMaxTokens * kNumTopk <= 1 << kPlaceBits && kNumLocalExperts < 1 << (31 - kPlaceBits));

struct Shared {
  i32 choices[kNumExperts];  // how often each expert is chosen
  i32 item[2];               // the item at hand, by turns
  bool failed;
};

__device__ __forceinline__ LlHeader* header_at(const Params& p, u32 epoch, int receiver, int sender) {
  return at<LlHeader>(p.peers[receiver], kLlHeaders + static_cast<u64>(epoch % kNumSides * kNumRanks + sender) * kLlHeaderStride);
}

__device__ __forceinline__ LlMessage* message_at(const Params& p, u32 epoch, int receiver, int sender, int token) {
  const u64 place = static_cast<u64>(epoch % kNumSides * kNumRanks + sender) * kNumMaxTokens + token;
  return at<LlMessage>(p.peers[receiver], kLlMessages + place * kLlMessageStride);
}

// The experts of all tokens, -1 for none, and how often each is chosen.
__device__ inline void read_table(const Params& p, short* table, i32* choices) {
  for (int i = threadIdx.x; i < p.num_tokens * kNumTopk; i += kLlThreads) {
    const i64 expert = p.idx_bytes == 8 ? at<const i64>(p.topk_idx, 0)[i] : at<const i32>(p.topk_idx, 0)[i];
    const bool exists = expert >= 0 && expert < kNumExperts;
    table[i] = exists ? static_cast<short>(expert) : -1;
    if (exists) atomicAdd(choices + expert, 1);
    if (p.check && (expert < -1 || expert >= kNumExperts)) report_bad_expert(p, i / kNumTopk, expert);
  }
}

__device__ __forceinline__ u64 word_of(u32 value, u32 epoch) { return static_cast<u64>(value) << 32 | epoch; }

__device__ inline void send_headers(const Params& p, u32 epoch, const i32* choices) {
  const int warp = warp_idx(), lane = lane_idx();
  if (warp >= kNumRanks) return;
  LlHeader* header = header_at(p, epoch, warp, p.rank);
  if (lane == 0) st_relaxed_sys(&header->num_tokens, word_of(p.num_tokens, epoch));
  for (int e = lane; e < kNumLocalExperts; e += 32) {
    st_relaxed_sys(header->num_choices + e, word_of(choices[warp * kNumLocalExperts + e], epoch));
  }
}

// A bit for each rank that the token goes to. `expert`: in lane k, the token's choice k.
__device__ __forceinline__ u32 ranks_of(int expert) { return __reduce_or_sync(~0u, expert >= 0 ? 1u << (expert / kNumLocalExperts) : 0); }

__device__ inline void send_row(const Params& p, u32 epoch, int token, u32 ranks) {
  char* to[kNumRanks];
#pragma unroll
  for (int r = 0; r < kNumRanks; ++r)
    to[r] = ranks >> r & 1 ? reinterpret_cast<char*>(message_at(p, epoch, r, p.rank, token)) + kLlHeadBytes : nullptr;
  const Vec16* row = at<const Vec16>(p.x, static_cast<u64>(token) * kHidden * 2);
  if (kHasFp8 && p.use_fp8) {
    constexpr int kPieces = kHidden / 16;
    for (int first = warp_idx() * 32; first < kPieces; first += kRowThreads) {
      const int i = first + lane_idx();
      const bool exists = i < kPieces;
      Vec16 held[2] = {};
      if (exists) held[0] = ld_streaming(row + 2 * i), held[1] = ld_streaming(row + 2 * i + 1);
      float scale;
      const Vec16 bytes = to_fp8(held, p.round_scale, scale);
      if (!exists) continue;
#pragma unroll
      for (int r = 0; r < kNumRanks; ++r) {
        if (!to[r]) continue;
        st_vec(reinterpret_cast<Vec16*>(to[r]) + i, bytes);
        if (i % 8 == 0) reinterpret_cast<float*>(to[r] + kHidden)[i / 8] = scale;
      }
    }
  } else {
    constexpr int kPieces = kHidden / 8;
#pragma unroll 2
    for (int i = threadIdx.x; i < kPieces; i += kRowThreads) {
      const Vec16 held = ld_streaming(row + i);
#pragma unroll
      for (int r = 0; r < kNumRanks; ++r) {
        if (to[r]) st_vec(reinterpret_cast<Vec16*>(to[r]) + i, held);
      }
    }
  }
}

// One warp. Places are counted over the table, which all blocks have, so no block needs another's counts.
__device__ inline void send_choices(const Params& p, u32 epoch, int token, int expert, u32 ranks, const short* table) {
  const int lane = lane_idx();
  int choices[kNumTopk], before[kNumTopk] = {};
#pragma unroll
  for (int k = 0; k < kNumTopk; ++k) choices[k] = __shfl_sync(~0u, expert, k);
  for (int i = lane; i < token * kNumTopk; i += 32) {
    const int other = table[i];
#pragma unroll
    for (int k = 0; k < kNumTopk; ++k) before[k] += other == choices[k];
  }
  int place = __popc(__match_any_sync(~0u, expert) & ((1u << lane) - 1));  // a token may choose an expert twice
#pragma unroll
  for (int k = 0; k < kNumTopk; ++k) {
    const int sum = __reduce_add_sync(~0u, before[k]);
    if (lane == k) place += sum;
  }
  if (lane >= kNumTopk) return;
  const int holder = expert >= 0 ? expert / kNumLocalExperts : -1;
  const float weight = p.topk_weights ? at<const float>(p.topk_weights, 0)[token * kNumTopk + lane] : 0.f;
#pragma unroll
  for (int r = 0; r < kNumRanks; ++r) {
    LlMessage* message = message_at(p, epoch, r, p.rank, token);
    const u32 choice = holder == r ? (expert - r * kNumLocalExperts + 1) << kPlaceBits | place : 0;
    st_relaxed_sys(message->choice + lane, word_of(choice, epoch));
    if (ranks >> r & 1) message->weight[lane] = weight;
  }
}

__device__ inline void send(const Params& p, u32 epoch, short* table, Shared& shared) {
  const int warp = warp_idx(), lane = lane_idx();
  u32* taken = &at<State>(p.state, 0)->ll_dispatch_items;
  u32 next = 0;
  if (threadIdx.x == 0) next = add_relaxed_gpu(taken, 1);  // comes while the table is read
  read_table(p, table, shared.choices);
  if (threadIdx.x < kNumRanks) {
    const u32* acks = at<const u32>(p.peers[p.rank], kLlDispatchAcks);
    if (!wait_epoch(make_waiter(p), acks + threadIdx.x, epoch - kNumSides, kPhaseLlDispatchRoom, threadIdx.x)) shared.failed = true;
  }
  if (threadIdx.x == 0) {
    shared.item[0] = next;
    if (was_aborted(p)) shared.failed = true;
  }
  __syncthreads();
  if (shared.failed) return;
  for (int turn = 0;; ++turn) {
    const int item = shared.item[turn % 2], token = item - 1;
    if (item > p.num_tokens) break;
    if (threadIdx.x == 0) next = add_relaxed_gpu(taken, 1);
    u32 ranks = 0;
    if (item == 0) {
      send_headers(p, epoch, shared.choices);
    } else {
      const int expert = lane < kNumTopk ? table[token * kNumTopk + lane] : -1;
      ranks = ranks_of(expert);
      if (warp == kChoiceWarp) {
        send_choices(p, epoch, token, expert, ranks, table);
      } else {
        send_row(p, epoch, token, ranks);
      }
    }
    if (threadIdx.x == 0) shared.item[(turn + 1) % 2] = next;
    __syncthreads();  // the flags release what all threads wrote
    if (warp == kChoiceWarp && ranks >> lane & 1) st_release_sys(&message_at(p, epoch, lane, p.rank, token)->flag, epoch);
  }
}

// The numbers in the upper halves of `count` words, at `words` and every kLlHeaderStride after it; they are loaded all at once, and only
// waited for where they have not come. -1: the time is up.
template <int kMost>
__device__ __forceinline__ int sum_of(const Params& p, u32 epoch, const u64* words, int count) {
  u64 held[kMost > 0 ? kMost : 1];
  auto word = [&](int s) { return at<const u64>(reinterpret_cast<u64>(words), static_cast<u64>(s) * kLlHeaderStride); };
#pragma unroll
  for (int s = 0; s < kMost; ++s) held[s] = s < count ? ld_relaxed_sys(word(s)) : word_of(0, epoch);
  int sum = 0;
#pragma unroll
  for (int s = 0; s < kMost; ++s) {
    if (static_cast<u32>(held[s]) != epoch && !wait_epoch(make_waiter(p), word(s), epoch, kPhaseLlCounts, s, &held[s])) return -1;
    sum += held[s] >> 32;
  }
  return sum;
}

// Loads are started before it is known where their values go: nearly all of the time is spent waiting for memory.
template <int kVecs>
__device__ inline void receive_row(const Params& p, const LlMessage* message, int source, int token, int place) {
  constexpr int kAtOnce = 14;
  const int lane = lane_idx();
  const char* body = reinterpret_cast<const char*>(message) + kLlHeadBytes;
  const Vec16* row = reinterpret_cast<const Vec16*>(body);
  const float* scales = reinterpret_cast<const float*>(body + kHidden);
  const u32 places = __ballot_sync(~0u, place >= 0);
  auto row_of = [&](u32 left) { return static_cast<u64>(__shfl_sync(~0u, place, __ffs(left) - 1)); };
  u32 idx = 0;
  if (lane == 0) idx = add_relaxed_gpu(&at<State>(p.state, 0)->ll_dispatch_entries, 1);
  const float weight = lane < kNumTopk ? message->weight[lane] : 0.f;
  float scale = p.use_fp8 && lane < kScalesPerRow ? ld_relaxed_sys(scales + lane) : 0.f;
  for (int first = lane; first - lane < kVecs; first += 32 * kAtOnce) {
    Vec16 held[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (first + j * 32 < kVecs) held[j] = ld_streaming(row + first + j * 32);
    }
    for (u32 left = places; left; left &= left - 1) {
      Vec16* to = at<Vec16>(p.recv_x, 0) + row_of(left) * kVecs;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (first + j * 32 < kVecs) st_vec(to + first + j * 32, held[j]);
      }
    }
  }
  for (int first = 0; p.use_fp8 && first < kScalesPerRow; first += 32) {
    const int i = first + lane;
    const float next_scale = i + 32 < kScalesPerRow ? ld_relaxed_sys(scales + i + 32) : 0.f;
    for (u32 left = places; left; left &= left - 1) {
      const u64 to = row_of(left) * kScalesPerRow + i;
      if (i >= kScalesPerRow) continue;
      if (p.use_ue8m0) {
        at<u8>(p.recv_scales, 0)[to] = __float_as_uint(scale) >> 23;
      } else {
        at<float>(p.recv_scales, 0)[to] = scale;
      }
    }
    scale = next_scale;
  }
  LlEntry* entry = at<LlEntry>(p.handle, kLlHandleEntries) + __shfl_sync(~0u, idx, 0);
  if (lane == 0) entry->source = source, entry->token = token;
  if (lane < kNumTopk) entry->row[lane] = place, entry->weight[lane] = weight;
}

// One warp.
__device__ inline void receive_token(const Params& p, u32 epoch, int source, int token, u64 start) {
  const int lane = lane_idx();
  const Waiter waiter = make_waiter(p);
  const LlMessage* message = message_at(p, epoch, p.rank, source, token);
  u64 choice = 0;
  bool ok = lane >= kNumTopk || wait_epoch(waiter, message->choice + lane, epoch, kPhaseLlRows, source, &choice);
  if (!__all_sync(~0u, ok)) return;
  const u32 chosen = choice >> 32;  // 0: not here
  if (!__any_sync(~0u, chosen)) return;
  int place = kLlElsewhere;
  if (chosen) {
    const int expert = (chosen >> kPlaceBits) - 1;
    const int before = sum_of<kNumRanks - 1>(p, epoch, header_at(p, epoch, p.rank, 0)->num_choices + expert, source);
    ok = before >= 0;
    place = before + (chosen & ((1u << kPlaceBits) - 1));
    place = place < kCapacity ? expert * kCapacity + place : kLlNoRoom;
  }
  if (lane == 0) {
    ok &= wait_epoch(waiter, &message->flag, epoch, kPhaseLlRows, source);
    if (p.wait_stats) max_relaxed_gpu(at<u64>(p.state, kLocalWaits) + source, nanoseconds() - start);
  }
  if (!__all_sync(~0u, ok)) return;
  __syncwarp();  // all lanes may read what lane 0 acquired
  if (p.use_fp8) {
    receive_row<kHidden / 16>(p, message, source, token, place);
  } else {
    receive_row<kHidden / 8>(p, message, source, token, place);
  }
}

__device__ inline void count(const Params& p, u32 epoch) {
  for (int e = threadIdx.x; e < kNumLocalExperts; e += kLlThreads) {
    const int sum = sum_of<kNumRanks>(p, epoch, header_at(p, epoch, p.rank, 0)->num_choices + e, kNumRanks);
    at<i32>(p.handle, kLlHandleNumRecvPerExpert)[e] = min(sum, kCapacity);
    if (p.recv_stats) at<i32>(p.recv_stats, 0)[e] += sum;
  }
}

__device__ inline void receive(const Params& p, u32 epoch) {
  const u64 start = nanoseconds();
  const int lane = lane_idx();
  u64 header = 0;  // lane s: of source s
  bool ok = true;
  if (lane < kNumRanks) {
    ok = wait_epoch(make_waiter(p), &header_at(p, epoch, p.rank, lane)->num_tokens, epoch, kPhaseLlCounts, lane, &header);
  }
  if (!__all_sync(~0u, ok)) return;
  const int num_tokens = header >> 32, most = __reduce_max_sync(~0u, num_tokens);
  for (int item = blockIdx.x + warp_idx() * gridDim.x; item < most * kNumRanks; item += kWarps * gridDim.x) {
    const int source = (item + p.rank) % kNumRanks, token = item / kNumRanks;
    if (token < __shfl_sync(~0u, num_tokens, source)) receive_token(p, epoch, source, token, start);
  }
  if (blockIdx.x == 0) count(p, epoch);
}

// The last block of the grid ends the call. One warp.
__device__ inline void finish(const Params& p, u32 sent, u32 received) {
  State* state = at<State>(p.state, 0);
  const int lane = lane_idx();
  if (p.phases & kLlReceive && p.wait_stats && lane < kNumRanks) {
    u64* waited = at<u64>(p.state, kLocalWaits) + lane;
    at<u64>(p.wait_stats, 0)[lane] += *waited;
    *waited = 0;
  }
  if (lane != 0) return;
  state->ll_dispatch_blocks = 0;
  if (p.phases & kLlSend) {
    state->ll_dispatch_items = 0;
    state->ll_dispatch_sent = sent;
  }
  if (p.phases & kLlReceive) {
    *at<i32>(p.handle, kLlHandleNumEntries) = state->ll_dispatch_entries;
    state->ll_dispatch_entries = 0;
    state->ll_dispatch_received = received;
  }
}

extern "C" __global__ void __launch_bounds__(kLlThreads, 1) ll_dispatch(const __grid_constant__ Params p) {
  extern __shared__ short table[];
  __shared__ Shared shared;
  overlap_kernels();
  State* state = at<State>(p.state, 0);
  const u32 sent = state->ll_dispatch_sent + 1, received = state->ll_dispatch_received + 1;
  if (blockIdx.x == 0 && threadIdx.x < kNumRanks) {
    st_relaxed_sys(at<u32>(p.peers[threadIdx.x], kLlDispatchAcks) + p.rank, received - 1);  // earlier kernels have ended: no fence
  }
  for (int e = threadIdx.x; e < kNumExperts; e += kLlThreads) shared.choices[e] = 0;
  if (threadIdx.x == 0) shared.failed = false;
  __syncthreads();

  if (p.phases & kLlSend) send(p, sent, table, shared);
  __syncthreads();
  if (p.phases & kLlReceive && !shared.failed) receive(p, received);
  __syncthreads();

  if (warp_idx() != 0) return;
  const bool last = lane_idx() == 0 && is_last_block_here(&state->ll_dispatch_blocks);
  if (!__shfl_sync(~0u, last, 0)) return;
  __syncwarp();
  finish(p, sent, received);
}
