"""What a backend promises: the interface, and the data that a Buffer gives to its backend in a call.

`Buffer` and the wrappers of frameworks know no more of a backend. `backends.cuda` and `backends.host` implement it, and
`backends.factory` chooses one. The data classes are not frozen where each call makes one: freezing triples the time that this takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ..arrays.view import Framework, View
from ..comm.call_signature import Signature, combine_kind, dispatch_kind, low_latency_combine_kind
from ..comm.communicator import Communicator
from ..comm.failure_notice import FailureNotice
from ..config import Config
from ..description import BufferDescription
from ..results import (
    CombineResult,
    DispatchHandle,
    DispatchResult,
    Event,
    LowLatencyCombineResult,
    LowLatencyDispatchResult,
    LowLatencyHandle,
)
from ..statistics import Counters
from ..tuned import TuningResult
from .call_lock import CallLock
from .purposes import Purposes

_Sent = TypeVar("_Sent", DispatchResult, LowLatencyDispatchResult, covariant=True)
_Back = TypeVar("_Back", CombineResult, LowLatencyCombineResult, covariant=True)
SCALE_COLUMN_ALIGNMENT = 4
"""Rows of scales that lie by column are rounded up to it, because TMA loads columns of a multiple of 16 bytes."""


class Backend(Protocol):
    """Moves rows between the ranks of one Buffer. Most methods are collective. `check`, `counters`, `masked_ranks`, `prepare_throughput`
    and `prepare_low_latency` are not.
    """

    name: str
    """"cuda" or "host"."""
    num_sms: int
    """SMs of the next dispatch and combine."""
    info: BufferInfo
    call_lock: CallLock
    description: BufferDescription
    """See `Buffer.describe`."""
    purposes: Purposes
    """What calls are for, if they belong to a backward pass."""
    shared_name: str
    """Names the Buffer in all processes of its ranks, and no other Buffer."""

    @property
    def context(self) -> AbstractContextManager[Any]:
        """Enter it around CUDA work outside of a call."""

    @property
    def tables(self) -> HandleTables:
        """Export handles as numbers, and make handles of them."""

    def begin(self, x: Any, async_finish: bool, previous_event: Any, stream: Any) -> Call:
        """Choose the stream of a call; raise if an earlier call timed out."""

    def dispatch(self, inputs: DispatchInputs, call: Call) -> DispatchResult:
        """See `Buffer.dispatch`."""

    def combine(self, inputs: CombineInputs, call: Call) -> CombineResult:
        """See `Buffer.combine`."""

    def call_form(self, inputs: Any, call: Call) -> CallForm | None:
        """Return the form of a call without a hook. None: its calls are ordinary ones."""

    def prepare_throughput(self, preparation: ThroughputPreparation) -> PreparedCalls[DispatchResult, CombineResult]:
        """See `Buffer.prepare_throughput`."""

    def low_latency_dispatch(self, inputs: LowLatencyDispatchInputs, call: Call, with_hook: bool) -> LowLatencyDispatchResult:
        """See `Buffer.low_latency_dispatch`. If `inputs.into` is given, the results lie there."""

    def low_latency_combine(self, inputs: LowLatencyCombineInputs, call: Call, with_hook: bool) -> LowLatencyCombineResult:
        """See `Buffer.low_latency_combine`."""

    def prepare_low_latency(
        self, preparation: LowLatencyPreparation
    ) -> PreparedCalls[LowLatencyDispatchResult, LowLatencyCombineResult]:
        """See `Buffer.prepare_low_latency`."""

    def low_latency_combine_view(self, framework: Framework, capacity: int) -> View:
        """Return the memory of `Buffer.get_low_latency_combine_buffer`."""

    def set_mask(self, rank: int, masked: bool) -> None:
        """Exclude a rank from low-latency calls, or include it again."""

    def masked_ranks(self) -> list[int]:
        """List the ranks that low-latency calls exclude, ascending."""

    def copy_ceilings(self, row_bytes: int, num_rows: int, iterations: int) -> dict[str, float]:
        """See `Buffer.copy_ceilings`."""

    def autotune(self, num_tokens: int, dtype: str, limit_s: float, saves: bool) -> TuningResult:
        """See `Buffer.autotune`."""

    def counters(self, during_capture: bool = False) -> Counters:
        """Return what `Buffer.statistics` tells of a Buffer with `config.statistics`. Any thread may call it, also after `destroy`.

        `during_capture` allows it while the stream of the last call is captured in a CUDA graph.
        """

    def copy(self, source: int, out: View, stream: int | None) -> None:
        """Copy from the address `source` to `out`, in the order of a GPU's stream."""

    def check(self) -> None:
        """See `Buffer.check`."""

    def synchronize(self) -> None:
        """See `Buffer.synchronize`."""

    def sleep(self, keeps_results: bool) -> None:
        """See `Buffer.sleep`."""

    def wake(self) -> None:
        """See `Buffer.wake`."""

    def lose(self, rank: int, reason: str) -> None:
        """Note that the process of a rank has ended. Waits for it end. Any thread may call this."""

    def lost_ranks(self) -> tuple[int, ...]:
        """Return the ranks that this one knows to be lost, ascending."""

    def leave_members(self) -> None:
        """Give the memory back, without the other members. `change_members` takes it again."""

    def change_members(self, comm: Communicator, notice: FailureNotice, generation: int, aborts: bool) -> None:
        """Begin a generation with other members, over whom this is collective. See `Buffer.shrink`.

        `notice` is theirs. `aborts`: whether calls may still wait for a rank that is lost.
        """

    def trim(self) -> int:
        """See `Buffer.trim`."""

    def drop(self) -> bool:
        """Free the memory of a Buffer that the program has dropped, if nothing can use it. Return whether it is free. Not collective."""

    def destroy(self, in_touch: bool, error: BaseException | None) -> None:
        """Release everything. `error` is the exception that ends the Buffer, which the other ranks hear of."""


