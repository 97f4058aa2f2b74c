"""The `deepep_rt.Buffer`s that serve one Buffer of DeepEP. A call makes the Buffer that it needs.

Hidden size, top-k and experts of a call are the same on all ranks. All ranks therefore see at the same call that they need a new Buffer.
The number of tokens differs between ranks. A rank with more tokens than the Buffer takes makes a call with a new routing without tokens.
The host waits in such a call for the counts of all ranks anyway. Then all ranks read the number of tokens of all ranks. If one had too
many, all ranks make a larger Buffer and repeat the call. On one node the numbers lie in `SharedCounts`, and no message is needed. Between
nodes the ranks exchange `MessageCounts` after the call. There a rank may also receive more rows than fit, so it says that too.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from .. import _env
from .._checks import argument_error, flag, whole_number
from ..backends.agreement import creation_comm
from ..buffer import Buffer, notice_of
from ..comm.communicator import Communicator
from ..comm.consensus import timed_allgather
from ..config import MAX_EXPERTS, MAX_TOPK
from ..errors import EPConfigError, EPError, EPInputError, EPOutOfMemoryError, EPPeerError, EPTimeoutError, EPUnavailableError
from ..network import NetworkOptions
from ..results import DispatchResult
from .config import USUAL_TOPK, low_latency_bytes, normal_bytes

_MIN_TOKENS = 128  # of a Buffer for the normal mode: fewer would save little memory
_MAX_INITIAL_TOKENS = 8192  # of a Buffer that no call has needed yet
_PREFIX = "deepep_rt-"  # of the name of a file with counts
_MAX_WORDS = 2 + MAX_EXPERTS  # of a rank: its numbers of tokens and rows, and a count for each expert


@dataclass(frozen=True)
class Shape:
    """The sizes of a call that all ranks know, but for tokens."""

    hidden: int
    num_topk: int
    num_experts: int
    dtype: str
    backend: str


class SharedCounts:
    """Memory that all ranks of a host map. Each rank writes its numbers for the others. The constructor is collective.

    A word holds a number and the number of its call, so a reader sees whether the word belongs to the current call. Even and odd calls use
    separate words. A rank that writes for call n + 2 has seen that all ranks started call n + 1, so they have read the words of call n.

    Raise EPUnavailableError on every rank, if they cannot map the same memory.
    """

    def __init__(self, comm: Communicator, timeout_s: float) -> None:
        self._rank, self._timeout_s, self._call = comm.Get_rank(), timeout_s, 1
        shape = (2, comm.Get_size(), _MAX_WORDS)
        num_bytes = 8 * int(np.prod(shape))
        memory, problem = None, None
        with ExitStack() as at_end:  # also if a rank does not come, or a signal handler raises
            path = None
            try:
                path = _make_file(num_bytes, at_end) if self._rank == 0 else None
            except OSError as error:
                problem = f"rank {self._rank}: {error}"
            path = comm.bcast(path)
            try:
                if path is not None:
                    with _open_file(path, num_bytes) as opened:
                        memory = mmap.mmap(opened.fileno(), num_bytes)
            except OSError as error:
                problem = f"rank {self._rank}: {error}"
            problems = [found for found in comm.allgather(problem) if found]
        if problems or memory is None:
            raise EPUnavailableError(
                f"the ranks of this host cannot share memory ({problems[0]}); expected one /dev/shm or temporary folder for all. "
                f"Start them in one container."
            )
        self._words = np.frombuffer(memory, np.int64).reshape(shape)

    def post(self, numbers: Sequence[int]) -> None:
        """Write this rank's numbers for the current call, each from 0 to 2**31 - 1.

        The rank may write again until all ranks have started the call.
        """
        self._words[self._call % 2, self._rank, : len(numbers)] = np.asarray(numbers, np.int64) | self._call << 32

    def read(self, count: int) -> np.ndarray:
        """Return the first `count` numbers of all ranks, `[num_ranks, count]` int64, and end the current call.

        Raise EPTimeoutError if a rank did not write its numbers.
        """
        words = self._words[self._call % 2, :, :count]
        deadline = time.monotonic() + self._timeout_s
        while not ((found := words.copy()) >> 32 == self._call).all():
            if time.monotonic() > deadline:
                late = int((found >> 32 != self._call).any(axis=1).argmax())
                raise EPTimeoutError(
                    f"rank {self._rank} waited {self._timeout_s:g} s for the number of tokens of rank {late}. "
                    f"Call dispatch in the same way on all ranks, with topk_idx or without.",
                    rank=self._rank,
                    peer=late,
                    phase="the number of tokens",
                )
        self._call += 1
        return found & 0xFFFFFFFF

    def close(self, in_touch: bool) -> None:
        """Do nothing: the memory goes with the last process that maps it."""


def _make_file(num_bytes: int, at_end: ExitStack) -> str:
    """Make a new file, which `at_end` removes. It lies in memory if /dev/shm is writable."""
    number, path = tempfile.mkstemp(prefix=_PREFIX, dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    at_end.callback(os.unlink, path)
    at_end.callback(os.close, number)
    os.ftruncate(number, num_bytes)
    return path


def _open_file(path: str, num_bytes: int) -> BinaryIO:
    """Open the file that rank 0 made. Refuse any other path, because others may write to the store that brought it."""
    file = Path(path)
    if not file.name.startswith(_PREFIX) or file.is_symlink() or file.stat().st_size != num_bytes:
        raise OSError(f"path={path!r}; expected a file of {num_bytes} bytes that rank 0 made")
    return file.open("r+b")


class MessageCounts:
    """The numbers of each rank for the current call, exchanged when the ranks read them. It has the methods of `SharedCounts`.

    The ranks read after the call. A rank whose arguments were wrong has then made no call and sends no message, so its next call meets the
    same call of the other ranks.

    No other messages may use `comm`, and `close` frees it.
    """

    def __init__(self, comm: Communicator, timeout_s: float) -> None:
        self._comm, self._timeout_s = comm, timeout_s
        self._numbers: Sequence[int] = ()
        self._error: EPTimeoutError | None = None

    def post(self, numbers: Sequence[int]) -> None:
        """Set this rank's numbers for the current call. The rank may set them again until it reads."""
        self._numbers = numbers

    def read(self, count: int) -> np.ndarray:
        """Return the first `count` numbers of all ranks, as `SharedCounts.read` does, and end the current call.

        Raise EPTimeoutError if a rank did not come. Every later call raises it too, because a late rank would meet the wrong messages.
        """
        if self._error is not None:
            raise self._error
        mine, found = np.array(self._numbers[:count], np.int64), np.zeros((self._comm.Get_size(), count), np.int64)
        hint = "all ranks to call dispatch in the same way, with topk_idx or without"
        try:
            self._comm.finish(self._comm.Iallgather(mine, found), "the number of tokens", hint, self._timeout_s)
        except EPTimeoutError as error:
            self._error = error
            raise
        return found

    def close(self, in_touch: bool) -> None:
        """Free the communicator. Collective, if `in_touch` says that all ranks are alive."""
        (self._comm.Free if in_touch and self._error is None else self._comm.abandon)()


