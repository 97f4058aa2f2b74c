// Rows on the way of throughput calls over several nodes, and the words that follow them.
//
// A copy warp takes rows in groups: a chunk that it fills, a chunk that it takes out of its slot, or rows of this node. With TMA its rows
// go through a ring of stages: a bulk load brings rows to a stage, and a bulk store for each of their places takes them away. The copy
// engine works on rows of one group while the warp looks for the next one. Without TMA the whole warp copies each row.
//
// A signal follows a group: a word at another rank, or a put with its word. It needs a fence, and a fence takes as long as many rows. So a
// signal warp raises all due signals after each fence, and copy warps wait for no fence. Without TMA a copy warp raises its own signals.
//
// Liveness: a copy warp holds at most one chunk to fill and one chunk to empty, and has claimed the next of each. While the slot of the one
// has no credit and the other one has not arrived, the warp moves other rows. It waits only when nothing that it has claimed can move, and
// everything that it has loaded has been written and signalled. So it keeps nothing back that another rank waits for (nodes.cuh).
#pragma once
#include "common/bulk.cuh"
#include "nodes/nodes.cuh"

// What follows a group of rows.
using Signal = u64;
constexpr Signal kNoSignal = ~0ull, kLastSignal = ~1ull;
constexpr u32 kPutSignal = 0, kCreditSignal = 1, kExposedSignal = 2;

__device__ __forceinline__ Signal signal_of(u32 kind, int flow, int chunk) {
  return static_cast<u64>(kind) << 56 | static_cast<u64>(flow) << 32 | static_cast<u32>(chunk);
}
__device__ __forceinline__ u32 kind_of(Signal s) { return s >> 56; }
__device__ __forceinline__ int flow_of(Signal s) { return s >> 32 & 0xffffff; }
__device__ __forceinline__ int chunk_of(Signal s) { return static_cast<u32>(s); }

// Signals of the copy warps of a block for its signal warp, in shared memory.
struct SignalRing {
  static constexpr u32 kEntries = 64;
  u32 claimed;  // entries that copy warps have claimed
  u32 raised;   // the signal warp's answer: entries that are free again
  Signal entries[kEntries];

  // Called by all threads of the block, before they meet.
  __device__ __forceinline__ void clear() {
    if (threadIdx.x == 0) claimed = raised = 0;
    if (threadIdx.x < kEntries) entries[threadIdx.x] = kNoSignal;
  }

  // Called by one thread, which has acquired what the signal releases. The signal warp waits for no one, so there is room soon.
  __device__ __forceinline__ void send(Signal s) {
    const u32 number = atomicAdd(&claimed, 1u);
    while (number - ld_acquire_block(&raised) >= kEntries) continue;
    st_release_block(entries + number % kEntries, s);
  }
};

// The work of the signal warp. `raise(signal)` is called by the whole warp. The wait has no time limit, because copy warps always end.
template <int kCopyWarps, class Raise>
__device__ __forceinline__ void raise_signals(SignalRing& ring, Raise raise) {
  u32 raised = 0;
  for (int num_working = kCopyWarps; num_working > 0;) {
    if (lane_idx() == 0) {
      while (ld_acquire_block(ring.entries + raised % SignalRing::kEntries) == kNoSignal) continue;
    }
    __syncwarp();
    Signal& entry = ring.entries[(raised + lane_idx()) % SignalRing::kEntries];
    const Signal mine = ld_acquire_block(&entry);
    const u32 missing = __ballot_sync(~0u, mine == kNoSignal);
    const int num = missing ? __ffs(missing) - 1 : 32;
    if (lane_idx() < num) entry = kNoSignal;
    __syncwarp();  // all lanes release what each lane acquired
    fence_release_sys();
    raised += num;
    if (lane_idx() == 0) st_release_block(&ring.raised, raised);
    for (int i = 0; i < num; ++i) {
      const Signal s = __shfl_sync(~0u, mine, i);
      if (s == kLastSignal) {
        --num_working;
      } else {
        raise(s);
      }
    }
  }
}

