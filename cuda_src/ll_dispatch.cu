// ll_dispatch: a low-latency dispatch. A token travels once to each rank that holds some of its experts, and is laid out there expert by
// expert. Launched for sending, for receiving, or for both (p.phases).
//
// Sending. Blocks take items as they go. The first item is the header: it tells every rank how many tokens this rank has and how often they
// choose each of its experts. The others are tokens: all warps but one read the row, convert it to FP8 if asked to, and write it to each
// receiver's inbox; the last warp works out the token's position among this rank's choices of each expert, and writes it in front of the
// row. Then it raises the flag of the message, or tells the rank that this token does not come.
//
// Receiving. With the headers of all sources every warp knows where a source's rows begin in each expert: the order (source, token, choice)
// needs no counting of what has arrived. Each warp waits for a message, and copies its row to its experts and what combine has to know to
// the handle.
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
  i32 choices[kNumExperts];  // how often each expert is chosen
  i32 item[2];               // the item at hand, by turns
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
  for (int e = threadIdx.x; e < kNumExperts; e += kLlThreads) shared.choices[e] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < p.num_tokens * kNumTopk; i += kLlThreads) {
    if (table[i] >= 0) atomicAdd(shared.choices + table[i], 1);
  }
  __syncthreads();
  const int warp = warp_idx(), lane = lane_idx();
  if (warp >= kNumRanks) return;
  LlHeader* header = header_at(p, epoch, warp, p.rank);
  for (int e = lane; e < kNumLocalExperts; e += 32) {
    st_relaxed_sys(header->num_choices + e, shared.choices[warp * kNumLocalExperts + e]);
  }
  __syncwarp();
  if (lane == 0) st_release_sys(&header->flag, static_cast<u64>(p.num_tokens) << 32 | epoch);
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
  u32* taken = &at<State>(p.state, 0)->ll_dispatch_items;
  u32 next = 0;
  if (threadIdx.x == 0) next = add_relaxed_gpu(taken, 1);  // comes while the table is read
  read_table(p, table);
  if (threadIdx.x < kNumRanks) {
    const u32* acks = at<const u32>(p.peers[p.rank], kLlDispatchAcks);
    if (!wait_epoch(make_waiter(p), acks + threadIdx.x, epoch - kNumSides, kPhaseLlDispatchRoom, threadIdx.x)) shared.failed = true;
  }
  if (threadIdx.x == 0) shared.item[0] = next;
  __syncthreads();
  if (shared.failed) return;
  for (int turn = 0;; ++turn) {
    const int item = shared.item[turn % 2], token = item - 1;
    if (item > p.num_tokens) break;
    if (threadIdx.x == 0) next = add_relaxed_gpu(taken, 1);
    int expert = -1;
    u32 ranks = 0;
    if (item == 0) {
      send_headers(p, epoch, table, shared);
    } else {
      if (lane < kNumTopk) expert = table[token * kNumTopk + lane];
      ranks = ranks_of(expert);
      if (warp == kMetaWarp) {
        send_head(p, epoch, token, expert, ranks, table);
      } else {
        send_row(p, epoch, token, ranks);
      }
    }
    if (threadIdx.x == 0) shared.item[(turn + 1) % 2] = next;
    __syncthreads();  // the flags release what all threads wrote
    if (item > 0 && warp == kMetaWarp && lane < kNumRanks) {
      LlMessage* message = reinterpret_cast<LlMessage*>(message_at(p, epoch, lane, p.rank, token));
      st_release_sys(&message->flag, 2 * epoch + !(ranks >> lane & 1));
    }
  }
}

// Rows of the sources before `source` for local expert `expert`.
__device__ __forceinline__ int rows_before(const Params& p, u32 epoch, int source, int expert) {
  int sum = 0;
#pragma unroll
  for (int s = 0; s < kNumRanks - 1; ++s) {
    if (s < source) sum += header_at(p, epoch, p.rank, s)->num_choices[expert];
  }
  return sum;
}

