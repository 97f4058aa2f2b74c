// The send half of the low-latency dispatches. ll_dispatch.cu describes the protocol. `Rows`: ConvertedRows or OpaqueRows.
#pragma once
#include "low_latency/ll_dispatch.cuh"

// Reads the experts of all tokens, -1 for none, and counts the choices of each expert. Block 0 keeps the experts for combine. All warps but
// the first call this; the first warp acquires credits meanwhile.
__device__ inline void read_expert_table(const Params& p, short* table, i32* choices) {
  for (int i = threadIdx.x - 32; i < p.num_tokens * kNumTopk; i += kLlThreads - 32) {
    const i64 expert = p.idx_bytes == 8 ? at<const i64>(p.topk_idx, 0)[i] : at<const i32>(p.topk_idx, 0)[i];
    const bool exists = expert >= 0 && expert < kNumExperts;
    table[i] = exists ? static_cast<short>(expert) : -1;
    if (blockIdx.x == 0) at<short>(p.handle, kLlHandleChoices)[i] = table[i];
    if (exists) atomicAdd(choices + expert, 1);
    if (p.check && (expert < -1 || expert >= kNumExperts)) report_bad_expert(p, i / kNumTopk, expert);
  }
}

// One warp sends the header for one rank. For a scale-out rank, the first word is the signal that the others have arrived.
template <class Rows>
__device__ inline void send_header(const Params& p, u32 epoch, int rank, const short* table, const i32* choices) {
  const int lane = lane_idx();
  const bool scale_out = is_scale_out(p, rank);
  const u64 there = header_offset(epoch, p.rank), staged = kLlStagedHeaders + ring_slot(epoch, rank) * kLlHeaderStride;
  LlHeader* header = scale_out ? at<LlHeader>(network_base(p), staged) : at<LlHeader>(p.peers[rank], there);
  const u64 num_tokens = tagged_word(p.num_tokens, epoch);
  if (lane == 0 && !scale_out) st_relaxed_sys(&header->num_tokens, num_tokens);
  if (lane < 2) st_relaxed_sys(header->call_signature + lane, tagged_word(static_cast<u32>(p.call_signature >> 32 * lane), epoch));
  for (int e = lane; e < kNumLocalExperts; e += 32) {
    st_relaxed_sys(header->num_choices + e, tagged_word(choices[rank * kNumLocalExperts + e], epoch));
  }
  int num_rows = 0;
  for (int first = 0; first < kNumMaxTokens; first += 32) {
    bool is_sent = false;
    if (first + lane < p.num_tokens) {
#pragma unroll(kNumTopk <= 8 ? kNumTopk : 8)
      for (int k = 0; k < kNumTopk; ++k) {
        const int expert = table[(first + lane) * kNumTopk + k];
        is_sent |= expert >= 0 && expert / kNumLocalExperts == rank;
      }
    }
    const u32 sent_bits = __ballot_sync(~0u, is_sent);
    num_rows += __popc(sent_bits);
    if (lane == 0) st_relaxed_sys(header->tokens + first / 32, tagged_word(sent_bits, epoch));
  }
  if (lane == 0) st_relaxed_sys(&header->num_rows, tagged_word(num_rows, epoch));
  if (lane == 0) count_sent(p, num_rows, Rows::row_bytes(p));
  if (!scale_out) return;
  __syncwarp();
  put(p, rank, there + sizeof(u64), staged + sizeof(u64), sizeof(LlHeader) - sizeof(u64), there, num_tokens);
}

