"""The state that the calls of both modes of DeepEP V1's Buffer share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import torch

from .._checks import argument_error, flag
from ..buffer import Buffer, notice_of
from ..comm.failure_notice import FailureNotice
from ..errors import EPAsleepError, EPDestroyedError, EPInputError, EPUnavailableError
from ..results import MAKE_ANOTHER, SharedByCopies
from .buffer_cache import ElasticBuffers, LowLatencyBuffers, NormalBuffers
from .slot_buffers import SlotBuffers

P = ParamSpec("P")
R = TypeVar("R")


class NoAttributeError(EPUnavailableError, AttributeError):
    """Reports a name of DeepEP that this library lacks. `hasattr` returns False for such a name."""


class BufferState:
    """The ranks and nodes, the memory and the communication stream of one Buffer.

    `normal` and `low_latency` are None without that mode, and `elastic` is None but for DeepEP V2's Buffer. `notice` tells the other ranks
    of refused calls also before there is a Buffer.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        ranks_per_node: int,
        normal: NormalBuffers | None,
        low_latency: LowLatencyBuffers | SlotBuffers | None,
        enable_shrink: bool,
        notice: FailureNotice,
        elastic: ElasticBuffers | None = None,
    ) -> None:
        self.rank, self.num_ranks, self.ranks_per_node = rank, num_ranks, ranks_per_node
        self.normal, self.low_latency, self.elastic, self.enable_shrink = normal, low_latency, elastic, enable_shrink
        self.is_destroyed = self.is_asleep = False
        self.notice = notice
        self._comm_stream: Any = None

    @property
    def num_nodes(self) -> int:
        """Nodes of the group. DeepEP calls them RDMA ranks."""
        return self.num_ranks // self.ranks_per_node

    def refuse(self, call: str, error: EPInputError) -> None:
        """Tell the other ranks, which may wait in a call of any Buffer, that this rank has refused a call."""
        self.notice.refuse(error, call)
        for buffer in self._living():
            if (notice := notice_of(buffer)) is not None:
                notice.refuse(error, call)

    def comm_stream(self) -> Any:
        """Return the communication stream. The first call makes it."""
        if self._comm_stream is None:
            if not torch.cuda.is_available():
                raise EPUnavailableError("get_comm_stream: expected a GPU, but PyTorch finds none. Call it only on GPUs.")
            self._comm_stream = torch.cuda.Stream(priority=-1)  # its few blocks get their SMs before those of other work
        return self._comm_stream

    def check_live(self) -> None:
        """Raise EPDestroyedError after `destroy`, and EPAsleepError during a sleep."""
        self._check_exists()
        if self.is_asleep:
            raise EPAsleepError("this Buffer sleeps; expected a Buffer that is awake. Call wake() on all ranks first.")

    def _check_exists(self) -> None:
        if self.is_destroyed:
            raise EPDestroyedError("this Buffer was destroyed. Make a new one.")

    def _living(self) -> list[Buffer]:
        every = (self.normal, self.low_latency, self.elastic)
        return [buffer for buffers in every if buffers is not None for buffer in buffers.living]

    def sleep(self, keep_results: bool) -> None:
        """Let all Buffers sleep, or none; see `Buffer.sleep`."""
        self.check_live()
        with ExitStack() as undone:
            for buffer in self._living():
                buffer.sleep(keep_results=keep_results)
                undone.callback(buffer.wake)
            undone.pop_all()
        self.is_asleep = True

    def wake(self) -> None:
        """Wake all Buffers. After an error, a later call wakes the rest."""
        self._check_exists()
        if not self.is_asleep:
            raise EPInputError("wake() of a Buffer that is awake; expected a Buffer that sleeps. Call sleep() before.")
        for buffer in self._living():
            if buffer.is_asleep:
                buffer.wake()
        self.is_asleep = False

    def normal_buffers(self) -> NormalBuffers:
        """Return the Buffers of the normal mode; raise if there are none."""
        self.check_live()
        if self.normal is None:
            raise EPInputError(
                "num_nvl_bytes=0; expected memory for dispatch and combine. Make the Buffer with num_nvl_bytes=int(1e9), for example."
            )
        return self.normal

    def low_latency_buffers(self) -> LowLatencyBuffers | SlotBuffers:
        """Return the Buffers of the low-latency mode; raise EPInputError if there are none."""
        self.check_live()
        if self.low_latency is None:
            raise EPInputError(
                "low_latency_mode=False; expected True for low-latency calls. Make the Buffer with low_latency_mode=True."
            )
        return self.low_latency

    def maskable_buffers(self, method: str) -> LowLatencyBuffers | SlotBuffers:
        """Return the Buffers of the low-latency mode; raise EPInputError if they cannot exclude ranks."""
        buffers = self.low_latency_buffers()
        if not self.enable_shrink:
            raise EPInputError(f"enable_shrink=False; {method} expects True. Make the Buffer with enable_shrink=True.")
        return buffers


