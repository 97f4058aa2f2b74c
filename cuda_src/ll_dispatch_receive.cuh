// The receiving half of ll_dispatch, which tells the protocol.
#pragma once
#include "ll_dispatch.cuh"

constexpr int kHeaderWords = sizeof(LlHeader) / sizeof(u64);

// Warp 0 waits for the headers of all sources on behalf of its block: words that all warps of a large grid poll come late. Then, all warps.
// False: the time is up.
__device__ inline bool read_headers(const Params& p, const Call& call, Sources& sources) {
  if (warp_idx() == 0) {
    bool ok = true;
    int most = 0, before = 0;
    for (int first = 0; first < kNumRanks; first += 32) {
      const int source = first + lane_idx();
      u64 tokens = 0, rows = 0;
      if (source < kNumRanks && !call.out[source]) {
        const LlHeader* header = at<const LlHeader>(p.peers[p.rank], header_offset(call.received, source));
        ok &= wait_until(p, call.received, kPhaseLlCounts, source, [&](u32&) {
          tokens = ld_acquire_sys(&header->num_tokens), rows = ld_relaxed_sys(&header->num_rows);
          return static_cast<u32>(tokens) == call.received && static_cast<u32>(rows) == call.received;
        });
      }
      const int num_tokens = tokens >> 32, num_rows = rows >> 32;
      __syncwarp();
      int up_to = num_rows;  // rows of the sources up to this one, of these 32
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int more = __shfl_up_sync(~0u, up_to, step);
        up_to += lane_idx() >= step ? more : 0;
      }
      if (source < kNumRanks) sources.num_tokens[source] = num_tokens, sources.rows_before[source] = before + up_to - num_rows;
      before += __shfl_sync(~0u, up_to, 31);
      most = max(most, __reduce_max_sync(~0u, num_tokens));
    }
    ok = __all_sync(~0u, ok);
    if (lane_idx() == 0) sources.rows_before[kNumRanks] = before, sources.most = most, sources.ok = ok;
  }
  __syncthreads();
  return sources.ok;
}

// The sum of a header's word over the first `count` sources, `word` being that of source 0; they are loaded several at once, and only
// waited for where they have not come. -1: the time is up.
__device__ __forceinline__ int sum_of(const Params& p, const Call& call, const u64* word, int count) {
  constexpr int kAtOnce = kNumRanks < 4 ? kNumRanks : 4;  // more would spill
  auto word_at = [&](int s) { return at<const u64>(reinterpret_cast<u64>(word), static_cast<u64>(s) * kLlHeaderStride); };
  int sum = 0;
  for (int first = 0; first < count; first += kAtOnce) {
    u64 held[kAtOnce];
    auto counts = [&](int i) { return first + i < count && !call.out[first + i]; };
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) held[i] = counts(i) ? ld_relaxed_sys(word_at(first + i)) : word_of(0, call.received);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int s = first + i;
      if (static_cast<u32>(held[i]) != call.received && !wait_epoch(p, word_at(s), call.received, kPhaseLlCounts, s, &held[i])) return -1;
      sum += held[i] >> 32;
    }
  }
  return sum;
}

// The part of an item that a warp does. Warps share items while there are enough of them for all; where time-outs mask, an item is taken
// whole or not at all.
struct Part {
  int count, idx;

  __device__ __forceinline__ explicit Part(int num_items) : count(1) {
    while (!kMasksOnTimeout && count < kWarps && 2 * count * num_items <= kWarps * static_cast<int>(gridDim.x)) count *= 2;
    idx = warp_idx() % count;
  }
};