// A group of up to 32 rows. Lane j has row j: where it lies, and its places. 0: none.
template <int kPlaces>
struct Rows {
  int count = 0;
  u64 from;
  u64 to[kPlaces];
  Signal when_read, when_written;
};

// Rows of a stage.
struct Staged {
  u64 to[32];  // [row][place of up to kPlaces]
  Signal when_read, when_written;
  u32 shift;  // of the bytes in the stage: the place's offset within its 128-byte line, so that bytes cross the link in whole lines
};

// The copies of one warp, with TMA. Unlike bulk_pipeline, a warp may look for other work between two rows, and end what is on its way
// before it waits.
template <int kPlaces, int kStages>
struct BulkCopies {
  // As in bulk_pipeline: the warp fills some stages while the copy engine empties the others.
  static constexpr int kFilling = kStages / 2, kEmptying = kStages - kFilling, kUnwritten = 2;

  char* stages;
  u64* barriers;
  Staged* staged;
  SignalRing* ring;
  int row_bytes, rows_per_stage;
  int started = 0, ended = 0, written = 0;
  Signal unwritten = kNoSignal;  // lane i: what follows the rows of turn i, modulo 32

  __device__ BulkCopies(char* stages, u64* barriers, Staged* staged, SignalRing* ring, int row_bytes)
      : stages(stages), barriers(barriers), staged(staged), ring(ring), row_bytes(row_bytes) {
    const int fit = (kNodesStageBytes - 128) / row_bytes;
    rows_per_stage = row_bytes % 128 ? 1 : fit < 32 / kPlaces ? fit : 32 / kPlaces;
    if (lane_idx() == 0) {
      for (int i = 0; i < kStages; ++i) barrier_init(barriers + i);
      barrier_init_fence();
    }
    __syncwarp();
  }

  __device__ __forceinline__ bool has_room() const { return started - ended < kFilling; }
  __device__ __forceinline__ bool in_flight() const { return ended < started; }

  // All lanes have acquired the rows of a new group, or the permission to write to its places.
  __device__ __forceinline__ void begin_group() { fence_bulk_copies(); }

  __device__ __forceinline__ char* stage_at(int stage, int row, u32 shift) const {
    return stages + stage * kNodesStageBytes + row * row_bytes + shift;
  }

  // Loads rows of a group to a stage, from row `first` on. Returns their number.
  __device__ __forceinline__ int start(const Rows<kPlaces>& rows, int first) {
    const int lane = lane_idx(), stage = started % kStages, num = min(rows_per_stage, rows.count - first);
    const u64 from = __shfl_sync(~0u, rows.from, (first + lane) % 32);
    u64 to[kPlaces], any = 0;
#pragma unroll
    for (int d = 0; d < kPlaces; ++d) {
      to[d] = __shfl_sync(~0u, rows.to[d], (first + lane) % 32);
      any = any ? any : to[d];
    }
    const bool mine = lane < num && any;
    const u32 shift = rows_per_stage == 1 ? __shfl_sync(~0u, static_cast<u32>(any) % 128, 0) : 0;
    const int num_loads = __popc(__ballot_sync(~0u, mine));
    Staged& s = staged[stage];
    if (lane < rows_per_stage) {
#pragma unroll
      for (int d = 0; d < kPlaces; ++d) s.to[lane * kPlaces + d] = lane < num ? to[d] : 0;
    }
    if (lane == 0) {
      const bool is_last = first + num == rows.count;
      s.when_read = is_last ? rows.when_read : kNoSignal;
      s.when_written = is_last ? rows.when_written : kNoSignal;
      s.shift = shift;
      barrier_expect(barriers + stage, num_loads * row_bytes);
    }
    __syncwarp();
    if (mine) bulk_load(stage_at(stage, lane, shift), at<const void>(from, 0), row_bytes, barriers + stage);
    ++started;
    return num;
  }

