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
          tokens = ld_relaxed_sys(&header->num_tokens), rows = ld_relaxed_sys(&header->num_rows);
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

// All threads, once, after read_headers: copies the rest of all headers. False: the time is up.
__device__ inline bool read_counts(const Params& p, const Call& call, i32* choices, u32* comes) {
  bool ok = true;
  auto header_of = [&](int source) { return at<const LlHeader>(p.peers[p.rank], header_offset(call.received, source)); };
  auto await = [&](int source, const u64* word) {
    u64 found = 0;
    if (!call.out[source]) ok &= wait_word(p, word, call.received, kPhaseLlCounts, source, found);
    return static_cast<u32>(found >> 32);
  };
  for (int i = threadIdx.x; i < kNumExperts; i += kLlThreads) {
    const int source = i / kNumLocalExperts;
    choices[i] = await(source, header_of(source)->num_choices + i % kNumLocalExperts);
  }
  for (int i = kLlThreads - 1 - threadIdx.x; i < kNumRanks * kLlBitmapWords; i += kLlThreads) {  // threads that had less to do
    const int source = i / kLlBitmapWords;
    comes[i] = await(source, header_of(source)->tokens + i % kLlBitmapWords);
  }
  return __syncthreads_and(ok);
}

// The part of an item that a warp does. Warps share items while there are enough of them for all; where time-outs mask, an item is taken
// whole or not at all.
struct Part {
  int count, idx;
  int group, groups;  // of the warps that share an item, among those of the grid

  __device__ __forceinline__ explicit Part(int num_items) {
    int log2_count = 0;
    while (!kMasksOnTimeout && 1 << log2_count < kWarps && num_items << (log2_count + 1) <= kWarps * static_cast<int>(gridDim.x)) {
      ++log2_count;
    }
    count = 1 << log2_count, idx = warp_idx() & (count - 1);
    group = blockIdx.x + (warp_idx() >> log2_count) * gridDim.x, groups = (kWarps >> log2_count) * gridDim.x;
  }
};

// One warp's part of a row on its way from the inbox to its experts. Nearly all of the time is spent waiting for memory, so loads are
// started before it is known where they go, and whether there is a row at all.
template <int kVecs>
struct RowPart {
  static constexpr int kAtOnce = kLlPieces;
  Vec16* row;
  u32* scales;
  int thread, step;
  Vec16 held[kAtOnce];
  u32 scale;

  __device__ __forceinline__ RowPart(const LlMessage* message, Part part)
      : row(reinterpret_cast<Vec16*>(body_of(message))),
        scales(reinterpret_cast<u32*>(body_of(message) + kHidden)),
        thread(part.idx * 32 + lane_idx()),
        step(part.count * 32) {}

  __device__ __forceinline__ bool exists(int first, int j) const { return first + j * step < kVecs; }

  __device__ __forceinline__ void load(int first) {
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (exists(first, j)) held[j] = ld_relaxed_sys(row + first + j * step);
    }
  }

  __device__ __forceinline__ void start(const Params& p) {
    scale = p.use_fp8 && thread < kScalesPerRow ? ld_relaxed_sys(scales + thread) : 0;
    load(thread);
  }

  __device__ __forceinline__ bool all_come(int first) const {
    bool come = true;
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (exists(first, j)) come &= has_come(held[j]);
    }
    return come;
  }

  // After start. `place`: in lane k, where the row belongs for the token's choice k, or negative. False: the time is up.
  __device__ __forceinline__ bool finish(const Params& p, u32 epoch, int source, int place) {
    const int lane = lane_idx();
    const u32 places = __ballot_sync(~0u, place >= 0);
    auto row_of = [&](u32 left) { return static_cast<u64>(__shfl_sync(~0u, place, __ffs(left) - 1)); };
    bool ok = true;
    for (int first = thread; first - lane < kVecs; first += step * kAtOnce) {
      if (first != thread) load(first);
      ok &= wait_until(p, epoch, kPhaseLlRows, source, [&](u32&) {
        if (all_come(first)) return true;
        if (has_come(ld_relaxed_sys(row + first))) load(first);  // one piece stands for the others: polling is cheap
        return false;
      });
      __syncwarp();
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        if (exists(first, j)) st_vec(row + first + j * step, not_yet());
      }
      for (u32 left = places; left; left &= left - 1) {
        Vec16* to = at<Vec16>(p.recv_x, 0) + row_of(left) * kVecs;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
          if (exists(first, j)) st_vec(to + first + j * step, held[j]);
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
    return __all_sync(~0u, ok);
  }
};

// The source's last row so far: the differences add up to the longest wait.
__device__ inline void add_wait(const Params& p, u32 epoch, int source, u64 waited) {
  u64* longest = at<u64>(p.state, kLocalWaits) + (epoch % 2) * kNumRanks + source;
  const u64 before = max_relaxed_gpu(longest, waited);
  if (before < waited) add_relaxed_gpu(at<u64>(p.wait_stats, 0) + source, waited - before);
}