// Copies one warp's part of a row to its places as it comes. Nearly all of the time is spent waiting for memory, so loads are started
// before it is known where they go: find_place() gives, in lane k, the place of the token's choice k.
template <int kVecs, class FindPlace>
__device__ inline bool receive_row(const Params& p, u32 epoch, const LlMessage* message, int source, Part part, FindPlace find_place) {
  constexpr int kAtOnce = kLlPieces;
  const int lane = lane_idx(), thread = part.idx * 32 + lane, step = part.count * 32;
  Vec16* row = reinterpret_cast<Vec16*>(body_of(message));
  u32* scales = reinterpret_cast<u32*>(body_of(message) + kHidden);
  u32 scale = p.use_fp8 && thread < kScalesPerRow ? ld_relaxed_sys(scales + thread) : 0;
  int place = 0;
  u32 places = 0;
  auto row_of = [&](u32 left) { return static_cast<u64>(__shfl_sync(~0u, place, __ffs(left) - 1)); };
  bool ok = true;
  for (int first = thread; first - lane < kVecs; first += step * kAtOnce) {
    Vec16 held[kAtOnce];
    auto exists = [&](int j) { return first + j * step < kVecs; };
    auto load = [&] {
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (exists(j)) held[j] = ld_relaxed_sys(row + first + j * step);
      }
    };
    auto all_come = [&] {
      bool come = true;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (exists(j)) come &= has_come(held[j]);
      }
      return come;
    };
    load();
    if (first == thread) {
      place = find_place();
      places = __ballot_sync(~0u, place >= 0);
    }
    ok &= wait_until(p, epoch, kPhaseLlRows, source, [&](u32&) {
      if (all_come()) return true;
      if (has_come(ld_relaxed_sys(row + first))) load();  // one piece stands for the others: polling is cheap
      return false;
    });
    __syncwarp();
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (exists(j)) st_vec(row + first + j * step, not_yet());
    }
    for (u32 left = places; left; left &= left - 1) {
      Vec16* to = at<Vec16>(p.recv_x, 0) + row_of(left) * kVecs;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (exists(j)) st_vec(to + first + j * step, held[j]);
      }
    }
  }
  for (int i = thread; p.use_fp8 && i - lane < kScalesPerRow; i += step) {
    if (i < kScalesPerRow) {
      ok &= wait_until(p, epoch, kPhaseLlRows, source,
                       [&](u32&) { return scale != kNotYet || (scale = ld_relaxed_sys(scales + i)) != kNotYet; });
      st_relaxed_sys(scales + i, kNotYet);
    }
    __syncwarp();
    for (u32 left = places; left; left &= left - 1) {
      const u64 to = row_of(left) * kScalesPerRow + i;
      if (i >= kScalesPerRow) continue;
      if (p.use_ue8m0) {
        at<u8>(p.recv_scales, 0)[to] = scale >> 23;
      } else {
        at<u32>(p.recv_scales, 0)[to] = scale;
      }
    }
    scale = kNotYet;
  }
  return __all_sync(~0u, ok && place != kLlUnknown);
}

// The source's last row so far: the differences add up to the longest wait.
__device__ inline void add_wait(const Params& p, u32 epoch, int source, u64 waited) {
  u64* longest = at<u64>(p.state, kLocalWaits) + (epoch % 2) * kNumRanks + source;
  const u64 before = max_relaxed_gpu(longest, waited);
  if (before < waited) add_relaxed_gpu(at<u64>(p.wait_stats, 0) + source, waited - before);
}

// One warp's part of a token. False: the time is up for all ranks.
__device__ inline bool receive_token(const Params& p, const Call& call, const Sources& sources, int source, int token, Part part,
                                     u64 start) {
  const int lane = lane_idx();
  const u32 epoch = call.received;
  const u64 mine = p.peers[p.rank];
  const LlMessage* message = at<const LlMessage>(mine, message_offset(epoch, source, token));
  const LlHeader* header = at<const LlHeader>(mine, header_offset(epoch, source));
  u64 choice = 0, weight = 0;
  if (lane < kNumTopk) choice = ld_relaxed_sys(message->choice + lane), weight = ld_relaxed_sys(message->weight + lane);  // perhaps
  bool ok = true, comes = false;
  int rows_before = 0;  // of this source
  for (int w = lane; w <= token / 32; w += 32) {
    u64 word;
    ok &= wait_epoch(p, header->tokens + w, epoch, kPhaseLlCounts, source, &word);
    const u32 those = word >> 32, bit = 1u << token % 32;
    rows_before += __popc(w == token / 32 ? those & (bit - 1) : those);
    if (w == token / 32) comes = those & bit;
  }
  if (!__all_sync(~0u, ok)) return false;
  if (!__any_sync(~0u, comes)) return true;
  LlEntry* entry = at<LlEntry>(p.handle, kLlHandleEntries) + sources.rows_before[source] + __reduce_add_sync(~0u, rows_before);
  if (is_far(p, source)) {
    if (lane == 0) ok = wait_epoch(p, at<const u64>(mine, flag_offset(epoch, source, token)), epoch, kPhaseLlRows, source);
    ok = __shfl_sync(~0u, ok, 0);
    __syncwarp();         // all lanes may read what lane 0 acquired,
    choice = weight = 0;  // and what they read before was too early
  }
  auto await_word = [&](const u64* words, u64& word) {
    if (lane < kNumTopk && static_cast<u32>(word) != epoch) ok = ok && wait_epoch(p, words + lane, epoch, kPhaseLlRows, source, &word);
  };
  auto find_place = [&] {
    await_word(message->choice, choice);
    await_word(message->weight, weight);
    int place = kLlElsewhere;
    const u32 chosen = choice >> 32;  // 0: nothing
    const int expert = static_cast<int>(chosen >> kPlaceBits) - 1 - p.rank * kNumLocalExperts;
    if (ok && chosen && expert >= 0 && expert < kNumLocalExperts) {
      const int before = sum_of(p, call, at<const LlHeader>(mine, header_offset(epoch, 0))->num_choices + expert, source);
      ok = before >= 0;
      place = before + (chosen & ((1u << kPlaceBits) - 1));
      place = place < kCapacity ? expert * kCapacity + place : kLlNoRoom;
    }
    ok = __all_sync(~0u, ok);
    if (!ok) place = kLlUnknown;
    if (part.idx == 0) {
      if (lane == 0) entry->source = source, entry->token = token;
      if (lane < kNumTopk) entry->row[lane] = place, entry->weight[lane] = __uint_as_float(weight >> 32);
    }
    return place;
  };
  if (p.use_fp8) {
    ok = receive_row<kHidden / 16>(p, epoch, message, source, part, find_place);
  } else {
    ok = receive_row<kHidden / 8>(p, epoch, message, source, part, find_place);
  }
  if (p.wait_stats && lane == 0) add_wait(p, epoch, source, nanoseconds() - start);
  if (!kMasksOnTimeout) return ok;
  if (!ok && lane < kNumTopk) entry->row[lane] = kLlElsewhere;  // where time-outs mask, part 0 is the whole row
  return true;
}

