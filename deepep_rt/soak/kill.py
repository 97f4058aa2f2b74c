"""Kill, stop and add ranks of a Buffer with slots, while the others make random rounds and check every byte (`soak --kill`).

This process starts the ranks (`member`, `processes`). The seed decides which of them to disturb, and when. After each change it waits until
all ranks that must be members have made a whole round with each other. So a rank that hangs, or that disagrees, is found at once.
"""

from __future__ import annotations

import datetime
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import _env
from ..backends.agreement import why_no_gpu
from ..comm.store_server import StoreServer
from ..config import Config
from ..errors import EPConfigError, EPError, EPUnavailableError
from .buffers import buffer_of
from .ending import Interruption
from .member import DONE, END, EVICTED, JOIN, LEAVE, LEFT, MISMATCH, READY, WAKE, WENT_ON, Given, options_of
from .processes import Process, Processes
from .report import mismatch, write

CHANGES = ("kill", "stop", "leave", "wake", "join")
CALLS = ("shrink", "admit", "join", "wake")
"""Calls that change the members, in the order of the report."""

_SPARES = {"host": 1, "cuda": 3}  # processes that wait to join: with more of them, joins wait less for their start
_LONGEST_PAUSE_S = 0.2  # between two changes
_GRACE_S, _COMPILING_S = 60.0, 900.0  # added to the time-outs of the library
_MOST_LEFT = 4  # descriptors and threads that a member may have more than when it had the same members first
_DEFAULT_RANKS, _DEFAULT_MINUTES, DEFAULT_TIMEOUT_S = 3, 10.0, 10.0


@dataclass(frozen=True)
class Kills:
    """The options of `--kill`. None: the default."""

    ranks: int | None = None
    slots: int | None = None
    changes: int | None = None
    stops: float = 0.1
    minutes: float | None = None
    seed: int | None = None
    backend: str = "auto"
    json_file: Path | None = None
    sizes: Mapping[str, int | None] | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    progress_s: float = 10.0

    @property
    def num_ranks(self) -> int:
        """The ranks at the start."""
        return _DEFAULT_RANKS if self.ranks is None else self.ranks

    @property
    def num_slots(self) -> int:
        return self.num_ranks + 1 if self.slots is None else self.slots

    def check(self) -> None:
        """Raise EPConfigError if a value is out of range, or if MPI's launcher has started several processes."""
        if self.num_ranks < 1 or self.num_slots < max(2, self.num_ranks):
            raise EPConfigError(
                f"--ranks is {self.num_ranks} and --slots is {self.num_slots}; expected at least 1 rank, and 2 slots or as many as ranks. "
                f"Pass such numbers."
            )
        if self.changes is not None and self.changes < 1:
            raise EPConfigError(f"--changes is {self.changes}; expected a whole number from 1 on. Pass one.")
        if not 0 <= self.stops <= 1:
            raise EPConfigError(f"--stops is {self.stops:g}; expected a share from 0 to 1. Pass one.")
        if (launch := _env.launch()) is not None and launch.size > 1:
            raise EPConfigError(
                f"--kill is one of {launch.size} processes of {launch.launcher}; expected one process, which starts the ranks. "
                f"Run it without a launcher."
            )

    def choose_backend(self) -> str:
        """Return the backend of all ranks. Raise EPUnavailableError if there is no GPU for "cuda"."""
        if self.backend == "host":
            return "host"
        reason = why_no_gpu()
        if reason is not None and self.backend == "cuda":
            raise EPUnavailableError(f"--backend is 'cuda'; expected a GPU: {reason}. Run python -m deepep_rt doctor.")
        return "cuda" if reason is None else "host"


def run(asked: Kills) -> dict[str, Any]:
    """Run on this host. Return the report. Its "status" is "passed", "mismatch" or "interrupted".

    Raises:
        EPConfigError: if an option is wrong.
        EPUnavailableError: if the backend is "cuda" and there is no GPU.
        EPError: if a rank raised, hung, or was left out by mistake. The message has the command that repeats the run.
    """
    asked.check()
    return _Run(asked).run()


