"""The Buffers behind a Buffer of DeepEP V1, which learns its sizes from its calls: made when a call needs them, and grown.

Hidden size, top-k and experts of a call are the same on all ranks, so all ranks see at the same call that a Buffer has to be made. The
number of tokens differs between ranks. Each rank therefore writes it to memory that all ranks of the host can read (`Board`), before it
starts a call whose routing is new. A rank with more tokens than the Buffer takes goes through that call without tokens. The host waits in
such a call for the counts of all ranks anyway; then all ranks read the board, see whether somebody had too many, and if so make a larger
Buffer and do the call again. In between there is no message.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from .. import _env
from .._checks import argument_error, flag, whole_number
from ..buffer import Buffer
from ..comm.communicator import Communicator
from ..comm.rendezvous import private_comm, timed_allgather
from ..errors import EPError, EPInputError, EPTimeoutError, EPUnavailableError
from ..results import DispatchResult
from .config import nvl_bytes

_PREFIX = "deepep_rt-"  # of the file that a board lies in
_LEAST_TOKENS = 128  # of a Buffer for the normal mode: fewer would save little
_MOST_TOKENS_AHEAD = 8192  # that room is made for before a call needs it
_MOST_WORDS = 1 + (1 << 13)  # of a rank on the board: its number of tokens, and a count for each expert


class Board:
    """Memory in which each rank of a host leaves numbers for the others. Collective to make; given back with the last reference.

    A number stands beside the number of the call that it belongs to, in one word, so that a reader knows whether it has come. There are
    two sides, by turns: a rank that writes for the next call but one has seen all ranks start the next call, after they have read this one.

    Args:
        comm: The ranks, all of one host.
        timeout_s: How long to wait for a rank's numbers.

    Raises:
        EPUnavailableError: on every rank, if they have no memory in common.
    """

    def __init__(self, comm: Communicator, timeout_s: float) -> None:
        self._rank, self._timeout_s, self._call = comm.Get_rank(), timeout_s, 1
        shape = (2, comm.Get_size(), _MOST_WORDS)
        num_bytes = 8 * int(np.prod(shape))
        file, memory, problem = None, None, None
        try:
            file = _shared_file(num_bytes) if self._rank == 0 else None
        except OSError as error:
            problem = f"rank {self._rank}: {error}"
        path = comm.bcast(None if file is None else str(file))
        try:
            if path is not None:
                with _opened(path, num_bytes) as opened:
                    memory = mmap.mmap(opened.fileno(), num_bytes)
        except OSError as error:
            problem = f"rank {self._rank}: {error}"
        problems = [said for said in comm.allgather(problem) if said]
        if file is not None:
            file.unlink()
        if problems or memory is None:
            raise EPUnavailableError(f"the ranks of this host share no memory ({problems[0]}); start them in one container")
        self._words = np.frombuffer(memory, np.int64).reshape(shape)

    def post(self, numbers: Sequence[int]) -> None:
        """Leave this rank's numbers of the call at hand, 0 to 2**31 - 1 each. They may be corrected until all ranks have started it."""
        self._words[self._call % 2, self._rank, : len(numbers)] = np.asarray(numbers, np.int64) | self._call << 32

    def read(self, count: int) -> np.ndarray:
        """The first `count` numbers of all ranks, `[num_ranks, count]`; the call is over then."""
        words = self._words[self._call % 2, :, :count]
        deadline = time.monotonic() + self._timeout_s
        while not ((held := words.copy()) >> 32 == self._call).all():
            if time.monotonic() > deadline:
                late = int((held >> 32 != self._call).any(axis=1).argmax())
                raise EPTimeoutError(
                    f"rank {self._rank} waited {self._timeout_s:g} s for the number of tokens of rank {late}: all ranks have to call "
                    f"dispatch in the same way, with topk_idx or without",
                    rank=self._rank,
                    peer=late,
                    phase="the number of tokens",
                )
        self._call += 1
        return held & 0xFFFFFFFF