// What the host and combine want to know of the whole call.
__device__ inline void count(const Params& p, const Call& call, const Sources& sources) {
  if (threadIdx.x == 0) *at<i32>(p.handle, kLlHandleNumEntries) = sources.rows_before[kNumRanks];
  for (int e = threadIdx.x; e < kNumLocalExperts; e += kLlThreads) {
    const u64* first = at<const LlHeader>(p.peers[p.rank], header_offset(call.received, 0))->num_choices + e;
    const int sum = min(sum_of(p, call, first, kNumRanks), kCapacity);
    at<i32>(p.handle, kLlHandleNumRecvPerExpert)[e] = sum;
    if (p.recv_stats) at<i32>(p.recv_stats, 0)[e] += sum;
  }
}

// All blocks come to the same verdict about each source.
__device__ inline void settle(const Params& p, Call& call) {
  for (int i = threadIdx.x; i < kNumRanks * kHeaderWords; i += kLlThreads) {
    const int source = i / kHeaderWords;
    const u64* words = at<const u64>(p.peers[p.rank], header_offset(call.received, source));
    auto await = [&](int w) { return wait_epoch(p, words + w, call.received, kPhaseLlCounts, source); };
    if (!call.out[source] && !(await(0) && await(i % kHeaderWords))) call.out[source] = true;
  }
  __syncthreads();
  for (int s = threadIdx.x; s < kNumRanks; s += kLlThreads) {
    u32* verdict = at<u32>(p.state, kLocalVerdicts) + s;
    const u32 mine = call.received << 1 | static_cast<u32>(call.out[s]);
    u32 found = ld_relaxed_gpu(verdict);
    while (found >> 1 != mine >> 1) {
      const u32 old = cas_acq_rel_gpu(verdict, found, mine);
      found = old == found ? mine : old;
    }
    call.out[s] = found & 1;
  }
  __syncthreads();
}

__device__ inline void receive(const Params& p, Shared& shared) {
  Call& call = shared.call;
  const Sources& sources = shared.sources;
  const u64 start = nanoseconds();
  if (blockIdx.x == 0) {  // for the next call
    for (int s = threadIdx.x; s < kNumRanks; s += kLlThreads) at<u64>(p.state, kLocalWaits)[(call.received + 1) % 2 * kNumRanks + s] = 0;
  }
  if constexpr (kMasksOnTimeout) settle(p, call);
  if (blockIdx.x == 0) {  // as sending did, or more
    for (int s = threadIdx.x; s < kNumRanks; s += kLlThreads) {
      if (call.out[s]) at<u32>(p.handle, kLlHandleOut)[s] = 1;
    }
  }
  if (!read_headers(p, call, shared.sources)) return;
  const int num_items = sources.most * kNumRanks;
  const Part part(num_items);
  const int groups = kWarps / part.count * gridDim.x;
  for (int item = blockIdx.x + warp_idx() / part.count * gridDim.x; item < num_items; item += groups) {
    const int source = (item + p.rank) % kNumRanks, token = item / kNumRanks;
    if (token < sources.num_tokens[source] && !receive_token(p, call, sources, source, token, part, start)) return;
  }
  if (blockIdx.x == 0) count(p, call, sources);
}
