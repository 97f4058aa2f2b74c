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

// Loads the last `num_bytes` of an array, at most 16, with zeros after them. It is not inline, because code that a call jumps over costs
// time.
__device__ __noinline__ Vec16 load_last(const Vec16* from, int num_bytes) {
  Vec16 vec = {};
  if ((reinterpret_cast<u64>(from) | num_bytes) % 4 == 0) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if (4 * w < num_bytes) vec.word[w] = reinterpret_cast<const u32*>(from)[w];
    }
    return vec;
  }
#pragma unroll
  for (int b = 0; b < 16; ++b) {
    if (b < num_bytes) vec.word[b / 4] |= static_cast<u32>(reinterpret_cast<const u8*>(from)[b]) << 8 * (b % 4);
  }
  return vec;
}

// The reverse of load_last.
__device__ __noinline__ void store_last(Vec16* to, int num_bytes, Vec16 vec) {
  if ((reinterpret_cast<u64>(to) | num_bytes) % 4 == 0) {
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if (4 * w < num_bytes) reinterpret_cast<u32*>(to)[w] = vec.word[w];
    }
    return;
  }
#pragma unroll
  for (int b = 0; b < 16; ++b) {
    if (b < num_bytes) reinterpret_cast<u8*>(to)[b] = vec.word[b / 4] >> 8 * (b % 4);
  }
}

// Vectors of the row, and of the row with its scales.
__device__ __forceinline__ int row_vecs(const Params& p) { return static_cast<u32>(p.row_bytes) / 16; }
__device__ __forceinline__ int all_vecs(const Params& p) { return row_vecs(p) + (static_cast<u32>(p.scale_bytes) + 15) / 16; }

// The vectors before those of scales that are not aligned or not whole. `scales`: their address.
__device__ __forceinline__ int whole_vecs(const Params& p, u64 scales) { return (scales | p.scale_bytes) % 16 ? row_vecs(p) : all_vecs(p); }

// Bytes of a vector of scales.
__device__ __forceinline__ int scale_vec_bytes(const Params& p, int i) { return min(p.scale_bytes - 16 * (i - row_vecs(p)), 16); }

// Where a vector of each message is, in an array of rows or in one of their scales.
struct VecPlace {
  u64 first;      // address of that of row 0
  u32 row_bytes;  // from one row to the next

  VecPlace() = default;
  __device__ __forceinline__ VecPlace(const Params& p, u64 rows, u64 scales, int i) {
    const bool is_scale = i >= row_vecs(p);
    first = is_scale ? scales + 16 * (i - row_vecs(p)) : rows + 16 * i;
    row_bytes = is_scale ? p.scale_bytes : p.row_bytes;
  }

  __device__ __forceinline__ Vec16* of(u32 row) const { return at<Vec16>(first, static_cast<u64>(row) * row_bytes); }
};

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

  // Whether the warp has vectors.
  __device__ __forceinline__ bool has_any(int i) const { return i - lane_idx() < count; }

  __device__ __forceinline__ Vec16 vec(int i) const {
    const int num_whole = whole_vecs(p, p.x_scales);
    const VecPlace place(p, p.x, p.x_scales, i);
    Vec16 loaded = {};
    if (i < num_whole) loaded = ld_streaming(place.of(token));
    if (i >= num_whole && i < count) loaded = load_last(place.of(token), scale_vec_bytes(p, i));
    return loaded;
  }

  __device__ __forceinline__ void load() {
    held[0] = vec(first);
    if (has_any(first + kRowThreads)) held[1] = vec(first + kRowThreads);
  }

  // Called by whole warps that have vectors.
  __device__ __forceinline__ void send(const Receivers& receivers, int i, Vec16 vec) {
    const u32 key = key_for(vec);
    vec = with_key(vec, key);
    receivers.each([&](LlMessage* message) {
      Vec16* body = reinterpret_cast<Vec16*>(body_of(message));
      if (i < count) st_relaxed_sys(body + i, vec);
      if (lane_idx() == 0) st_relaxed_sys(reinterpret_cast<u32*>(body + count) + i / kKeyedVecs, key);
    });
  }

  __device__ __forceinline__ void send(const Receivers& receivers) {
    while (has_any(first)) {
      send(receivers, first, held[0]);
      first += kRowThreads;
      if (!has_any(first)) return;
      send(receivers, first, held[1]);
      first += kRowThreads;
      if (!has_any(first)) return;
      load();
    }
  }
};

struct OpaqueRows {
  using Outgoing = OpaqueOutgoing;

  // Bytes of a row with its scales.
  __device__ __forceinline__ static u32 given_bytes(const Params& p) { return p.row_bytes; }
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
  int count, num_whole, thread, step;
  Vec16 held[kAtOnce];
  u32 key[kAtOnce];
  VecPlace places[kAtOnce];  // in the results

  __device__ __forceinline__ OpaquePart(const Params& p, const LlMessage* message, const WarpGroup& group)
      : row(reinterpret_cast<Vec16*>(body_of(message))),
        count(all_vecs(p)),
        num_whole(whole_vecs(p, p.recv_scales)),
        thread(group.thread(group.block())),
        step(group.num_threads()) {
    find_places(p, thread);
  }

  __device__ __forceinline__ bool exists(int first, int j) const { return first + j * step < count; }

  __device__ __forceinline__ u32* key_of(int first, int j) const {
    return reinterpret_cast<u32*>(row + count) + (first + j * step) / kKeyedVecs;
  }

  // Whether the warp has vectors.
  __device__ __forceinline__ bool has_any(int i) const { return i - lane_idx() < count; }

  __device__ __forceinline__ void find_places(const Params& p, int first) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) places[j] = VecPlace(p, p.recv_x, p.recv_scales, first + j * step);
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
    for (int first = thread; has_any(first);) {
      __syncwarp();  // all lanes have read the keys
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (!exists(first, j)) continue;
        st_vec(row + first + j * step, empty_vec());
        if (lane_idx() == 0) st_relaxed_sys(key_of(first, j), kEmptySentinel);
        held[j] = with_key(held[j], key[j]);
      }
      for (u32 left = choices; left; left &= left - 1) {
        const u32 to = __shfl_sync(~0u, to_row, __ffs(left) - 1);
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          if (first + j * step < num_whole) st_vec(places[j].of(to), held[j]);
        }
      }
      if (num_whole < count) store_parts(p, first, choices, to_row);
      first += step * kAtOnce;
      if (!has_any(first)) break;
      find_places(p, first);
      load(first);
      ok &= wait_until(p, epoch, kPhaseLlRows, source, [&](u32&) {
        if (all_arrived(first)) return true;
        load(first);
        return false;
      });
    }
    return __all_sync(~0u, ok);
  }

  // Stores scales that are not aligned or not whole, for each of the choices.
  __device__ __forceinline__ void store_parts(const Params& p, int first, u32 choices, int to_row) const {
    for (u32 left = choices; left; left &= left - 1) {
      const u32 to = __shfl_sync(~0u, to_row, __ffs(left) - 1);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = first + j * step;
        if (i >= num_whole && i < count) store_last(places[j].of(to), scale_vec_bytes(p, i), held[j]);
      }
    }
  }
};
