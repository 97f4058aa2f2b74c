"""The interface of a backend: `Buffer` and the wrappers of frameworks know no more of it.

`backends.cuda` and `backends.host` implement it. `backends.factory` chooses one.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from ..arrays.view import Framework, View
from ..description import BufferDescription
from ..results import (
    CombineResult,
    DispatchHandle,
    DispatchResult,
    LowLatencyCombineResult,
    LowLatencyDispatchResult,
    LowLatencyHandle,
)
from ..statistics import Counters
from ..tuned import TuningResult
from .call_lock import CallLock
from .calls import (
    BufferInfo,
    Call,
    CombineInputs,
    DispatchInputs,
    LowLatencyCombineInputs,
    LowLatencyDispatchInputs,
    LowLatencyPreparation,
    ThroughputPreparation,
)
from .purposes import Purposes

_Sent = TypeVar("_Sent", DispatchResult, LowLatencyDispatchResult, covariant=True)
_Back = TypeVar("_Back", CombineResult, LowLatencyCombineResult, covariant=True)


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

    def low_latency_combine_view(self, framework: Framework) -> View:
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

        Args:
            during_capture: Whether it is allowed while the stream of the last call is captured in a CUDA graph.
        """

    def copy(self, source: int, out: View, stream: int | None) -> None:
        """Copy from the address `source` to `out`, in the order of a GPU's stream."""

    def check(self) -> None:
        """See `Buffer.check`."""

    def synchronize(self) -> None:
        """See `Buffer.synchronize`."""

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

    def load_low_latency(self, words: View, num_tokens: int, has_weights: bool) -> LowLatencyHandle:
        """Make a handle of the array that a low-latency dispatch wrote. The array has to outlive the call that gets the handle."""

    def rows_between_ranks(self, handle: DispatchHandle, framework: Framework) -> View:
        """Return `[source, destination]` int32: the rows that a rank sends to a rank. Only for Buffers on one node."""

    def first_rows(self, handle: DispatchHandle, framework: Framework) -> View:
        """Return `[num_ranks]` int32: the position in `recv_x` of the first row from each rank. Only for Buffers on several nodes."""

    def entries(self, handle: LowLatencyHandle, framework: Framework) -> Entries:
        """Return the tokens that a low-latency dispatch brought to this rank."""


@dataclass(frozen=True)
class Entries:
    """Tokens that arrived in a low-latency dispatch, one in each line of a table of int32.

    Attributes:
        words: `[lines, columns]` int32.
        num_entries: `[1]` int32: lines that are filled.
        source: The column of the source rank.
        token: The column of the token's number there.
        rows: The columns of its rows, expert by expert; -1 or less: none.
    """

    words: View
    num_entries: View
    source: int
    token: int
    rows: slice
