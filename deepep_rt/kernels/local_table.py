"""The part of the kernel table with kernels that work on arrays of one rank, without a Buffer."""

from __future__ import annotations

from .kernel import Kernel

LOCAL_KERNELS = (
    Kernel(
        "fp8_encode",
        """
    u64 x;                  // [num_groups, 128]
    u64 out;                // [num_groups, 128] e4m3
    u64 scales;             // [num_groups] float32
    i64 num_groups;
""",
        folder="elementwise",
        threads="kLocalThreads",
        per_dtype=True,
        is_local=True,
        needs_fp8=True,
    ),
    Kernel(
        "fp8_decode",
        """
    u64 x;                  // [num_rows, num_channels] e4m3
    u64 scales;             // [num_rows, num_channels / 128] float32
    u64 out;                // [num_rows, num_channels]
    u64 num_kept;           // int32, or 0: all rows
    i64 num_rows;
    i32 num_channels;
""",
        folder="elementwise",
        threads="kLocalThreads",
        per_dtype=True,
        is_local=True,
        needs_fp8=True,
    ),
    Kernel(
        "zero_padding",
        """
    u64 x;                  // [num_rows, row_bytes]
    u64 out;                // the same, or the same memory
    u64 num_kept;           // int32
    i64 num_rows;
    i64 row_bytes;
""",
        folder="elementwise",
        threads="kLocalThreads",
        is_local=True,
    ),
    Kernel(
        "dispatch_layout",
        """
    u64 topk_idx;           // [num_tokens, num_topk] int32 or int64
    u64 per_rank;           // [num_ranks] int32: added to
    u64 per_expert;         // [num_experts] int32: added to
    u64 is_in_rank;         // [num_tokens, num_ranks] u8: 1 if the rank holds an expert of the token
    i32 idx_bytes;          // 4 or 8
    i32 num_tokens;
    i32 num_topk;
    i32 num_experts;
    i32 num_ranks;
""",
        folder="elementwise",
        threads="kLocalThreads",
        is_local=True,
    ),
)
