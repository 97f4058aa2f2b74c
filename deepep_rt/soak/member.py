"""The process of one rank of `soak --kill`. `kill` starts it, and tells it over standard input when to join, leave, wake and end.

It prints an event as a line of JSON after each change of the members, once a whole round with the new members was right. Every round begins
with a dispatch in which all members tell each other their next round, because a loss may reach them a round apart.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

import numpy as np

from ..buffer import Buffer
from ..comm.store import StoreCommunicator
from ..comm.store_client import StoreClient
from ..errors import EPError, EPEvictedError, EPTimeoutError
from .arrays import Arrays
from .buffers import Options, buffer_of
from .check import Checker
from .graph import Graph, OldRouting
from .plan import round_of
from .rounds import run_round
from .session import Session, Times

JOIN, LEAVE, WAKE, END = "join", "leave", "wake", "end"
"""What `kill` tells a member."""
READY, LEFT, WENT_ON, EVICTED, MISMATCH, FAILED, DONE = "ready", "left", "went on", "evicted", "mismatch", "failed", "done"
"""What a member tells."""

SHOWS_STACKS = signal.SIGUSR1
"""Lets a member print the stacks of its threads."""

ENDS, LEAVES = 1, 2  # bits of what members tell each other before a round
_ONE_BUFFER = 1 << 61  # rounds


@dataclass(frozen=True)
class Given:
    """What a member must know."""

    address: str  # of the store
    rank: int  # -1: it joins
    ranks: int  # in the first generation
    slots: int
    backend: str
    timeout_s: float
    seed: int
    sizes: dict[str, int]


def options_of(given: Given) -> Options:
    """Return what the plans of a run depend on. One Buffer serves all rounds."""
    sizes: dict[str, Any] = given.sizes
    return Options(
        seed=given.seed,
        num_ranks=given.slots,
        on_gpu=given.backend == "cuda",
        has_slots=True,
        rounds_per_buffer=_ONE_BUFFER,
        sleep_every=_ONE_BUFFER,  # a rank that is lost while others wake up would keep them asleep
        **sizes,
    )


class Stopped(Exception):
    """This process ends in the middle of its rounds: the others end while it sleeps, or it has found a difference."""


class Member:
    """One process. `out` takes its events."""

    def __init__(self, given: Given, commands: IO[str], out: IO[str]) -> None:
        self.given, self._out = given, out
        self._commands: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, args=(commands,), daemon=True, name="deepep_rt soak commands").start()
        self.options = options_of(given)
        self.plan = buffer_of(self.options, 0)
        self.next_round = self.num_rounds = 0
        self._is_leaving = self._is_ending = False
        self._is_new = True  # the members have changed since the last whole round
        self._changes: list[dict[str, Any]] = []
        self._held: dict[int, int] = {}  # descriptors and threads, by the number of members
        self._old_routing: OldRouting | None = None
        self._making: int | None = None  # the round that is not whole
        self.activity = "the start"

    def run(self) -> None:
        """Make rounds until the parent ends the run, or the other members leave this one out."""
        self.buffer = self._enter()  # it chooses the GPU
        arrays = Arrays(self.options.on_gpu)
        if self.options.on_gpu:
            self.options = replace(self.options, has_fp8=_has_fp8())
        with arrays.main_stream():
            self.check = Checker(arrays, self.buffer.rank)
            self.session = Session(
                self.options, self.plan, self.buffer, arrays, self.check, Times(), self.buffer.rank, lambda: None
            )
            self._tell(READY, rank=self.buffer.rank)
            with contextlib.suppress(Stopped):
                self._rounds()
            arrays.synchronize()
        if self.check.mismatches:
            return
        held = _num_held()
        more = 0 if self.buffer.is_asleep else held - self._held.get(len(self.buffer.members), held)
        self._tell(DONE, more=more, **self._figures())
        self.session.graph = self._old_routing = None
        self.buffer.destroy()

    # --- the members -------------------------------------------------------------------------------------------------------------

    def _enter(self) -> Buffer:
        """Make the Buffer with the first members, or join them when the parent says so."""
        given, settings = self.given, self.plan.settings()
        settings |= dict(
            max_ranks=given.slots, rendezvous=f"{given.address}/soak", backend=given.backend, timeout_s=given.timeout_s
        )
        if given.rank >= 0:
            host, port = given.address.rsplit(":", 1)
            comm = StoreCommunicator(StoreClient(host, int(port)), "start", given.rank, given.ranks)
            return Buffer(comm, **settings)
        while (words := self._next_command().split())[0] != JOIN:
            pass
        began = time.monotonic()
        buffer = Buffer.join(**settings, slot=int(words[1]) if len(words) > 1 else None)
        self._changes.append({"name": JOIN, "seconds": time.monotonic() - began})
        return buffer

    def _rounds(self) -> None:
        while True:
            try:
                if self._step():
                    return
                continue
            except EPTimeoutError:
                pass  # the frames of the exception hold results, which must be gone before others take their memory
            self._timed("shrink", self.buffer.shrink, is_change=True)
            if self._making is not None:
                self.session.drop(self._making)
                self._making = None

    def _step(self) -> bool:
        """Make a round, and let the members change if one of them says so. Return whether the run ends."""
        if self._is_new and self.plan.has_graph:
            self._renew_graphs()
        self._obey()
        number, told = self._agree()
        if told[self.buffer.rank] & LEAVES:
            self._leave()
        elif any(bits & LEAVES for bits in told.values()):
            self._timed("shrink", self.buffer.shrink, is_change=True)
        elif any(bits & ENDS for bits in told.values()):
            return True
        else:
            self._round(number)
            self._timed("admit", self.buffer.admit)  # last: a process that joins begins with the next round
        return False

    def _leave(self) -> None:
        """Leave the other members, and come back when the parent says so."""
        self.activity = "shrink"
        self.buffer.shrink([self.buffer.rank])
        self._is_leaving = False
        self._tell(LEFT, **self._figures())
        self.activity = "sleep"
        while (command := self._next_command()) != WAKE:
            if command == END:
                raise Stopped
        self._timed(WAKE, self.buffer.wake, is_change=True)

    def _timed(self, name: str, call: Any, is_change: bool = False) -> None:
        """Make a call that may change the members, and note how long it took if it did."""
        self.activity = name
        before, began = self.buffer.members, time.monotonic()
        call()
        if is_change or self.buffer.members != before:
            self._changes.append({"name": name, "seconds": time.monotonic() - began})
            self._is_new = True

    def _agree(self) -> tuple[int, dict[int, int]]:
        """Tell the other members the next round and the wishes of this one. Return the round to make, and the bits of each member.

        A member that misses a loss in this call makes the round, and hears of the loss there.
        """
        buffer, shape, arrays = self.buffer, self.plan.shape, self.session.arrays
        members = buffer.members
        row_bytes = shape.hidden * np.dtype(shape.dtype).itemsize
        words = np.zeros((len(members), row_bytes // 8), np.int64)
        words[:, 0], words[:, 1] = self.next_round, self._is_ending * ENDS + self._is_leaving * LEAVES
        idx = np.full((len(members), shape.topk), -1, np.int64)
        idx[:, 0] = np.array(members) * shape.local_experts
        self.activity = "the agreement on a round"
        x = arrays.typed(arrays.put(words.view(np.uint8)), shape.dtype, (len(members), shape.hidden))
        sent = buffer.dispatch(x, arrays.put(idx))
        buffer.synchronize()
        sources, rows = (_on_host(arrays.raw(array)) for array in (sent.recv_src_idx, sent.recv_x))
        sources, rows = sources.view(np.int32).reshape(-1, 2)[:, 0], rows.view(np.int64).reshape(-1, row_bytes // 8)
        if tuple(sources.tolist()) != members or rows[:, 2:].any():
            raise EPError(
                f"the agreement on a round brought rows of ranks {sources.tolist()}; expected one of each of {members}."
            )
        return int(rows[:, 0].max()), dict(zip(members, rows[:, 1].tolist(), strict=True))

    # --- rounds ------------------------------------------------------------------------------------------------------------------

    def _round(self, number: int) -> None:
        """Make a round, and check all of its results."""
        session, buffer, plan = self.session, self.buffer, round_of(self.options, number)
        self.next_round, self.check.now, self._making = number + 1, number, number
        session.arrays.delay(plan.delays_s[buffer.rank])
        self.activity = f"round {number}"
        run_round(session, plan)
        session.check_kept(number)
        buffer.synchronize()  # raises if a rank was lost: then the differences do not count
        session.settle()
        buffer.check()
        if self.check.mismatches:
            self._tell(MISMATCH, mismatches=[found.described() for found in self.check.mismatches], **self._figures())
            raise Stopped
        self.num_rounds, self._making = self.num_rounds + 1, None
        if self._is_new:
            self._is_new = False
            self._tell(WENT_ON, changes=self._changes, **self._figures())
            self._changes = []
        else:  # after a second round: the first one starts threads
            self._held.setdefault(len(buffer.members), _num_held())

    def _renew_graphs(self) -> None:
        """Make the calls that a new member makes before it captures its graph. A graph along a routing of before must notice that."""
        if self._old_routing is not None:
            self._old_routing.check(self.next_round)
            self._old_routing = None
        if self.session.graph is None:
            self.session.graph = Graph(self.session)
        else:
            self.session.graph.warm_up()
        self._old_routing = OldRouting(self.session)

    # --- the parent --------------------------------------------------------------------------------------------------------------

    def _figures(self) -> dict[str, Any]:
        return {
            "members": self.buffer.members,
            "round": self.next_round,
            "rounds": self.num_rounds,
            "checked_bytes": self.check.num_bytes,
        }

    def describe_activity(self) -> str:
        """Say what this process does, for errors."""
        session = getattr(self, "session", None)
        return self.activity + (f", {session.activity}" if session else "")

    def _tell(self, event: str, **facts: Any) -> None:
        print(json.dumps({"event": event, **facts}), file=self._out, flush=True)

    def fail(self, error: BaseException) -> None:
        """Tell the parent that a call has raised."""
        self._tell(FAILED, error=f"{self.describe_activity()}: {type(error).__name__}: {error}")

    def evicted(self) -> None:
        """Tell the parent that the other members have left this one out."""
        self._tell(EVICTED)

    def _read(self, commands: IO[str]) -> None:
        for line in commands:
            self._commands.put(line.strip())
        os._exit(1)  # the parent has ended, or needs this process no longer

    def _next_command(self) -> str:
        return self._commands.get()

    def _obey(self) -> None:
        """Note what the parent has said since the last round."""
        with contextlib.suppress(queue.Empty):
            while True:
                command = self._commands.get_nowait()
                self._is_leaving |= command == LEAVE
                self._is_ending |= command == END


def _has_fp8() -> bool:
    """Return whether the GPU of this process converts to FP8."""
    from ..jit import compiler
    from ..kernels.tuning import has_fp8

    return has_fp8(compiler.target_arch())


def _on_host(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.get()


def _num_held() -> int:
    """Count the descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")) + threading.active_count()


def main(words: Sequence[str]) -> int:
    """Run one process. `words` has what it is given, as JSON. Return the exit status."""
    faulthandler.enable()
    faulthandler.register(SHOWS_STACKS)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print is no event
    member = Member(Given(**json.loads(words[0])), sys.stdin, out)
    try:
        member.run()
    except EPEvictedError:
        member.evicted()
    except BaseException as error:
        member.fail(error)
        return 1
    return 0
