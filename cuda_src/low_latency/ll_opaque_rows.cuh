// Rows of ll_dispatch_opaque: any bytes.
//
// A message has vectors of 16 bytes: those of the row, then those of its scales, the last one padded. Such bytes may look like memory that
// no row has reached yet (kEmptySentinel). So 32 vectors that one warp sends share a key, a 4-byte word after all vectors. Each word
// travels XOR the key, and the warp chooses a key with which none of the 128 words becomes kEmptySentinel. 128 words exclude at most 128 of
// the keys from 0 to 128, so there is one. Nearly always it is 0. A warp of the receiver reads whole groups of 32 vectors too. So each key
// has one reader, which clears it with the vectors, and warps need not wait for each other.
//
// Bytes on the way: 4 more for each 512.
#pragma once
#include "low_latency/ll_dispatch.cuh"

constexpr int kKeyedVecs = 32;  // vectors that share a key

// Reads the `i`th 16 bytes of an array of `num_bytes`, with zeros after its end.
__device__ __forceinline__ Vec16 load_scales(const char* scales, int num_bytes, int i) {
  Vec16 vec = {};
  const int left = num_bytes - 16 * i;
  const char* from = scales + 16 * i;
  const u64 alignment = reinterpret_cast<u64>(scales) | num_bytes;
  if (alignment % 16 == 0) return ld_streaming(reinterpret_cast<const Vec16*>(from));
  if (alignment % 4 == 0) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if (4 * w < left) vec.word[w] = reinterpret_cast<const u32*>(from)[w];
    }
    return vec;
  }
#pragma unroll
  for (int b = 0; b < 16; ++b) {
    if (b < left) vec.word[b / 4] |= static_cast<u32>(reinterpret_cast<const u8*>(from)[b]) << 8 * (b % 4);
  }
  return vec;
}

// The reverse of load_scales. Bytes after the end are dropped.
__device__ __forceinline__ void store_scales(char* scales, int num_bytes, int i, const Vec16& vec) {
  const int left = num_bytes - 16 * i;
  char* to = scales + 16 * i;
  const u64 alignment = reinterpret_cast<u64>(scales) | num_bytes;
  if (alignment % 16 == 0) return st_vec(reinterpret_cast<Vec16*>(to), vec);
  if (alignment % 4 == 0) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if (4 * w < left) reinterpret_cast<u32*>(to)[w] = vec.word[w];
    }
    return;
  }
#pragma unroll
  for (int b = 0; b < 16; ++b) {
    if (b < left) reinterpret_cast<u8*>(to)[b] = vec.word[b / 4] >> 8 * (b % 4);
  }
}

// Vectors of the row, and of the row with its scales.
__device__ __forceinline__ int row_vecs(const Params& p) { return p.row_bytes / 16; }
__device__ __forceinline__ int all_vecs(const Params& p) { return row_vecs(p) + (p.scale_bytes + 15) / 16; }

__device__ __forceinline__ Vec16 with_key(Vec16 vec, u32 key) {
#pragma unroll
  for (u32& word : vec.word) word ^= key;
  return vec;
}

// Called by whole warps, with the vectors of a key. Returns the least key with which no word becomes kEmptySentinel.
__device__ __forceinline__ u32 key_for(const Vec16& vec) {
  u32 key = 0;
  while (__any_sync(~0u, !is_written(with_key(vec, key)))) ++key;
  return key;
}

// The row of a token. A thread has two vectors at a time. It starts to load the first ones before it knows the receivers.
struct OpaqueOutgoing {
  const Params& p;
  const int token, count;
  int first = threadIdx.x;
  Vec16 held[2];

  __device__ __forceinline__ OpaqueOutgoing(const Params& p, int token) : p(p), token(token), count(all_vecs(p)) { load(); }

  __device__ __forceinline__ Vec16 vec(int i) const {
    if (i < row_vecs(p)) return ld_streaming(at<const Vec16>(p.x, static_cast<u64>(token) * p.row_bytes) + i);
    if (i < count) return load_scales(at<const char>(p.x_scales, static_cast<u64>(token) * p.scale_bytes), p.scale_bytes, i - row_vecs(p));
    return {};
  }

  __device__ __forceinline__ void load() { held[0] = vec(first), held[1] = vec(first + kRowThreads); }

