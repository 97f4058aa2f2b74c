"""C structures that Python and the kernels share: the C text is written once, the NumPy dtype and a size check come from it."""

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
    """A C structure of scalars and arrays of scalars, one member a line; array extents are numbers or constants."""

    name: str
    members: str

    def text(self, constants: Mapping[str, int]) -> str:
        """The C definition, with an assertion that the compiler lays it out as NumPy does."""
        return (
            f"struct {self.name} {{\n{self.members.strip()}\n}};\nstatic_assert(sizeof({self.name}) == {self.size(constants)});\n"
        )

    def dtype(self, constants: Mapping[str, int]) -> np.dtype:
        """The aligned NumPy dtype of the structure."""
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
    """Where a member starts, in bytes."""
    assert dtype.fields is not None
    return dtype.fields[name][1]


RouteMessage = CStruct(
    "RouteMessage",
    """
    i32 num_rows[kNumRanks];             // rows that the sender sends to each rank
    i32 num_choices[kNumLocalExperts];   // how often its tokens chose each expert of the receiver
    u32 flag;                            // epoch; written last
    """,
)

RouteBlock = CStruct(
    "RouteBlock",
    """
    i32 num_rows[kNumRanks];          // rows of one block's tokens for each rank
    i32 num_choices[kNumExperts];     // how often they chose each expert
    u32 flag;                         // epoch; written last
    """,
)

Landing = CStruct(
    "Landing",
    """
    u64 x;            // offsets from the publisher's symmetric base: where the rows go,
    u64 scales;
    u64 topk_idx;
    u64 topk_weights;
    u64 src_idx;
    i64 capacity;     // and how many fit
    u64 alike;        // what all ranks must give alike: about the call,
    u32 serial;       // and which routing this is
    u32 flag;         // epoch; written last
    """,
)

State = CStruct(
    "State",
    """
    u32 route_epoch;       // calls of each kernel that have finished here
    u32 dispatch_epoch;
    u32 combine_epoch;
    u32 dispatch_blocks;   // of the running kernel: blocks that have finished, and takes of items; the last block resets them
    u32 dispatch_items;
    u32 combine_blocks;
    u32 combine_items;
    u32 combine_tokens;
    u32 ceiling_blocks;
    u32 ceiling_items;
    u32 abort;             // set by the first wait that timed out; later waits give up at once
    """,
)

LlProgress = CStruct(
    "LlProgress",
    """
    u32 sent;           // low-latency calls of a kind whose sending, or receiving, part has run here
    u32 received;
    u32 starts;         // blocks of the running kernel that have read this
    u32 taken;          // items that were ever taken,
    u32 taken_before;   // and before the running kernel
    """,
)

LlHeader = CStruct(
    "LlHeader",
    """
    u64 num_tokens;                      // of the sender; each word has the epoch in its lower half, so that none needs a flag
    u64 alike;                           // what all ranks must give alike
    u64 num_rows;                        // of its tokens, those that come to the receiver: how many,
    u64 tokens[kLlBitmapWords];          // and which, a bit for each
    u64 num_choices[kNumLocalExperts];   // how often its tokens chose each expert of the receiver
    """,
)

LlMessage = CStruct(
    "LlMessage",
    """
    u64 choice[kNumTopk];   // epoch; in the upper half 0, or the expert + 1 and the place among the sender's choices of it
    u64 weight[kNumTopk];   // epoch; in the upper half the float
    """,
)

LlEntry = CStruct(
    "LlEntry",
    """
    i32 source;
    i32 token;
    i32 row[kNumTopk];           // of recv_x, counted over all experts, where each choice lies, or kLlElsewhere, kLlNoRoom, kLlUnknown
    f32 weight[kNumTopk];
    """,
)

LlCombineHeader = CStruct(
    "LlCombineHeader",
    """
    u64 alike;            // what all ranks must give alike; the epoch in the lower half, as in LlHeader
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
    u32 differs;     // 1: another rank gave something else than this one
    i32 other;       // which one,
    u64 alike[2];    // and what this one and that one gave
    u32 serial[2];
    u32 noticed;       // 1: one of the words that follow was written; each is 0, or tells of one call
    u64 other_choice;  // combine got another choice than its dispatch: 1 << 63, index in topk_idx, now + 1, then + 1 (32, 16, 16 bits)
    u64 no_room;       // rows past num_worst_tokens: how many arrived, how many fit (32 bits each)
    u64 full_expert;   // a low-latency dispatch brought an expert more rows than fit: the expert + 1, how many (32 bits each)
    """,
)

Mailbox = CStruct(
    "Mailbox",
    """
    i32 num_recv;                                // rows that this call receives
    i32 num_recv_per_expert[kNumLocalExperts];   // aligned up
    u32 flag;                                    // 1; written last
    u32 started;                                 // 1: the GPU has come to the call; the host limits its wait from here
    """,
)

SHARED = (RouteMessage, RouteBlock, Landing, State, LlProgress, LlHeader, LlMessage, LlEntry, LlCombineHeader, Report, Mailbox)

LL_SEND, LL_RECEIVE = 1, 2
"""The parts of a low-latency call that a launch does: one of them, or both added up."""

LL_ELSEWHERE, LL_NO_ROOM, LL_UNKNOWN = -1, -2, -3
"""In LlEntry.row: the expert lives on another rank; it has no room left (tokens named it repeatedly); the time was up."""

PHASES = {
    "kPhaseRoute": (1, "the token counts of dispatch"),
    "kPhaseDispatchLanding": (2, "the address where dispatch may write"),
    "kPhaseDispatchRows": (3, "the rows of dispatch"),
    "kPhaseCombineLanding": (4, "the address where combine may write"),
    "kPhaseCombineRows": (5, "the rows of combine"),
    "kPhaseRouteBlocks": (6, "the token counts of other thread blocks of this GPU"),
    "kPhaseLlDispatchRoom": (7, "room for the rows of a low-latency dispatch"),
    "kPhaseLlCounts": (8, "the token counts of a low-latency dispatch"),
    "kPhaseLlRows": (9, "the rows of a low-latency dispatch"),
    "kPhaseLlCombineRoom": (10, "room for the rows of a low-latency combine"),
    "kPhaseLlWeights": (11, "the weights of a low-latency combine"),
    "kPhaseLlCombineRows": (12, "the rows of a low-latency combine"),
}
"""What a wait on the device can wait for: its number in a Report, and its name for people."""


LL_OPEN_HOOK = 255
"""Stands for a phase in a Report: no wait ran out of time, but a whole low-latency call came between the halves of another one."""

ROOM_PHASES = {PHASES[name][0] for name in ("kPhaseLlDispatchRoom", "kPhaseLlCombineRoom")}
"""Waits for a peer that still has to read what an earlier call has sent."""


def phase_name(number: int) -> str:
    return next((words for value, words in PHASES.values() if value == number), f"phase {number}")
