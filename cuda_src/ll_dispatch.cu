// ll_dispatch: a low-latency dispatch. A token travels once to each rank that holds some of its experts, and is laid out there expert by
// expert. Launched for sending, for receiving, or for both (p.phases).
//
// Sending. Block 0 first tells every rank how many tokens this rank has and how often they choose each of its experts (a header). Blocks
// take tokens as they go. All warps but one read a token's row, convert it to FP8 if asked to, and write it to each receiver's inbox; the
// last warp works out the token's position among this rank's choices of each expert, and writes it in front of the row. Then it raises the
// flag of the message, or tells the rank that this token does not come.
//
// Receiving. With the headers of all sources every block knows where a source's rows begin in each expert: the order (source, token,
// choice) needs no counting of what has arrived. Each warp waits for a message, and copies its row to its experts and what combine has to
// know to the handle.
//
// Reuse of the inbox, kNumSides sides by the epoch: the last receiving block acknowledges the call to every rank, and a sender waits for
// the acknowledgement of kNumSides calls ago, so the two parts may be far apart. Flags hold the epoch and need no cleaning. Counters of the
// running kernel (ll_dispatch_blocks, _items, _entries) are reset by its last block, which also advances ll_dispatch_sent and _received.
// No block waits for another one of its grid: tokens are taken by whoever runs, so all rows are sent even if only one block gets an SM.
//
// Bytes: a row, (FP8: half of it and 4 / 128,) once over the link for each rank; at the receiver written, read, and written once for each
// expert.
#include "fp8.cuh"
#include "wait.cuh"
#include "work.cuh"

constexpr int kWarps = kLlThreads / 32, kMetaWarp = kWarps - 1, kRowThreads = 32 * kMetaWarp;
constexpr int kSend = 1, kReceive = 2;
constexpr int kCapacity = kNumRanks * kNumMaxTokens;  // rows of an expert
constexpr int kScalesPerRow = kHidden / kFp8Group;

struct Shared {
  i32 per_expert[kNumExperts];  // sending: choices of each expert; receiving: [source][local expert], rows of the sources before it
  i32 token[2];                 // the token at hand, by turns
  i32 num_tokens[kNumRanks];    // of each source
  bool failed;
};

__device__ __forceinline__ LlHeader* header_at(const Params& p, u32 epoch, int receiver, int sender) {
  return at<LlHeader>(p.peers[receiver], kLlHeaders + static_cast<u64>(epoch % kNumSides * kNumRanks + sender) * kLlHeaderStride);
}

__device__ __forceinline__ char* message_at(const Params& p, u32 epoch, int receiver, int sender, int token) {
  const u64 place = static_cast<u64>(epoch % kNumSides * kNumRanks + sender) * kNumMaxTokens + token;
  return at<char>(p.peers[receiver], kLlMessages + place * kLlMessageStride);
}

// The experts of all tokens, -1 for none.
__device__ inline void read_table(const Params& p, short* table) {
  for (int i = threadIdx.x; i < p.num_tokens * kNumTopk; i += kLlThreads) {
    const i64 expert = p.idx_bytes == 8 ? at<const i64>(p.topk_idx, 0)[i] : at<const i32>(p.topk_idx, 0)[i];
    table[i] = expert >= 0 && expert < kNumExperts ? static_cast<short>(expert) : -1;
    if (p.check && (expert < -1 || expert >= kNumExperts)) report_bad_expert(p, i / kNumTopk, expert);
  }
}

__device__ inline void send_headers(const Params& p, u32 epoch, const short* table, Shared& shared) {
  for (int i = threadIdx.x; i < p.num_tokens * kNumTopk; i += kLlThreads) {
    if (table[i] >= 0) atomicAdd(shared.per_expert + table[i], 1);
  }
  __syncthreads();
  const int warp = warp_idx(), lane = lane_idx();
  if (warp >= kNumRanks) return;
  LlHeader* header = header_at(p, epoch, warp, p.rank);
  for (int e = lane; e < kNumLocalExperts; e += 32) {
    st_relaxed_sys(header->num_choices + e, shared.per_expert[warp * kNumLocalExperts + e]);
  }
  if (lane == 0) st_relaxed_sys(&header->num_tokens, p.num_tokens);
  __syncwarp();
  if (lane == 0) st_release_sys(&header->flag, epoch);
}

