"""The kernel table. Each entry belongs to one .cu file of cuda_src with an entry point of the same name.

`local_table` has the entries of kernels that need no Buffer.
"""

from __future__ import annotations

from ..arrays.compressed_rows import COMPRESSIONS
from .kernel import Kernel
from .local_table import LOCAL_KERNELS

_COMMON = """
    u64 peers[kNumRanks];   // address of each rank's symmetric memory on this rank
    u64 state;              // local memory (Layout.local)
    u64 status_page;        // pinned host memory (Layout.status_page)
    u64 timeout_ns;
    i32 rank;
    i32 pes[kNumRanks];     // NVSHMEM's number of each rank
"""

_ROUTE = (
    _COMMON
    + """
    i32 num_tokens;
    u64 topk_idx;           // [num_tokens, kNumTopk] int32 or int64
    u64 handle;             // out
    i32 idx_bytes;          // 4 or 8
    i32 expert_alignment;
    i32 check;              // report expert numbers out of range
    i32 to_host;            // the host waits for the received counts
"""
)

_RECV_WINDOW = """
    u64 recv_x_offset;      // where this rank receives rows: offsets from its symmetric base
    u64 recv_scales_offset;
    u64 recv_topk_idx_offset;
    u64 recv_topk_weights_offset;
    u64 recv_src_idx_offset;
    i64 capacity;           // rows that fit there
"""

_SIGNATURE = """
    u64 call_signature;     // all ranks must agree on it
"""

_DISPATCH = (
    _COMMON
    + """
    i32 row_bytes;
    u64 x;                  // [num_tokens, row_bytes]
    u64 scales;             // [num_tokens, scale_bytes], or 0
    u64 topk_idx;           // [num_tokens, kNumTopk], or 0
    u64 topk_weights;       // [num_tokens, kNumTopk] float32, or 0
    u64 handle;
"""
    + _RECV_WINDOW
    + """
    u64 num_recv;              // for the caller: [1] int32
    u64 num_recv_per_expert;   // and [kNumLocalExperts] int32
    i32 scale_bytes;
    i32 idx_bytes;
"""
)

_SUMS = (
    _COMMON
    + """
    i32 num_tokens;
    u64 y;                  // [rows received in dispatch, kRowBytes]
    u64 topk_weights;       // [rows received in dispatch, kNumTopk] float32, or 0
    u64 bias_0;             // [num_tokens, kRowBytes], or 0
    u64 bias_1;
    u64 handle;
    u64 out;                // [num_tokens, kRowBytes]
    u64 out_topk_weights;   // [num_tokens, kNumTopk] float32; over several nodes 0 without weights
"""
)

_COMBINE = (
    _SUMS
    + """
    u64 recv_x_offset;      // where this rank receives the rows of its tokens: offsets from its symmetric base
    u64 recv_topk_weights_offset;
    i64 capacity;           // rows of y
    u64 call_signature;     // all ranks must agree on it
"""
)

_COMBINE_NODES = (
    _SUMS
    + """
    u64 exposed_offset;     // where this rank exposes rows: offsets from its symmetric base
    u64 exposed_weights_offset;
    u64 sums;               // staging for what other nodes send
    u64 sum_weights;
    i64 capacity;           // rows of y
    u64 call_signature;     // all ranks must agree on it
    i32 chunk_tokens;       // the form of a chunk: its most tokens, and offsets in a slot
    i32 chunk_weights;
    i32 chunk_rows;
    i32 choice;             // with reduce="topk", the choice whose rows y has, in the order of the launches; otherwise -1
    u64 expert_offsets;     // these two of expert_positions, for statistics of choice 0
    u64 expert_ends;
"""
)

_LOW_LATENCY_COMBINE = (
    _COMMON
    + """
    i32 phases;
    i32 num_tokens;
    u64 y;                  // [kNumLocalExperts, kNumRanks * kNumMaxTokens, kHidden] bfloat16
    u64 topk_idx;
    u64 topk_weights;
    u64 handle;
    u64 out;                // [num_tokens, kHidden] bfloat16
    i32 idx_bytes;
    i32 reduce_early;       // each rank adds up its rows of a token and sends one
    i32 has_weights;        // the weights came with the dispatch
    u32 call_signature;     // all ranks must agree on it
"""
)


KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            "route",
            _ROUTE + _RECV_WINDOW + _SIGNATURE,
            folder="throughput",
            threads="kRouteThreads",
            overlaps=True,
        ),
        Kernel(
            "dispatch",
            _DISPATCH
            + """
    i32 rows_per_copy;
    i32 follows_route;      // the routing is new: the kernel before this one computes it, and publishes the receive window
    i32 to_host;            // write the received counts to the mailbox
"""
            + _SIGNATURE,
            folder="throughput",
            threads="kDispatchThreads",
            shared="kDispatchSharedBytes",
            overlaps=True,
        ),
        Kernel(
            "combine",
            _COMBINE,
            folder="throughput",
            threads="kCombineThreads",
            shared="kCombineSharedBytes",
            per_dtype=True,
        ),
        *(
            Kernel(
                f"combine_{compression}",
                _COMBINE,
                folder="throughput",
                threads="kCombineThreads",
                shared="kCombineSharedBytes",
                per_dtype=True,
                compression=compression,
                needs_fp8=compression == "fp8",
            )
            for compression in COMPRESSIONS
        ),
        Kernel(
            "combine_choices",
            _COMMON
            + """
    i32 num_tokens;
    i32 first_token;        // of the window
    i32 window_tokens;
    i32 is_weighted;        // rows are multiplied by their weights
    u64 y;                  // [rows by expert, kRowBytes]
    u64 topk_weights;       // [rows by expert] float32, or 0
    u64 bias_0;             // [num_tokens, kRowBytes], or 0
    u64 bias_1;
    u64 handle;
    u64 positions;          // these three of expert_positions
    u64 totals;
    u64 sources;
    u64 out;                // [num_tokens, kRowBytes]
    u64 out_topk_weights;   // [num_tokens, kNumTopk] float32, or 0
    u64 recv_x_offset;      // where this rank receives the rows of its tokens: offsets from its symmetric base
    u64 recv_topk_weights_offset;
    u64 recv_masks_offset;
    u64 call_signature;     // all ranks must agree on it
""",
            folder="experts",
            threads="kCombineThreads",
            shared="kCombineSharedBytes",
            per_dtype=True,
        ),
        Kernel(
            "route_nodes",
            _ROUTE,
            folder="nodes",
            threads="kRouteThreads",
            over_nodes=True,
            max_stack_bytes=8,  # arguments of NVSHMEM's functions
        ),
        Kernel(
            "dispatch_nodes",
            _DISPATCH
            + """
    i32 refuses_more;       // whether no rank sends rows if more than `capacity` arrive; otherwise further rows are dropped
    i32 repeats;            // the routing is that of an earlier dispatch
    i32 chunk_tokens;       // the form of a chunk: its most tokens, and offsets in a slot
    i32 chunk_topk_idx;
    i32 chunk_weights;
    i32 chunk_scales;
    i32 chunk_rows;
    u64 call_signature;     // all ranks must agree on it
""",
            folder="nodes",
            threads="kNodesThreads",
            over_nodes=True,
            max_stack_bytes=8,  # arguments of NVSHMEM's functions
        ),
        *(
            Kernel(
                f"combine_nodes_{compression}" if compression else "combine_nodes",
                _COMBINE_NODES,
                folder="nodes",
                threads="kCombineNodesThreads",
                per_dtype=True,
                over_nodes=True,
                compression=compression,
                needs_fp8=compression == "fp8",
                max_stack_bytes=8,  # arguments of NVSHMEM's functions
            )
            for compression in (None, *COMPRESSIONS)
        ),
        Kernel(
            "link_rates",
            _COMMON
            + """
    i32 kind;               // what moves: bytes near, bytes far, words near, words far
    i32 num_chunks;
    i64 num_bytes;          // of a chunk
    u64 src;                // [num_bytes]
    u64 recv_offset;        // where this rank receives bytes: offset from its symmetric base
""",
            folder="nodes",
            threads="kNodesThreads",
            over_nodes=True,
            max_stack_bytes=8,  # arguments of NVSHMEM's functions
        ),
        Kernel(
            "ll_dispatch",
            _COMMON
            + """
    i32 phases;             // 1: send, 2: receive, 3: both
    i32 num_tokens;
    u64 x;                  // [num_tokens, kHidden] bfloat16
    u64 topk_idx;           // [num_tokens, kNumTopk] int32 or int64
    u64 topk_weights;       // [num_tokens, kNumTopk] float32, or 0
    u64 handle;             // out
    u64 recv_x;             // [kNumLocalExperts, kNumRanks * kNumMaxTokens, kHidden]
    u64 recv_scales;        // [..., kHidden / 128] float32, or u8 (use_ue8m0)
    u64 recv_stats;         // [kNumLocalExperts] int32, or 0: added to
    u64 wait_stats;         // [kNumRanks] int64, or 0: added to
    i32 idx_bytes;
    i32 use_fp8;
    i32 round_scale;
    i32 use_ue8m0;
    i32 check;              // report expert numbers out of range
    u32 call_signature;     // all ranks must agree on it
""",
            folder="low_latency",
            threads="kLlThreads",
            shared="kLlTableBytes",
            low_latency=True,
            overlaps=True,
            max_stack_bytes=8,  # arguments of NVSHMEM's functions
        ),
        *(
            Kernel(
                f"{name}_{compression}" if compression else name,
                _LOW_LATENCY_COMBINE,
                folder="low_latency",
                threads="kLlThreads",
                low_latency=True,
                scale_up_only=name == "ll_combine_large",
                overlaps=True,
                compression=compression,
                needs_fp8=compression == "fp8",
                max_stack_bytes=0 if name == "ll_combine_large" else 8,  # arguments of NVSHMEM's functions
            )
            for compression in (None, *COMPRESSIONS)
            for name in ("ll_combine", "ll_combine_large")
        ),
        Kernel(
            "copy_bandwidth",
            _COMMON
            + """
    i32 num_rows;           // rows for each peer
    u64 src;                // [kNumRanks, num_rows, row_bytes]
    u64 recv_x_offset;      // offset from the symmetric base
    i64 row_bytes;
""",
            folder="elementwise",
            threads="kDispatchThreads",
            shared="kDispatchSharedBytes",
        ),
        *LOCAL_KERNELS,
    )
}