// Called by one warp. It counts expert slots over the table, which each block has. No block needs the counts of another one. The warp
// starts to load the weights first, because the receivers wait for its message. A lane reads four choices of the table at a time.
__device__ inline void send_choices(const Params& p, u32 epoch, int token, int expert, const Receivers& receivers, const short* table) {
  constexpr int kAtOnce = kNumTopk < 8 ? kNumTopk : 8, kPerLoad = sizeof(u64) / sizeof(short);
  const int lane = lane_idx();
  float weight = 0.f;
  if (lane < kNumTopk && p.topk_weights) weight = at<const float>(p.topk_weights, 0)[token * kNumTopk + lane];
  int expert_slot = __popc(__match_any_sync(~0u, expert) & ((1u << lane) - 1));  // a token may choose an expert twice
  for (int first = 0; first < kNumTopk; first += kAtOnce) {
    int choices[kAtOnce], before[kAtOnce] = {};
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) choices[k] = __shfl_sync(~0u, expert, first + k);
    for (int i = lane * kPerLoad; i < token * kNumTopk; i += 32 * kPerLoad) {
      const u64 others = *reinterpret_cast<const u64*>(table + i);
#pragma unroll
      for (int j = 0; j < kPerLoad; ++j) {
        const int other = i + j < token * kNumTopk ? static_cast<short>(others >> 16 * j) : -1;
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) before[k] += other == choices[k];
      }
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int sum = __reduce_add_sync(~0u, before[k]);
      if (lane == first + k) expert_slot += sum;
    }
  }
  if (lane >= kNumTopk) return;
  const u64 choice = tagged_word(expert >= 0 ? (expert + 1) << kExpertSlotBits | expert_slot : 0, epoch);
  receivers.each([&](LlMessage* message) {
    st_relaxed_sys(message->choice + lane, choice);
    st_relaxed_sys(message->weight + lane, tagged_word(__float_as_uint(weight), epoch));
  });
}

// Called by all warps, each for some of the scale-out ranks, once the message is complete.
template <class Rows>
__device__ inline void put_message(const Params& p, u32 epoch, int token, int rank) {
  const u32 num_bytes = kLlHeadBytes + Rows::body_bytes(p);
  u32 scale_out = __ballot_sync(~0u, rank >= 0 && is_scale_out(p, rank));
  for (int i = 0; scale_out; ++i, scale_out &= scale_out - 1) {
    const int to = __shfl_sync(~0u, rank, __ffs(scale_out) - 1);
    if (i % kWarps != warp_idx()) continue;
    put(p, to, message_offset(epoch, p.rank, token), staged_offset(epoch, token), num_bytes, flag_offset(epoch, p.rank, token), epoch);
  }
}

template <class Rows>
__device__ inline void send(const Params& p, short* table, Shared& shared) {
  const int warp = warp_idx(), lane = lane_idx();
  u32* tickets = &progress_of(p)->tickets;
  u32 next = 0;
  if (threadIdx.x == 0) next = fetch_add_relaxed_gpu(tickets);  // arrives while the table is read
  if (warp == 0) {
    acquire_credits(p, progress_of(p), kLlDispatchAcks, kPhaseLlDispatchRoom, nullptr, shared.call);
  } else {
    read_expert_table(p, table, shared.choices);
  }
  if (threadIdx.x == 0) shared.item[0] = next;
  __syncthreads();
  advance_once(p, shared.call);
  if (shared.call.failed) return;
  const u32 epoch = shared.call.sent;
  if (blockIdx.x == 0) {
    for (int r = threadIdx.x; r < kNumRanks; r += kLlThreads) at<u32>(p.handle, kLlHandleExcluded)[r] = shared.call.excluded[r];
    if (threadIdx.x == 0) *at<u32>(p.handle, kLlHandleEpoch) = epoch;
    if constexpr (kHasSlots) {
      if (threadIdx.x == 0) *at<u32>(p.handle, kLlHandleGeneration) = at<const State>(p.state, 0)->generation;
    }
  }
  for (int turn = 0;; ++turn) {
    const int item = shared.item[turn % 2] - shared.call.tickets_before, token = item - 1;
    if (item > p.num_tokens) break;
    if (threadIdx.x == 0) next = fetch_add_relaxed_gpu(tickets);
    int rank = -1;  // in some lanes, one of the token's receiving ranks
    if (item == 0) {
      for (int r = warp; r < kNumRanks; r += kWarps) {
        if (!shared.call.excluded[r]) send_header<Rows>(p, epoch, r, table, shared.choices);
      }
    } else {
      const int expert = lane < kNumTopk ? table[token * kNumTopk + lane] : -1;
      if (warp == kChoiceWarp) {
        rank = first_choice_of(expert, shared.call.excluded);
        send_choices(p, epoch, token, expert, Receivers(p, epoch, token, rank), table);
      } else {
        typename Rows::Outgoing row(p, token);
        rank = first_choice_of(expert, shared.call.excluded);
        row.send(Receivers(p, epoch, token, rank));
      }
    }
    if (threadIdx.x == 0) shared.item[(turn + 1) % 2] = next;
    __syncthreads();
    if constexpr (kHasScaleOut) put_message<Rows>(p, epoch, token, rank);
  }
}