// A bit for each rank that the token goes to. `expert`: in lane k, the token's choice k.
__device__ __forceinline__ u32 ranks_of(int expert) { return __reduce_or_sync(~0u, expert >= 0 ? 1u << (expert / kNumLocalExperts) : 0); }

__device__ inline void send_row(const Params& p, u32 epoch, int token, u32 ranks) {
  char* to[kNumRanks];
#pragma unroll
  for (int r = 0; r < kNumRanks; ++r) to[r] = ranks >> r & 1 ? message_at(p, epoch, r, p.rank, token) + kLlHeadBytes : nullptr;
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

// One warp. Positions are counted over the table, which all blocks have, so no block needs another's counts.
__device__ inline void send_head(const Params& p, u32 epoch, int token, int expert, u32 ranks, const short* table) {
  const int lane = lane_idx();
  int choices[kNumTopk], before[kNumTopk] = {};
#pragma unroll
  for (int k = 0; k < kNumTopk; ++k) choices[k] = __shfl_sync(~0u, expert, k);
  for (int i = lane; i < token * kNumTopk; i += 32) {
    const int other = table[i];
#pragma unroll
    for (int k = 0; k < kNumTopk; ++k) before[k] += other == choices[k];
  }
  int position = __popc(__match_any_sync(~0u, expert) & ((1u << lane) - 1));  // a token may choose an expert twice
#pragma unroll
  for (int k = 0; k < kNumTopk; ++k) {
    const int sum = __reduce_add_sync(~0u, before[k]);
    if (lane == k) position += sum;
  }
  if (lane >= kNumTopk) return;
  const float weight = p.topk_weights ? at<const float>(p.topk_weights, 0)[token * kNumTopk + lane] : 0.f;
#pragma unroll
  for (int r = 0; r < kNumRanks; ++r) {
    if (!(ranks >> r & 1)) continue;
    LlMessage* message = reinterpret_cast<LlMessage*>(message_at(p, epoch, r, p.rank, token));
    message->expert[lane] = expert >= 0 && expert / kNumLocalExperts == r ? expert - r * kNumLocalExperts : -1;
    message->position[lane] = position;
    message->weight[lane] = weight;
  }
}

__device__ inline void send(const Params& p, u32 epoch, short* table, Shared& shared) {
  const int warp = warp_idx(), lane = lane_idx();
  State* state = at<State>(p.state, 0);
  read_table(p, table);
  for (int e = threadIdx.x; e < kNumExperts; e += kLlThreads) shared.per_expert[e] = 0;
  if (threadIdx.x < kNumRanks) {
    const u32* acks = at<const u32>(p.peers[p.rank], kLlDispatchAcks);
    if (!wait_epoch(make_waiter(p), acks + threadIdx.x, epoch - kNumSides, kPhaseLlDispatchRoom, threadIdx.x)) shared.failed = true;
  }
  __syncthreads();
  if (shared.failed) return;
  if (blockIdx.x == 0) send_headers(p, epoch, table, shared);
  if (threadIdx.x == 0) shared.token[0] = add_relaxed_gpu(&state->ll_dispatch_items, 1);
  __syncthreads();
  for (int turn = 0;; ++turn) {
    const int token = shared.token[turn % 2];
    if (token >= p.num_tokens) break;
    u32 next = 0;
    if (threadIdx.x == 0) next = add_relaxed_gpu(&state->ll_dispatch_items, 1);
    const int expert = lane < kNumTopk ? table[token * kNumTopk + lane] : -1;
    const u32 ranks = ranks_of(expert);
    if (warp == kMetaWarp) {
      send_head(p, epoch, token, expert, ranks, table);
    } else {
      send_row(p, epoch, token, ranks);
    }
    if (threadIdx.x == 0) shared.token[(turn + 1) % 2] = next;
    __syncthreads();  // the flags release what all threads wrote
    if (warp == kMetaWarp && lane < kNumRanks) {
      LlMessage* message = reinterpret_cast<LlMessage*>(message_at(p, epoch, lane, p.rank, token));
      st_release_sys(&message->flag, 2 * epoch + !(ranks >> lane & 1));
    }
  }
}

// A warp copies a row to as many rows of `to` as `places` has bits. `place`: in lane k, the row for choice k.
__device__ inline void spread_row(const char* from, u64 to, int num_vecs, u32 places, int place) {
  constexpr int kAtOnce = 14;
  const Vec16* source = reinterpret_cast<const Vec16*>(from);
  for (int first = 0; first < num_vecs; first += 32 * kAtOnce) {
    Vec16 held[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int i = first + j * 32 + lane_idx();
      if (i < num_vecs) held[j] = ld_streaming(source + i);
    }
    for (u32 left = places; left; left &= left - 1) {
      const u64 row = __shfl_sync(~0u, place, __ffs(left) - 1);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = first + j * 32 + lane_idx();
        if (i < num_vecs) st_vec(at<Vec16>(to, 0) + row * num_vecs + i, held[j]);
      }
    }
  }
}

