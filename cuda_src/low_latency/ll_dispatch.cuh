// The common part of both halves of ll_dispatch: offsets of headers and messages, and the shared memory of a block.
#pragma once
#include "common/fp8.cuh"
#include "low_latency/low_latency.cuh"

constexpr int kCapacity = kNumRanks * kNumMaxTokens;  // rows of an expert
constexpr int kScalesPerRow = kHidden / kFp8Group;
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

// Bytes of a row with its scales.
__device__ __forceinline__ u32 row_bytes_of(const Params& p) { return p.use_fp8 ? kHidden + kScalesPerRow * 4 : kHidden * 2; }

__device__ __forceinline__ char* body_of(const LlMessage* message) {
  return reinterpret_cast<char*>(const_cast<LlMessage*>(message)) + kLlHeadBytes;
}