  // Stores the rows of the oldest stage that is full.
  __device__ __forceinline__ void end_one() {
    const int lane = lane_idx(), stage = ended % kStages;
    const Staged& s = staged[stage];
    barrier_wait(barriers + stage, (ended / kStages) % 2);
    if (lane < rows_per_stage * kPlaces && s.to[lane])
      bulk_store(at<void>(s.to[lane], 0), stage_at(stage, lane / kPlaces, s.shift), row_bytes);
    bulk_commit();
    const Signal when_read = s.when_read, when_written = s.when_written;
    if (lane == ended % 32) unwritten = when_written;
    __syncwarp();  // all lanes have read `s`, and what the barrier guards
    send(when_read);
    ++ended;
    if (ended - written > kUnwritten) {
      bulk_wait_written<kUnwritten>();
      send_written(ended - kUnwritten);
    }
    bulk_wait_read<kEmptying>();
    __syncwarp();  // the stages of all lanes
  }

  // Afterwards everything is written, and all signals are with the signal warp.
  __device__ __forceinline__ void drain() {
    while (in_flight()) end_one();
    bulk_wait_written<0>();
    send_written(ended);
  }

  __device__ __forceinline__ void finish() {
    drain();
    send(kLastSignal);
  }

 private:
  __device__ __forceinline__ void send_written(int turns) {
    __syncwarp();  // lane 0 releases what all lanes have written
    for (; written < turns; ++written) send(__shfl_sync(~0u, unwritten, written % 32));
  }

  __device__ __forceinline__ void send(Signal s) {
    if (s != kNoSignal && lane_idx() == 0) ring->send(s);
  }
};

// Copies a row to up to kPlaces places; 0: not there. Called by a whole warp.
template <int kPlaces>
__device__ inline void copy_to_places(const u64 (&to)[kPlaces], u64 from, int row_bytes) {
  constexpr int kInFlight = 8;
  const int count = row_bytes / 16;
  for (int i = lane_idx(); i < count; i += kInFlight * 32) {
    Vec16 held[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (i + j * 32 < count) held[j] = ld_streaming(at<const Vec16>(from, 0) + i + j * 32);
    }
#pragma unroll
    for (int d = 0; d < kPlaces; ++d) {
      if (to[d] == 0) continue;
#pragma unroll
      for (int j = 0; j < kInFlight; ++j) {
        if (i + j * 32 < count) st_vec(at<Vec16>(to[d], 0) + i + j * 32, held[j]);
      }
    }
  }
}

// The same without TMA. `raise(signal)` is called by the whole warp.
template <int kPlaces, class Raise>
struct WarpCopies {
  Raise raise;
  int row_bytes;

  __device__ __forceinline__ bool has_room() const { return true; }
  __device__ __forceinline__ bool in_flight() const { return false; }
  __device__ __forceinline__ void begin_group() {}
  __device__ __forceinline__ void end_one() {}
  __device__ __forceinline__ void drain() {}
  __device__ __forceinline__ void finish() {}

  __device__ __forceinline__ int start(const Rows<kPlaces>& rows, int) {
    for (int j = 0; j < rows.count; ++j) {
      u64 to[kPlaces], any = 0;
#pragma unroll
      for (int d = 0; d < kPlaces; ++d) any |= to[d] = __shfl_sync(~0u, rows.to[d], j);
      const u64 from = __shfl_sync(~0u, rows.from, j);
      if (any) copy_to_places(to, from, row_bytes);
    }
    if (rows.when_read == kNoSignal && rows.when_written == kNoSignal) return rows.count;
    fence_release_sys();  // each lane: what follows guards what all lanes have read and written
    __syncwarp();
    if (rows.when_read != kNoSignal) raise(rows.when_read);
    if (rows.when_written != kNoSignal) raise(rows.when_written);
    return rows.count;
  }
};