class PreparedCalls(Protocol[_Sent, _Back]):
    """A dispatch and a combine whose arguments are checked. The caller holds the call lock during each method."""

    def dispatch(self) -> _Sent:
        """See `PreparedThroughput.dispatch` and `PreparedLowLatency.dispatch`."""

    def set_rows(self, y: View) -> None:
        """Let later combines read the experts' rows from `y`."""

    def combine(self) -> _Back:
        """See `PreparedThroughput.combine` and `PreparedLowLatency.combine`."""


class CallForm(Protocol):
    """A call whose arguments are checked, but for addresses and the handle. It keeps no argument. See `CallForms`."""

    def takes(self, handle: Any) -> bool:
        """Return whether a call with this handle has the form. None: the call has no handle."""

    def __call__(self, call: Call, addresses: Sequence[Any], handle: Any) -> Any:
        """Make a call with arrays at these addresses."""


class HandleTables(Protocol):
    """Exports what handles know as plain numbers.

    Compiled programs (JAX) pass arrays and no Python objects. If the routing is an array, a call depends on its arguments alone.
    Such calls may run again, in any order.
    """

    num_words: int
    """Length of the int32 array of a dispatch."""
    num_expert_words: int
    """The same for `layout="expert"`. Its dispatch has fixed its rows (`num_worst_tokens`)."""
    num_low_latency_words: int
    """Length of the int32 array of a low-latency dispatch."""
    low_latency_counts: slice
    """The place of the local experts' numbers of rows in that array."""

    def save(self, handle: DispatchHandle, out: View, stream: int | None) -> None:
        """Write the routing of a handle to `out`, `[num_words]` or `[num_expert_words]` int32, in the order of a GPU's stream."""

    def load(self, words: View, num_tokens: int, num_recv_rows: int, layout: str = "token") -> DispatchHandle:
        """Make a handle of such an array. The array has to outlive the calls that get the handle."""

    def load_low_latency(self, words: View, num_tokens: int, has_weights: bool, capacity: int) -> LowLatencyHandle:
        """Make a handle of the array that a low-latency dispatch wrote. The array has to outlive the call that gets the handle."""

    def rows_between_ranks(self, handle: DispatchHandle, framework: Framework) -> View:
        """Return `[source, destination]` int32: the rows that a rank sends to a rank. Only for Buffers on one node."""

    def first_rows(self, handle: DispatchHandle, framework: Framework) -> View:
        """Return `[num_ranks]` int32: the position in `recv_x` of the first row from each rank. Only for Buffers on several nodes."""

    def entries(self, handle: LowLatencyHandle, framework: Framework) -> Entries:
        """Return the tokens that a low-latency dispatch brought to this rank."""