_QUANTISED = "Quantise the rows before the call, and pass x=(rows, scales)"
_NO_OVERLAP = "Call it after the product of the experts; return_recv_hook overlaps the way back with other work"
_OF_OTHERS: dict[str, dict[str, str]] = {
    "__init__": {"is_intranode": ""},
    "low_latency_dispatch": {"use_nvfp4": _QUANTISED, "x_global_scale": _QUANTISED},
    "low_latency_combine": {
        "overlap": _NO_OVERLAP,
        **dict.fromkeys(("packed_recv_count", "comp_signal", "block_m", "threshold", "num_sms"), ""),
        "src_signals": _NO_OVERLAP,
        "src_signal_expect_value": "",
    },
}
"""Arguments that other versions of DeepEP have, by call, with what to do instead. Empty: the argument has no effect here."""


def knows_other_versions(call: Callable[P, R]) -> Callable[P, R]:
    """Let a call take arguments of other versions of DeepEP: those without effect, and others if they ask for nothing.

    It raises EPInputError for another value. An argument that no version has stays Python's TypeError.
    """
    known = _OF_OTHERS[call.__name__]

    @functools.wraps(call)
    def made(*arguments: P.args, **options: P.kwargs) -> R:
        for name in known.keys() & options.keys():
            value = options.pop(name)
            if known[name] and value is not None and value is not False:
                raise argument_error(value, name, "none, because this library has no such feature", f"{known[name]}.")
        return call(*arguments, **options)

    return made


def tells_refusals(call: Callable[P, R]) -> Callable[P, R]:
    """Let the other ranks hear if a call of this class refuses its arguments."""

    @functools.wraps(call)
    def told(*arguments: P.args, **options: P.kwargs) -> R:
        state: BufferState = arguments[0]._state  # type: ignore[attr-defined]
        try:
            made = call(*arguments, **options)
        except EPInputError as error:
            if not error.call_made and not state.is_destroyed:
                state.refuse(call.__name__, error)
            raise
        if state.notice.has_refused:
            state.notice.repeat()
        return made

    return told


_METHODS_OF_OTHERS = {
    "engram": "This library has no remote storage of embeddings. Fetch them with your framework",
    "pp_": "This library has no pipeline-parallel send. Use torch.distributed.send and recv",
    "agrs": "This library has no all-gather sessions. Use torch.distributed.all_gather_into_tensor and reduce_scatter_tensor",
    "all_gather": "This library has no all-gather sessions. Use torch.distributed.all_gather_into_tensor",
    "low_precision": "Pass use_logfmt=True to low_latency_combine",
    "nvfp4": "Quantise with your framework, and pass x=(rows, scales) to low_latency_dispatch",
}
"""What to use instead of methods that some version of DeepEP has, by a part of their names."""


class Calls(SharedByCopies):
    """The base of the classes that hold the calls of one mode."""

    _instead = MAKE_ANOTHER
    _state: BufferState

    def sleep(self, *, keep_results: bool = False) -> None:
        """Give memory back to the GPU until `wake`, between calls. Collective. DeepEP has no such call; see `deepep_rt.Buffer.sleep`.

        Args:
            keep_results: Copy the results that the program holds to host memory, and back in `wake`.

        Raises:
            EPUnavailableError: If the memory cannot sleep. The Buffer stays awake.
            EPInputError: If a hook is open, a rank is masked, or a CUDA graph is being captured.
            EPOutOfMemoryError: If the memory of one host does not suffice for what is kept.
            EPTimeoutError: If a rank does not call it.
            EPAsleepError: If the Buffer sleeps already.

        Example:
            >>> buffer.sleep()
            >>> train_with_all_of_the_memory()
            >>> buffer.wake()
        """
        self._state.sleep(flag(keep_results, "keep_results"))

    def wake(self) -> None:
        """Take memory again, at the same addresses, after `sleep`. Collective.

        Raises:
            EPOutOfMemoryError: If the GPU of one rank has too little memory. Free memory, and call this again on all ranks.
            EPTimeoutError: If a rank does not call it.
            EPInputError: If the Buffer is awake.
        """
        self._state.wake()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Raise NoAttributeError, with what to use instead."""
            instead = next((text for part, text in _METHODS_OF_OTHERS.items() if part in name), "")
            remedy = instead or "See docs/coming-from-deepep.md for the names that are"
            raise NoAttributeError(f"{type(self).__name__}.{name} is not a part of this library. {remedy}.")

    def get_comm_stream(self) -> Any:
        """Return the `torch.cuda.Stream` on which calls with `async_finish` run.

        Raises:
            EPUnavailableError: Without a GPU.
        """
        return self._state.comm_stream()
