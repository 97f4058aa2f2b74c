// The receive half of the low-latency dispatches. ll_dispatch.cu describes the protocol. `Part`: the class of a warp's part of a row.
#pragma once
#include "low_latency/ll_dispatch.cuh"

constexpr int kHeaderWords = sizeof(LlHeader) / sizeof(u64);
// With at most this many busy blocks, the blocks poll whole headers, which saves a round trip. With twice as many, polling sometimes delays
// the stores of the headers by 3 to 4 us. More ranks make this more likely.
constexpr int kMaxEagerBlocks = 64 / kNumRanks;

// Adds the time that a source kept this rank waiting, as one waiting thread saw it. `start`: when the wait began. `arrival_ns`: read by the
// thread that saw the data arrive, because other lanes may have waited longer.
__device__ inline void add_wait(const Params& p, u32 epoch, int source, u64 start, u64 arrival_ns) {
  const u64 waited = arrival_ns - start;
  u64* longest = at<u64>(p.state, kLocalWaits) + (epoch % 2) * kNumRanks + source;
  add_longest(longest, waited, [&] { return at<u64>(p.wait_stats, 0) + source; });
}

// The first word of a header, which says whether the header of a scale-out source is there: other words may arrive before it, in parts.
__device__ __forceinline__ u64 first_word(const Params& p, const LlHeader* header, int source) {
  return is_scale_out(p, source) ? ld_acquire_sys(&header->num_tokens) : ld_relaxed_sys(&header->num_tokens);
}

// Warp 0 waits for the headers of all sources, for its block. False: the wait timed out, or a source differs.
__device__ inline bool read_headers(const Params& p, const Call& call, u64 start, Sources& sources) {
  bool ok = true;
  int max_tokens = 0, before = 0;
  for (int first = 0; first < kNumRanks; first += 32) {
    const int source = first + lane_idx();
    u64 tokens = 0, rows = 0, low = 0, high = 0, arrival_ns = start;
    bool differs = false;
    if (source < kNumRanks && !call.excluded[source]) {
      const LlHeader* header = at<const LlHeader>(inbox_base(p, source), header_offset(call.received, source));
      const bool arrived = wait_until(p, call.received, kPhaseLlCounts, source, [&](u32&) {
        if (is_scale_out(p, source)) {
          tokens = first_word(p, header, source), rows = ld_relaxed_sys(&header->num_rows);
        } else {
          ld_relaxed_sys(&header->num_tokens, tokens, rows);
        }
        ld_relaxed_sys(header->call_signature, low, high);
        const bool is_whole = static_cast<u32>(tokens) == call.received && static_cast<u32>(rows) == call.received &&
                              static_cast<u32>(low) == call.received && static_cast<u32>(high) == call.received;
        if (is_whole && p.wait_stats) arrival_ns = nanoseconds();
        return is_whole;
      });
      if (!kMasksOnTimeout && p.wait_stats && blockIdx.x == 0) add_wait(p, call.received, source, start, arrival_ns);
      differs = arrived && (high >> 32 << 32 | low >> 32) != p.call_signature;
      ok &= arrived && !differs;
    }
    if (blockIdx.x == 0) abort_on_difference(p, kPhaseLlCounts, call.received, differs, source, high >> 32 << 32 | low >> 32);
    const int num_tokens = tokens >> 32, num_rows = rows >> 32;
    __syncwarp();
    const int up_to = sum_to_lane(num_rows);  // rows of these 32 sources up to this one
    if (source < kNumRanks) sources.num_tokens[source] = num_tokens, sources.rows_before[source] = before + up_to - num_rows;
    before += __shfl_sync(~0u, up_to, 31);
    max_tokens = max(max_tokens, __reduce_max_sync(~0u, num_tokens));
  }
  if (lane_idx() == 0) sources.rows_before[kNumRanks] = before, sources.max_tokens = max_tokens;
  return __all_sync(~0u, ok);
}

