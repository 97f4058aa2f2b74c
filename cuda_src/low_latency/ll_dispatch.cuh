// The common part of both halves of the low-latency dispatches: offsets of headers and messages, and the shared memory of a block.
#pragma once
#include "low_latency/low_latency.cuh"

constexpr int kChoiceWarp = kLastWarp, kRowThreads = 32 * kChoiceWarp;  // of the send half
constexpr int kMaxReceivers = kNumRanks < kNumTopk ? kNumRanks : kNumTopk;
constexpr int kExpertSlotBits = 17;  // lower bits of a choice; the expert is in the bits above
static_assert(kNumMaxTokens * kNumTopk <= 1 << kExpertSlotBits && kNumExperts < 1 << (31 - kExpertSlotBits));

// The numbers in the headers of all sources.
struct Sources {
  i32 num_tokens[kNumRanks], rows_before[kNumRanks + 1];
  i32 max_tokens;  // the largest of num_tokens
};

struct Shared {
  Call call;
  Sources sources;
  i32 choices[kNumExperts];  // choices of each expert: by this rank's tokens (send half), then of each local expert by each source (receive
                             // half)
  u32 item[2];               // the current item; two words, used in turn
};

// Dynamic shared memory.
union alignas(u64) Table {
  short experts[kNumMaxTokens * kNumTopk];         // send half: the experts of all tokens, -1 for none
  u32 arrival_bitmap[kNumRanks * kLlBitmapWords];  // receive half: a bit for each token that a source sends here
};
static_assert(sizeof(Table) == kLlTableBytes);

__device__ __forceinline__ LlProgress* progress_of(const Params& p) { return at<LlProgress>(p.state, kLocalLlDispatch); }

// Called by all threads, once `call` is complete. In a send half, the last row warp has the least to do.
__device__ __forceinline__ void advance_once(const Params& p, const Call& call) {
  if (threadIdx.x == 32 * (kLastWarp - 1)) advance(p, progress_of(p), call, p.num_tokens + 1 + gridDim.x);
}

__device__ __forceinline__ u64 header_offset(u32 epoch, int sender) { return kLlHeaders + ring_slot(epoch, sender) * kLlHeaderStride; }

__device__ __forceinline__ u64 message_offset(u32 epoch, int sender, int token) {
  return kLlMessages + (ring_slot(epoch, sender) * kNumMaxTokens + token) * kLlMessageStride;
}

__device__ __forceinline__ u64 flag_offset(u32 epoch, int sender, int token) {
  return kLlMessageFlags + (ring_slot(epoch, sender) * kNumMaxTokens + token) * sizeof(u64);
}

__device__ __forceinline__ u64 staged_offset(u32 epoch, int token) {
  return kLlStagedMessages + (static_cast<u64>(epoch % kRingDepth) * kNumMaxTokens + token) * kLlMessageStride;
}

__device__ __forceinline__ char* body_of(const LlMessage* message) {
  return reinterpret_cast<char*>(const_cast<LlMessage*>(message)) + kLlHeadBytes;
}

// Destinations of a token's message: the inboxes of scale-up ranks, and the staging memory for scale-out ranks.
struct Receivers {
  LlMessage* messages[kMaxReceivers];  // in the memory of scale-up ranks, or null
  LlMessage* staged;                   // or null

  // `rank`: a receiving rank in some lanes, -1 in the others.
  __device__ __forceinline__ Receivers(const Params& p, u32 epoch, int token, int rank) {
    const bool scale_out = rank >= 0 && is_scale_out(p, rank), scale_up = rank >= 0 && !scale_out;
    const u64 theirs = scale_up ? p.peers[rank] + message_offset(epoch, p.rank, token) : 0;
    u32 left = __ballot_sync(~0u, scale_up);
#pragma unroll
    for (LlMessage*& message : messages) {
      const u64 one = __shfl_sync(~0u, theirs, left ? __ffs(left) - 1 : 0);
      message = left ? at<LlMessage>(one, 0) : nullptr;
      left &= left - 1;
    }
    staged = __any_sync(~0u, scale_out) ? at<LlMessage>(network_base(p), staged_offset(epoch, token)) : nullptr;
  }

  template <class Write>
  __device__ __forceinline__ void each(Write write) const {
#pragma unroll
    for (LlMessage* message : messages) {
      if (message) write(message);
    }
    if (kHasScaleOut && staged) write(staged);
  }
};