def _shared_file(num_bytes: int) -> Path:
    """A new file, in memory if there is a folder for that."""
    number, path = tempfile.mkstemp(prefix=_PREFIX, dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    os.ftruncate(number, num_bytes)
    os.close(number)
    return Path(path)


def _opened(path: str, num_bytes: int) -> BinaryIO:
    """Open the file that another rank made, and no other one: its name came over a store that others may write to."""
    file = Path(path)
    if not file.name.startswith(_PREFIX) or file.is_symlink() or file.stat().st_size != num_bytes:
        raise OSError(f"{path!r} is no memory of ours")
    return file.open("r+b")


@dataclass(frozen=True)
class Shape:
    """What all ranks know of a call of the normal mode."""

    hidden: int
    num_topk: int
    num_experts: int
    dtype: str
    backend: str


class NormalBuffers:
    """Buffers of the normal mode, by shape.

    Args:
        comm: The ranks, all of one host.
        num_bytes: Memory that a Buffer may take before a call needs more (`num_nvl_bytes`).
        num_slots: Of each Buffer.
    """

    def __init__(self, comm: Communicator, num_bytes: int, num_slots: int) -> None:
        self._comm, self._num_bytes, self._num_slots, self._timeout_s = comm, num_bytes, num_slots, _env.timeout_s()
        self._board = Board(comm, self._timeout_s)
        self._meetings = private_comm(comm, self._timeout_s, "the making of a Buffer", "all ranks to make it at the same time")
        self._current: dict[Shape, Buffer] = {}
        self._outgrown: list[Buffer] = []  # handles and results of theirs may be held

    def shape_for_ranks(self, hidden: int, dtype: str, backend: str) -> Shape:
        """A shape for tokens that name ranks and no experts: one that is there, or one of its own, with an expert for each rank."""
        num_ranks = self._comm.Get_size()
        for shape in self._current:
            if (shape.hidden, shape.dtype, shape.backend) == (hidden, dtype, backend) and shape.num_topk >= num_ranks:
                return shape
        return Shape(hidden, num_ranks, num_ranks, dtype, backend)

    def dispatch(
        self,
        shape: Shape,
        num_tokens: int,
        counts: Sequence[int],
        send: Callable[[Buffer, bool], DispatchResult],
    ) -> tuple[Buffer, DispatchResult, np.ndarray]:
        """Do a call whose counts the host waits for, in a Buffer that takes the tokens of all ranks.

        Args:
            shape: Of the call.
            num_tokens: Of this rank.
            counts: More numbers for the other ranks to know.
            send: Does the call; False: without tokens.

        Returns:
            The Buffer, the result, and the counts of all ranks.
        """
        buffer = self.take(shape, num_tokens, 1)
        while True:
            self._board.post([num_tokens, *counts])
            problem = None
            try:
                sent = send(buffer, num_tokens <= buffer.config.num_max_tokens_per_rank)
            except EPError as error:
                if not error.call_made:
                    raise
                problem = error  # the other ranks go on, and this one with them
            said = self._board.read(1 + len(counts))
            if said[:, 0].max() <= buffer.config.num_max_tokens_per_rank:
                if problem is None:
                    return buffer, sent, said[:, 1:]
                try:
                    raise problem
                finally:
                    del problem  # its traceback holds this frame, and with it the arguments of the call
            buffer = self._make(shape, int(said[:, 0].max()))

    def take(self, shape: Shape, num_tokens: int, least: int) -> Buffer:
        """The Buffer of a shape, for at least `least` tokens a rank, a number that all ranks know. A new one takes `num_tokens` too."""
        buffer = self._current.get(shape)
        if buffer is None:
            hint = "all ranks to call dispatch, with the same hidden, number of experts and top-k"
            tokens = timed_allgather(self._meetings, (num_tokens,), self._timeout_s, "the first dispatch of its kind", hint)
            return self._make(shape, max(*(most for (most,) in tokens), least, self._tokens_ahead(shape)))
        return buffer if least <= buffer.config.num_max_tokens_per_rank else self._make(shape, least)

    def check(self) -> None:
        """Raise what the next call would raise."""
        for buffer in [*self._outgrown, *self._current.values()]:
            buffer.check()

    def destroy(self, in_touch: bool) -> None:
        """Collective. `in_touch`: whether all ranks are known to be there."""
        with ExitStack() as rest:
            for buffer in [*self._outgrown, *self._current.values()]:
                rest.callback(buffer.destroy, in_touch)

    def _make(self, shape: Shape, num_tokens: int) -> Buffer:
        check_not_capturing(shape.backend)
        made = Buffer(self._comm, num_max_tokens_per_rank=_rounded(num_tokens), num_slots=self._num_slots, **asdict(shape))
        if shape in self._current:
            self._outgrown.append(self._current[shape])
        self._current[shape] = made
        return made

    def _tokens_ahead(self, shape: Shape) -> int:
        """Tokens for which `num_bytes` are enough."""
        tokens, sizes = _LEAST_TOKENS, (shape.hidden, shape.num_topk, shape.num_experts, shape.dtype, self._num_slots)
        while tokens < _MOST_TOKENS_AHEAD and nvl_bytes(self._comm.Get_size(), 2 * tokens, *sizes) <= self._num_bytes:
            tokens *= 2
        return tokens


class LowLatencyBuffers:
    """Buffers of the low-latency mode, by their sizes, which every call names.

    Args:
        comm: The ranks.
        settings: Of every Buffer.
    """

    def __init__(self, comm: Communicator, **settings: Any) -> None:
        self._comm, self._settings = comm, settings
        self._buffers: dict[tuple[int, int, int, int, str], Buffer] = {}
        self._masked: set[int] = set()  # by hand

    def take(self, num_tokens: int, hidden: int, num_topk: int, num_experts: int, backend: str) -> Buffer:
        """A Buffer for calls of these sizes, perhaps one that takes more experts a token: some of them are none then."""
        key = (num_tokens, hidden, num_topk, num_experts, backend)
        buffer = self._buffers.get(key) or self._for_more_choices(*key)
        if buffer is None:
            check_not_capturing(backend)
            buffer = self._buffers[key] = Buffer(
                self._comm,
                num_max_tokens_per_rank=num_tokens,
                hidden=hidden,
                num_topk=num_topk,
                num_experts=num_experts,
                backend=backend,
                low_latency=True,
                **self._settings,
            )
            for rank in self._masked:
                buffer.mask_rank(rank)
        return buffer

    def _for_more_choices(self, num_tokens: int, hidden: int, num_topk: int, num_experts: int, backend: str) -> Buffer | None:
        for (tokens, width, most, experts, where), buffer in self._buffers.items():
            if (tokens, width, experts, where) == (num_tokens, hidden, num_experts, backend) and most > num_topk:
                return buffer
        return None

    def find_silent_ranks(self, num_tokens: int, hidden: int, num_experts: int) -> None:
        """A call without tokens on each Buffer for calls of these sizes: it waits for all ranks."""
        for (tokens, *sizes, backend), buffer in self._buffers.items():
            if (tokens, sizes[0], sizes[2]) == (num_tokens, hidden, num_experts):
                device = "cuda" if backend == "cuda" else "cpu"
                x = torch.empty((0, hidden), dtype=torch.bfloat16, device=device)
                buffer.low_latency_dispatch(x, torch.empty((0, sizes[1]), dtype=torch.int64, device=device))

    def set_mask(self, rank: int, masked: bool) -> None:
        """Leave a rank out of the calls, or let it take part again."""
        rank = whole_number(rank, "rank_to_mask", 0, self._comm.Get_size() - 1)
        if rank == self._comm.Get_rank():
            raise argument_error(rank, "rank_to_mask", "a rank of the group other than this one", "Pass another rank.")
        masked = flag(masked, "mask")
        (self._masked.add if masked else self._masked.discard)(rank)
        for buffer in self._buffers.values():
            if masked != (rank in buffer.query_masked_ranks()):
                (buffer.mask_rank if masked else buffer.unmask_rank)(rank)

    def masked_ranks(self) -> list[int]:
        """The ranks that calls leave out."""
        return sorted(self._masked.union(*(buffer.query_masked_ranks() for buffer in self._buffers.values())))

    def check(self) -> None:
        """Raise what the next call would raise."""
        for buffer in self._buffers.values():
            buffer.check()

    def destroy(self) -> None:
        """Collective."""
        with ExitStack() as rest:
            for buffer in self._buffers.values():
                rest.callback(buffer.destroy)


def check_not_capturing(backend: str) -> None:
    """Raise EPInputError while a CUDA graph is captured: no Buffer can be made then."""
    if backend == "cuda" and torch.cuda.is_current_stream_capturing():
        raise EPInputError(
            "a CUDA graph is being captured, and a call of these sizes was never made before; make one before the capture"
        )


def _rounded(num_tokens: int) -> int:
    """The next power of two: a Buffer that grows does not grow often."""
    return max(_LEAST_TOKENS, 1 << (num_tokens - 1).bit_length())
