"""Bounded exchanges of messages between the ranks of the host backend."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from .errors import EPTimeoutError
from .structs import PHASES


class Mail:
    """Bounded exchanges of messages between all ranks. After a time-out it is broken for good."""

    def __init__(self, comm: MPI.Intracomm, timeout_s: float) -> None:
        self._comm, self._timeout_s = comm, timeout_s
        self._rank = comm.Get_rank()
        self._call_idx = 0
        self._failure: EPTimeoutError | None = None
        self._left_over: Any = None

    @property
    def is_broken(self) -> bool:
        return self._failure is not None

    def check(self) -> None:
        """Raise if an earlier call timed out."""
        if (first := self._failure) is not None:
            text = f"this Buffer is broken since an earlier call timed out; make a new one. The earlier error: {first}"
            raise EPTimeoutError(text, rank=first.rank, peer=first.peer, phase=first.phase, call_idx=first.call_idx)

    def start_call(self) -> None:
        self._call_idx += 1

    def exchange(
        self, outgoing: Sequence[Sequence[np.ndarray]], incoming: Sequence[Sequence[np.ndarray]], tag: int, phase: str
    ) -> None:
        """Send the arrays `outgoing[peer]` to each peer as one message, and fill `incoming[peer]` with its message."""
        peers: list[int] = []
        requests: list[MPI.Request] = []
        for post, parts_of in ((self._comm.Irecv, incoming), (self._comm.Isend, outgoing)):
            for peer, parts in enumerate(parts_of):
                if peer != self._rank and (message := _Message.of(parts)) is not None:
                    peers.append(peer)
                    requests.append(post(message.buffer, peer, tag))
                    message.datatype.Free()  # the pending request holds on to it
        try:
            self._wait(peers, requests, PHASES[phase][1])
        except BaseException:
            self._left_over = (outgoing, incoming, requests)  # MPI may still read or write there
            raise

    def _wait(self, peers: list[int], requests: list[MPI.Request], phase: str) -> None:
        deadline = time.monotonic() + self._timeout_s
        pause = 0.0
        while not MPI.Request.Testall(requests):
            if time.monotonic() > deadline:
                self._fail(peers, requests, phase)
            time.sleep(pause)  # ranks often share cores: polling without a pause would slow down the one that is waited for
            pause = min(pause + 2e-6, 2e-5)  # MPI moves large messages in pieces, and each may wait for a pause

    def _fail(self, peers: list[int], requests: list[MPI.Request], phase: str) -> None:
        silent = [(peer, request) for peer, request in zip(peers, requests, strict=True) if request and not request.Test()]
        if not silent:
            return  # the last message came just now
        for _, request in silent:
            request.Cancel()
            request.Free()
        first = silent[0][0]
        others = sorted({peer for peer, _ in silent} - {first})
        self._failure = EPTimeoutError(
            f"rank {self._rank} waited {self._timeout_s:g} s for rank {first}: {phase} did not come "
            f"(call {self._call_idx} of this rank{f'; ranks {others} were silent too' if others else ''}). "
            f"Check that all ranks make the same calls in the same order and that rank {first} is alive; "
            f"if it is only slow, raise timeout_s (DEEPEP_RT_TIMEOUT_S)",
            rank=self._rank,
            peer=first,
            phase=phase,
            call_idx=self._call_idx,
        )
        raise self._failure


@dataclass(frozen=True)
class _Message:
    """Several arrays as one MPI message, without packing them."""

    buffer: Any
    datatype: MPI.Datatype

    @staticmethod
    def of(parts: Sequence[np.ndarray]) -> _Message | None:
        """None if there is nothing to send."""
        blocks = [(part.nbytes, part.ctypes.data) for part in parts if part.nbytes]
        if not blocks:
            return None
        lengths, addresses = zip(*blocks, strict=True)
        datatype = MPI.BYTE.Create_hindexed(lengths, addresses).Commit()
        return _Message([MPI.BOTTOM, 1, datatype], datatype)