class _Run:
    """The process that disturbs the ranks."""

    def __init__(self, asked: Kills) -> None:
        self.asked, self.backend = asked, asked.choose_backend()
        self.seed = int.from_bytes(os.urandom(4), "little") if asked.seed is None else asked.seed
        self.random = random.Random(self.seed)
        self.processes = Processes(self._note)
        self.living: dict[int, Process] = {}
        self.asleep: dict[int, Process] = {}
        self.spare: list[Process] = []
        self.counts = dict.fromkeys(CHANGES, 0)
        self.seconds: dict[str, list[float]] = {name: [] for name in CALLS}
        self.noticed: list[float] = []  # seconds from a kill until all others have made a whole round
        self.mismatches: list[dict[str, Any]] = []
        self._check_sizes()
        self.start = self.last_progress = time.monotonic()
        self.interruption = Interruption(prints=False)
        self.limit_s = 4 * asked.timeout_s + _GRACE_S

    def run(self) -> dict[str, Any]:
        """Start the ranks, disturb them until the end, and return the report."""
        self.server = StoreServer()
        self.server.serve_in_thread()
        status, left = "passed", []
        try:
            with self.interruption:
                self._start()
                while not self.mismatches and not self._is_over():
                    self._change()
                    self._print_progress()
                status = "interrupted" if self.interruption.is_set else "passed"
                if not self.mismatches:
                    left += self._end()
        except _Damaged:
            pass
        except EPError as error:
            self._write(self._document("error", error=str(error)))
            made = _counted("change", sum(self.counts.values()))
            raise EPError(f"after {made} of seed {self.seed}, {error} Repeat it: {self._command()}") from error
        finally:
            self.processes.end()
            self.server.close()
            left += self.processes.left_behind()
        document = self._document("mismatch" if self.mismatches else "leak" if left else status, left_behind=left)
        self._write(document)
        return document

    def _check_sizes(self) -> None:
        """Raise EPConfigError if no Buffer has these sizes, or a rank has fewer tokens than it tells others before a round."""
        plan, slots = buffer_of(options_of(self._given(0)), 0), self.asked.num_slots
        shape = plan.shape
        Config(slots, shape.tokens, shape.hidden, shape.topk, plan.num_experts, shape.dtype)
        if shape.tokens < slots:
            raise EPConfigError(f"--low-latency-tokens is {shape.tokens}; expected at least the {slots} of --slots. Pass more.")

    # --- changes -----------------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        asked = self.asked
        self.living = {rank: self._process(rank) for rank in range(asked.num_ranks)}
        self.spare = [self._process() for _ in range(_SPARES[self.backend])]
        self._await_rounds(f"the Buffer and a whole round with {asked.num_ranks} ranks")

    def _process(self, rank: int = -1) -> Process:
        return self.processes.start(self._given(rank, self.server.address))

    def _given(self, rank: int, address: str = "") -> Given:
        asked = self.asked
        return Given(
            address=address,
            rank=rank,
            ranks=asked.num_ranks,
            slots=asked.num_slots,
            backend=self.backend,
            timeout_s=asked.timeout_s,
            seed=self.seed,
            sizes=self._sizes,
        )

    @property
    def _sizes(self) -> dict[str, int]:
        """The sizes that do not follow from the seed."""
        return {name: value for name, value in (self.asked.sizes or {}).items() if value is not None}

    def _is_over(self) -> bool:
        if self.interruption.is_set:
            return True
        if self.asked.changes is not None and sum(self.counts.values()) >= self.asked.changes:
            return True
        minutes = self.asked.minutes or (_DEFAULT_MINUTES if self.asked.changes is None else None)
        return minutes is not None and time.monotonic() - self.start >= 60 * minutes

    def _change(self) -> None:
        """Make the next change. The seed decides what it is, among those that are possible now."""
        draw, free = self.random, self.asked.num_slots - len(self.living) - len(self.asleep)
        possible: list[tuple[Callable[[], None], float]] = []
        if len(self.living) > 1:
            share = 5 * self.asked.stops
            possible += [(self._kill, 5 - share), (self._stop, share), (self._leave, 1)]
        if free:
            possible += [(self._join, 4)]
        if self.asleep:
            possible += [(self._wake, 2)]
        if free and len(self.living) > 1:
            possible += [(self._kill_during_a_join, 1)]
        time.sleep(draw.random() * _LONGEST_PAUSE_S)
        for process in (*self.living.values(), *self.asleep.values()):
            process.expect()
        changes, weights = zip(*possible, strict=True)
        draw.choices(changes, weights)[0]()

    def _pick(self, ranks: Mapping[int, Process]) -> Process:
        return ranks[self.random.choice(sorted(ranks))]

    def _kill(self) -> None:
        """Kill a rank, and sometimes a second one a moment later, while the others shrink."""
        num_victims = 2 if len(self.living) > 2 and self.random.random() < 0.2 else 1
        for number in range(num_victims):
            if number:
                time.sleep(0.05 * self.random.random() ** 2)
            self._kill_one()
        began = time.monotonic()
        self._await_rounds("a whole round without the ranks that were killed")
        self.noticed.append(time.monotonic() - began)

    def _kill_one(self) -> None:
        victim = self._pick(self.living)
        del self.living[victim.rank]
        victim.is_killed = True
        victim.popen.kill()
        self.counts["kill"] += 1

    def _stop(self) -> None:
        """Stop a rank until the others have left it out. It then goes on, and must hear that."""
        victim = self._pick(self.living)
        del self.living[victim.rank]
        victim.is_stopped = True
        victim.popen.send_signal(signal.SIGSTOP)
        self._await_rounds(f"a whole round without rank {victim.rank}, which was stopped")
        victim.popen.send_signal(signal.SIGCONT)
        self.counts["stop"] += 1
        self._await([victim], EVICTED, "EPEvictedError, because the others have left it out")

    def _leave(self) -> None:
        one = self._pick(self.living)
        self.asleep[one.rank] = self.living.pop(one.rank)
        one.send(LEAVE)
        self._await([one], LEFT, "the end of shrink")
        self.counts["leave"] += 1
        self._await_rounds(f"a whole round without rank {one.rank}, which has left")

    def _wake(self) -> None:
        one = self._pick(self.asleep)
        self.living[one.rank] = self.asleep.pop(one.rank)
        one.send(WAKE)
        self.counts["wake"] += 1
        self._await_rounds(f"a whole round with rank {one.rank}, which comes back")

    def _join(self) -> None:
        self._finish_join(self._begin_join())

    def _kill_during_a_join(self) -> None:
        """Kill a rank while another one joins."""
        new = self._begin_join()
        time.sleep(0.1 * self.random.random())
        self._kill_one()
        self._finish_join(new)

    def _begin_join(self) -> Process:
        """Let a process join in any slot, or in a certain one. A rank that sleeps keeps its slot for itself."""
        new = self.spare.pop(0)
        self.spare.append(self._process())
        free = sorted(set(range(self.asked.num_slots)) - self.living.keys() - self.asleep.keys())
        slot = self.random.choice(free)
        new.send(f"{JOIN} {slot}" if self.asleep or self.random.random() < 0.5 else JOIN)
        self.counts["join"] += 1
        return new

    def _finish_join(self, new: Process) -> None:
        self._await([new], READY, "a slot", self._compiling_s)
        self.living[new.rank] = new
        self._await_rounds(f"a whole round with rank {new.rank}, which joins")

    def _end(self) -> list[str]:
        """End all ranks. Return what they say that they hold too much of."""
        members = list(self.living.values())
        members[0].send(END)
        for process in self.asleep.values():
            process.send(END)
        everyone = [*members, *self.asleep.values()]
        self._await(everyone, DONE, "the end of the run")
        self._wait(lambda: [one for one in everyone if one.popen.poll() is None], "the end of a process after destroy()", 0)
        found = {process: process.facts["more"] for process in everyone if process.facts["more"] > _MOST_LEFT}
        return [f"{process}: {more} more descriptors and threads than before the changes" for process, more in found.items()]

    # --- events ------------------------------------------------------------------------------------------------------------------

    @property
    def _compiling_s(self) -> float:
        return _COMPILING_S if self.backend == "cuda" else 0.0

    def _await(self, processes: Iterable[Process], event: str, what: str, more_s: float = 0.0) -> None:
        waited = list(processes)
        self._wait(lambda: [one for one in waited if event not in one.events], what, more_s)

    def _await_rounds(self, what: str) -> None:
        """Wait until all that must be members now have made a whole round together."""
        expected = tuple(sorted(self.living))
        self._wait(lambda: [one for one in self.living.values() if one.members != expected], what, self._compiling_s)

    def _wait(self, waiting: Callable[[], list[Process]], what: str, more_s: float) -> None:
        self.processes.wait(waiting, self.limit_s + more_s, what)

    def _note(self, process: Process, event: dict[str, Any]) -> None:
        """Take in what a process tells."""
        if event["event"] == READY:
            process.rank = event["rank"]
        elif event["event"] == WENT_ON:
            process.members = tuple(event["members"])
            for change in event["changes"]:
                self.seconds[change["name"]].append(change["seconds"])
        elif event["event"] == MISMATCH:
            self.mismatches += event["mismatches"]
            raise _Damaged

    # --- output ------------------------------------------------------------------------------------------------------------------

    def _print_progress(self) -> None:
        now = time.monotonic()
        if now - self.last_progress >= self.asked.progress_s:
            self.last_progress = now
            members = " ".join(map(str, sorted(self.living)))
            print(
                f"soak: {now - self.start:.0f} s, seed {self.seed}, members {members}, {_changes(self.counts)}",
                file=sys.stderr,
                flush=True,
            )
            self._write(self._document("running"))

    def _command(self) -> str:
        """Format the command that makes the same changes again."""
        asked = self.asked
        words: list[Any] = ["python", "-m", "deepep_rt", "soak", "--kill", "--backend", self.backend]
        words += ["--ranks", asked.num_ranks, "--slots", asked.num_slots, "--stops", f"{asked.stops:g}"]
        for name, value in self._sizes.items():
            words += ["--" + name.replace("_", "-"), value]
        words += ["--timeout-s", f"{asked.timeout_s:g}", "--seed", self.seed, "--changes", max(sum(self.counts.values()), 1)]
        return " ".join(map(str, words))

    def _document(self, status: str, **more: Any) -> dict[str, Any]:
        facts = [process.facts for process in self.processes.all]
        return {
            "status": status,
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "backend": self.backend,
            "seed": self.seed,
            "num_ranks": self.asked.num_ranks,
            "slots": self.asked.num_slots,
            "settings": self._sizes,
            "timeout_s": self.asked.timeout_s,
            "changes": self.counts,
            "rounds": max((one.get("round", 0) for one in facts), default=0),
            "checked_bytes": sum(one.get("checked_bytes", 0) for one in facts),
            "seconds": round(time.monotonic() - self.start, 1),
            "calls": {name: _figures(seconds) for name, seconds in self.seconds.items()},
            "rounds_after_kills": _figures(self.noticed),
            "mismatches": [{**found, "command": self._command()} for found in self.mismatches],
            "left_behind": [],
            "command": self._command(),
            "error": None,
            **more,
        }

    def _write(self, document: dict[str, Any]) -> None:
        if self.asked.json_file:
            write(self.asked.json_file, document)