__device__ inline void await_headers(const Params& p, u32 epoch, Shared& shared) {
  if (threadIdx.x < kNumRanks) {
    const LlHeader* header = header_at(p, epoch, p.rank, threadIdx.x);
    if (!wait_epoch(make_waiter(p), &header->flag, epoch, kPhaseLlCounts, threadIdx.x)) shared.failed = true;
    shared.num_tokens[threadIdx.x] = header->num_tokens;
  }
  __syncthreads();
  if (shared.failed) return;
  for (int e = threadIdx.x; e < kNumLocalExperts; e += kLlThreads) {
    int sum = 0;
    for (int s = 0; s < kNumRanks; ++s) {
      shared.per_expert[s * kNumLocalExperts + e] = sum;
      sum += header_at(p, epoch, p.rank, s)->num_choices[e];
    }
    if (blockIdx.x == 0) {
      at<i32>(p.handle, kLlHandleNumRecvPerExpert)[e] = sum;
      if (p.recv_stats) at<i32>(p.recv_stats, 0)[e] += sum;
    }
  }
  __syncthreads();
}

__device__ inline void receive_message(const Params& p, u32 epoch, int source, int token, const Shared& shared, u64 start) {
  const int lane = lane_idx();
  const char* from = message_at(p, epoch, p.rank, source, token);
  const LlMessage* message = reinterpret_cast<const LlMessage*>(from);
  u32 found = 0;
  bool ok = true;
  if (lane == 0) ok = wait_epoch(make_waiter(p), &message->flag, 2 * epoch, kPhaseLlRows, source, &found);
  if (p.wait_stats && lane == 0) max_relaxed_gpu(at<u64>(p.state, kLocalWaits) + source, nanoseconds() - start);
  found = __shfl_sync(~0u, found, 0);
  if (!__shfl_sync(~0u, ok, 0) || found & 1) return;
  __syncwarp();  // all lanes may read what lane 0 acquired
  const int expert = lane < kNumTopk ? message->expert[lane] : -1;
  const int place = expert >= 0 ? expert * kCapacity + shared.per_expert[source * kNumLocalExperts + expert] + message->position[lane] : -1;
  const u32 places = __ballot_sync(~0u, place >= 0);
  const char* row = from + kLlHeadBytes;
  if (p.use_fp8) {
    spread_row(row, p.recv_x, kHidden / 16, places, place);
    const float* scales = reinterpret_cast<const float*>(row + kHidden);
    for (int first = 0; first < kScalesPerRow; first += 32) {
      const int i = first + lane;
      const float scale = i < kScalesPerRow ? ld_relaxed_sys(scales + i) : 0.f;
      for (u32 left = places; left; left &= left - 1) {
        const u64 to = static_cast<u64>(__shfl_sync(~0u, place, __ffs(left) - 1)) * kScalesPerRow + i;
        if (i >= kScalesPerRow) continue;
        if (p.use_ue8m0) {
          at<u8>(p.recv_scales, 0)[to] = __float_as_uint(scale) >> 23;
        } else {
          at<float>(p.recv_scales, 0)[to] = scale;
        }
      }
    }
  } else {
    spread_row(row, p.recv_x, kHidden / 8, places, place);
  }
  u32 idx = 0;
  if (lane == 0) idx = add_relaxed_gpu(&at<State>(p.state, 0)->ll_dispatch_entries, 1);
  LlEntry* entry = at<LlEntry>(p.handle, kLlHandleEntries) + __shfl_sync(~0u, idx, 0);
  if (lane == 0) entry->source = source, entry->token = token;
  if (lane < kNumTopk) entry->row[lane] = place, entry->weight[lane] = message->weight[lane];
}

