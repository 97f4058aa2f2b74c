"""Run random rounds of both modes on all ranks, and check every byte.

`plan` draws each round from the seed. `throughput`, `low_latency` and `graph` make the calls. `expected` and `arrays` compute the
expected results, `check` compares, and `report` writes the report. The ranks follow the same plan without a message. Every few rounds
they synchronize. They stop together when the time is over, or when a rank has found a difference or was interrupted.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from .._checks import is_int_in_range
from ..bench.ranks import check_writable, fail_together, world
from ..buffer import Buffer
from ..comm.consensus import timed_allgather
from ..config import MAX_TIMEOUT_S, Config
from ..errors import EPConfigError, EPError
from .arrays import Arrays
from .buffers import Options, buffer_of
from .check import MOST_REPORTED, Checker, Mismatch
from .ending import Interruption, Watchdog
from .plan import round_of
from .report import command, mismatch, percentiles, with_commands, write
from .rounds import run_round
from .session import CALLS, Session, Times

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


_ROUNDS_BETWEEN_SYNCS = 16
_DEFAULT_MINUTES = 10.0
_COMPILING_S = 900.0  # additional limit for making a Buffer on GPUs


@dataclass(frozen=True)
class Asked:
    """The options of the command line. None: the default."""

    minutes: float | None = None
    rounds: int | None = None
    seed: int | None = None
    round: int | None = None
    since: int | None = None
    backend: str = "auto"
    json_file: Path | None = None
    groups: str = ""  # ranks of each group, such as "3,1". Empty: one group of all ranks
    sizes: dict[str, int | None] = field(default_factory=dict)
    timeout_s: float = 60.0
    progress_s: float = 10.0

    def check(self) -> None:
        """Check the values and their combination.

        Raise EPConfigError if a value is out of range, or two values contradict each other.
        """
        if self.minutes is not None and not 0 < self.minutes < MAX_TIMEOUT_S:
            raise EPConfigError(f"--minutes is {self.minutes:g}; expected a positive number. Pass one.")
        for name, least in (("rounds", 1), ("round", 0), ("since", 0)):
            value = getattr(self, name)
            if value is not None and not is_int_in_range(value, least, 1 << 62):
                raise EPConfigError(f"--{name} is {value}; expected a whole number from {least} on. Pass one.")
        if self.since is not None and (self.round is None or self.since > self.round):
            raise EPConfigError(f"--since is {self.since}; expected --round with a round from {self.since} on. Pass both.")
        if self.round is not None and self.seed is None:
            raise EPConfigError(f"--round is {self.round}; expected the --seed of the run that it repeats. Pass it too.")
        if self.backend not in ("auto", "cuda", "host"):
            raise EPConfigError(f"--backend is {self.backend!r}; expected auto, cuda or host. Choose one of these.")
        for name in ("timeout_s", "progress_s"):
            if not 0 < getattr(self, name) <= MAX_TIMEOUT_S:
                option = "--" + name.replace("_", "-")
                raise EPConfigError(f"{option} is {getattr(self, name):g}; expected a positive number of seconds. Pass one.")


def run(asked: Asked) -> dict[str, Any] | None:
    """Run on all ranks of the current mpirun. Rank 0 returns the report. Its "status" is "passed", "mismatch" or "interrupted".

    Raises:
        EPConfigError: if an option is wrong.
        EPUnavailableError: if MPI does not load, or if the backend is "cuda" and there is no GPU.
        EPError: if a call of a round raised. The message has the round and the command that repeats it.
    """
    with fail_together(world()) as comm:
        asked.check()
        if asked.groups:
            comm, asked = _in_groups(comm, asked)
        if asked.json_file:
            check_writable(comm, asked.json_file, "--json", is_file=True)
        return Run(comm, asked).run()


def _in_groups(comm: Intracomm, asked: Asked) -> tuple[Intracomm, Asked]:
    """Return the communicator of this rank's group, and the options of its run: a seed and a report of its own."""
    from ..backends.agreement import why_no_gpu
    from ..comm.convert import communicator_of

    sizes = [int(size) if size.isdecimal() else 0 for size in asked.groups.split(",")]
    if min(sizes) < 1 or sum(sizes) != comm.size:
        raise EPConfigError(
            f"--groups is {asked.groups!r}; expected numbers of ranks, separated by commas, that add up to {comm.size}. Pass such numbers."
        )
    if asked.backend != "host" and why_no_gpu() is None:
        from ..cuda import driver

        driver.use_device(communicator_of(comm).ranks_on_host().index(comm.rank))  # a group alone would begin with the first GPU
    number = next(number for number in range(len(sizes)) if comm.rank < sum(sizes[: number + 1]))
    path, seed = asked.json_file, asked.seed
    group = cast("Intracomm", comm.Split(number, comm.rank))
    path = path and path.with_name(f"{path.stem}-{number}{path.suffix}")
    return group, replace(asked, seed=None if seed is None else seed + number, json_file=path)


