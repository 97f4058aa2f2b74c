"""The kernel table: what the library knows of each kernel, such as its file, its parameters, and the Buffers that can launch it.

Each entry belongs to one .cu file of cuda_src with an entry point of the same name. Kernels that differ only in the compression of rows
share a file, whose entry point is `KERNEL` (kernels/source.py). `LOCAL_KERNELS` work on arrays of one rank, without a Buffer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..arrays.compressed_rows import COMPRESSIONS, LOW_LATENCY_CHANNELS
from ..arrays.dtypes import FP8_GROUP
from ..config import COMBINE_DTYPES, MAX_NODES, MAX_RANKS_PER_NODE, Config
from ..statistics import CALL_KINDS
from .structs import CStruct

_CALL_KINDS = {
    "route": CALL_KINDS.index("dispatch"),
    "dispatch": CALL_KINDS.index("dispatch"),
    "expand_tiles": CALL_KINDS.index("dispatch"),
    "combine": CALL_KINDS.index("combine"),
    "combine_choices": CALL_KINDS.index("combine"),
    "combine_tiles": CALL_KINDS.index("combine"),
    "ll_dispatch": CALL_KINDS.index("low_latency_dispatch"),
    "ll_dispatch_opaque": CALL_KINDS.index("low_latency_dispatch"),
    "ll_combine": CALL_KINDS.index("low_latency_combine"),
    "ll_combine_large": CALL_KINDS.index("low_latency_combine"),
}


@dataclass(frozen=True)
class Kernel:
    """A kernel."""

    name: str  # of its entry point
    params: str  # members of its Params
    threads: str  # constant with the threads of a block
    folder: str = ""  # of its file in cuda_src
    shared: str | None = None  # constant with the bytes of dynamic shared memory
    per_dtype: bool = False  # compiled once for each element type of combine
    compression: str | None = None  # form of a combine's rows on the way, one of `COMPRESSIONS`. None: they travel as they are
    is_local: bool = False  # works on arrays of one rank without a Buffer (jit/launch.py)
    sums_tiles: bool = False  # its copy warps add up the rows that they send
    needs_fp8: bool = False  # needs a GPU that converts to FP8
    low_latency: bool = False  # needs a Buffer with room for low-latency calls. With a scale-out domain it links NVSHMEM
    carries: str = ""  # carries what others put over this transport
    over_nodes: bool = False  # serves throughput calls of Buffers with several nodes. Other throughput kernels serve one node
    anywhere: bool = False  # serves throughput calls of both
    scale_up_only: bool = False  # all ranks must reach each other directly
    overlaps: bool = False  # may start while its predecessor ends. Waits for it before it uses what it writes (common/memory.cuh)
    max_stack_bytes: int = 0  # declared stack frame. CI fails if the frame is larger or registers spill

    def fits(self, config: Config) -> bool:
        """Return whether a Buffer of these sizes can launch the kernel."""
        if self.compression and config.hidden % (LOW_LATENCY_CHANNELS if self.low_latency else FP8_GROUP):
            return False
        if self.carries and self.carries != config.transport:
            return False
        if self.over_nodes or (self.anywhere and config.has_network):
            return config.has_network and config.num_nodes <= MAX_NODES and config.node_size <= MAX_RANKS_PER_NODE
        if not self.low_latency:
            return not config.has_network and config.num_ranks <= MAX_RANKS_PER_NODE
        return config.fits_low_latency and not (self.scale_up_only and config.has_network)

    def links_nvshmem(self, constants: Mapping[str, int]) -> bool:
        """Return whether the kernel, compiled with these constants, contains NVSHMEM's device library."""
        if not (self.low_latency or self.over_nodes):
            return False
        return constants["kRanksPerNode"] < constants["kNumRanks"] and not constants["kHasRelay"]

    def puts(self, config: Config) -> bool:
        """Return whether the kernel puts something to other nodes of a Buffer of these sizes."""
        return config.has_network and (self.low_latency or self.over_nodes) and not self.carries

    @property
    def call_kind(self) -> int:
        """The number in `CALL_KINDS` of the calls that the kernel is a part of; -1: of none."""
        return _CALL_KINDS.get(self._plain_name.removesuffix("_nodes"), -1)

    @property
    def source(self) -> str:
        """The file with the kernel's entry point, relative to the folder of the CUDA sources."""
        file = f"{self._plain_name}_compressed.cu" if self.compression else f"{self.name}.cu"
        return f"{self.folder}/{file}" if self.folder else file

    @property
    def _plain_name(self) -> str:
        """The name of the same kernel for rows that travel as they are."""
        return self.name.removesuffix(f"_{self.compression}")

    @property
    def struct(self) -> CStruct:
        return CStruct("Params", self.params)


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
        "prepare_tiles",
        """
    u64 topk_idx;           // [num_tokens, num_topk] int32 or int64, or 0
    u64 num_rows;           // [num_ranks, num_ranks] int32, by source and destination; these two of a handle
    u64 send_list;          // [num_ranks, max_tokens] int32: the tokens of the rows for each rank
    u64 order;              // out: [num_ranks, max_tokens] a row among those for a rank, and its token, in the order in which they leave
    u64 offsets;            // these two of expert_positions
    u64 ends;
    u64 tile_left;          // out: [tiles] int32, the rows of each tile, and one more
    i32 finds_order;        // 0: `order` is there already
    i32 idx_bytes;          // 4 or 8
    i32 num_tokens;
    i32 num_topk;
    i32 num_experts;        // of a rank
    i32 num_ranks;
    i32 max_tokens;
    i32 rank;
    i32 num_expert_rows;
    i32 tile_rows;
""",
        folder="experts",
        threads="kPositionThreads",
        is_local=True,
        overlaps=True,
    ),
    Kernel(
        "order_chunks",
        """
    u64 positions;          // [capacity, num_topk] int32, of expert_positions
    u64 num_rows;           // [num_ranks, num_ranks] int32, of a handle: by source and destination
    u64 order;              // out: [num_ranks, max_chunks] int32, the chunks of the rows from each rank in the order in which they leave
    i32 num_topk;
    i32 num_ranks;
    i32 rank;
    i32 capacity;           // rows by token
    i32 max_chunks;
    i32 chunk_rows;
    i32 num_expert_rows;    // at least 1
""",
        folder="experts",
        threads="kPositionThreads",
        is_local=True,
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
""",
        folder="experts",
        threads="kLocalThreads",
        per_dtype=True,
        is_local=True,
    ),
    Kernel(
        "list_choices",
        """
    u64 positions;          // [., num_topk] int32; these three of expert_positions
    u64 totals;
    u64 sources;
    u64 weights;            // [rows by expert] float32, or 0
    u64 rows;               // out: [rows of the list] ChoiceRow
    u64 first;              // out: [num_ranks + 1] int32, the first row of the list from each source, and the end
    i32 num_topk;
    i32 num_ranks;
    i32 first_token;        // of the window
    i32 window_tokens;
""",
        folder="experts",
        threads="kPositionThreads",
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
    u64 exposed_offset;     // where this rank exposes rows, or where y lies already: offsets from its symmetric base
    u64 exposed_weights_offset;
    i64 capacity;           // rows of y
    u64 call_signature;     // all ranks must agree on it
    i32 chunk_tokens;       // the most tokens of a chunk
    i32 sum_stride;         // from one sum to the next at the rank of its token (NodesLayout.sum_stride)
"""
)