__device__ inline void receive(const Params& p, u32 epoch, Shared& shared) {
  const u64 start = nanoseconds();
  await_headers(p, epoch, shared);
  if (shared.failed) return;
  int most = 0;
  for (int s = 0; s < kNumRanks; ++s) most = max(most, shared.num_tokens[s]);
  for (int item = blockIdx.x + warp_idx() * gridDim.x; item < most * kNumRanks; item += kWarps * gridDim.x) {
    const int source = (item + p.rank) % kNumRanks, token = item / kNumRanks;
    if (token >= shared.num_tokens[source]) continue;
    receive_message(p, epoch, source, token, shared, start);
  }
}

// The last block of the grid ends the call. One warp.
__device__ inline void finish(const Params& p, u32 sent, u32 received) {
  State* state = at<State>(p.state, 0);
  const int lane = lane_idx();
  if (p.phases & kReceive && lane < kNumRanks) {
    st_release_sys(at<u32>(p.peers[lane], kLlDispatchAcks) + p.rank, received);
    if (p.wait_stats) {
      u64* waited = at<u64>(p.state, kLocalWaits) + lane;
      at<u64>(p.wait_stats, 0)[lane] += *waited;
      *waited = 0;
    }
  }
  if (lane != 0) return;
  state->ll_dispatch_blocks = 0;
  if (p.phases & kSend) {
    state->ll_dispatch_items = 0;
    state->ll_dispatch_sent = sent;
  }
  if (p.phases & kReceive) {
    *at<i32>(p.handle, kLlHandleNumEntries) = state->ll_dispatch_entries;
    state->ll_dispatch_entries = 0;
    state->ll_dispatch_received = received;
  }
}

extern "C" __global__ void __launch_bounds__(kLlThreads, 1) ll_dispatch(const __grid_constant__ Params p) {
  extern __shared__ short table[];
  __shared__ Shared shared;
  State* state = at<State>(p.state, 0);
  const u32 sent = state->ll_dispatch_sent + 1, received = state->ll_dispatch_received + 1;
  if (threadIdx.x == 0) shared.failed = false;
  __syncthreads();

  if (p.phases & kSend) send(p, sent, table, shared);
  __syncthreads();
  if (p.phases & kReceive && !shared.failed) receive(p, received, shared);
  __syncthreads();

  if (warp_idx() != 0) return;
  const bool last = lane_idx() == 0 && is_last_block(&state->ll_dispatch_blocks);
  if (!__shfl_sync(~0u, last, 0)) return;
  __syncwarp();
  finish(p, sent, received);
}
