// The low-latency combine in which a group of warps shares the row of an entry: ll_combine, and ll_combine_fp8 and ll_combine_log10 for
// rows that are compressed on the way. With few entries, a group spans several blocks. Without p.reduce_early a group sends one unweighted
// row for each expert, and the rank of the token adds them up. A row for another scale-up domain is first written to staging memory of this
// rank and put from there.
#pragma once
#include "low_latency/ll_combine.cuh"

// Called by all warps of a group. `block`: number of this block in the group. `idx`: number of the entry.
template <class Form>
__device__ inline void send_entry(const Params& p, const Call& call, const WarpGroup& group, int block, int idx) {
  const int thread = group.thread(block), step = group.num_threads();
  const u32 epoch = call.sent;
  Entry entry(p, idx);
  if (call.excluded[entry.source]) return;
  const bool scale_out = is_scale_out(p, entry.source);
  const u64 staged = staged_offset(epoch, idx), row_bytes = kSentRowBytes;
  auto row_for = [&](int which) {
    return scale_out ? at<Vec16>(network_base(p), staged) : at<Vec16>(p.peers[entry.source], row_offset(epoch, which, entry.token));
  };
  if (p.reduce_early) {
    const bool ok = entry.await_weight(p, epoch);
    if (!p.has_weights && !group.all(ok)) return;
    if (thread == 0) count_sent(p, 1, row_bytes);
    Form::send_row(p, entry, thread, step, row_for(p.rank));
    if (!scale_out) return;
    group.sync();
    if (thread < 32) {
      put(p, entry.source, row_offset(epoch, p.rank, entry.token), staged, row_bytes, flag_offset(epoch, p.rank, entry.token), epoch);
    }
    return;
  }
  if constexpr (Form::kIsCompressed) return;  // such rows are always added up first
#pragma unroll 1                              // calls with p.reduce_early would jump over long code
  for (int k = 0; k < kNumTopk; ++k) {
    const i64 from = __shfl_sync(~0u, entry.row, k);
    if (from == kLlElsewhere) continue;
    if (thread == 0) count_sent(p, 1, row_bytes);
    Vec16* to = row_for(k);
    for (int i = thread; i < kRowVecs; i += step) {
      st_relaxed_sys(to + i, from == kLlNoRoom ? Vec16{} : avoid_sentinel(ld_streaming(at<const Vec16>(p.y, 0) + from * kRowVecs + i)));
    }
    if (!scale_out) continue;
    group.sync();
    if (thread < 32) {
      put_and_wait(p, entry.source, row_offset(epoch, k, entry.token), staged, row_bytes, flag_offset(epoch, k, entry.token), epoch);
    }
    group.sync();
  }
}

// All warps of a group stay until the end, because they meet at barriers.
template <class Form>
__device__ inline void send_entries(const Params& p, const Call& call, const WarpGroup& group, int item, int num_items, int num_entries) {
  __shared__ u32 ticket[2][kWarps];  // two, used in turn
  u32 next = 0;
  for (int turn = 0; item < num_items; turn ^= 1) {
    if (group.is_leader()) next = fetch_add_relaxed_gpu(&progress_of(p)->tickets);
    const int position = item >> group.log2_blocks, idx = kHasScaleOut ? entry_at(call, position, p.rank, num_entries) : position;
    if (idx < num_entries) send_entry<Form>(p, call, group, item & ((1 << group.log2_blocks) - 1), idx);
    if (group.is_leader()) ticket[turn][group.idx] = next;
    group.sync();
    item = ticket[turn][group.idx] - call.tickets_before;
  }
}

// `Form`: of the rows on the way.
template <class Form>
__device__ __forceinline__ void combine_entries(const Params& p) {
  prefetch_tables(p);
  overlap_kernels();
  // The number of entries arrives too late, so this assumes that all ranks have as many tokens as this one. In a graph, the number of
  // members may be an older one. The shape of groups is free.
  const int num_members = kHasSlots ? p.num_members : kNumRanks;
  const WarpGroup senders(log2_warps_per_item(p.num_tokens * (num_members < kNumTopk ? num_members : kNumTopk), kMaxLog2WarpsPerItem));
  combine<kHasScaleOut, Form>(p, senders, 1 << senders.log2_blocks, [&](const Call& call, int item, int num_items, int num_entries) {
    send_entries<Form>(p, call, senders, item, num_items, num_entries);
  });
}