// All warps but the first copy the rest of all headers, for the block. `awaited`: whether to wait for missing words. False: a wait timed
// out, or words are missing without a wait.
__device__ inline bool copy_headers(const Params& p, const Call& call, bool awaited, i32* choices, u32* arrival_bitmap) {
  constexpr int kThreads = kLlThreads - 32;
  const int thread = threadIdx.x - 32;
  bool ok = true;
  auto header_of = [&](int source) { return at<const LlHeader>(inbox_base(p, source), header_offset(call.received, source)); };
  auto is_there = [&](int source) {
    if (!is_scale_out(p, source) || static_cast<u32>(first_word(p, header_of(source), source)) == call.received) return true;
    return awaited && wait_epoch(p, &header_of(source)->num_tokens, call.received, kPhaseLlCounts, source);
  };
  auto read_word = [&](int source, const u64* word) {
    if (call.excluded[source]) return 0u;
    if (!is_there(source)) {
      ok = false;
      return 0u;
    }
    u64 found = ld_relaxed_sys(word);
    if (static_cast<u32>(found) != call.received) ok &= awaited && wait_word(p, word, call.received, kPhaseLlCounts, source, found);
    return static_cast<u32>(found >> 32);
  };
  for (int i = thread; i < kNumExperts; i += kThreads) {
    const int source = i / kNumLocalExperts;
    choices[i] = read_word(source, header_of(source)->num_choices + i % kNumLocalExperts);
  }
  // From the other end, for threads that had less to do.
  for (int i = kThreads - 1 - thread; i < kNumRanks * kLlBitmapWords; i += kThreads) {
    const int source = i / kLlBitmapWords;
    arrival_bitmap[i] = read_word(source, header_of(source)->tokens + i % kLlBitmapWords);
  }
  return ok;
}

// The state of a block in the receive half.
struct ReceiveContext {
  const Params& p;
  Shared& shared;
  const u32* arrival_bitmap;
  u64 start;  // when the receive half began
};

// Receives one warp's part of a token. False: the wait timed out for all ranks.
template <class Part>
__device__ inline bool receive_token(const ReceiveContext& r, int source, int token, const WarpGroup& group) {
  const Params& p = r.p;
  const int lane = lane_idx();
  const u32 epoch = r.shared.call.received, bit = 1u << token % 32;
  const u64 mine = inbox_base(p, source);
  const u32* arrival_bitmap = r.arrival_bitmap + source * kLlBitmapWords;
  if (!(arrival_bitmap[token / 32] & bit)) return true;
  const LlMessage* message = at<const LlMessage>(mine, message_offset(epoch, source, token));
  Part row(p, message, group);
  bool ok = true, late = false;  // late: the head was missing at the first look
  if (is_scale_out(p, source)) {
    if (p.wait_stats) late = static_cast<u32>(ld_relaxed_sys(at<const u64>(mine, flag_offset(epoch, source, token)))) != epoch;
    if (lane == 0) ok = wait_epoch(p, at<const u64>(mine, flag_offset(epoch, source, token)), epoch, kPhaseLlRows, source);
    ok = __shfl_sync(~0u, ok, 0);
    __syncwarp();  // all lanes may read what lane 0 acquired
  }
  u64 choice = epoch, weight = epoch;
  auto load_head = [&] {
    if (lane < kNumTopk) choice = ld_relaxed_sys(message->choice + lane), weight = ld_relaxed_sys(message->weight + lane);
  };
  auto has_head = [&] { return static_cast<u32>(choice) == epoch && static_cast<u32>(weight) == epoch; };
  load_head();
  row.start();
  int rows_before = 0;  // of this source
#pragma unroll 1        // of 1024 tokens, a lane has at most one word
  for (int w = lane; w <= token / 32; w += 32) rows_before += __popc(w == token / 32 ? arrival_bitmap[w] & (bit - 1) : arrival_bitmap[w]);
  LlEntry* entry = at<LlEntry>(p.handle, kLlHandleEntries) + r.shared.sources.rows_before[source] + __reduce_add_sync(~0u, rows_before);
  late |= !has_head();
  // Waits for the head and for the first vectors together. One after the other, they would take a round trip to memory more.
  ok = ok && wait_until(p, epoch, kPhaseLlRows, source, [&](u32& seen) {
         seen = static_cast<u32>(choice);
         if (has_head() && row.has_arrived()) return true;
         if (!has_head()) load_head();
         row.start();
         return false;
       });
  ok = __all_sync(~0u, ok);
  int to_row = ok ? kLlElsewhere : kLlUnknown;
  const u32 chosen = choice >> 32;  // 0: no choice
  const int expert = static_cast<int>(chosen >> kExpertSlotBits) - 1 - p.rank * kNumLocalExperts;
  if (ok && chosen && expert >= 0 && expert < kNumLocalExperts) {
    to_row = chosen & ((1u << kExpertSlotBits) - 1);
#pragma unroll(kNumRanks <= 16 ? kNumRanks : 8)
    for (int s = 0; s < kNumRanks; ++s) to_row += s < source ? r.shared.choices[s * kNumLocalExperts + expert] : 0;
    to_row = to_row < p.capacity ? expert * p.capacity + to_row : kLlNoRoom;
  }
  if (row.thread < 32) {  // the first warp of the group
    if (lane == 0) entry->source = source, entry->token = token;
    if (lane < kNumTopk) entry->row[lane] = to_row, entry->weight[lane] = __uint_as_float(weight >> 32);
  }
  ok = row.finish(p, epoch, source, to_row) && ok;
  if (p.wait_stats && __any_sync(~0u, late) && lane == 0) add_wait(p, epoch, source, r.start, nanoseconds());
  if (!kMasksOnTimeout) return ok;
  if (!group.all(ok) && row.thread < 32 && lane < kNumTopk) entry->row[lane] = kLlElsewhere;
  return true;
}