// What a block knows in its receiving half.
struct Receiving {
  const Params& p;
  Shared& shared;
  u32* comes;
  u64 start;             // when it began
  bool counted = false;  // whether this warp has been in read_counts

  __device__ __forceinline__ bool count() { return counted || (counted = read_counts(p, shared.call, shared.choices, comes)); }
};

// One warp's part of a token. False: the time is up for all ranks.
template <int kVecs>
__device__ inline bool receive_token(Receiving& r, int source, int token, Part part) {
  const Params& p = r.p;
  const int lane = lane_idx();
  const u32 epoch = r.shared.call.received, bit = 1u << token % 32;
  const u64 mine = p.peers[p.rank];
  const u32* comes = r.comes + source * kLlBitmapWords;
  if (r.counted && !(comes[token / 32] & bit)) return true;
  const LlMessage* message = at<const LlMessage>(mine, message_offset(epoch, source, token));
  u64 choice = 0, weight = 0;
  if (lane < kNumTopk) choice = ld_relaxed_sys(message->choice + lane), weight = ld_relaxed_sys(message->weight + lane);  // perhaps
  RowPart<kVecs> row(message, part);
  row.start(p);
  if (!r.count()) return false;
  if (!(comes[token / 32] & bit)) return true;
  int rows_before = 0;  // of this source
  for (int w = lane; w <= token / 32; w += 32) rows_before += __popc(w == token / 32 ? comes[w] & (bit - 1) : comes[w]);
  LlEntry* entry = at<LlEntry>(p.handle, kLlHandleEntries) + r.shared.sources.rows_before[source] + __reduce_add_sync(~0u, rows_before);
  bool ok = true;
  if (is_far(p, source)) {
    if (lane == 0) ok = wait_epoch(p, at<const u64>(mine, flag_offset(epoch, source, token)), epoch, kPhaseLlRows, source);
    ok = __shfl_sync(~0u, ok, 0);
    __syncwarp();         // all lanes may read what lane 0 acquired,
    choice = weight = 0;  // and what they read before was too early
    row.start(p);
  }
  auto await_word = [&](const u64* words, u64& word) {
    if (lane < kNumTopk && static_cast<u32>(word) != epoch) ok = ok && wait_word(p, words + lane, epoch, kPhaseLlRows, source, word);
  };
  await_word(message->choice, choice);
  await_word(message->weight, weight);
  ok = __all_sync(~0u, ok);
  int place = ok ? kLlElsewhere : kLlUnknown;
  const u32 chosen = choice >> 32;  // 0: nothing
  const int expert = static_cast<int>(chosen >> kPlaceBits) - 1 - p.rank * kNumLocalExperts;
  if (ok && chosen && expert >= 0 && expert < kNumLocalExperts) {
    place = chosen & ((1u << kPlaceBits) - 1);
#pragma unroll(kNumRanks <= 16 ? kNumRanks : 8)
    for (int s = 0; s < kNumRanks; ++s) place += s < source ? r.shared.choices[s * kNumLocalExperts + expert] : 0;
    place = place < kCapacity ? expert * kCapacity + place : kLlNoRoom;
  }
  if (part.idx == 0) {
    if (lane == 0) entry->source = source, entry->token = token;
    if (lane < kNumTopk) entry->row[lane] = place, entry->weight[lane] = __uint_as_float(weight >> 32);
  }
  ok = row.finish(p, epoch, source, place) && ok;
  if (p.wait_stats && lane == 0) add_wait(p, epoch, source, nanoseconds() - r.start);
  if (!kMasksOnTimeout) return ok;
  if (!ok && lane < kNumTopk) entry->row[lane] = kLlElsewhere;  // where time-outs mask, part 0 is the whole row
  return true;
}

// What the host and combine want to know of the whole call.
__device__ inline void tell_counts(const Receiving& r) {
  const Params& p = r.p;
  if (threadIdx.x == 0) *at<i32>(p.handle, kLlHandleNumEntries) = r.shared.sources.rows_before[kNumRanks];
  for (int e = threadIdx.x; e < kNumLocalExperts; e += kLlThreads) {
    int sum = 0;
    for (int s = 0; s < kNumRanks; ++s) sum += r.shared.choices[s * kNumLocalExperts + e];
    sum = min(sum, kCapacity);
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

// kVecs: of a row.
template <int kVecs>
__device__ inline void receive(const Params& p, u32* comes, Shared& shared) {
  Call& call = shared.call;
  const Sources& sources = shared.sources;
  Receiving r{p, shared, comes, nanoseconds()};
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
  for (int item = part.group; item < num_items; item += part.groups) {
    const int source = (item + p.rank) % kNumRanks, token = item / kNumRanks;
    if (token < sources.num_tokens[source] && !receive_token<kVecs>(r, source, token, part)) return;
  }
  if (r.count() && blockIdx.x == 0) tell_counts(r);  // all warps count, those that had no token too
}
