// ll_dispatch: a low-latency dispatch. A token travels once to each rank that holds some of its experts, and is laid out there expert by
// expert. Launched for sending, for receiving, or for both (p.phases).
//
// Sending. Blocks take items as they go. The first item is the header: it tells every rank how many tokens this rank has, which of them
// come there, and how often they choose each of its experts. The others are tokens: all warps but one read the row, convert it to FP8 if
// asked to, and write it to each receiver's inbox. The last warp works out the token's places among this rank's choices of each expert, and
// tells its receivers. What goes over the network is written to memory of this rank first, and put from there once the block is done.
//
// Receiving. With the headers of all sources every warp knows where a source's rows begin in each expert: the order (source, token, choice)
// needs no counting of what has arrived. p.receive_warps warps share a token of a source: each learns where its row belongs, waits for its
// part of the row, and copies that to the experts; the first one writes what combine has to know to the handle.
//
// Words, rows, sides, masked ranks: low_latency.cuh. Counters only grow; the last block to have read them moves them on.
// No block waits for another one of its grid: tokens are taken by whoever runs, so all rows are sent even if only one block gets an SM.
//
// Where time-outs mask, all blocks have to be of one mind about a source, or places would differ: each first waits for the whole header,
// and the first one to say whether it has come decides (settle). A row that is lost after that leaves its place undefined.
//
// Bytes: a row, (FP8: half of it and 4 / 128,) once over the link for each rank; at the receiver written, read, cleared, and written once
// for each expert.
#include "fp8.cuh"
#include "low_latency.cuh"

constexpr int kChoiceWarp = kLastWarp, kRowThreads = 32 * kChoiceWarp;
constexpr int kCapacity = kNumRanks * kNumMaxTokens;  // rows of an expert
constexpr int kScalesPerRow = kHidden / kFp8Group;
constexpr int kPlaceBits = 17;  // of a choice; the expert is in the bits above
constexpr int kHeaderWords = sizeof(LlHeader) / sizeof(u64);
constexpr int kMostReceivers = kNumRanks < kNumTopk ? kNumRanks : kNumTopk;
static_assert(kNumMaxTokens * kNumTopk <= 1 << kPlaceBits && kNumExperts < 1 << (31 - kPlaceBits));

struct Shared {
  Call call;
  i32 choices[kNumExperts];  // how often each expert is chosen
  u32 item[2];               // the item at hand, by turns
};

__device__ __forceinline__ LlProgress* progress_of(const Params& p) { return at<LlProgress>(p.state, kLocalLlDispatch); }

__device__ __forceinline__ u64 side_of(u32 epoch, int rank) { return static_cast<u64>(epoch % kNumSides) * kNumRanks + rank; }

__device__ __forceinline__ u64 header_offset(u32 epoch, int sender) { return kLlHeaders + side_of(epoch, sender) * kLlHeaderStride; }

__device__ __forceinline__ u64 message_offset(u32 epoch, int sender, int token) {
  return kLlMessages + (side_of(epoch, sender) * kNumMaxTokens + token) * kLlMessageStride;
}

__device__ __forceinline__ u64 flag_offset(u32 epoch, int sender, int token) {
  return kLlMessageFlags + (side_of(epoch, sender) * kNumMaxTokens + token) * sizeof(u64);
}

__device__ __forceinline__ u64 staged_offset(u32 epoch, int token) {
  return kLlStagedMessages + (static_cast<u64>(epoch % kNumSides) * kNumMaxTokens + token) * kLlMessageStride;
}

// The experts of all tokens, -1 for none, and how often each is chosen. All warps but the first, which begins the call meanwhile.
__device__ inline void read_table(const Params& p, short* table, i32* choices) {
  for (int i = threadIdx.x - 32; i < p.num_tokens * kNumTopk; i += kLlThreads - 32) {
    const i64 expert = p.idx_bytes == 8 ? at<const i64>(p.topk_idx, 0)[i] : at<const i32>(p.topk_idx, 0)[i];
    const bool exists = expert >= 0 && expert < kNumExperts;
    table[i] = exists ? static_cast<short>(expert) : -1;
    if (exists) atomicAdd(choices + expert, 1);
    if (p.check && (expert < -1 || expert >= kNumExperts)) report_bad_expert(p, i / kNumTopk, expert);
  }
}