// Receives one warp's part of all tokens. False: the wait timed out for all ranks.
template <class Part>
__device__ inline bool receive_tokens(const ReceiveContext& r, const WarpGroup& group) {
  const Sources& sources = r.shared.sources;
  const Members& members = r.shared.call;
  const int num_items = sources.max_tokens * members.count();
  for (int item = group.first(); item < num_items; item += group.step()) {
    const int source = members.at(members.modulo(item + members.place(r.p.rank))), token = members.divide(item);
    if (token < sources.num_tokens[source] && !receive_token<Part>(r, source, token, group)) return false;
  }
  return true;
}

// Writes the counts of the whole call for the host and for combine.
template <class Rows>
__device__ inline void publish_counts(const ReceiveContext& r) {
  const Params& p = r.p;
  const int num_entries = r.shared.sources.rows_before[kNumRanks];
  if (threadIdx.x == 0) *at<i32>(p.handle, kLlHandleNumEntries) = num_entries;
  if (threadIdx.x == 0) count_received(p, num_entries, Rows::row_bytes(p));
  for (int e = threadIdx.x; e < kNumLocalExperts; e += kLlThreads) {
    int sum = 0;
    for (int s = 0; s < kNumRanks; ++s) sum += r.shared.choices[s * kNumLocalExperts + e];
    if (sum > p.capacity) report_event(p, &Report::full_expert, static_cast<u64>(e + 1) << 32 | sum);
    sum = min(sum, p.capacity);
    count_expert(p, e, sum);
    at<i32>(p.handle, kLlHandleNumRecvPerExpert)[e] = sum;
    if (p.recv_stats) at<i32>(p.recv_stats, 0)[e] += sum;
  }
}

// Where time-outs mask, block 0 waits for whole headers, decides which sources are excluded, and tells the other blocks. Relaxed accesses
// are enough, because the words of a header carry the epoch. It also measures the waits; otherwise read_headers does. Threads start with
// the first words of all sources.
__device__ inline void decide_source_status(const Params& p, u64 start, Call& call) {
  for (int i = threadIdx.x; i < kNumRanks * kHeaderWords; i += kLlThreads) {
    const int source = i % kNumRanks, w = i / kNumRanks;
    if (call.excluded[source]) continue;
    const u64* word = at<const u64>(inbox_base(p, source), header_offset(call.received, source)) + w;
    u64 arrival_ns = start;
    const bool arrived = wait_until(p, call.received, kPhaseLlCounts, source, [&](u32& seen) {
      seen = static_cast<u32>(ld_relaxed_sys(word));
      if (p.wait_stats) arrival_ns = nanoseconds();
      return seen == call.received;
    });
    if (p.wait_stats && w == 0) add_wait(p, call.received, source, start, arrival_ns);
    if (!arrived) call.excluded[source] = true;
  }
  __syncthreads();
  for (int s = threadIdx.x; s < kNumRanks; s += kLlThreads) {
    st_relaxed_sys(at<u32>(p.state, kLocalSourceStatus) + s, call.received << 1 | static_cast<u32>(call.excluded[s]));
  }
}