class _BuffersByShape:
    """Buffers, one for each `Shape`, and those that a larger one has replaced."""

    def __init__(self) -> None:
        self._current: dict[Shape, Buffer] = {}
        self._outgrown: list[Buffer] = []  # the program may still hold their handles and results

    @property
    def living(self) -> list[Buffer]:
        """All Buffers."""
        return [*self._outgrown, *self._current.values()]

    def check(self) -> None:
        """Raise the error that the next call would raise."""
        for buffer in self.living:
            buffer.check()


class NormalBuffers(_BuffersByShape):
    """Buffers of the normal mode, one for each `Shape`. `num_bytes` is the memory that one may take before a call needs more."""

    def __init__(
        self, comm: Communicator, num_bytes: int, num_slots: int, ranks_per_node: int, network: NetworkOptions | None = None
    ) -> None:
        super().__init__()
        self._comm, self._num_bytes, self._num_slots, self._timeout_s = comm, num_bytes, num_slots, _env.timeout_s()
        self._network, self._ranks_per_node = network, ranks_per_node
        self._is_one_node = ranks_per_node == comm.Get_size()
        met = creation_comm(comm, self._timeout_s)
        self._counts: SharedCounts | MessageCounts = (
            SharedCounts(met, self._timeout_s) if self._is_one_node else MessageCounts(met.Dup(), self._timeout_s)
        )
        met.release()

    def shape_for_ranks(self, hidden: int, dtype: str, backend: str) -> Shape:
        """Return a shape for tokens that name ranks and no experts: an existing one, or one with an expert for each rank."""
        num_ranks = self._comm.Get_size()
        num_topk = min(num_ranks, MAX_TOPK)
        for shape in self._current:
            if (shape.hidden, shape.dtype, shape.backend) == (hidden, dtype, backend) and shape.num_topk >= num_topk:
                return shape
        return Shape(hidden, num_topk, num_ranks, dtype, backend)

    def dispatch(
        self,
        shape: Shape,
        num_tokens: int,
        counts: Sequence[int],
        send: Callable[[Buffer, bool], DispatchResult],
    ) -> tuple[Buffer, DispatchResult, np.ndarray]:
        """Make a call whose counts the host waits for, in a Buffer that takes the tokens of all ranks.

        `counts` are more numbers for the other ranks, which the call returns of all ranks. `send` makes the call, with this rank's tokens
        (True) or without them (False).
        """
        buffer = self.buffer_for(shape, num_tokens, 0)
        while True:
            config, problem = buffer.config, None
            mine = [num_tokens, 0, *counts]
            self._counts.post(mine)
            try:
                sent = send(buffer, num_tokens <= config.num_max_tokens_per_rank)
            except EPError as error:
                if isinstance(error, EPOutOfMemoryError) and error.num_recv_tokens:
                    mine[1] = error.num_recv_tokens
                    self._counts.post(mine)  # between nodes, the numbers travel after the call
                elif not error.call_made:
                    raise
                problem = error  # the other ranks have made the call, so this rank has to count it too
            posted = self._counts.read(len(mine))
            most_tokens, most_rows = posted[:, :2].max(axis=0).tolist()
            if most_tokens <= config.num_max_tokens_per_rank and most_rows <= config.num_max_recv_tokens:
                if problem is None:
                    return buffer, sent, posted[:, 2:]
                try:
                    raise problem
                finally:
                    del problem  # its traceback holds this frame, and with it the arguments of the call
            if most_rows > config.num_max_recv_tokens:
                _take_late_report(buffer)
            with self._elsewhere(shape, f"a rank has {most_tokens} tokens"):
                buffer = self._make(shape, max(most_tokens, config.num_max_tokens_per_rank), most_rows)

    def buffer_for(self, shape: Shape, num_tokens: int, min_rows: int) -> Buffer:
        """Return the Buffer of a shape, or make one that takes these tokens of this rank. All ranks give the same `min_rows`."""
        buffer, min_tokens = self._current.get(shape), -(-min_rows // self._comm.Get_size())
        if buffer is None:
            hint = "all ranks to call dispatch, with the same hidden, number of experts and top-k"
            with self._elsewhere(shape, "no earlier call was of this kind"):
                tokens = timed_allgather(self._comm, (num_tokens,), self._timeout_s, "the first dispatch of its kind", hint)
                most_tokens = max(*(number for (number,) in tokens), min_tokens, self._initial_tokens(shape))
                return self._make(shape, most_tokens, min_rows)
        config = buffer.config
        if min_tokens <= config.num_max_tokens_per_rank and min_rows <= config.num_max_recv_tokens:
            return buffer
        with self._elsewhere(shape, f"num_worst_tokens={min_rows}, and this Buffer is for {config.num_max_recv_tokens}"):
            return self._make(shape, max(min_tokens, config.num_max_tokens_per_rank), min_rows)

    @contextmanager
    def _elsewhere(self, shape: Shape, why: str) -> Iterator[None]:
        """Make a Buffer in the block. Peers that make a call of another one hear of it, and this rank hears if they leave."""
        given = ", ".join(f"{name}={value}" for name, value in asdict(shape).items())
        notes = [(buffer, f"it makes a larger or another Buffer for its dispatch with {given} ({why})") for buffer in self.living]
        with making_instead(self._comm, notes):
            yield

    def destroy(self, in_touch: bool) -> None:
        """Destroy all Buffers. Collective. `in_touch`: whether all ranks are known to be alive."""
        with ExitStack() as stack:
            stack.callback(self._counts.close, in_touch)
            for buffer in self.living:
                stack.callback(buffer.destroy, in_touch)

    def _make(self, shape: Shape, num_tokens: int, num_rows: int) -> Buffer:
        """Make a Buffer that takes `num_tokens` tokens of a rank and brings `num_rows` rows to a rank."""
        check_not_capturing(shape.backend)
        settings: dict[str, Any] = {"num_max_tokens_per_rank": _rounded_up(num_tokens), "num_slots": self._num_slots}
        if not self._is_one_node:
            settings |= {"ranks_per_node": self._ranks_per_node, "network": self._network}
            settings["num_max_recv_tokens"] = self._most_rows(shape, settings["num_max_tokens_per_rank"], num_rows)
        made = Buffer(self._comm, **settings, **asdict(shape))
        if shape in self._current:
            self._outgrown.append(self._current[shape])
        self._current[shape] = made
        return made

    def _most_rows(self, shape: Shape, num_tokens: int, num_rows: int) -> int:
        """Return the rows that a Buffer may bring to a rank: twice those that a rank sends, or more if calls have needed more."""
        num_ranks, needed = self._comm.Get_size(), [_rounded_up(num_rows)]
        if shape in self._current:
            needed.append(self._current[shape].config.num_max_recv_tokens)
        return min(max(2 * num_tokens * min(shape.num_topk, num_ranks), *needed), num_tokens * num_ranks)

    def _initial_tokens(self, shape: Shape) -> int:
        """Return a number of tokens for which `num_bytes` are enough."""
        tokens, sizes = _MIN_TOKENS, (shape.hidden, shape.num_topk, shape.num_experts, shape.dtype, self._num_slots)
        num_ranks, node = self._comm.Get_size(), self._ranks_per_node
        while tokens < _MAX_INITIAL_TOKENS and normal_bytes(num_ranks, 2 * tokens, *sizes, node) <= self._num_bytes:
            tokens *= 2
        return tokens


class LowLatencyBuffers(_BuffersByShape):
    """Buffers of the low-latency mode. Every call names all sizes, and the largest Buffer of them serves calls for fewer tokens.

    `num_bytes` is the memory that the program has asked for. A new Buffer takes as many tokens as fit in it, as `low_latency_bytes` counts.
    """

    def __init__(self, comm: Communicator, num_bytes: int, **settings: Any) -> None:
        super().__init__()
        self._comm, self._num_bytes, self._settings = comm, num_bytes, settings
        self._masked: set[int] = set()  # by `set_mask`

    def buffer_for(self, num_tokens: int, hidden: int, num_topk: int, num_experts: int, backend: str) -> Buffer:
        """Return a Buffer for calls of these sizes, or make one. It may take more tokens, and more experts of a token."""
        shape = Shape(hidden, num_topk, num_experts, "bfloat16", backend)
        for other, buffer in sorted(self._current.items(), key=lambda item: item[0].num_topk):
            is_enough = other.num_topk >= num_topk and buffer.config.num_max_tokens_per_rank >= num_tokens
            if is_enough and replace(other, num_topk=num_topk) == shape:
                return buffer
        check_not_capturing(backend)
        sizes = num_tokens, hidden, num_topk, num_experts, backend
        text = "it makes a Buffer for its low_latency_dispatch, which has "
        notes = [(other, text + _differences(sizes, _sizes_of(other))) for other in self.living]
        old = self._current.get(shape)
        with making_instead(self._comm, notes):
            buffer = self._make(shape, self._room(num_tokens, hidden, num_topk, num_experts, old is not None))
        if old is not None:
            self._outgrown.append(old)
        self._current[shape] = buffer
        for rank in self._masked:
            buffer.mask_rank(rank)
        return buffer

    def _room(self, num_tokens: int, hidden: int, num_topk: int, num_experts: int, grows: bool) -> int:
        """Return the tokens of a rank for which a new Buffer has room. Where it `grows`, it rarely grows again."""

        def fits(tokens: int) -> bool:
            try:
                num_bytes = low_latency_bytes(tokens, hidden, self._comm.Get_size(), num_experts, max(num_topk, USUAL_TOPK))
            except EPConfigError:  # no Buffer has room for so many
                return False
            return tokens <= least or num_bytes <= self._num_bytes

        least = 1 << (num_tokens - 1).bit_length() if grows else num_tokens
        if not fits(least):
            return num_tokens
        low, high = least, 2 * least
        while fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _make(self, shape: Shape, num_tokens: int) -> Buffer:
        sizes = {**asdict(shape), "num_max_tokens_per_rank": num_tokens}
        try:
            return Buffer(self._comm, **sizes, low_latency=True, **self._settings)
        except EPConfigError as error:  # it names the arguments of that class
            raise EPConfigError(str(error).replace("num_max_tokens_per_rank", "num_max_dispatch_tokens_per_rank")) from error

    def find_silent_ranks(self, num_tokens: int, hidden: int, num_experts: int) -> None:
        """Make a call without tokens on each Buffer for calls of these sizes. Such a call waits for all ranks."""
        for buffer in self.living:
            most, width, num_topk, experts, backend = _sizes_of(buffer)
            if (width, experts) == (hidden, num_experts) and most >= num_tokens:
                device = "cuda" if backend == "cuda" else "cpu"
                x = torch.empty((0, hidden), dtype=torch.bfloat16, device=device)
                idx = torch.empty((0, num_topk), dtype=torch.int64, device=device)
                buffer.low_latency_dispatch(x, idx, use_fp8=False)  # any hidden size, and GPUs without FP8, too

    def set_mask(self, rank: int, masked: bool) -> None:
        """Exclude a rank from the calls, or include it again."""
        rank = whole_number(rank, "rank_to_mask", 0, self._comm.Get_size() - 1)
        if rank == self._comm.Get_rank():
            raise argument_error(rank, "rank_to_mask", "a rank of the group other than this one", "Pass another rank.")
        masked = flag(masked, "mask")
        (self._masked.add if masked else self._masked.discard)(rank)
        for buffer in self.living:
            if masked != (rank in buffer.query_masked_ranks()):
                (buffer.mask_rank if masked else buffer.unmask_rank)(rank)

    def masked_ranks(self) -> list[int]:
        """List the ranks that calls exclude, ascending."""
        return sorted(self._masked.union(*(buffer.query_masked_ranks() for buffer in self.living)))

    def destroy(self) -> None:
        """Destroy all Buffers. Collective."""
        with ExitStack() as stack:
            for buffer in self.living:
                stack.callback(buffer.destroy)


class ElasticBuffers(_BuffersByShape):
    """The `deepep_rt.Buffer`s of one ElasticBuffer, one for each Shape. All ranks name the same sizes, so they make them together."""

    def __init__(self, comm: Communicator, **settings: Any) -> None:
        super().__init__()
        self._comm, self._settings = comm, settings
        self._usual_sms: dict[Buffer, int] = {}

    def buffer_for(self, shape: Shape, num_tokens: int, num_rows: int, num_sms: int) -> Buffer:
        """Return the Buffer of a shape for so many tokens of a rank, and rows that it receives, or make one. It uses `num_sms`, or with 0
        the SMs of a new Buffer.
        """
        buffer = self._current.get(shape)
        if (
            buffer is None
            or num_tokens > (config := buffer.config).num_max_tokens_per_rank
            or num_rows > config.num_max_recv_tokens
        ):
            buffer = self._make(shape, num_tokens, num_rows, buffer)
        self.use_sms(buffer, num_sms)
        return buffer

    def use_sms(self, buffer: Buffer, num_sms: int) -> None:
        """Set the SMs of the next call."""
        if (num_sms := num_sms or self._usual_sms[buffer]) != buffer.num_sms:
            buffer.num_sms = num_sms

    def _make(self, shape: Shape, num_tokens: int, num_rows: int, old: Buffer | None) -> Buffer:
        check_not_capturing(shape.backend)
        settings: dict[str, Any] = self._settings
        if old is not None:
            num_tokens, num_rows = (
                max(num_tokens, old.config.num_max_tokens_per_rank),
                max(num_rows, old.config.num_max_recv_tokens),
            )
        if num_rows and "ranks_per_node" in settings:
            settings = settings | {"num_max_recv_tokens": min(num_rows, num_tokens * self._comm.Get_size())}
        given = ", ".join(f"{name}={value}" for name, value in asdict(shape).items())
        text = f"it makes a Buffer for {num_tokens} tokens of a rank with {given}"
        with making_instead(self._comm, [(buffer, text) for buffer in self.living]):
            made = Buffer(self._comm, num_max_tokens_per_rank=num_tokens, **settings, **asdict(shape))
        if old is not None:
            self._outgrown.append(old)
        self._current[shape], self._usual_sms[made] = made, made.num_sms
        return made

    def destroy(self) -> None:
        """Destroy all Buffers. Collective."""
        with ExitStack() as stack:
            for buffer in self.living:
                stack.callback(buffer.destroy)


def _sizes_of(buffer: Buffer) -> tuple[Any, ...]:
    """Return the sizes of calls for which a Buffer was made."""
    config = buffer.config
    return config.num_max_tokens_per_rank, config.hidden, config.num_topk, config.num_experts, buffer.backend


def _differences(mine: tuple[Any, ...], theirs: tuple[Any, ...]) -> str:
    """Return in which sizes a call differs from those of a Buffer."""
    names = ("num_max_dispatch_tokens_per_rank", "hidden", "the top-k of topk_idx", "num_experts", "backend")
    pairs = zip(names, mine, theirs, strict=True)
    return " and ".join(f"{name}={given!r}, and {of!r} in this call" for name, given, of in pairs if given != of)


@contextmanager
def making_instead(comm: Communicator, notes: Iterable[tuple[Buffer, str]]) -> Iterator[None]:
    """Make a Buffer in the block, where all ranks have to make it.

    A peer that makes a call of an existing Buffer instead would wait for this rank, and this rank for that peer. So it reads a note and
    raises. This rank then raises too, because that peer leaves. `notes` are the existing Buffers, each with what such a peer reads.

    Waits on `comm` and on what is made of it hear of peers that leave.
    """
    notices, outer = [], comm.heard
    for buffer, text in notes:
        if (notice := notice_of(buffer)) is not None:
            notices.append(notice)
            notice.go_elsewhere("the making of a Buffer", text)

    def heard() -> EPPeerError | None:
        errors = (notice.heard("the making of a Buffer") for notice in notices)
        return next((error for error in errors if error is not None), outer() if outer is not None else None)

    comm.heard = heard
    try:
        yield
    finally:
        comm.heard = outer
        for notice in notices:
            notice.come_back()


def check_not_capturing(backend: str) -> None:
    """Raise EPInputError during the capture of a CUDA graph, in which no Buffer can be made."""
    if backend == "cuda" and torch.cuda.is_current_stream_capturing():
        raise EPInputError(
            "a CUDA graph is being captured; expected an earlier call of these sizes outside of a capture. "
            "Make one before the capture."
        )


def _take_late_report(buffer: Buffer) -> None:
    """Take the report about rows that do not fit. GPUs of other ranks make it after the call, and a later call would raise it."""
    try:
        buffer.synchronize()
    except EPOutOfMemoryError as error:
        if not error.num_recv_tokens:
            raise


def _rounded_up(num_tokens: int) -> int:
    """Return the next power of two, so that a Buffer rarely grows."""
    return max(_MIN_TOKENS, 1 << (num_tokens - 1).bit_length())