// One warp: the header for one rank. Over the network its first word is the signal that the others have come.
__device__ inline void send_header(const Params& p, u32 epoch, int rank, const short* table, const i32* choices) {
  const int lane = lane_idx();
  const bool far = is_far(p, rank);
  const u64 there = header_offset(epoch, p.rank), staged = kLlStagedHeaders + side_of(epoch, rank) * kLlHeaderStride;
  LlHeader* header = far ? at<LlHeader>(p.peers[p.rank], staged) : at<LlHeader>(p.peers[rank], there);
  const u64 num_tokens = word_of(p.num_tokens, epoch);
  if (lane == 0 && !far) st_relaxed_sys(&header->num_tokens, num_tokens);
  for (int e = lane; e < kNumLocalExperts; e += 32) {
    st_relaxed_sys(header->num_choices + e, word_of(choices[rank * kNumLocalExperts + e], epoch));
  }
  int num_rows = 0;
  for (int first = 0; first < kNumMaxTokens; first += 32) {
    bool comes = false;
    for (int k = 0; k < kNumTopk && first + lane < p.num_tokens; ++k) {
      const int expert = table[(first + lane) * kNumTopk + k];
      comes |= expert >= 0 && expert / kNumLocalExperts == rank;
    }
    const u32 those = __ballot_sync(~0u, comes);
    num_rows += __popc(those);
    if (lane == 0) st_relaxed_sys(header->tokens + first / 32, word_of(those, epoch));
  }
  if (lane == 0) st_relaxed_sys(&header->num_rows, word_of(num_rows, epoch));
  if (!far) return;
  __syncwarp();
  put(p, rank, there + sizeof(u64), staged + sizeof(u64), sizeof(LlHeader) - sizeof(u64), there, num_tokens);
}

// Where a token's message goes: to near ranks, and to where it is put from for far ones.
struct Receivers {
  LlMessage* messages[kMostReceivers];  // in the memory of near ranks, or null
  LlMessage* staged;                    // or null

  // `rank`: in some lanes a rank, -1 in the others.
  __device__ __forceinline__ Receivers(const Params& p, u32 epoch, int token, int rank) {
    u32 left = __ballot_sync(~0u, rank >= 0);
    bool any_far = false;
#pragma unroll
    for (LlMessage*& message : messages) {
      const int to = __shfl_sync(~0u, rank, left ? __ffs(left) - 1 : 0);
      const bool far = left && is_far(p, to);
      any_far |= far;
      message = left && !far ? at<LlMessage>(p.peers[to], message_offset(epoch, p.rank, token)) : nullptr;
      left &= left - 1;
    }
    staged = any_far ? at<LlMessage>(p.peers[p.rank], staged_offset(epoch, token)) : nullptr;
  }

  template <class Write>
  __device__ __forceinline__ void each(Write write) const {
#pragma unroll
    for (LlMessage* message : messages) {
      if (message) write(message);
    }
    if (kHasFar && staged) write(staged);
  }
};

__device__ __forceinline__ char* body_of(const LlMessage* message) {
  return reinterpret_cast<char*>(const_cast<LlMessage*>(message)) + kLlHeadBytes;
}

__device__ inline void send_row(const Params& p, int token, const Receivers& receivers) {
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
      receivers.each([&](LlMessage* message) {
        char* body = body_of(message);
        st_relaxed_sys(reinterpret_cast<Vec16*>(body) + i, bytes);
        if (i % 8 == 0) st_relaxed_sys(reinterpret_cast<u32*>(body + kHidden) + i / 8, __float_as_uint(scale));
      });
    }
  } else {
    constexpr int kPieces = kHidden / 8;
#pragma unroll(kMostReceivers <= 8 ? 2 : 1)
    for (int i = threadIdx.x; i < kPieces; i += kRowThreads) {
      const Vec16 held = sendable(ld_streaming(row + i));
      receivers.each([&](LlMessage* message) { st_relaxed_sys(reinterpret_cast<Vec16*>(body_of(message)) + i, held); });
    }
  }
}