  __device__ __forceinline__ void send(const Receivers& receivers) {
    for (;; load()) {
      u32 keys[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) keys[j] = key_for(held[j]), held[j] = with_key(held[j], keys[j]);
      receivers.each([&](LlMessage* message) {
        Vec16* body = reinterpret_cast<Vec16*>(body_of(message));
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int i = first + j * kRowThreads;
          if (i >= count) continue;
          st_relaxed_sys(body + i, held[j]);
          if (lane_idx() == 0) st_relaxed_sys(reinterpret_cast<u32*>(body + count) + i / kKeyedVecs, keys[j]);
        }
      });
      first += 2 * kRowThreads;
      if (first - lane_idx() >= count) return;
    }
  }
};

struct OpaqueRows {
  using Outgoing = OpaqueOutgoing;

  // Bytes of a row with its scales.
  __device__ __forceinline__ static u32 row_bytes(const Params& p) { return p.row_bytes + p.scale_bytes; }

  // Bytes of a message after its head.
  __device__ __forceinline__ static u32 body_bytes(const Params& p) {
    return 16 * all_vecs(p) + 4 * ((all_vecs(p) + kKeyedVecs - 1) / kKeyedVecs);
  }

  // Fills all results with bytes of 0xff after a time-out; `num_threads` threads share the work.
  __device__ __noinline__ static void poison(const Params& p, u64 thread, u64 num_threads) {
    const u64 num_rows = static_cast<u64>(kNumLocalExperts) * p.capacity;
    ::poison(p.recv_x, num_rows * p.row_bytes, thread, num_threads);
    ::poison(p.recv_scales, num_rows * p.scale_bytes, thread, num_threads);
  }
};

// One warp's part of a row between the inbox and the experts. Each thread loads kAtOnce vectors at a time. It starts the loads before it
// knows the destination.
struct OpaquePart {
  using Rows = OpaqueRows;
  static constexpr int kAtOnce = 2;
  Vec16* row;
  int count, thread, step;
  Vec16 held[kAtOnce];
  u32 key[kAtOnce];

  __device__ __forceinline__ OpaquePart(const Params& p, const LlMessage* message, const WarpGroup& group)
      : row(reinterpret_cast<Vec16*>(body_of(message))),
        count(all_vecs(p)),
        thread(group.thread(group.block())),
        step(group.num_threads()) {}

  __device__ __forceinline__ bool exists(int first, int j) const { return first + j * step < count; }
  __device__ __forceinline__ u32* key_of(int first, int j) const {
    return reinterpret_cast<u32*>(row + count) + (first + j * step) / kKeyedVecs;
  }

  // Loads the vectors `first`, `first` + step, ..., and their keys.
  __device__ __forceinline__ void load(int first) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (exists(first, j)) held[j] = ld_relaxed_sys(row + first + j * step), key[j] = ld_relaxed_sys(key_of(first, j));
    }
  }

  // Loads the first vectors of this thread, or says whether they have arrived.
  __device__ __forceinline__ void start() { load(thread); }
  __device__ __forceinline__ bool has_arrived() const { return all_arrived(thread); }

  __device__ __forceinline__ bool all_arrived(int first) const {
    bool arrived = true;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (exists(first, j)) arrived &= is_written(held[j]) && key[j] != kEmptySentinel;
    }
    return arrived;
  }

  // Called once the first vectors have arrived, or where to_row is negative in all lanes. `to_row`: in lane k, the output row of the
  // token's choice k, or negative. False: a wait timed out.
  __device__ __forceinline__ bool finish(const Params& p, u32 epoch, int source, int to_row) {
    const u32 choices = __ballot_sync(~0u, to_row >= 0);
    bool ok = true;
    for (int first = thread; first - lane_idx() < count; first += step * kAtOnce) {
      if (first != thread) {
        load(first);
        ok &= wait_until(p, epoch, kPhaseLlRows, source, [&](u32&) {
          if (all_arrived(first)) return true;
          load(first);
          return false;
        });
      }
      __syncwarp();  // all lanes have read the keys
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (!exists(first, j)) continue;
        st_vec(row + first + j * step, empty_vec());
        if (lane_idx() == 0) st_relaxed_sys(key_of(first, j), kEmptySentinel);
        held[j] = with_key(held[j], key[j]);
      }
      for (u32 left = choices; left; left &= left - 1) {
        const u64 to = __shfl_sync(~0u, to_row, __ffs(left) - 1);
        Vec16* vecs = at<Vec16>(p.recv_x, to * p.row_bytes);
        char* scales = at<char>(p.recv_scales, to * p.scale_bytes);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          const int i = first + j * step;
          if (i < row_vecs(p)) {
            st_vec(vecs + i, held[j]);
          } else if (i < count) {
            store_scales(scales, p.scale_bytes, i - row_vecs(p), held[j]);
          }
        }
      }
    }
    return __all_sync(~0u, ok);
  }
};
