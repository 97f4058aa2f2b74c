"""C structures that Python and the kernels share. The C text of each is written once; its NumPy dtype and size check follow from it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

_SCALARS = {"u64": "u8", "i64": "i8", "u32": "u4", "i32": "i4", "f32": "f4", "u8": "u1"}
_MEMBER = re.compile(r"^\s*(\w+)\s+(\w+)(?:\[(\w+)\])?;")

PRELUDE_TYPES = """\
typedef unsigned char u8;
typedef unsigned int u32;
typedef int i32;
typedef unsigned long long u64;
typedef long long i64;
typedef float f32;
"""


@dataclass(frozen=True)
class CStruct:
    """A C structure of scalars and arrays of scalars, with one member a line. Array extents are numbers or constants."""

    name: str
    members: str

    def text(self, constants: Mapping[str, int]) -> str:
        """Return the C definition, with an assertion that the compiler lays it out as NumPy does."""
        return (
            f"struct {self.name} {{\n{self.members.strip()}\n}};\nstatic_assert(sizeof({self.name}) == {self.size(constants)});\n"
        )

    def dtype(self, constants: Mapping[str, int]) -> np.dtype:
        """Return the aligned NumPy dtype of the structure."""
        fields: list[tuple] = []
        for kind, name, extent in self._parsed:
            if not extent:
                fields.append((name, _SCALARS[kind]))
            else:
                fields.append((name, _SCALARS[kind], (int(extent) if extent.isdigit() else constants[extent],)))
        return np.dtype(fields, align=True)

    def size(self, constants: Mapping[str, int]) -> int:
        return self.dtype(constants).itemsize

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(name for _, name, _ in self._parsed)

    @cached_property
    def _parsed(self) -> list[tuple[str, str, str | None]]:
        rows = []
        for line in self.members.strip().splitlines():
            if not line.strip() or line.strip().startswith("//"):
                continue
            match = _MEMBER.match(line)
            if match is None or match[1] not in _SCALARS:
                raise AssertionError(f"struct {self.name}: cannot read the member {line!r}")
            rows.append((match[1], match[2], match[3]))
        return rows


def offset(dtype: np.dtype, name: str) -> int:
    """Return the offset of a member in bytes."""
    assert dtype.fields is not None
    return dtype.fields[name][1]


RouteMessage = CStruct(
    "RouteMessage",
    """
    u64 num_rows[kNumRanks];             // rows that the sender sends to each rank; each word carries the epoch in its lower half
    u64 num_choices[kNumLocalExperts];   // choices of each expert of the receiver by the sender's tokens
    """,
)

RouteBlock = CStruct(
    "RouteBlock",
    """
    u64 num_rows[kNumRanks];          // rows of one block's tokens for each rank; each word carries the epoch in its lower half
    u64 num_choices[kNumExperts];     // choices of each expert by these tokens
    """,
)

WindowMessage = CStruct(
    "WindowMessage",
    """
    u64 x;                   // offsets of the receiver's arrays from its symmetric base, in units of kAlignment bytes
    u64 scales;              // each word carries the epoch in its lower half
    u64 topk_idx;
    u64 topk_weights;
    u64 src_idx;
    u64 capacity;            // rows that fit
    u64 call_signature[2];   // all ranks must agree on it; its lower half, then its upper half
    u64 serial;              // of the routing; all ranks must agree on it too
    u64 unused;              // readers load two words at a time
    """,
)

State = CStruct(
    "State",
    """
    u32 route_epoch;       // calls of route_nodes that have finished here; a route of one node has the epoch of its dispatch
    u32 dispatch_epoch;    // calls of each kernel that have finished here
    u32 combine_epoch;
    u32 dispatch_blocks;   // blocks of the running kernel that have finished; the last one resets all counters of blocks and tickets
    u32 dispatch_items;    // tickets that the running kernel has claimed
    u32 combine_blocks;
    u32 combine_items;
    u32 combine_tokens;
    u32 combine_copied;    // items that copy warps of a combine of choices have finished
    u32 combine_differs;   // 1: the ranks made different calls, as the first launch of a call of combine_choices saw
    u32 copy_bandwidth_blocks;
    u32 copy_bandwidth_items;
    u32 abort;             // set by the first wait that times out; all later waits end at once
    u32 nodes_epoch;       // launches of the kernels over several nodes, without route_nodes, that have finished here
    u32 nodes_blocks;      // as above, for the running one of these kernels
    u32 nodes_copied;      // tickets of each role that the running kernel has claimed
    u32 nodes_filled;
    u32 nodes_emptied;
    u32 nodes_reduced;
    u32 nodes_differs;     // 1: the ranks made different calls, as the last launch of these kernels saw that did not skip its work
    u32 absent;            // with slots: a bit for each slot that has no process in this generation
    u32 generation;        // its number
    u32 members;           // with slots: the ranks that have a process, ascending, 4 bits for each. The rest is ~0
    u32 members_reciprocal;  // 2^31 / their number, rounded up
    u32 tiles_sending;     // blocks of the running expand_tiles that have begun to send
    """,
)

LostRanks = CStruct(
    "LostRanks",
    """
    u32 read_at;  // when a thread that waits has last read the status page's word about lost ranks, in units of 1024 ns
    u32 ranks;    // what it read: a bit for each
    """,
)

LlProgress = CStruct(
    "LlProgress",
    """
    u32 sent;             // low-latency calls of this kind whose send half has run here
    u32 received;         // the same for the receive half
    u32 starts;           // blocks of the running kernel that have read this
    u32 tickets;          // tickets that all kernels have claimed so far
    u32 tickets_before;   // the same before the running kernel
    """,
)

LlHeader = CStruct(
    "LlHeader",
    """
    u64 num_tokens;                      // of the sender; each word carries the epoch in its lower half and needs no flag
    u64 num_rows;                        // tokens that the sender sends to the receiver
    u64 call_signature[2];               // all ranks must agree on it; its lower half, then its upper half
    u64 tokens[kLlBitmapWords];          // a bit for each token of the sender: whether it is one of them
    u64 num_choices[kNumLocalExperts];   // choices of each expert of the receiver by the sender's tokens
    """,
)

LlMessage = CStruct(
    "LlMessage",
    """
    u64 choice[kNumTopk];   // lower half: epoch; upper half: 0, or the expert + 1 and the slot among the sender's choices of this expert
    u64 weight[kNumTopk];   // lower half: epoch; upper half: the float
    """,
)

LlEntry = CStruct(
    "LlEntry",
    """
    i32 source;
    i32 token;
    i32 row[kNumTopk];           // row of recv_x of each choice, counted over all experts; or kLlElsewhere, kLlNoRoom, kLlUnknown
    f32 weight[kNumTopk];
    """,
)

LlCombineHeader = CStruct(
    "LlCombineHeader",
    """
    u64 call_signature;   // each word carries the epoch in its lower half, as in LlHeader
    u64 dispatch_epoch;   // of the dispatch that made the handle
    """,
)

Report = CStruct(
    "Report",
    """
    u32 flag;        // 1: a wait timed out
    u32 phase;
    i32 rank;
    i32 peer;
    u32 expected;
    u32 seen;
    u32 bad_flag;    // 1: a token chose an expert that does not exist
    i32 bad_token;
    i64 bad_expert;
    u32 differs;     // 1: the call of another rank differs from this rank's call
    i32 other;       // the other rank
    u64 call_signature[2];   // of this rank and of the other rank
    u32 serial[2];           // the same for the routing
    u32 has_events;    // 1: a kernel wrote one of the words below; each word is 0 or describes one call
    u64 other_choice;  // combine got another choice than its dispatch: 1 << 63, index in topk_idx, now + 1, then + 1 (32, 16, 16 bits)
    u64 no_room;       // rows exceed num_worst_tokens: rows that arrived, rows that fit (32 bits each)
    u64 full_expert;   // rows of a low-latency dispatch exceed an expert's room: the expert + 1, the rows (32 bits each)
    u64 too_many;      // rows exceed the memory of a rank: the rank + 1, the rows (32 bits each)
    u64 old_routing;   // a call got the routing of another generation: that + 1, the generation of the call (32 bits each)
    """,
)

Mailbox = CStruct(
    "Mailbox",
    """
    i32 num_recv;                                // rows that this call receives
    i32 num_recv_per_expert[kNumLocalExperts];   // aligned up
    u32 flag;                                    // 1; written last
    u32 started;                                 // 1: the GPU has started the call; the host limits its wait from here
    """,
)

NetworkState = CStruct(
    "NetworkState",
    """
    u64 base;        // address of network memory, less the offset where it begins: base + offset is the address of an offset
    u64 ring;        // descriptors in pinned host memory, for the relay; 0 with NVSHMEM
    u32 ring_mask;   // entries of the ring, less 1; the number of entries is a power of two
    u32 next;        // descriptors that kernels have claimed so far; it wraps around
    """,
)

Descriptor = CStruct(
    "Descriptor",
    """
    u64 from;        // offsets from the base of symmetric memory: of the bytes here,
    u64 to;          // of their place at the receiver,
    u64 word;        // and of the word there that `value` goes to after the bytes
    u64 value;
    u64 num_bytes;   // 0: only the word
    i32 rank;        // the receiver
    u32 is_awaited;  // 1: a kernel waits for `sent`
    u32 sent;        // the same as `sequence`; the relay writes it when the bytes here may change, if that is awaited
    i32 unused[2];
    u32 sequence;    // number of the descriptor since the start, plus 1; written last
    """,
)

WireState = CStruct(
    "WireState",
    """
    u64 free_at;   // time until which the messages of before occupy the wire
    u32 carried;   // descriptors that earlier launches have carried; it wraps around
    u32 stop;      // 1: the kernel that puts has ended; the stream of that kernel sets it
    u32 blocks;    // of the running launch that have finished
    u32 unused;
    """,
)

RouteNodesBlock = CStruct(
    "RouteNodesBlock",
    """
    i32 num_rows[kNumBuckets];        // rows of one block's tokens for each rank, then tokens for each flow
    i32 num_choices[kNumExperts];     // choices of each expert by these tokens
    u32 flag;                         // epoch; written last
    """,
)

SourceCounts = CStruct(
    "SourceCounts",
    """
    i32 num_rows;                        // rows that a source sends to this rank
    i32 num_choices[kNumLocalExperts];   // choices of each expert of this rank by the source's tokens
    u32 flag;                            // epoch; written last
    """,
)

FlowCounts = CStruct(
    "FlowCounts",
    """
    i32 num_tokens;                    // tokens that the source sends through this flow
    i32 first_sum;                     // tokens that it sends through the flows before this one
    i32 num_rows[kFan];                // rows of them for each rank of the fan
    i32 num_choices[kFanExperts];      // choices of each expert of these ranks by the source's tokens
    """,
)

NodeWindow = CStruct(
    "NodeWindow",
    """
    u64 x;                // offsets of the receiver's arrays from its symmetric base
    u64 scales;
    u64 topk_idx;
    u64 topk_weights;
    u64 src_idx;
    i64 capacity;         // rows that fit
    u64 call_signature;   // all ranks must agree on it
    u32 serial;           // of the routing; all ranks must agree on it too
    i32 missing_rows;     // rows for which the receiver has no memory; 0: it has room
    i32 first[kNumNodes]; // the first row from the reader's rail, node by node
    u32 flag;             // epoch; written last
    """,
)

Hello = CStruct(
    "Hello",
    """
    u64 call_signature[2];   // of the first rank of the sender's node, and of a rank there that differs from it, if there is one
    u32 serial[2];
    i32 missing_rows;        // the most rows for which a rank of the node has no memory
    i32 missing_rank;        // that rank
    i32 rank[2];             // the ranks of the signatures
    """,
)

ChunkHead = CStruct(
    "ChunkHead",
    """
    i32 tokens[32];           // of the source; for rows of choices, their places at the ranks of their tokens
    i32 pos[kChunkPositions]; // [32][kFan]: the index of a token's row among the rows from the source to a rank of the fan, or -1; for
                              // rows of choices [32]: the rank of the fan
    """,
)

ChoiceRow = CStruct(
    "ChoiceRow",
    """
    i32 position;  // of a row that a combine of choices sends, among the rows by expert
    i32 place;     // at the token's rank: the token within its window, times num_topk, plus the choice
    i32 source;    // the token's rank
    f32 weight;
    """,
)

CallStatistics = CStruct(
    "CallStatistics",
    """
    u64 calls;             // of one kind, which have finished here
    u64 rows_sent;
    u64 rows_received;
    u64 bytes_sent;        // of these rows and their scales
    u64 bytes_received;
    u64 waits[kNumRanks];  // nanoseconds that this rank waited for each source; see common/statistics.cuh
    """,
)

SHARED = (
    RouteMessage, RouteBlock, WindowMessage, State, LostRanks, LlProgress, LlHeader, LlMessage, LlEntry, LlCombineHeader, Report, Mailbox,
    NetworkState, Descriptor, WireState, RouteNodesBlock, SourceCounts, FlowCounts, NodeWindow, Hello, ChunkHead, ChoiceRow, CallStatistics,
)  # fmt: skip

LL_SEND, LL_RECEIVE = 1, 2
"""The halves of a low-latency call. A launch runs one of them, or both (their sum)."""

LL_ELSEWHERE, LL_NO_ROOM, LL_UNKNOWN = -1, -2, -3
"""In LlEntry.row: another rank holds the expert; the expert has no room left (tokens named it repeatedly); the wait timed out."""

PHASES = {
    "kPhaseRoute": (1, "the token counts of dispatch"),
    "kPhaseDispatchWindow": (2, "the address where dispatch may write"),
    "kPhaseDispatchRows": (3, "the rows of dispatch"),
    "kPhaseCombineWindow": (4, "the address where combine may write"),
    "kPhaseCombineRows": (5, "the rows of combine"),
    "kPhaseRouteBlocks": (6, "the token counts of other thread blocks of this GPU"),
    "kPhaseLlDispatchRoom": (7, "room for the rows of a low-latency dispatch"),
    "kPhaseLlCounts": (8, "the token counts of a low-latency dispatch"),
    "kPhaseLlRows": (9, "the rows of a low-latency dispatch"),
    "kPhaseLlCombineRoom": (10, "room for the rows of a low-latency combine"),
    "kPhaseLlWeights": (11, "the weights of a low-latency combine"),
    "kPhaseLlCombineRows": (12, "the rows of a low-latency combine"),
    "kPhaseNodeCounts": (13, "the token counts of another node"),
    "kPhaseNodeHello": (14, "the start of the call on another node"),
    "kPhaseNodeRoom": (15, "room for rows on another node"),
    "kPhaseNodeRows": (16, "the rows of dispatch from another node"),
    "kPhaseNodeSums": (17, "the sums of combine from another node"),
    "kPhaseExposedRows": (18, "the rows of combine on another rank of this node"),
    "kPhaseExpertOutputs": (19, "the rows of its experts, whose words in y_ready are not set"),
    "kPhaseRelay": (20, "the relay of this rank, which still sends a row"),
}
"""The kinds of waits on the device: the number in a Report, and the name in messages."""


NUM_PHASES = max(number for number, _ in PHASES.values()) + 1
"""Phases have numbers below it."""

LL_OPEN_HOOK = 255
"""A phase of a Report without a time-out: a whole low-latency call ran between the halves of another one."""

EPOCHS = {PHASES[f"kPhase{call}{step}"][0]: call.lower() for call in ("Dispatch", "Combine") for step in ("Window", "Rows")}
"""By phase, the call whose epoch a wait of one node expects."""

ROOM_PHASES = {PHASES[name][0] for name in ("kPhaseLlDispatchRoom", "kPhaseLlCombineRoom")}
"""Waits for a peer that still has to read data of an earlier call."""


def phase_name(number: int) -> str:
    return next((words for value, words in PHASES.values() if value == number), f"phase {number}")