@dataclass(frozen=True)
class Entries:
    """Tokens that arrived in a low-latency dispatch, one in each line of a table of int32."""

    words: View  # [lines, columns] int32
    num_entries: View  # [1] int32: lines that are filled
    source: int  # the column of the source rank
    token: int  # the column of the token's number there
    rows: slice  # the columns of its rows, expert by expert; -1 or less: none


@dataclass(slots=True)
class Call:
    """How a call runs: its stream (unused on the host backend), and what it waits for."""

    stream: int
    caller_stream: int | None
    async_finish: bool
    previous_event: Any
    framework: Framework | None = None  # the caller's
    capture: Any = None  # the CapturedGraph of the stream, or None
    follows: int | None = None  # another stream, whose work the call waits for
    words_cleared: Event | None = None  # with signals: the words of the tiles are cleared


@dataclass
class BufferInfo:
    """The Buffer of a call: its serial number in this process, its sizes and its device."""

    serial: int
    config: Config
    device: int
    since: int = 0
    """The value of `results.generations` since which its members are the same. Older handles are refused."""


@dataclass(slots=True)
class DispatchInputs:
    """Checked arguments of dispatch. Either `topk_idx` gives a new routing, or `handle` repeats a known one."""

    x: View
    topk_idx: View | None
    topk_weights: View | None
    scales: View | None
    handle: DispatchHandle | None
    num_worst_tokens: int | None
    expert_alignment: int
    layout: str = "token"  # the order of the rows: "token" or "expert"
    zero_padding: bool = False  # the other two only for "expert"
    scales_by_column: bool = False
    use_fp8: bool = False  # convert x on the way
    round_scale: bool = False  # scales are powers of two
    use_ue8m0: bool = False  # and are sent as their exponents
    signals: bool = False  # tell a consumer of each tile of rows by expert that is complete
    rows: View | None = None  # if x only holds the place of the rows: the rows, which another kernel sends

    @property
    def signature(self) -> Signature:
        """What all ranks must agree on, after `use_fp8` has converted the rows."""
        x, scales = self.rows or self.x, self.scales
        return Signature(
            dispatch_kind(self.layout, self.handle is not None, self.signals),
            x.dtype,
            _dtype(self.topk_idx),
            _dtype(self.topk_weights),
            _dtype(scales),
            self.round_scale,
            self.zero_padding,
            "column" if self.scales_by_column else "row",
            x.row_bytes,
            scales.row_bytes if scales else 0,
            self.expert_alignment,
        )


@dataclass(slots=True)
class CombineInputs:
    """Checked arguments of combine."""

    x: View
    handle: DispatchHandle
    topk_weights: View | None
    biases: tuple[View, ...]
    weighted: bool = False  # multiply rows by topk_weights, instead of sending them back
    reduce: str = "rank"  # each rank adds up its rows of a token; "topk": the token's rank adds up the row of each choice
    compress: str | None = None  # the form of rows on the way, one of `COMPRESSIONS`; None: as they are
    y_ready: View | None = None  # a word for each tile of rows by expert, set once its rows are written; None: all are

    @property
    def signature(self) -> Signature:
        """What all ranks must agree on."""
        kind = combine_kind(self.weighted, self.reduce, self.compress)
        return Signature(kind, self.x.dtype, topk_weights=_dtype(self.topk_weights), row_bytes=self.x.row_bytes)