_CHOICES = (
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
"""
)

_CHOICE_SUMS = """
    u64 out;                // [num_tokens, kRowBytes]
    u64 out_topk_weights;   // [num_tokens, kNumTopk] float32, or 0
    u64 recv_x_offset;      // where this rank receives the rows of its tokens: offsets from its symmetric base
    u64 recv_topk_weights_offset;
"""

# The members of a dispatch lie in few lines of the constant cache, because a first access to a line delays a call of few tokens.
_LOW_LATENCY_DISPATCH = (
    _COMMON
    + """
    i32 phases;             // 1: send, 2: receive, 3: both
    i32 num_tokens;
    i32 capacity;           // rows of an expert, at most kNumRanks * kNumMaxTokens
    u64 x;                  // [num_tokens, row]
    u64 topk_idx;           // [num_tokens, kNumTopk] int32 or int64
    u64 topk_weights;       // [num_tokens, kNumTopk] float32, or 0
    u64 handle;             // out
    u64 recv_x;             // [kNumLocalExperts, capacity, row]
    u64 recv_scales;        // [kNumLocalExperts, capacity, scales]
    u64 recv_stats;         // [kNumLocalExperts] int32, or 0: added to
    u64 wait_stats;         // [kNumRanks] int64, or 0: added to
    u64 call_signature;     // all ranks must agree on it
    i32 idx_bytes;
    u8 check;               // report expert numbers out of range
"""
)

_CONVERTED_ROWS = """
    u8 use_fp8;             // x has kHidden bfloat16. They become FP8, with kHidden / 128 scales
    u8 round_scale;
    u8 use_ue8m0;           // the scales are u8, not float32
"""

_OPAQUE_ROWS = """
    i32 row_bytes;          // of x; a multiple of 16
    i32 scale_bytes;
    u64 x_scales;           // [num_tokens, scale_bytes]
"""

_LOW_LATENCY_COMBINE = (
    _COMMON
    + """
    i32 phases;
    i32 num_tokens;
    u64 y;                  // [kNumLocalExperts, capacity of the dispatch, kHidden] bfloat16
    u64 topk_idx;
    u64 topk_weights;
    u64 handle;
    u64 out;                // [num_tokens, kHidden] bfloat16
    i32 idx_bytes;
    i32 reduce_early;       // each rank adds up its rows of a token and sends one
    i32 has_weights;        // the weights came with the dispatch
    u32 call_signature;     // all ranks must agree on it
    i32 num_members;        // when the call was made
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
            "expand_tiles",
            _COMMON
            + """
    i32 row_bytes;
    i32 place_bytes;        // that the dispatch has sent in place of each row
    u64 x;                  // [num_tokens, row_bytes]
    u64 handle;
    u64 order;              // of prepare_tiles
    u64 recv_x_offset;      // where this rank receives rows by token: offset from its symmetric base
    u64 positions;          // these three of expert_positions
    u64 offsets;
    u64 ends;
    u64 out_x;              // [num_rows, row_bytes] rows by expert
    u64 tile_left;          // [tiles] int32, of prepare_tiles
    u64 tile_ready;         // [tiles] int32: 1 once the rows of the tile are here
    i32 num_rows;
    i32 tile_rows;          // rows of a tile
    i32 zero_padding;
    i32 num_sending;        // blocks that send
    i32 follows_route;      // as in the dispatch
"""
            + _SIGNATURE,
            folder="experts",
            threads="kTilesThreads",
            shared="kTilesSharedBytes",
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
        Kernel(
            "await_tiles",
            _COMMON
            + """
    u64 tile_ready;         // [num_tiles] int32: 1 once the rows of the tile are written
    i32 num_tiles;
""",
            folder="experts",
            threads="kLocalThreads",
            anywhere=True,
        ),
        Kernel(
            "combine_tiles",
            _COMBINE
            + """
    u64 positions;          // [capacity, kNumTopk] int32, of expert_positions: the row of y of each choice
    u64 expert_weights;     // [rows of y] float32 to multiply rows with, or to return if topk_weights is not 0; or 0
    u64 order;              // of order_chunks
    u64 tile_ready;         // [tiles of y] int32: 1 once the rows of the tile are written
    i32 tile_rows;          // rows of a tile
""",
            folder="experts",
            threads="kCombineThreads",
            shared="kCombineSharedBytes",
            per_dtype=True,
            sums_tiles=True,
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
            _CHOICES
            + """
    u64 positions;          // these three of expert_positions
    u64 totals;
    u64 sources;
"""
            + _CHOICE_SUMS
            + """
    u64 recv_masks_offset;
"""
            + _SIGNATURE,
            folder="experts",
            threads="kChoicesThreads",
            shared="kChoicesSharedBytes",
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
            threads="kDispatchNodesThreads",
            shared="kDispatchNodesSharedBytes",
            over_nodes=True,
            max_stack_bytes=8,  # arguments of NVSHMEM's functions
        ),
        *(
            Kernel(
                f"combine_nodes_{compression}" if compression else "combine_nodes",
                _COMBINE_NODES,
                folder="nodes",
                threads="kCombineNodesThreads",
                shared=None if compression else "kCombineNodesSharedBytes",
                per_dtype=True,
                over_nodes=True,
                compression=compression,
                needs_fp8=compression == "fp8",
                max_stack_bytes=8,  # arguments of NVSHMEM's functions
            )
            for compression in (None, *COMPRESSIONS)
        ),
        Kernel(
            "combine_choices_nodes",
            _CHOICES
            + """
    u64 rows;               // these two of list_choices
    u64 first_rows;
"""
            + _CHOICE_SUMS
            + """
    i32 chunk_tokens;       // the form of a chunk: its most rows, and offsets in a slot
    i32 chunk_weights;
    i32 chunk_rows;
"""
            + _SIGNATURE,
            folder="nodes",
            threads="kCombineNodesThreads",
            shared="kDispatchNodesSharedBytes",
            per_dtype=True,
            over_nodes=True,
            max_stack_bytes=8,  # arguments of NVSHMEM's functions
        ),
        Kernel(
            "wire",
            _COMMON
            + """
    i32 fs_per_byte;        // femtoseconds that a byte takes on the wire
    i32 latency_ns;
""",
            folder="nodes",
            threads="kWireThreads",
            shared="kWireSharedBytes",
            over_nodes=True,
            carries="wire",
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
            shared="kLinkRatesSharedBytes",
            over_nodes=True,
            max_stack_bytes=8,  # arguments of NVSHMEM's functions
        ),
        *(
            Kernel(
                name,
                _LOW_LATENCY_DISPATCH + form,
                folder="low_latency",
                threads="kLlThreads",
                shared="kLlTableBytes",
                low_latency=True,
                overlaps=True,
                max_stack_bytes=8,  # arguments of NVSHMEM's functions
            )
            for name, form in (("ll_dispatch", _CONVERTED_ROWS), ("ll_dispatch_opaque", _OPAQUE_ROWS))
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


def throughput_kernels(config: Config) -> list[tuple[str, str | None]]:
    """List the kernels that a Buffer loads for throughput calls when it is made, with the element type that each is compiled for."""
    suffix = "_nodes" if config.has_network else ""
    combine: list[tuple[str, str | None]] = [(f"combine{suffix}", config.dtype)] if config.dtype in COMBINE_DTYPES else []
    return [(f"route{suffix}", None), (f"dispatch{suffix}", None), *combine]


def low_latency_kernels(config: Config) -> list[tuple[str, str | None]]:
    """List those for low-latency calls."""
    return [
        (kernel.name, None) for kernel in KERNELS.values() if config.low_latency and kernel.low_latency and kernel.fits(config)
    ]