class _Damaged(Exception):
    """A rank has found a difference."""


def _figures(seconds: list[float]) -> dict[str, Any]:
    if not seconds:
        return {"count": 0, "median_s": None, "longest_s": None}
    return {"count": len(seconds), "median_s": round(statistics.median(seconds), 4), "longest_s": round(max(seconds), 4)}


def _counted(name: str, number: int) -> str:
    return f"{number} {name}" if number == 1 else f"{number} {name}s"


def _changes(counts: Mapping[str, int]) -> str:
    return ", ".join(_counted(name, number) for name, number in counts.items())


def lines(document: Mapping[str, Any]) -> Iterable[str]:
    """Format the report as text."""
    where = f"{document['backend']} backend, seed {document['seed']}, {document['num_ranks']} ranks, {document['slots']} slots"
    rounds, size = _counted("round", document["rounds"]), document["checked_bytes"] / 1e9
    yield f"{document['status']}: {_changes(document['changes'])} in {document['seconds']:.0f} s ({where}), {rounds}, {size:.3f} GB checked"
    yield ""
    yield f"{'call':24}{'count':>8}{'median s':>12}{'longest s':>12}"
    for name, times in {**document["calls"], "a round after a kill": document["rounds_after_kills"]}.items():
        figures = ("-" if times[key] is None else f"{times[key]:.3f}" for key in ("median_s", "longest_s"))
        yield f"{name:24}{times['count']:>8}" + "".join(f"{figure:>12}" for figure in figures)
    for found in document["mismatches"]:
        yield ""
        yield from mismatch(found, document["seed"])
    for left in document["left_behind"]:
        yield f"LEFT BEHIND: {left}"
    if document["status"] not in ("passed", "interrupted"):
        yield f"  the same changes again: {document['command']}"