@dataclass(slots=True)
class ThroughputPreparation:
    """Checked arguments of prepare_throughput."""

    caller_x: Any  # the caller's array, whose library has the current stream
    dispatch: DispatchInputs  # with a handle
    y_weights: View | None  # the topk_weights of combines
    biases: tuple[View, ...]  # the next two as in CombineInputs
    compress: str | None
    async_finish: bool
    stream: Any

    def combine(self, y: View) -> CombineInputs:
        """Return the arguments of a combine of these rows."""
        assert self.dispatch.handle is not None
        return CombineInputs(y, self.dispatch.handle, self.y_weights, self.biases, compress=self.compress)

    @property
    def arrays(self) -> tuple[View, ...]:
        """All arrays but the rows of combines."""
        given = self.dispatch
        arrays = given.x, given.topk_idx, given.topk_weights, given.scales, self.y_weights, *self.biases
        return tuple(array for array in arrays if array is not None)


@dataclass(slots=True)
class LowLatencyMemory:
    """The caller's memory for results. A captured call may be replayed at any time, because no other call uses this memory."""

    recv_x: View
    recv_scales: View | None
    tables: View  # of the handle


@dataclass(slots=True)
class LowLatencyDispatchInputs:
    """Checked arguments of low_latency_dispatch."""

    x: View
    topk_idx: View
    topk_weights: View | None
    use_fp8: bool
    round_scale: bool  # scales are powers of two
    use_ue8m0: bool  # and are sent as their exponents
    recv_stats: View | None
    wait_stats: View | None
    is_opaque: bool  # rows travel as they are, with the caller's scales
    x_scales: View | None  # of such rows
    num_max_tokens: int  # the most tokens of a rank
    into: LowLatencyMemory | None = None  # where the results shall lie, if the caller says so

    def signature(self, x: str, x_scales: str | None) -> Signature:
        """Return what all ranks must agree on. Arguments: the dtypes of rows and scales on the way."""
        weights = None if self.topk_weights is None else self.topk_weights.dtype
        row_bytes = scale_bytes = 0  # the call's own forms
        if self.is_opaque:
            row_bytes, scale_bytes = self.x.row_bytes, self.x_scales.row_bytes if self.x_scales else 0
        kinds = "low_latency_dispatch", x, self.topk_idx.dtype, weights, x_scales, self.round_scale, False, "row"
        return Signature(*kinds, row_bytes, scale_bytes, self.num_max_tokens)


@dataclass(slots=True)
class LowLatencyCombineInputs:
    """Checked arguments of low_latency_combine."""

    y: View
    topk_idx: View
    topk_weights: View
    handle: LowLatencyHandle
    reduce_early: bool  # an expert rank adds up its own experts' rows of a token before it sends them
    out: View | None
    compress: str | None = None  # the form of rows on the way, one of `COMPRESSIONS`; None: as they are

    @property
    def signature(self) -> Signature:
        """What all ranks must agree on."""
        return low_latency_combine_signature(self.reduce_early, self.compress, self.topk_idx)


@dataclass(slots=True)
class LowLatencyPreparation:
    """Checked arguments of prepare_low_latency."""

    caller_x: Any  # the caller's array, whose library has the current stream
    dispatch: LowLatencyDispatchInputs
    reduce_early: bool  # the next three as in LowLatencyCombineInputs
    compress: str | None
    out: View | None
    with_hook: bool
    async_finish: bool
    stream: Any

    @property
    def combine_signature(self) -> Signature:
        """What all ranks must agree on in the combines."""
        return low_latency_combine_signature(self.reduce_early, self.compress, self.dispatch.topk_idx)


def low_latency_combine_signature(reduce_early: bool, compress: str | None, topk_idx: View) -> Signature:
    """Return what all ranks must agree on in a low-latency combine."""
    return Signature(low_latency_combine_kind(reduce_early, compress), "bfloat16", topk_idx.dtype, "float32")


def _dtype(view: View | None) -> str | None:
    return view.dtype if view else None