// For a call in which copy warps fill or empty no chunks.
struct NoChunks {
  static constexpr int flow = 0, num_rows = 0;
  static constexpr bool has = false;
  __device__ __forceinline__ bool is_ready(u32&) const { return false; }
  template <class Group>
  __device__ __forceinline__ void take(Group&) {}
};

// Waits until a chunk can be filled or emptied. One lane looks at the word of each. False: one of them timed out.
template <class Filled, class Emptied>
__device__ __forceinline__ bool await_either(const Params& p, u32 epoch, u32 phase, const Filled& filled, const Emptied& emptied) {
  const int lane = lane_idx();
  auto is_ready = [&](u32& seen) {
    u32 of_credit = 0, of_chunk = 0;
    const bool has_room = filled.has && filled.is_ready(of_credit);
    const bool has_arrived = emptied.has && emptied.is_ready(of_chunk);
    seen = lane == 0 ? of_credit : of_chunk;
    return has_room || has_arrived;
  };
  bool ok = true;
  if (lane == 0 && filled.has) ok = wait_until(p, epoch, kPhaseNodeRoom, far_end(p, filled.flow), is_ready);
  if (lane == 1 && emptied.has) ok = wait_until(p, epoch, phase, far_end(p, emptied.flow), is_ready);
  return __all_sync(~0u, ok);
}

// The work of a copy warp: chunks to fill and to empty, and rows of this node (`near`), until all have moved or a wait times out. Each of
// the three has:
//   num_rows        of all warps
//   take(rows)      all lanes: set a group of rows, and go on to the next one
// Chunks also have:
//   has, flow       whether this warp holds one, and its flow
//   is_ready(seen)  one lane: whether it has a credit, or has arrived; `seen`: the epoch of the word that says so
// `near.take` returns whether there were rows.
//
// With kMixed, each warp mixes rows of this node with those of chunks evenly, so that neither links nor memory idle at the end. Otherwise
// rows of this node wait until no chunk can move: they need the same links, and nothing waits for them.
template <bool kMixed, class Group, class Copies, class Filled, class Emptied, class Near>
__device__ __forceinline__ void move_rows(const Params& p, u32 epoch, u32 phase, Copies& copies, Filled filled, Emptied emptied,
                                          Near near) {
  // Without chunks it is infinite or no number. Then no comparison with it holds, and rows of this node move because no chunk is ready.
  const float near_rows_per_row = kMixed ? static_cast<float>(near.num_rows) / static_cast<float>(filled.num_rows + emptied.num_rows) : 0;
  Group rows;
  int moved = 0, of_chunks = 0, of_near = 0;
  bool has_near = true, is_turn_of_fill = true;
  for (;;) {
    if (moved < rows.count) {
      if (copies.has_room()) {
        moved += copies.start(rows, moved);
      } else {
        copies.end_one();
      }
      continue;
    }
    moved = rows.count = 0;
    u32 seen;
    bool is_ready = false;
    if (lane_idx() == 0) is_ready = filled.has && filled.is_ready(seen);
    if (lane_idx() == 1) is_ready = emptied.has && emptied.is_ready(seen);
    const u32 ready = __ballot_sync(~0u, is_ready);
    __syncwarp();  // all lanes read and write after what these lanes acquired
    if (has_near && (ready == 0 || static_cast<float>(of_near) < static_cast<float>(of_chunks) * near_rows_per_row)) {
      has_near = near.take(rows);
      of_near += rows.count;
    } else if (ready & 1 && (is_turn_of_fill || !(ready & 2))) {
      filled.take(rows);
      of_chunks += rows.count;
      is_turn_of_fill = false;
    } else if (ready & 2) {
      emptied.take(rows);
      of_chunks += rows.count;
      is_turn_of_fill = true;
    } else if (copies.in_flight()) {
      copies.end_one();
      continue;
    } else {
      copies.drain();
      if (!(filled.has || emptied.has) || !await_either(p, epoch, phase, filled, emptied)) break;
      continue;
    }
    copies.begin_group();
  }
  copies.finish();
}
