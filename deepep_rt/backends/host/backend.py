"""The host backend: dispatch and combine in NumPy and MPI, for machines without a GPU and as the reference of the GPU tests.

A call has two rounds of messages, one message to each peer in a round. First every rank notifies every other of how the call looks
from its side: what it calls with which types, how many rows go where, and whether its input is wrong. So all ranks come to the same
verdict before a row moves: they all go on, or they all raise. Then the rows travel, straight into the result arrays. Every wait is
bounded. Ranks that low-latency calls leave out (they are masked, see `mail`) say nothing and get nothing: as if they had no tokens, and
as if nobody had chosen their experts.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numpy as np

from ...arrays.host_memory import Result, from_float32, rows_of, to_float32
from ...arrays.view import HOST, View
from ...comm import call_signature
from ...comm.communicator import Communicator
from ...comm.rendezvous import agree_on_measurement, begin_measurement
from ...config import Config
from ...errors import EPError, EPInputError, EPOutOfMemoryError
from ...results import CombineResult, DispatchHandle, DispatchResult, Event
from ..agreement import announce
from ..call_lock import CallLock
from ..calls import BufferInfo, Call, CombineInputs, DispatchInputs, LowLatencyCombineInputs
from ..overflow import OverflowLog
from .messages import Mail
from .routing import Routing

_MAX_PART_BYTES = 2**31 - 1  # MPI counts in C ints
_MOST_MEASURED_BYTES = 1 << 26  # that a rank sends at once to measure its speed

# A notice begins with what all ranks must say alike. Then comes what each says for itself. The problem is 0 (none), 1 (expert number:
# token, value), 2 (size: destination, bytes) or 3 (expert numbers that do not go with the handle). Two more are for the addressee alone:
# rows that it gets along a known routing, and rows that it is expected to send.
_CAPACITY = call_signature.NUM_FIELDS
_PROBLEM = slice(_CAPACITY + 1, _CAPACITY + 4)
_SENDS, _EXPECTS = _CAPACITY + 4, _CAPACITY + 5
_NOTICE_HEAD = _CAPACITY + 6  # then num_rows[num_ranks] for all, then num_choices[num_local_experts] for the addressee
_BAD_EXPERT, _TOO_LARGE, _OTHER_CHOICES = 1, 2, 3

_PHASES_OF_PARTS = {
    "low_latency_dispatch": {"kPhaseRoute": "kPhaseLlCounts", "kPhaseDispatchRows": "kPhaseLlRows"},
    "low_latency_combine": {
        "kPhaseDispatchLanding": "kPhaseLlWeights",
        "kPhaseDispatchRows": "kPhaseLlWeights",
        "kPhaseCombineLanding": "kPhaseLlCombineRoom",
        "kPhaseCombineRows": "kPhaseLlCombineRows",
    },
}


_Method = TypeVar("_Method", bound=Callable[..., Any])


def tells_of_memory(method: _Method) -> _Method:
    """Wrap a call of a backend: where host memory does not suffice, the other ranks are told, and wait no longer."""

    @functools.wraps(method)
    def call(self: HostBackend, *arguments: Any) -> Any:
        try:
            return method(self, *arguments)
        except EPError:
            raise
        except MemoryError as error:
            told = EPOutOfMemoryError(
                f"rank {self._rank}: host memory does not suffice for this call ({error}); expected room for its results. Make a Buffer "
                f"again, and give the call fewer tokens."
            )
            self._mail.leave(told)
            raise told from error

    return cast(_Method, call)


class HostBackend:
    """Dispatch and combine by messages between processes, in host memory. The face is that of `device.DeviceBackend`."""

    name = "host"

    def __init__(self, comm: Communicator, config: Config, serial: int) -> None:
        self._comm: Communicator | None = comm.Dup()  # our messages never meet the caller's
        self._comm.timeout_s = config.timeout_s
        self._config, self._serial = config, serial
        self.info = BufferInfo(serial, config, HOST)
        self.context = contextlib.nullcontext()  # there is no device to make current
        self.call_lock = CallLock(self.context)
        self.num_sms = config.num_sms  # of a GPU; here it is only kept
        self._rank, self._num_ranks = comm.Get_rank(), comm.Get_size()
        self._mail = Mail(self._comm, config.timeout_s, config.on_timeout == "mask", self.call_lock.check)
        self._num_rows_at = slice(_NOTICE_HEAD, _NOTICE_HEAD + self._num_ranks)
        self._num_choices_at = slice(_NOTICE_HEAD + self._num_ranks, None)
        self._overflow = OverflowLog(self._rank)
        self._num_routings = 0  # of throughput calls; the same on all ranks: they succeed or fail together
        self._calling: str | None = None  # the low-latency call that a dispatch or combine here is a part of
        announce(self._comm, "host backend", comm.transport_name, 0)

    def begin(self, x: Any, async_finish: bool, previous_event: Any, stream: Any) -> Call:
        """Start a call; there are no streams here, and earlier work has always finished."""
        self._mail.check()
        return Call(0, None, async_finish, previous_event)

    @tells_of_memory
    def dispatch(self, inputs: DispatchInputs, call: Call) -> DispatchResult:
        with self._mail.call():
            return self._dispatch(inputs)

    @tells_of_memory
    def combine(self, inputs: CombineInputs, call: Call) -> CombineResult:
        return self._add_up(inputs, None)

    def check(self) -> None:
        """Raise what a call would raise; see `Buffer.check`."""
        self._mail.check()

    def copy_ceiling(self, row_bytes: int, num_rows: int, iterations: int) -> float:
        """Bytes a second that messages carry from this rank to the others; see `Buffer.copy_ceiling`."""
        assert self._comm is not None
        given = dict(row_bytes=row_bytes, num_rows=num_rows, iterations=iterations)
        num_rows = max(1, min(num_rows, _MOST_MEASURED_BYTES // (self._num_ranks * row_bytes)))
        outgoing = incoming = None
        with contextlib.suppress(MemoryError):
            outgoing, incoming = (np.ones((self._num_ranks, num_rows * row_bytes), np.uint8) for _ in range(2))
        agree_on_measurement(self._comm, self._config.timeout_s, has_memory=incoming is not None, **given)
        assert outgoing is not None
        assert incoming is not None
        begin_measurement(self._comm, self._config.timeout_s)
        self._comm.Alltoall(outgoing, incoming)
        start = time.perf_counter()
        for _ in range(iterations):
            self._comm.Alltoall(outgoing, incoming)
        slowest = max(self._comm.allgather((time.perf_counter() - start) / iterations))
        return num_rows * max(self._num_ranks - 1, 1) * row_bytes / slowest

    def copy(self, source: int, out: View, stream: int | None) -> None:
        """Copy host memory at once."""
        ctypes.memmove(out.ptr, source, out.nbytes)

    def synchronize(self) -> None:
        self._mail.check()

    def destroy(self, in_touch: bool, error: BaseException | None) -> None:
        comm, self._comm = self._comm, None
        if comm is not None and error is not None:
            self._mail.failure_notice.notify(error)
        self._mail.release()
        # Freeing is collective; peers that were lost would not take part.
        if comm is not None and in_touch and not self._mail.is_broken and not self._mail.masked:
            comm.Free()
        elif comm is not None:
            comm.abandon()

    def _dispatch(self, inputs: DispatchInputs) -> DispatchResult:
        if inputs.handle is None:
            handle = self._route(inputs)
            return self._send_rows(handle, handle.routing, inputs)
        routing: Routing = inputs.handle.routing
        notices = self._notices("dispatch with a handle", inputs.x, inputs, routing.serial)
        self._find_problem(notices, inputs, routing.sent_tokens)
        if not notices[0, _PROBLEM.start] and not self._chooses_the_same(inputs, routing):
            notices[:, _PROBLEM] = _OTHER_CHOICES, 0, 0
        sizes = [len(tokens) for tokens in routing.sent_tokens]
        goes, comes = self._agree_on_rows(notices, "kPhaseDispatchLanding", sizes, routing.num_received)
        return self._send_rows(inputs.handle, routing.only(sent=goes, received=comes), inputs)

    def _add_up(self, inputs: CombineInputs, left_out: np.ndarray | None) -> CombineResult:
        """Combine. `left_out`: `[num_tokens, num_ranks]` bool, rows that come and are not added, or None."""
        with self._mail.call():
            return self._combine(inputs, left_out)

    def _combine(self, inputs: CombineInputs, left_out: np.ndarray | None) -> CombineResult:
        handle, x, config = inputs.handle, inputs.x, self._config
        routing: Routing = handle.routing
        notices = self._notices("combine", x, inputs, routing.serial)
        self._note_size(notices, int(routing.num_received.max()) * x.row_bytes, int(routing.num_received.argmax()))
        sizes = [len(tokens) for tokens in routing.sent_tokens]
        goes, comes = self._agree_on_rows(notices, "kPhaseCombineLanding", routing.num_received, sizes)
        routing = routing.only(sent=comes, received=goes)

        given = [rows_of(view) for view in (x, inputs.topk_weights) if view is not None]
        outgoing = [[part[first : first + count] for part in given] for first, count in self._spans(routing)]
        incoming = [[np.empty((len(tokens), p.shape[1]), np.uint8) for p in given] for tokens in routing.sent_tokens]
        incoming[self._rank] = outgoing[self._rank]
        lost = self._mail.exchange(outgoing, incoming, self._phase("kPhaseCombineRows"))

        total = np.zeros((handle.num_tokens, config.hidden), np.float32)
        weights = None if inputs.topk_weights is None else Result((handle.num_tokens, config.num_topk), "float32", fill=0)
        with np.errstate(all="ignore"):  # inf - inf and the like are the caller's numbers, not our mistakes
            for peer, (tokens, parts) in enumerate(zip(routing.sent_tokens, incoming, strict=True)):
                if peer in lost:
                    continue
                # Rank order: the same bits every time.
                counts = slice(None) if left_out is None else ~left_out[tokens, peer]
                total[tokens[counts]] += to_float32(parts[0][counts], x.dtype)
                if weights is not None:
                    weights.rows.view(np.float32)[tokens] += parts[1].view(np.float32)
            for bias in inputs.biases:
                total += to_float32(rows_of(bias), x.dtype)
            out = Result(total.shape, x.dtype)
            from_float32(total, x.dtype, out.rows)
        views = {"x": out.view(x.framework), "topk_weights": None if weights is None else weights.view(x.framework)}
        return CombineResult(event=Event(), make_views=lambda: views)

    def _route(self, inputs: DispatchInputs) -> DispatchHandle:
        """Work out a new routing and tell the ranks about it."""
        config, rank = self._config, self._rank
        num_tokens = inputs.x.shape[0]
        assert inputs.topk_idx is not None  # or there would be a handle
        idx = rows_of(inputs.topk_idx).view(inputs.topk_idx.dtype)
        chosen = np.zeros((num_tokens, self._num_ranks), bool)
        token, choice = np.nonzero((idx >= 0) & (idx < config.num_experts))
        chosen[token, idx[token, choice] // config.num_local_experts] = True
        tokens = [np.flatnonzero(chosen[:, peer]).astype(np.int32) for peer in range(self._num_ranks)]

        notices = self._notices("dispatch", inputs.x, inputs, 0)
        notices[:, _CAPACITY] = -1 if inputs.num_worst_tokens is None else inputs.num_worst_tokens
        notices[:, self._num_rows_at] = [len(t) for t in tokens]
        counts = np.bincount(idx[token, choice], minlength=config.num_experts)
        notices[:, self._num_choices_at] = counts.reshape(self._num_ranks, -1)
        self._find_problem(notices, inputs, tokens)
        heard = self._agree(notices, "kPhaseRoute")

        num_rows = heard[:, self._num_rows_at]  # [source, destination]
        capacity = heard[:, _CAPACITY]  # none where a rank said nothing: nothing goes there
        room = np.where(capacity < 0, np.iinfo(np.int64).max, capacity)  # [destination]
        first_row = np.cumsum(num_rows, axis=0) - num_rows
        fitting = np.clip(room - first_row, 0, num_rows)
        routing = Routing(
            serial=self._new_serial(),
            sent_tokens=tuple(t[:n] for t, n in zip(tokens, fitting[rank], strict=True)),
            num_received=fitting[:, rank],
            first_row=np.minimum(first_row[:, rank], room[rank]),
            num_sent=num_rows,
        )
        per_expert = heard[:, self._num_choices_at].sum(0)
        per_expert = -(-per_expert // inputs.expert_alignment) * inputs.expert_alignment
        worst = inputs.num_worst_tokens
        num_recv = int(num_rows[:, rank].sum())
        num_recv_rows = num_recv if worst is None else worst
        if num_recv > num_recv_rows:
            self._overflow.rows(num_recv, num_recv_rows)
        framework = inputs.x.framework
        views = {
            "num_recv": Result.of(num_rows[:, rank].sum(keepdims=True)).view(framework),
            "num_recv_per_expert": Result.of(per_expert).view(framework),
            "src_idx": Result((num_recv_rows, 2), "int32", fill=255).view(framework),  # filled when the rows arrive
        }
        told = per_expert.tolist() if worst is None else None
        return DispatchHandle(num_tokens, num_recv_rows, told, self._serial, routing, views)

    def _new_serial(self) -> int:
        """A number for a routing. Masked ranks may miss low-latency calls, so that routings of those are numbered like the calls."""
        if self._calling is not None:
            return self._mail.low_latency_calls
        self._num_routings += 1
        return self._num_routings

    def _send_rows(self, handle: DispatchHandle, routing: Routing, inputs: DispatchInputs) -> DispatchResult:
        """Send rows, and what belongs to them, along a routing that all ranks agree on."""
        framework, num_recv_rows = inputs.x.framework, handle.num_recv_rows
        asked = {"x": inputs.x, "scales": inputs.scales, "topk_idx": inputs.topk_idx, "topk_weights": inputs.topk_weights}
        given = {name: view for name, view in asked.items() if view is not None}
        sources = [rows_of(view) for view in given.values()]
        results = {name: Result((num_recv_rows, *view.shape[1:]), view.dtype) for name, view in given.items()}
        outgoing = [[np.take(rows, tokens, axis=0) for rows in sources] for tokens in routing.sent_tokens]
        spans = self._spans(routing)
        incoming: list[list[np.ndarray]] = [
            [result.rows[first : first + count] for result in results.values()] for first, count in spans
        ]
        if inputs.handle is None:  # the handle is new: it has to learn which tokens these are
            src_idx = handle.views["src_idx"].owner.view(np.int32).reshape(-1, 2)
            arrived = [np.empty((count, 1), np.int32) for _, count in spans]
            for peer, tokens in enumerate(routing.sent_tokens):
                outgoing[peer].append(tokens)
                incoming[peer].append(arrived[peer])
        for mine, theirs in zip(outgoing[self._rank], incoming[self._rank], strict=True):
            theirs.reshape(-1)[:] = mine.reshape(-1)
        lost = self._mail.exchange(outgoing, incoming, self._phase("kPhaseDispatchRows"))
        num_arrived = routing.num_rows
        if inputs.handle is None:
            routing.num_received[list(lost)] = 0  # the routing is new, and nobody else has seen it
            for peer, (first, count) in enumerate(spans):
                src_idx[first : first + count, 0] = peer
                src_idx[first : first + count, 1:] = arrived[peer]

        for result in results.values():
            result.rows[num_arrived:] = 0
        self._keep_local(results, num_arrived)
        views: dict[str, View | None] = dict.fromkeys(asked)
        views.update({name: result.view(framework) for name, result in results.items()})
        for name, view in handle.views.items():  # copies: the handle's own stay as they are whatever the caller does
            views[name] = Result.of(view.owner.view(np.int32).reshape(view.shape)).view(framework)
        return DispatchResult(handle=handle, event=Event(), make_views=lambda: views)

    def _keep_local(self, results: dict[str, Result], num_arrived: int) -> None:
        """Turn expert numbers into local ones, and blank the entries of other ranks and of padding."""
        if "topk_idx" not in results:
            return
        idx = results["topk_idx"].rows.view(results["topk_idx"].dtype)
        first, count = self._rank * self._config.num_local_experts, self._config.num_local_experts
        idx -= first
        elsewhere = (idx < 0) | (idx >= count)
        elsewhere[num_arrived:] = True
        idx[elsewhere] = -1
        if "topk_weights" in results:
            results["topk_weights"].rows.view(np.float32)[elsewhere] = 0

    def _phase(self, name: str) -> str:
        """What a wait of dispatch or combine is for, where it is a part of another call."""
        return _PHASES_OF_PARTS.get(self._calling or "", {}).get(name, name)

    def _spans(self, routing: Routing) -> list[tuple[int, int]]:
        """First row and number of rows from each rank."""
        return list(zip(routing.first_row.tolist(), routing.num_received.tolist(), strict=True))

    def _notices(
        self, kind: str, x: View, inputs: DispatchInputs | CombineInputs | LowLatencyCombineInputs, serial: int
    ) -> np.ndarray:
        """What this rank says about the call, `[num_ranks, ...]` int64: one row for each addressee."""
        idx, scales = getattr(inputs, "topk_idx", None), getattr(inputs, "scales", None)
        dtypes = [x.dtype, *(view.dtype if view else None for view in (idx, inputs.topk_weights, scales))]
        notices = np.zeros((self._num_ranks, _NOTICE_HEAD + self._num_ranks + self._config.num_local_experts), np.int64)
        notices[:, :_CAPACITY] = (
            *call_signature.fields(self._calling or kind, *dtypes, scales.row_bytes if scales else 0),
            serial,
        )
        return notices

    def _find_problem(self, notices: np.ndarray, inputs: DispatchInputs, tokens: Sequence[np.ndarray]) -> None:
        """Put what is wrong with this rank's input into its notices."""
        sizes = [len(t) for t in tokens]
        self._note_size(notices, max(sizes) * inputs.x.row_bytes, int(np.argmax(sizes)))
        if inputs.topk_idx is None:
            return
        idx = rows_of(inputs.topk_idx).view(inputs.topk_idx.dtype)
        wrong = np.argwhere((idx < -1) | (idx >= self._config.num_experts))
        if len(wrong):
            notices[:, _PROBLEM] = _BAD_EXPERT, wrong[0, 0], idx[tuple(wrong[0])]

    def _chooses_the_same(self, inputs: DispatchInputs, routing: Routing) -> bool:
        """Whether expert numbers beside a handle choose the ranks of its routing."""
        if inputs.topk_idx is None:
            return True
        home = rows_of(inputs.topk_idx).view(inputs.topk_idx.dtype) // self._config.num_local_experts
        for peer, (tokens, count) in enumerate(zip(routing.sent_tokens, routing.num_sent[self._rank], strict=True)):
            chosen = np.flatnonzero((home == peer).any(axis=1))
            # Tokens that did not fit are in no routing: the first that were chosen are.
            if len(chosen) != count or not np.array_equal(chosen[: len(tokens)], tokens):
                return False
        return True

    def _note_size(self, notices: np.ndarray, num_bytes: int, peer: int) -> None:
        if num_bytes > _MAX_PART_BYTES:
            notices[:, _PROBLEM] = _TOO_LARGE, peer, num_bytes

    def _agree(self, notices: np.ndarray, phase: str) -> np.ndarray:
        """Swap notices; raise on every rank that takes part if an input is wrong or the calls differ.

        Returns:
            What each rank said, `[num_ranks, ...]`; zeros for ranks that do not take part.
        """
        heard, ranks = self._mail.swap(notices, self._phase(phase))
        if difference := call_signature.describe_mismatch({int(rank): heard[rank, :_CAPACITY].tolist() for rank in ranks}):
            raise EPInputError(difference)
        wrong = np.flatnonzero(heard[:, _PROBLEM.start])
        if len(wrong):
            rank = self._rank if self._rank in wrong else int(wrong[0])
            raise EPInputError(self._describe(rank, *heard[rank, _PROBLEM].tolist()))
        return heard

    def _agree_on_rows(
        self, notices: np.ndarray, phase: str, sends: Sequence[int] | np.ndarray, expects: Sequence[int] | np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Agree on a call along a known routing, in which this rank sends so many rows to each rank and expects so many.

        Two ranks know differently of the rows between them if one masked the other, or did so earlier, while that routing was made.
        Then none are sent.

        Returns:
            Which ranks get rows, and from which ranks they come, `[num_ranks]` bool each.
        """
        notices[:, _SENDS], notices[:, _EXPECTS] = sends, expects
        heard = self._agree(notices, phase)
        return heard[:, _EXPECTS] == sends, heard[:, _SENDS] == expects

    def _describe(self, rank: int, problem: int, where: int, what: int) -> str:
        whose = "" if rank == self._rank else f"rank {rank}: "
        if problem == _BAD_EXPERT:
            last = self._config.num_experts - 1
            return f"{whose}topk_idx: token {where} chooses expert {what}; expected 0 to {last}, or -1 for none"
        if problem == _OTHER_CHOICES:
            return (
                f"{whose}topk_idx chooses other ranks than the routing of the handle; pass what its dispatch was given, or none"
            )
        return f"{whose}x: {what} bytes go to rank {where}; the host backend sends at most {_MAX_PART_BYTES}; split the batch"