// One warp. Loads are started before it is known where their values go: nearly all of the time is spent waiting for memory.
template <int kVecs>
__device__ inline void receive_row(const Params& p, u32 epoch, int source, int token, const char* from) {
  constexpr int kAtOnce = 14;
  const int lane = lane_idx();
  const LlMessage* message = reinterpret_cast<const LlMessage*>(from);
  const Vec16* row = reinterpret_cast<const Vec16*>(from + kLlHeadBytes);
  u32 idx = 0;
  if (lane == 0) idx = add_relaxed_gpu(&at<State>(p.state, 0)->ll_dispatch_entries, 1);
  const int expert = lane < kNumTopk ? message->expert[lane] : -1;
  const int position = lane < kNumTopk ? message->position[lane] : 0;
  const float weight = lane < kNumTopk ? message->weight[lane] : 0.f;
  Vec16 held[kAtOnce];
  auto load = [&](int first) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (first + j * 32 + lane < kVecs) held[j] = ld_streaming(row + first + j * 32 + lane);
    }
  };
  load(0);
  const int row_of_expert = expert >= 0 ? rows_before(p, epoch, source, expert) + position : kCapacity;
  const int place = row_of_expert < kCapacity ? expert * kCapacity + row_of_expert : -1;  // no room: tokens chose it twice
  const u32 places = __ballot_sync(~0u, place >= 0);
  auto store = [&](int first) {
    for (u32 left = places; left; left &= left - 1) {
      Vec16* to = at<Vec16>(p.recv_x, 0) + static_cast<u64>(__shfl_sync(~0u, place, __ffs(left) - 1)) * kVecs;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (first + j * 32 + lane < kVecs) st_vec(to + first + j * 32 + lane, held[j]);
      }
    }
  };
  store(0);
  for (int first = 32 * kAtOnce; first < kVecs; first += 32 * kAtOnce) {
    load(first);
    store(first);
  }
  if (p.use_fp8) {
    const float* scales = reinterpret_cast<const float*>(from + kLlHeadBytes + kHidden);
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
  }
  LlEntry* entry = at<LlEntry>(p.handle, kLlHandleEntries) + __shfl_sync(~0u, idx, 0);
  if (lane == 0) entry->source = source, entry->token = token;
  if (lane < kNumTopk) entry->row[lane] = place, entry->weight[lane] = weight;
}

__device__ inline void receive_message(const Params& p, u32 epoch, int source, int token, u64 start) {
  const char* from = message_at(p, epoch, p.rank, source, token);
  u32 found = 0;
  bool ok = true;
  if (lane_idx() == 0) {
    ok = wait_epoch(make_waiter(p), &reinterpret_cast<const LlMessage*>(from)->flag, 2 * epoch, kPhaseLlRows, source, &found);
    if (p.wait_stats) max_relaxed_gpu(at<u64>(p.state, kLocalWaits) + source, nanoseconds() - start);
  }
  found = __shfl_sync(~0u, found, 0);
  if (!__shfl_sync(~0u, ok, 0) || found & 1) return;
  __syncwarp();  // all lanes may read what lane 0 acquired
  if (p.use_fp8) {
    receive_row<kHidden / 16>(p, epoch, source, token, from);
  } else {
    receive_row<kHidden / 8>(p, epoch, source, token, from);
  }
}

__device__ inline void count(const Params& p, u32 epoch) {
  for (int e = threadIdx.x; e < kNumLocalExperts; e += kLlThreads) {
    const int sum = rows_before(p, epoch, kNumRanks, e) + header_at(p, epoch, p.rank, kNumRanks - 1)->num_choices[e];
    at<i32>(p.handle, kLlHandleNumRecvPerExpert)[e] = sum;
    if (p.recv_stats) at<i32>(p.recv_stats, 0)[e] += sum;
  }
}

__device__ inline void receive(const Params& p, u32 epoch) {
  const u64 start = nanoseconds();
  const int lane = lane_idx();
  u64 header = 0;  // lane s: of source s
  bool ok = true;
  if (lane < kNumRanks) {
    ok = wait_epoch(make_waiter(p), &header_at(p, epoch, p.rank, lane)->flag, epoch, kPhaseLlCounts, lane, &header);
  }
  if (!__all_sync(~0u, ok)) return;
  __syncwarp();
  const int num_tokens = header >> 32, most = __reduce_max_sync(~0u, num_tokens);
  for (int item = blockIdx.x + warp_idx() * gridDim.x; item < most * kNumRanks; item += kWarps * gridDim.x) {
    const int source = (item + p.rank) % kNumRanks, token = item / kNumRanks;
    if (token < __shfl_sync(~0u, num_tokens, source)) receive_message(p, epoch, source, token, start);
  }
  if (blockIdx.x == 0) count(p, epoch);
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
  if (p.phases & kReceive && !shared.failed) receive(p, received);
  __syncthreads();

  if (warp_idx() != 0) return;
  const bool last = lane_idx() == 0 && is_last_block_here(&state->ll_dispatch_blocks);
  if (!__shfl_sync(~0u, last, 0)) return;
  __syncwarp();
  finish(p, sent, received);
}
