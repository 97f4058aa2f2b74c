"""The part of the kernel table with kernels that work on arrays of one rank, without a Buffer."""

from __future__ import annotations

from .kernel import Kernel

LOCAL_KERNELS = (
    Kernel(
        "fp8_encode",
        """
    u64 x;                  // [num_groups, 128]
    u64 out;                // [num_groups, 128] e4m3
    u64 scales;             // [num_groups] float32, or u8 (use_ue8m0)
    i64 num_groups;
    i32 round_scale;        // scales are powers of two
    i32 use_ue8m0;          // and become their exponents
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
        "expert_positions",
        """
    u64 topk_idx;           // [capacity, num_topk] int32 or int64: local experts of the rows by token; -1: none
    u64 src_idx;            // [capacity, 2] int32: source rank and source token of the rows by token
    u64 num_recv;           // int32: rows by token that arrived
    u64 num_per_expert;     // [num_experts] int32: choices of each expert, aligned up
    u64 positions;          // out: [capacity, num_topk] int32, the row of each choice; -1: none
    u64 offsets;            // out: [num_experts + 1] int32, the first row of each expert, and the end
    u64 ends;               // out: [num_experts] int32, the end of an expert's rows without padding; -1: they did not arrive
    u64 totals;             // out: [2] int32, rows with their padding, dropped ones too; rows by token
    u64 sources;            // out: [capacity, 2] int32, a copy of src_idx
    u64 progress;           // of the blocks; zero before the first launch
    u64 block_counts;       // [kPositionBlocks, num_experts] u64: the choices of each block, with the epoch
    i32 idx_bytes;          // 4 or 8
    i32 num_topk;
    i32 num_experts;        // of this rank
    i32 alignment;
    i32 capacity;           // rows by token that fit
    i32 num_rows;           // rows that fit; -1: all
""",
        folder="experts",
        threads="kPositionThreads",
        is_local=True,
        overlaps=True,
    ),
    Kernel(
        "expand_rows",
        """
    u64 x;                  // rows by token, [., row_bytes]
    u64 scales;             // [., scale_words] words of 4 bytes, or 0
    u64 topk_weights;       // [., num_topk] float32, or 0
    u64 src_idx;            // [., 2] int32
    u64 positions;          // these four of expert_positions
    u64 offsets;
    u64 ends;
    u64 totals;
    u64 out_x;              // [num_rows, row_bytes]
    u64 out_scales;         // [num_rows, scale_words], or [scale_words, scale_stride]
    u64 out_weights;        // [num_rows] float32
    u64 out_src_idx;        // [num_rows, 3] int32: source rank, source token, choice; -1 in padding
    u64 out_experts;        // [num_rows] int32; -1 in padding
    u64 out_offsets;        // [num_experts + 1] int32
    u64 out_num_recv;       // [1] int32
    i64 row_bytes;
    i32 scale_words;        // of a row
    i32 scale_stride;       // from one column of scales to the next; 0: scales lie by row
    i32 num_topk;
    i32 num_experts;
    i32 num_rows;
    i32 zero_padding;
""",
        folder="experts",
        threads="kLocalThreads",
        is_local=True,
        overlaps=True,
    ),
    Kernel(
        "sum_expert_rows",
        """
    u64 x;                  // [., row_bytes] rows expert by expert
    u64 weights;            // a float32 for each of these rows, or 0
    u64 positions;          // [., num_topk] int32, of expert_positions
    u64 totals;             // of expert_positions
    u64 out;                // rows by token, [., row_bytes]
    u64 out_weights;        // [., num_topk] float32, or 0: rows are multiplied by their weights
    i64 row_bytes;
    i32 num_topk;
    i32 choice;             // the only choice whose rows count; -1: all count
""",
        folder="experts",
        threads="kLocalThreads",
        per_dtype=True,
        is_local=True,
    ),
    Kernel(
        "add_choice",
        """
    u64 x;                  // [num_tokens, row_bytes] the row of the choice of each token, or zeros
    u64 weights;            // [num_tokens, num_topk] float32, or 0: rows are not multiplied
    u64 sums;               // [num_tokens, channels] float32: of the choices so far; not read for choice 0
    u64 bias_0;             // [num_tokens, row_bytes], or 0
    u64 bias_1;
    u64 out;                // [num_tokens, row_bytes]; 0: more choices follow, and the sums go back to `sums`
    i64 num_tokens;
    i64 row_bytes;
    i32 num_topk;
    i32 choice;
""",
        folder="experts",
        threads="kLocalThreads",
        per_dtype=True,
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