// One warp. Places are counted over the table, which all blocks have, so no block needs another's counts.
__device__ inline void send_choices(const Params& p, u32 epoch, int token, int expert, const Receivers& receivers, const short* table) {
  constexpr int kAtOnce = kNumTopk < 8 ? kNumTopk : 8;
  const int lane = lane_idx();
  int place = __popc(__match_any_sync(~0u, expert) & ((1u << lane) - 1));  // a token may choose an expert twice
  for (int first = 0; first < kNumTopk; first += kAtOnce) {
    int choices[kAtOnce], before[kAtOnce] = {};
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) choices[k] = __shfl_sync(~0u, expert, first + k);
    for (int i = lane; i < token * kNumTopk; i += 32) {
      const int other = table[i];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) before[k] += other == choices[k];
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const int sum = __reduce_add_sync(~0u, before[k]);
      if (lane == first + k) place += sum;
    }
  }
  if (lane >= kNumTopk) return;
  const u64 choice = word_of(expert >= 0 ? (expert + 1) << kPlaceBits | place : 0, epoch);
  const float weight = p.topk_weights ? at<const float>(p.topk_weights, 0)[token * kNumTopk + lane] : 0.f;
  receivers.each([&](LlMessage* message) {
    st_relaxed_sys(message->choice + lane, choice);
    st_relaxed_sys(message->weight + lane, word_of(__float_as_uint(weight), epoch));
  });
}

// All warps, each for some of the far ranks; the message is complete.
__device__ inline void put_message(const Params& p, u32 epoch, int token, int rank) {
  const u32 num_bytes = kLlHeadBytes + (p.use_fp8 ? kHidden + kScalesPerRow * 4 : kHidden * 2);
  u32 far = __ballot_sync(~0u, rank >= 0 && is_far(p, rank));
  for (int i = 0; far; ++i, far &= far - 1) {
    const int to = __shfl_sync(~0u, rank, __ffs(far) - 1);
    if (i % kWarps != warp_idx()) continue;
    put(p, to, message_offset(epoch, p.rank, token), staged_offset(epoch, token), num_bytes, flag_offset(epoch, p.rank, token), epoch);
  }
}

__device__ inline void send(const Params& p, short* table, Shared& shared) {
  const int warp = warp_idx(), lane = lane_idx();
  u32* taken = &progress_of(p)->taken;
  u32 next = 0;
  if (threadIdx.x == 0) next = add_relaxed_gpu(taken, 1);  // comes while the table is read
  if (warp == 0) {
    begin(p, progress_of(p), kLlDispatchAcks, kPhaseLlDispatchRoom, nullptr, shared.call);
  } else {
    read_table(p, table, shared.choices);
  }
  if (threadIdx.x == 0) shared.item[0] = next;
  __syncthreads();
  if (shared.call.failed) return;
  if (blockIdx.x == 0) {
    for (int r = threadIdx.x; r < kNumRanks; r += kLlThreads) at<u32>(p.handle, kLlHandleOut)[r] = shared.call.out[r];
  }
  const u32 epoch = shared.call.sent;
  for (int turn = 0;; ++turn) {
    const int item = shared.item[turn % 2] - shared.call.taken_before, token = item - 1;
    if (item > p.num_tokens) break;
    if (threadIdx.x == 0) next = add_relaxed_gpu(taken, 1);
    int rank = -1;  // in some lanes, one of the token's ranks
    if (item == 0) {
      for (int r = warp; r < kNumRanks; r += kWarps) {
        if (!shared.call.out[r]) send_header(p, epoch, r, table, shared.choices);
      }
    } else {
      const int expert = lane < kNumTopk ? table[token * kNumTopk + lane] : -1;
      rank = first_choice_of(expert, shared.call.out);
      const Receivers receivers(p, epoch, token, rank);
      if (warp == kChoiceWarp) {
        send_choices(p, epoch, token, expert, receivers, table);
      } else {
        send_row(p, token, receivers);
      }
    }
    if (threadIdx.x == 0) shared.item[(turn + 1) % 2] = next;
    __syncthreads();
    if constexpr (kHasFar) put_message(p, epoch, token, rank);
  }
}

// What the headers of all sources say, each lane holding some of them.
struct Sources {
  static constexpr int kPerLane = (kNumRanks + 31) / 32;
  int num_tokens[kPerLane], num_rows[kPerLane];
  int most = 0;  // tokens of a source