class Run:
    """The run of one rank."""

    def __init__(self, comm: Intracomm, asked: Asked) -> None:
        from ..comm.convert import communicator_of

        self.comm, self.asked, self.rank = comm, asked, comm.rank
        self.ranks = communicator_of(comm)
        self.backend, has_fp8 = self.choose_backend()
        has_fp8 = all(comm.allgather(has_fp8))  # all ranks draw the same plans
        seed = comm.bcast(int.from_bytes(os.urandom(4), "little") if asked.seed is None else asked.seed)
        sizes: dict[str, Any] = asked.sizes
        self.options = Options(seed=seed, num_ranks=comm.size, on_gpu=self.backend == "cuda", has_fp8=has_fp8, **sizes)
        last = asked.round
        self.first = (last if asked.since is None else asked.since) if last is not None else 0
        if last is None and asked.rounds is not None:
            last = asked.rounds - 1
        self.end = None if last is None else last + 1
        self.limit_s = 60 * (asked.minutes or _DEFAULT_MINUTES) if self.end is None or asked.minutes else None
        self.start = time.monotonic()
        self.arrays = Arrays(self.options.on_gpu)
        self.check = Checker(self.arrays, self.rank)
        self.times = Times()
        self.num_rounds = self.num_buffers = self.num_sleeps = self.num_replays = 0
        self.session: Session | None = None
        self.last_progress = self.start
        self.interruption = Interruption(prints=self.rank == 0)
        self.watchdog = Watchdog(comm, self._activity)

    def choose_backend(self) -> tuple[str, bool]:
        """Agree on the backend of all ranks. Return it, and whether it converts to FP8."""
        from ..backends.agreement import agree, creation_comm
        from ..bench.machine import Machine
        from ..jit import compiler
        from ..kernels.tuning import has_fp8

        config = Config(self.comm.size, 1, 512, 1, self.comm.size, timeout_s=self.asked.timeout_s)
        met = creation_comm(self.ranks, config.timeout_s)
        backend = agree(met, config, self.asked.backend, "copy")
        met.release()
        self.machine = Machine(self.comm, backend)
        return backend, backend == "host" or has_fp8(compiler.target_arch())

    def run(self) -> dict[str, Any] | None:
        """Run all rounds. Return the report on rank 0."""
        try:
            with self.arrays.main_stream(), self.interruption, self.watchdog:
                self._print_progress("started", force=True)
                self._buffers()
                return self._finish()
        except Exception as error:
            self._write(self._document("error", error=f"rank {self.rank}: {error}"))
            raise

    def _buffers(self) -> None:
        number, ended = self.first, False
        while not ended and number != self.end:
            plan = buffer_of(self.options, number // self.options.rounds_per_buffer)
            last = (plan.number + 1) * self.options.rounds_per_buffer
            last = last if self.end is None else min(last, self.end)
            self.watchdog.feed(self.asked.timeout_s + (_COMPILING_S if self.options.on_gpu else 0))
            settings = plan.settings()
            with Buffer(self.comm, backend=self.backend, timeout_s=self.asked.timeout_s, **settings) as buffer:
                self.session = session = Session(
                    self.options, plan, buffer, self.arrays, self.check, self.times, self.rank, self._align
                )
                self.num_buffers += 1
                number, ended = self._rounds(session, number, last)
                self.session = None
            self.arrays.release()

    def _rounds(self, session: Session, first: int, last: int) -> tuple[int, bool]:
        """Run the rounds of one Buffer. Return the next round, and whether the run has ended."""
        ended, number = False, first
        try:
            for number in range(first, last):
                self._round(session, number)
                if (number + 1) % _ROUNDS_BETWEEN_SYNCS == 0:
                    ended = self._settle_and_align(session)
                if ended:
                    break
            session.activity = "the end of a Buffer"
            session.check_kept()
            self._check_masks(session, number)
            ended = self._settle_and_align(session) or ended
        except Exception as error:
            self._print_mismatches()
            again = command(self.options, self.backend, self.asked.timeout_s, number)
            raise EPError(
                f"round {number} of seed {self.options.seed}, {session.activity}: {type(error).__name__}: {error}. Repeat it: {again}"
            ) from error
        session.graph = None  # after the last replay has ended
        return number + 1, ended

    def _settle_and_align(self, session: Session) -> bool:
        session.settle()
        session.activity = "a synchronization"
        return self._align()

    def _activity(self) -> str:
        """Describe the current activity of this rank for the watchdog."""
        doing = self.session.activity if self.session else "making or destroying a Buffer"
        return f"round {self.first + self.num_rounds} of seed {self.options.seed}, {doing}"

    def _print_mismatches(self) -> None:
        """Print the mismatches before an error, because the ranks do not synchronize again."""
        for found in self._mismatches(self.check.mismatches):
            print("\n".join(mismatch(found, self.options.seed)), file=sys.stderr, flush=True)

    def _mismatches(self, found: Iterable[Mismatch]) -> list[dict[str, Any]]:
        return [with_commands(one, self.options, self.backend, self.asked.timeout_s) for one in found]

    def _round(self, session: Session, number: int) -> None:
        plan = round_of(self.options, number)
        self.watchdog.feed(self.asked.timeout_s)
        self.check.now = number
        if plan.sleep and session.sleep(plan.sleep):
            self.num_sleeps += 1
            self.num_replays += plan.kind == "graph" and session.graph is not None
        if plan.trims:
            session.buffer.trim()
        self.arrays.delay(plan.delays_s[self.rank])
        session.is_timed = not any(plan.delays_s)
        session.activity = plan.kind
        run_round(session, plan)
        self._check_masks(session, number)
        session.check_kept(number)
        session.buffer.check()
        self.num_rounds += 1
        if self.interruption.is_set:
            self._write_state()  # Open MPI ends the ranks a second after it was interrupted

    def _check_masks(self, session: Session, number: int) -> None:
        """Raise if a silent rank was masked. Drop the differences of this round, which follow from the masking."""
        masked = session.buffer.query_masked_ranks() if session.plan.shape.low_latency else []
        if masked:
            self.check.forget(number)
            raise EPError(
                f"ranks {masked} did not answer within timeout_s={self.asked.timeout_s:g}, and rank {self.rank} masked them; expected all "
                f"ranks to answer. See whether they ended or hang"
            )

    def _align(self) -> bool:
        """Synchronize all ranks. Tell whether the run ends: the time is over, or a rank found a difference or was interrupted."""
        is_late = self.rank == 0 and self.limit_s is not None and time.monotonic() - self.start >= self.limit_s
        ends = bool(is_late or self.check.mismatches)
        interrupted = self.interruption.is_set
        hint = "all ranks of a soak run to synchronize every few rounds"
        answers = timed_allgather(self.ranks, (ends, interrupted), self.asked.timeout_s, "a synchronization of all ranks", hint)
        self._print_progress(f"round {self.first + self.num_rounds - 1}")
        if any(theirs for _, theirs in answers):
            self.interruption.is_set = True
        return any(ends or interrupted for ends, interrupted in answers)

    # --- output ------------------------------------------------------------------------------------------------------------------

    def _print_progress(self, what: str, *, force: bool = False) -> None:
        """Print a line of progress on rank 0 with its figures."""
        now = time.monotonic()
        if self.rank or (now - self.last_progress < self.asked.progress_s and not force):
            return
        self.last_progress = now
        until = "" if self.limit_s is None else f" of {self.limit_s:.0f}"
        text = f"soak: {now - self.start:.0f}{until} s, seed {self.options.seed}, {what}"
        if not force:
            text += f", {self.num_buffers} Buffers, rank 0 checked {self.check.num_bytes / 1e9:.2f} GB"
            for name in ("dispatch", "low_latency_dispatch"):
                found = percentiles(self.times.seconds[name])
                if found["count"]:
                    text += f"; {name} p50 {found['p50_us']:.0f} p99 {found['p99_us']:.0f} max {found['max_us']:.0f} us"
        print(text, file=sys.stderr, flush=True)
        self._write_state()

    def _finish(self) -> dict[str, Any] | None:
        """Combine the figures of all ranks into the report."""
        from mpi4py import MPI

        slowest = {}
        for name in CALLS:
            mine = np.array(self.times.seconds[name])
            slowest[name] = np.empty_like(mine)
            self.comm.Allreduce(mine, slowest[name], MPI.MAX)
        num_bytes = self.comm.allreduce(self.check.num_bytes)
        found = self.comm.gather(self.check.mismatches)
        if self.rank:
            return None
        every = sorted(itertools.chain(*(found or [])), key=lambda one: (one.round, one.rank))[: 2 * MOST_REPORTED]
        status = "mismatch" if every else "interrupted" if self.interruption.is_set else "passed"
        document = self._document(status, ranks=self.comm.size, checked_bytes=num_bytes)
        document["calls"] = {name: percentiles(seconds) for name, seconds in slowest.items()}
        document["mismatches"] = self._mismatches(every)
        self._write(document)
        return document

    def _document(self, status: str, ranks: int = 1, **more: Any) -> dict[str, Any]:
        """Make the report from the data of this rank."""
        return {
            "status": status,
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            **self.described,
            "backend": self.backend,
            "seed": self.options.seed,
            "settings": {name: value for name, value in vars(self.options).items() if name != "seed"},
            "timeout_s": self.asked.timeout_s,
            "first_round": self.first,
            "rounds": self.num_rounds,
            "buffers": self.num_buffers,
            "sleeps": self.num_sleeps,
            "replays_after_sleep": self.num_replays,  # of a graph that was captured before
            "seconds": round(time.monotonic() - self.start, 1),
            "ranks_counted": ranks,  # 1: the figures are those of rank 0
            "checked_bytes": self.check.num_bytes,
            "calls": {name: percentiles(self.times.seconds[name]) for name in CALLS},
            "mismatches": self._mismatches(self.check.mismatches),
            "error": None,
            **more,
        }

    @functools.cached_property
    def described(self) -> dict[str, Any]:
        return self.machine.described()

    def _write_state(self) -> None:
        self._write(self._document("interrupted" if self.interruption.is_set else "running"))

    def _write(self, document: dict[str, Any]) -> None:
        if self.rank == 0 and self.asked.json_file:
            write(self.asked.json_file, document)