// Called by warp 0 of the other blocks. Returns whether the decision of block 0 differs from what this block assumed.
__device__ inline bool read_source_status(const Params& p, Call& call) {
  bool changes = false;
  for (int s = lane_idx(); s < kNumRanks; s += 32) {
    const u32 awaited = call.received << 1;
    u32 status;
    for (u32 spins = 1; ((status = ld_relaxed_gpu(at<u32>(p.state, kLocalSourceStatus) + s)) ^ awaited) > 1; ++spins) {
      if (spins % 64 == 0 && was_aborted(p)) break;  // block 0 may have ended before
    }
    const bool excluded = status != awaited;
    changes |= excluded != call.excluded[s];
    call.excluded[s] = excluded;
  }
  return __any_sync(~0u, changes);
}

// The part of the receive half that does not depend on rows. `start`: when the block's receive half began.
__device__ inline void start_receiving(const Params& p, u64 start, Call& call) {
  clear_next_waits(p, call.received, kPhaseLlCounts, kPhaseLlRows);
  if (blockIdx.x != 0) return;
  if constexpr (kMasksOnTimeout) decide_source_status(p, start, call);
  for (int s = threadIdx.x; s < kNumRanks; s += kLlThreads) {
    at<u64>(p.state, kLocalWaits)[(call.received + 1) % 2 * kNumRanks + s] = 0;  // for the next call
    if (call.excluded[s]) at<u32>(p.handle, kLlHandleExcluded)[s] = 1;           // the send half has excluded the same sources or fewer
  }
}

// Called after start_receiving. False: a wait timed out for all ranks, or a source differs.
template <class Part>
__device__ inline bool receive(const Params& p, u64 start, u32* arrival_bitmap, Shared& shared) {
  const Call& call = shared.call;
  const ReceiveContext r{p, shared, arrival_bitmap, start};
  // The last block writes the counts. With few rows it has none to receive.
  const bool publishes_counts = blockIdx.x == gridDim.x - 1;
  auto group_of = [&](int num_tokens) { return WarpGroup(log2_warps_per_item(num_tokens * call.count(), kMaxLog2WarpsPerItem)); };
  auto num_busy = [&](int num_tokens) { return num_tokens * call.count() << group_of(num_tokens).log2_blocks; };
  auto copy = [&](bool awaited) { return copy_headers(p, call, awaited, shared.choices, arrival_bitmap); };
  // A block that will have rows copies the headers: it waits for each word, or takes the words that are there. It first assumes that other
  // ranks have as many tokens as this one.
  const int expected = num_busy(p.num_tokens);
  bool ok = true, copied = publishes_counts || static_cast<int>(blockIdx.x) < expected;
  if (warp_idx() == 0) {
    // Meanwhile other warps copy by what the block assumed. If that was wrong, they copy again.
    if (kMasksOnTimeout && blockIdx.x != 0) copied &= !read_source_status(p, shared.call);
    ok = read_headers(p, call, start, shared.sources);
  } else if (copied) {
    copied = copy(expected <= kMaxEagerBlocks);
  }
  if (!__syncthreads_and(ok)) return false;
  const int max_tokens = shared.sources.max_tokens;
  if (!__syncthreads_and(copied)) {
    if (!publishes_counts && static_cast<int>(blockIdx.x) >= num_busy(max_tokens)) return true;
    if (!__syncthreads_and(warp_idx() == 0 || copy(true))) return false;
  }
  if (publishes_counts) publish_counts<typename Part::Rows>(r);
  return receive_tokens<Part>(r, group_of(max_tokens));
}