  // A whole warp. `ok`: whether all have come.
  __device__ inline Sources(const Params& p, const Call& call, bool& ok) {
    ok = true;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int source = 32 * i + lane_idx();
      u64 tokens = 0, rows = 0;
      if (source < kNumRanks && !call.out[source]) {
        const LlHeader* header = at<const LlHeader>(p.peers[p.rank], header_offset(call.received, source));
        ok &= wait_until(p, call.received, kPhaseLlCounts, source, [&](u32&) {
          tokens = ld_acquire_sys(&header->num_tokens), rows = ld_relaxed_sys(&header->num_rows);
          return static_cast<u32>(tokens) == call.received && static_cast<u32>(rows) == call.received;
        });
      }
      num_tokens[i] = tokens >> 32, num_rows[i] = rows >> 32;
      most = max(most, __reduce_max_sync(~0u, num_tokens[i]));
    }
    ok = __all_sync(~0u, ok);
    __syncwarp();
  }

  __device__ __forceinline__ int tokens_of(int source) const {
    int found = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int here = __shfl_sync(~0u, num_tokens[i], source % 32);
      if (source / 32 == i) found = here;
    }
    return found;
  }

  __device__ __forceinline__ int rows_before(int source) const {
    int sum = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) sum += 32 * i + lane_idx() < source ? num_rows[i] : 0;
    return __reduce_add_sync(~0u, sum);
  }
};

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

// Copies one warp's part of a row to its places as it comes. Nearly all of the time is spent waiting for memory, so loads are started
// before it is known where they go: find_place() gives, in lane k, the place of the token's choice k.
template <int kVecs, class FindPlace>
__device__ inline bool receive_row(const Params& p, u32 epoch, const LlMessage* message, int source, int part, FindPlace find_place) {
  constexpr int kAtOnce = kLlPieces;
  const int lane = lane_idx(), thread = part * 32 + lane, step = p.receive_warps * 32;
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
__device__ inline bool receive_token(const Params& p, const Call& call, const Sources& sources, int source, int token, int part,
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
  LlEntry* entry = at<LlEntry>(p.handle, kLlHandleEntries) + sources.rows_before(source) + __reduce_add_sync(~0u, rows_before);
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
    if (part == 0) {
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
  if (warp_idx() == 0) {
    const int num_entries = sources.rows_before(kNumRanks);
    if (lane_idx() == 0) *at<i32>(p.handle, kLlHandleNumEntries) = num_entries;
  }
  for (int e = threadIdx.x; e < kNumLocalExperts; e += kLlThreads) {
    const u64* first = at<const LlHeader>(p.peers[p.rank], header_offset(call.received, 0))->num_choices + e;
    const int sum = sum_of(p, call, first, kNumRanks);
    at<i32>(p.handle, kLlHandleNumRecvPerExpert)[e] = min(sum, kCapacity);
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

__device__ inline void receive(const Params& p, Call& call) {
  const u64 start = nanoseconds();
  if (blockIdx.x == 0 && p.wait_stats) {  // for the next call
    for (int s = threadIdx.x; s < kNumRanks; s += kLlThreads) at<u64>(p.state, kLocalWaits)[(call.received + 1) % 2 * kNumRanks + s] = 0;
  }
  if constexpr (kMasksOnTimeout) settle(p, call);
  if (blockIdx.x == 0) {  // as sending did, or more
    for (int s = threadIdx.x; s < kNumRanks; s += kLlThreads) {
      if (call.out[s]) at<u32>(p.handle, kLlHandleOut)[s] = 1;
    }
  }
  bool ok;
  const Sources sources(p, call, ok);
  if (!ok) return;
  const int parts = p.receive_warps, part = warp_idx() % parts;
  for (int item = blockIdx.x + warp_idx() / parts * gridDim.x; item < sources.most * kNumRanks; item += kWarps / parts * gridDim.x) {
    const int source = (item + p.rank) % kNumRanks, token = item / kNumRanks;
    if (token < sources.tokens_of(source) && !receive_token(p, call, sources, source, token, part, start)) return;
  }
  if (blockIdx.x == 0) count(p, call, sources);
}

extern "C" __global__ void __launch_bounds__(kLlThreads, 1) ll_dispatch(const __grid_constant__ Params p) {
  extern __shared__ short table[];
  __shared__ Shared shared;
  overlap_kernels();
  for (int e = threadIdx.x; e < kNumExperts; e += kLlThreads) shared.choices[e] = 0;
  __syncthreads();
  if (p.phases & kLlSend) {
    send(p, table, shared);
  } else {
    if (warp_idx() == 0) begin(p, progress_of(p), kLlDispatchAcks, kPhaseLlDispatchRoom, nullptr, shared.call);
    __syncthreads();
  }
  if (threadIdx.x == 32 * kLastWarp) advance(p, progress_of(p), shared.call, p.num_tokens + 1 + gridDim.x);
  if (p.phases & kLlReceive && !shared.call.failed) receive(p, shared.call);
}
