"""`membership`: the members of a Buffer agree, whichever of them die or wait.

The processes are threads over a store in memory. A schedule chooses the process that makes the next operation on the store, so a seed
repeats a run. A `Judge` checks each value of the roster, and each outcome that a process sees.

The quick tests make 300 random runs, and those marked `full` 4,000. The environment sets another number for these (`MEMBERSHIP_RUNS`), and
the first seed (`MEMBERSHIP_SEED`).
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import json
import math
import multiprocessing
import os
import random
import threading
import unittest.mock
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from memory_store import on_all, outcome
from ports import free_port

from deepep_rt import EPConfigError, EPTimeoutError, EPUnavailableError
from deepep_rt.comm import membership
from deepep_rt.comm.membership import Membership, Roster
from deepep_rt.comm.store_client import StoreClient
from deepep_rt.comm.store_server import StoreServer
from deepep_rt.errors import EPEvictedError

FULL, SEED = int(os.environ.get("MEMBERSHIP_RUNS", "1000")), int(os.environ.get("MEMBERSHIP_SEED", "0"))
NAME, TIMEOUT_S, OPERATION_S = "buffer", 0.5, 1e-4
ROSTER = f"{NAME}/roster"
METHODS = ("set", "get", "check", "delete_key", "add", "compare_set")
SETTINGS, OTHER_SETTINGS = json.dumps({"hidden": 64}), json.dumps({"hidden": 128})
LONG_S = 1e9


class MemoryStore:
    """The operations of `torch.distributed.Store`. There, `get` would wait for a key that is missing, so it fails here."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        assert key in self.values, f"get would wait for {key}"
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None

    def add(self, key: str, amount: int) -> int:
        self.values[key] = b"%d" % (total := int(self.values.get(key, b"0")) + amount)
        return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self.values.get(key, b"") == expected.encode():
            self.values[key] = desired.encode()
        return self.values.get(key, expected.encode())


# --- processes, one of which makes one operation at a time -------------------------------------------------------------------------


class Killed(BaseException):
    """Ends the thread of a process."""


class Process:
    """A thread. It makes an operation, reads the time or wakes up when it has the turn."""

    def __init__(self, world: World, number: int, program: Callable[[Process], None]) -> None:
        self.world, self.number, self.program = world, number, program
        self.name = f"p{number}"  # in the roster. It changes when the process joins again
        self.turn = threading.Lock()
        self.turn.acquire()
        self.wakes_s = self.stalled_s = 0.0
        self.num_operations = 0
        self.pending: tuple[Any, ...] = ()
        self.has_ended = self.is_killed = False
        self.state = ""
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.turn.acquire()
        try:
            if not self.is_killed:
                self.program(self)
        except Killed:
            pass
        except BaseException as error:
            self.world.error = error
        self.has_ended, self.state = True, "ended"
        self.world.end(self.name)
        self.world.pass_on(None)

    def wait(self, until_s: float = 0.0) -> None:
        """Give the turn back until the time is over and the schedule chooses this process."""
        self.wakes_s = until_s
        self.world.pass_on(self)
        if self.is_killed:
            raise Killed

    def operate(self, method: str, *arguments: Any) -> Any:
        self.pending = (method, *arguments)
        self.wait()
        self.pending = ()
        if self.world.schedule.kills(self):
            self.world.trace.append((round(self.world.now_s, 4), self.name, "dies before", method, arguments))
            self.is_killed = True
            raise Killed
        self.num_operations += 1
        result = getattr(self.world.store, method)(*arguments)
        self.world.trace.append((round(self.world.now_s, 4), self.name, method, arguments, result))
        self.world.judge.see(self, method, arguments, result)
        return result

    def connection(self) -> Any:
        """Make the store of a Membership."""
        return SimpleNamespace(**{method: functools.partial(self.operate, method) for method in METHODS})


class Schedule:
    """Choose by chance the process that goes on, and those that die or stall.

    Args:
        rng: The source of chance.
        most_kills: The most processes that die.
    """

    def __init__(self, rng: random.Random, most_kills: int = 0) -> None:
        self.rng, self.kills_left = rng, most_kills
        self.kill_rate = rng.choice([0.002, 0.01, 0.03])
        self.stall_rate = rng.choice([0, 0.003, 0.01, 0.03])
        self.stall_s = TIMEOUT_S * rng.choice([0.01, 0.1, 0.5, 2])
        self.jump_rate = rng.choice([0, 0, 0.002, 0.01])
        self.stay_rate = rng.choice([0, 0, 0.5, 0.9])
        self.weights: dict[int, float] = {}
        self.last: Process | None = None
        self.is_quiet = False

    def choose(self, ready: list[Process]) -> Process:
        if self.last not in ready or self.rng.random() >= self.stay_rate:
            if self.rng.random() < 0.02:
                self.weights.clear()
            weights = [self.weights.setdefault(process.number, self.rng.choice([0.03, 1, 1])) for process in ready]
            self.last = self.rng.choices(ready, weights)[0]
        assert self.last is not None
        if not self.is_quiet and self.rng.random() < self.stall_rate:
            self.last.stalled_s = self.last.world.now_s + self.rng.expovariate(1 / self.stall_s)
        return self.last

    def kills(self, process: Process) -> bool:
        """Return whether the process dies between two operations."""
        if self.is_quiet or not self.kills_left or self.rng.random() >= self.kill_rate:
            return False
        self.kills_left -= 1
        return True

    def jump_s(self) -> float:
        return 0.0 if self.is_quiet or self.rng.random() >= self.jump_rate else self.rng.uniform(0, 1.5 * TIMEOUT_S)


class RoundRobin:
    """Let processes take turns. `kill`: the number of a process, and how many operations it makes before it dies."""

    is_quiet = True

    def __init__(self, order: Iterable[int], turns: Mapping[int, int] | None = None, kill: tuple[int, int] | None = None) -> None:
        self.turns = itertools.cycle([number for number in order for _ in range((turns or {}).get(number, 1))])
        self.kill = kill

    def choose(self, ready: list[Process]) -> Process:
        by_number = {process.number: process for process in ready}
        return next(by_number[number] for number in self.turns if number in by_number)

    def kills(self, process: Process) -> bool:
        return (process.number, process.num_operations) == self.kill

    def jump_s(self) -> float:
        return 0.0


class World:
    """Processes over one store, and their clock.

    Args:
        schedule: Chooses the process that goes on.
        num_slots: The slots of the Buffer.
        notices: Returns after how many seconds a process learns that another one has ended. Infinity: never.
        wills: Whether the store learns of it too.
        is_settling: Whether the members of a generation wait for each other before they go on.
        is_atomic: Whether the store compares and sets at once.
        timeout_s: The limit of a change.
    """

    def __init__(
        self,
        schedule: Any,
        num_slots: int = 3,
        notices: Callable[[str, str], float] = lambda observer, ended: 0.0,
        wills: bool = False,
        is_settling: bool = False,
        is_atomic: bool = True,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.schedule, self.num_slots, self.notices, self.wills, self.timeout_s = schedule, num_slots, notices, wills, timeout_s
        self.is_settling, self.is_atomic = is_settling, is_atomic
        self.store, self.judge = MemoryStore(), Judge(self)
        self.now_s, self.num_steps = 0.0, 0
        self.processes: list[Process] = []
        self.ends_s: dict[str, float] = {}
        self.wills_s: dict[str, float] = {}
        self.back = threading.Lock()
        self.back.acquire()
        self.current: Process | None = None
        self.chosen: Process | None = None
        self.is_done: Callable[[], bool] = lambda: True
        self.most_steps = 0
        self.error: BaseException | None = None
        self.trace: list[tuple[Any, ...]] = []

    def start(self, program: Callable[[Process], None]) -> Process:
        self.processes.append(Process(self, len(self.processes), program))
        return self.processes[-1]

    def membership(self, process: Process, settings: str = SETTINGS) -> Membership:
        """Make the part of a process, which has a new name in it."""
        made = Membership(process.connection(), NAME, self.num_slots, self.timeout_s, settings, process=process.name)
        made.is_dead = lambda slot: self.knows_of(made.process, made.roster.processes[slot])
        if not self.is_atomic:
            store = made.store

            def compare_set(key: str, expected: str, desired: str) -> bytes:
                if (found := store.get(key) if store.check([key]) else b"") == expected.encode() and desired != expected:
                    store.set(key, desired)
                    return desired.encode()
                return found or expected.encode()

            store.compare_set = compare_set  # type: ignore[method-assign]
        return made

    def knows_of(self, observer: str, ended: str) -> bool:
        return ended in self.ends_s and self.now_s >= self.ends_s[ended] + self.notices(observer, ended)

    # The functions of `time` that `membership` uses.

    def monotonic(self) -> float:
        assert self.current is not None
        self.current.wait()
        return self.now_s

    def sleep(self, pause_s: float) -> None:
        assert self.current is not None
        self.current.wait(self.now_s + pause_s)

    # The turn.

    @property
    def living(self) -> list[Process]:
        return [process for process in self.processes if not process.has_ended]

    def end(self, name: str) -> None:
        """Note that a process has ended. Others learn of it later."""
        self.judge.ended.add(name)
        self.ends_s[name] = self.now_s
        if self.wills:
            self.wills_s[name] = self.now_s + min(self.notices("store", name), TIMEOUT_S)

    def pass_on(self, giver: Process | None) -> None:
        """Give the turn to the next process, or to `run`. The thread of `giver` waits for its next turn."""
        try:
            taker = None if self.error is not None or not self.living or self.is_done() else self._next()
        except BaseException as error:
            self.error, taker = error, None
        if taker is not giver or giver is None:
            (self.back if taker is None else taker.turn).release()
            if giver is not None:
                giver.turn.acquire()

    def _next(self) -> Process:
        assert self.num_steps < self.most_steps, "no progress"
        self.num_steps += 1
        self.now_s += OPERATION_S + self.schedule.jump_s()
        if (process := self.chosen) is None:
            living, is_quiet = self.living, self.schedule.is_quiet
            wakes_s = [process.wakes_s if is_quiet else max(process.wakes_s, process.stalled_s) for process in living]
            self.now_s = max(self.now_s, min(wakes_s))
            process = self.schedule.choose([living[i] for i in range(len(living)) if wakes_s[i] <= self.now_s])
        self.now_s = max(self.now_s, process.wakes_s)
        for name in [name for name, will_s in self.wills_s.items() if self.now_s >= will_s]:
            del self.wills_s[name]
            self.store.values[f"{NAME}/gone/{name}"] = b"its process has ended"
        self.current = process
        return process

    def run(self, is_done: Callable[[], bool] = lambda: False, most_steps: int = 200_000) -> None:
        """Go on until the condition holds, or all processes have ended."""
        self.is_done, self.most_steps = is_done, self.num_steps + most_steps
        self.pass_on(None)
        self.back.acquire()
        if self.error is not None:
            raise self.error

    def step(self, process: Process) -> None:
        """Let this process go on to its next operation, whatever the schedule says."""
        end, self.chosen = self.num_steps + 1, process
        self.run(lambda: self.num_steps == end)
        self.chosen = None

    def __enter__(self) -> World:
        self.patch = unittest.mock.patch.object(membership, "time", self)
        self.patch.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.is_done = lambda: True
        for process in self.living:
            process.is_killed = True
            process.turn.release()
            self.back.acquire()
        for process in self.processes:
            process.thread.join()
        self.patch.__exit__(None, None, None)
        if error is not None and hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note("\n".join(map(str, self.trace[-100:])))


# --- the properties ----------------------------------------------------------------------------------------------------------------


@dataclass
class Judge:
    """Check each value of the roster, and each outcome that a process sees."""

    world: World
    history: list[Roster] = field(default_factory=list)  # by number of the change
    last_text: bytes = b""
    by_generation: dict[int, dict[int, str]] = field(default_factory=dict)  # as members have seen them
    by_change: dict[int, tuple[int, dict[int, str]]] = field(default_factory=dict)
    seen: dict[str, Roster] = field(default_factory=dict)  # the roster that a process has read last
    seen_at: dict[str, int] = field(default_factory=dict)
    gone_at: dict[str, int] = field(default_factory=dict)
    votes: dict[tuple[int, str], tuple[float, Any]] = field(default_factory=dict)
    began_s: dict[str, float] = field(default_factory=dict)
    asked: dict[str, tuple[int, str]] = field(default_factory=dict)  # the slot and the settings
    claims: dict[int, str] = field(default_factory=dict)
    ended: set[str] = field(default_factory=set)

    def see(self, process: Process, method: str, arguments: tuple[Any, ...], result: Any) -> None:
        """Note an operation."""
        key, values = arguments[0], self.world.store.values
        if key == ROSTER:
            text = values.get(ROSTER, b"")
            if text != self.last_text:
                self.last_text = text
                self.check_roster(process.name, membership._roster_of(text))
            if isinstance(result, bytes) and result.startswith(b"["):
                self.seen[process.name], self.seen_at[process.name] = membership._roster_of(result), self.world.num_steps
        elif method == "set" and "/gone/" in key:
            self.gone_at.setdefault(key.rpartition("/")[2], self.world.num_steps)
            if key.endswith(f"/{process.name}"):
                self.ended.add(process.name)
        elif method == "set" and "/vote/" in key:
            number, *vote = json.loads(arguments[1])
            self.votes[number, process.name] = self.world.now_s, vote
            assert not self.world.is_atomic or process.name in self.history[number - 1].processes.values()

    def check_roster(self, writer: str, now: Roster) -> None:
        """Check a new value of the roster."""
        assert all(0 <= slot < self.world.num_slots for slot in now.processes)
        assert len(set(now.processes.values())) == len(now.processes), "a process has two slots"
        if not self.history:
            self.history.append(now)
            assert (now.generation, now.change, now.voted, now.formed_by) == (0, 0, 0, 0)
            return
        if not self.world.is_atomic:
            self.history.append(now)
            return
        before = self.history[-1]
        self.history.append(now)
        assert now.change == before.change + 1 == len(self.history) - 1
        assert now.voted in (before.voted, now.change)
        if now.voted == now.change:
            self.check_votes(writer, before, now)
        if now.generation == before.generation:
            assert (now.processes, now.formed_by) == (before.processes, before.formed_by)
            return
        assert (now.generation, now.formed_by) == (before.generation + 1, now.change)
        for slot, process in now.processes.items():
            if before.processes.get(slot) != process:
                self.check_added(writer, slot, process)
        for slot, process in before.processes.items():
            if now.processes.get(slot) != process:
                self.check_left_out(writer, now, slot, process)

    def check_votes(self, writer: str, before: Roster, now: Roster) -> None:
        """Check that a change with votes obeys the members that stay."""
        votes = {process: vote for (number, process), (_, vote) in self.votes.items() if number == now.change}
        if now.processes == before.processes and votes[writer][1]:  # it has read only votes of members that leave
            return
        for process in before.processes.values():
            if process in now.processes.values():
                lost, leaves, _ = votes[process]
                assert not leaves
                assert all(now.processes.get(slot) != before.processes.get(slot) for slot in lost if slot in before.processes)

    def check_added(self, writer: str, slot: int, process: str) -> None:
        assert all(process not in roster.processes.values() for roster in self.history[:-1]), f"{process} was a member before"
        asked, settings = self.asked[process]
        assert settings == SETTINGS
        assert asked in (-1, slot)
        assert self.gone_at.get(process, math.inf) > self.seen_at[writer], f"{process} had withdrawn"

    def check_left_out(self, writer: str, now: Roster, slot: int, process: str) -> None:
        assert now.voted == now.change, "a change without votes only adds members"
        votes = [vote for (number, _), (_, vote) in self.votes.items() if number == now.change]
        if process in self.ended or any(slot in lost for lost, _, _ in votes):
            return
        end_s = self.began_s[writer] + self.world.timeout_s
        time_s, (_, leaves, _) = self.votes.get((now.change, process), (math.inf, ([], False, False)))
        assert leaves or time_s > end_s, f"{process} had voted in time"
        assert leaves or self.world.now_s > end_s, f"{process} had time left to vote"

    def adopt(self, member: Membership) -> None:
        """Check the members as a process sees them after it has joined or has made a change."""
        roster = member.roster
        assert roster.processes.get(member.slot) == member.process
        assert not self.world.is_atomic or self.seen[member.process].processes.get(member.slot) == member.process
        assert self.by_generation.setdefault(roster.generation, dict(roster.processes)) == roster.processes, "two outcomes"
        if self.world.is_settling or not self.world.is_atomic:
            outcome = roster.generation, dict(roster.processes)
            assert self.by_change.setdefault(roster.change, outcome) == outcome, "two outcomes"

    def check_change(self, member: Membership, number: int, begins: bool) -> None:
        """Check the outcome of a change that a process has seen."""
        self.adopt(member)
        if not self.world.is_atomic:
            return
        roster, decided = member.roster, self.history[number]
        assert roster.change == number
        assert begins == (roster.formed_by == number)
        if begins:
            assert roster.processes == decided.processes
        elif decided.formed_by == number:  # it was late, and finds a later generation with the next changes
            assert not self.world.is_settling
            assert self.history[-1].formed_by > number
        if decided.formed_by != number or begins:
            assert not member.has_voted or decided.voted == number

    def check_evicted(self, member: Membership) -> None:
        assert self.seen[member.process].processes.get(member.slot) != member.process


class Life:
    """The program of a process. It makes changes by chance. In a quiet world, it takes out the dead and lets others in.

    Args:
        kinds: The changes to make again and again, instead of those by chance.
    """

    def __init__(self, world: World, process: Process, rng: random.Random, kinds: Sequence[str] = ()) -> None:
        self.world, self.process, self.rng, self.judge = world, process, rng, world.judge
        self.given = itertools.cycle(kinds) if kinds else None
        self.num_changes = 0
        self.slot = -1  # that it asks for
        self.is_right = True

    def found(self, processes: Mapping[int, str]) -> None:
        self.process.state = "member"
        self.world.sleep(0.0 if self.given else self.rng.choice([0, 0, 0.01, 0.1]) * self.rng.random())
        self.member = self.world.membership(self.process)
        try:
            self.member.found(processes)
        except EPConfigError:  # the others have gone on without it
            assert self.judge.history[-1].processes.get(self.member.slot) != self.process.name
            return
        self.judge.adopt(self.member)
        self.live()

    def join_by_chance(self, delay_s: float = 0.0) -> None:
        """Join with arguments by chance, some of which are wrong."""
        self.world.sleep(delay_s)
        rng, number = self.rng, self.world.num_slots
        slot = rng.choice([-1, -1, rng.randrange(number), number if rng.random() < 0.1 else -1])
        settings = OTHER_SETTINGS if rng.random() < 0.1 else SETTINGS
        limit_s = LONG_S if rng.random() < 0.6 else rng.uniform(0, 3 * TIMEOUT_S)
        self.join(slot, slot < number and rng.random() < 0.5, settings, limit_s)

    def join(self, slot: int = -1, claims: bool = False, settings: str = SETTINGS, limit_s: float = LONG_S) -> None:
        self.slot = slot
        self.is_right = settings == SETTINGS and slot < self.world.num_slots
        member = self.member = self.world.membership(self.process, settings)
        began_s = self.world.now_s
        try:
            if claims:
                self.process.state = "claiming"
                self.slot = slot = member.claim(None if slot < 0 else slot, limit_s)
                before = self.judge.claims.get(slot, "")
                assert not before or self.world.store.check([f"{NAME}/gone/{before}"])
                self.judge.claims[slot] = member.process
            self.judge.asked[member.process] = slot, settings
            self.process.state = "waiting"
            member.apply(None if slot < 0 else slot, limit_s)
        except EPTimeoutError:
            assert self.world.now_s > began_s + limit_s
            return
        except EPConfigError:
            assert not self.is_right
            return
        except EPEvictedError:
            self.rejoin()
            return
        assert self.is_right
        self.process.state = "member"
        self.judge.adopt(member)
        try:
            self.settle({})
        except EPEvictedError:
            self.rejoin()
        else:
            self.live()

    def rejoin(self) -> None:
        self.world.end(self.process.name)
        self.process.state = ""
        if self.rng.random() < 0.5:
            self.process.name += "+"
            self.join_by_chance()

    def live(self) -> None:
        rng, world, member = self.rng, self.world, self.member
        try:
            while True:
                if self.given:
                    kind = next(self.given)
                else:
                    world.sleep(rng.uniform(0, 0.01))
                    kind = rng.choice(["admit", "shrink"] if world.schedule.is_quiet else [*2 * ["admit", "shrink"], "leave"])
                if kind == "admit":
                    if self.change(admits=True):
                        self.settle({})
                elif kind == "shrink":
                    self.shrink()
                elif rng.random() < 0.2:
                    while not self.change(leaves=True) and not member.has_voted:
                        pass
                    return  # all members leave
        except EPEvictedError:
            self.rejoin()

    def change(self, **vote: Any) -> bool:
        """Make a change, and check its outcome."""
        member, number = self.member, self.member.roster.change + 1
        self.judge.began_s[member.process] = self.world.now_s
        try:
            begins = member.change(**vote)
        except EPEvictedError:
            self.judge.check_evicted(member)
            raise
        self.num_changes += 1
        self.judge.check_change(member, number, begins)
        return begins

    def shrink(self) -> None:
        """Go on without the members that are lost, as `Members.shrink` does."""
        lost = {}
        for slot, process in self.member.roster.processes.items():
            knows = self.world.knows_of(self.member.process, process)
            if slot != self.member.slot and self.rng.random() < (0.7 if knows else 0.0 if self.world.schedule.is_quiet else 0.02):
                lost[slot] = process
        while True:
            if self.change(lost=self.still(lost)):
                self.settle(lost)
            if self.member.has_voted and not self.still(lost):
                return

    def still(self, lost: Mapping[int, str]) -> set[int]:
        return {slot for slot, process in lost.items() if self.member.roster.processes.get(slot) == process}

    def settle(self, lost: dict[int, str]) -> None:
        """Wait for the members of a generation, and go on without those that do not come, as `Members._settle` does."""
        while self.world.is_settling:
            roster, store = self.member.roster, self.member.store
            store.set(f"settled/{roster.generation}/{self.member.slot}", "")
            end_s, missing = self.world.now_s + self.world.timeout_s, roster.slots
            while True:
                missing = tuple(slot for slot in missing if not store.check([f"settled/{roster.generation}/{slot}"]))
                if not missing:
                    return
                is_late, dead = self.world.now_s > end_s, [slot for slot in missing if self.member.is_dead(slot)]
                if is_late or dead:
                    break
                self.world.sleep(0.01)
            lost.update({slot: roster.processes[slot] for slot in (missing if is_late else dead)})
            while not self.change(lost=self.still(lost)):
                pass


def random_run(seed: int, **options: Any) -> World:
    """Let processes die, wait and join by chance. Then let all go on, until the dead are out and those that wait are in."""
    rng = random.Random(f"run {seed}")
    num_slots = rng.randint(2, 6)
    num_founders, num_applicants = rng.randint(1, num_slots), rng.randint(0, 4)
    slots = rng.sample(range(num_slots), num_founders)
    delays_s = [[0.0], [math.inf], [0.0, 0.01, 0.1, math.inf]][rng.randrange(3)]

    @functools.cache
    def notices(observer: str, ended: str) -> float:
        return random.Random(f"{seed} {observer} {ended}").choice(delays_s)

    options = {"is_settling": rng.random() < 0.5, "wills": rng.random() < 0.5, "num_slots": num_slots, **options}
    schedule = Schedule(random.Random(f"schedule {seed}"), rng.choice([0, 1, 2, 4]))
    lives: list[Life] = []

    def start(begin: Callable[[Life], None]) -> None:
        def program(process: Process) -> None:
            lives.append(Life(world, process, random.Random(f"{seed} {process.number}")))
            begin(lives[-1])

        world.start(program)

    with World(schedule, notices=notices, **options) as world:
        founders = {slot: f"p{number}" for number, slot in enumerate(slots)}
        for _ in slots:
            start(lambda life: life.found(founders))
        for _ in range(num_applicants):
            delay_s = rng.choice([0.0, 0.01, 0.05, 0.3]) * rng.random()
            start(lambda life, delay_s=delay_s: life.join_by_chance(delay_s))  # type: ignore[misc]
        end = rng.randint(50, 1200)
        world.run(lambda: world.num_steps >= end)
        schedule.is_quiet = True
        num_before = {life.process.number: life.num_changes for life in lives}
        world.run(lambda: world.num_steps % 20 == 0 and has_converged(world, lives, num_before), 60_000)
    return world


def has_converged(world: World, lives: list[Life], num_before: Mapping[int, int]) -> bool:
    """Return whether the dead are out, those that wait are in or have no slot, and the members make changes."""
    living = [life for life in lives if not life.process.has_ended]
    members = [life for life in living if life.process.state == "member"]
    if len(lives) < len(world.processes) or any(not life.process.state for life in living):
        return False  # not all have begun
    if not members:
        return True
    if any(life.num_changes < num_before.get(life.process.number, 0) + 2 for life in members):
        return False
    slots = world.judge.history[-1].processes
    if set(slots.values()) != {life.process.name for life in members}:
        return False
    for life in living:
        free = [slot for slot in range(world.num_slots) if slot not in slots and life.slot in (-1, slot)]
        if life.process.state == "waiting" and (free or not life.is_right):
            return False
        if life.process.state == "claiming" and world.wills and free:
            taken = [world.store.values.get(f"{NAME}/claim/{slot}", b"").decode() for slot in free]
            if any(not name or name in world.judge.ended for name in taken):
                return False
    return True


@pytest.mark.parametrize("number", [300, pytest.param(FULL, marks=pytest.mark.full)], ids=["quick", "full"])
def test_random_runs(number: int) -> None:
    for seed in range(number):
        try:
            random_run(SEED + seed)
        except BaseException as error:
            raise AssertionError(f"seed {SEED + seed}: {error!r}") from error


def test_the_properties_need_a_store_that_compares_and_sets_at_once() -> None:
    """The tests notice two outcomes of one change."""
    for seed in range(200):
        try:
            random_run(SEED + seed, is_atomic=False)
        except AssertionError as error:
            if "two outcomes" in str(error):
                return
    raise AssertionError("not noticed")


# --- each kill -----------------------------------------------------------------------------------------------------------------------


def runs_with_each_kill(
    num_members: int, num_applicants: int, claims: bool, order: Sequence[int], turns: Mapping[int, int], notice_s: float
) -> int:
    """Let each process die after each number of operations. Return how many runs these were."""
    num_runs = 0
    for killed in range(num_members + num_applicants):
        for num_operations in itertools.count():
            num_runs += 1
            if not run_with_a_kill(
                RoundRobin(order, turns, (killed, num_operations)), num_members, num_applicants, claims, notice_s
            ):
                break
    return num_runs


def run_with_a_kill(schedule: RoundRobin, num_members: int, num_applicants: int, claims: bool, notice_s: float) -> bool:
    """Return whether the schedule has killed a process before the changes were made."""
    lives: list[Life] = []
    kinds = ["admit", "shrink"] if num_applicants else ["shrink"]

    def start(begin: Callable[[Life], None]) -> None:
        def program(process: Process) -> None:
            lives.append(Life(world, process, random.Random(process.number), kinds))
            begin(lives[-1])

        world.start(program)

    num_slots = num_members + num_applicants
    with World(schedule, num_slots, lambda observer, ended: notice_s, is_settling=num_applicants > 0, timeout_s=0.1) as world:
        founders = {slot: f"p{slot}" for slot in range(num_members)}
        for _ in range(num_members):
            start(lambda life: life.found(founders))
        for _ in range(num_applicants):
            start(lambda life: life.join(claims=claims))
        world.run(lambda: world.num_steps % 5 == 0 and has_converged(world, lives, {}), 20_000)
        members = [life for life in lives if not life.process.has_ended]
        assert len(members) >= num_slots - 1, "only the process that was killed is out"
    return len(members) < num_slots


@pytest.mark.parametrize("notice_s", [0.0, 0.003, math.inf])
def test_a_member_dies_at_each_operation_of_a_shrink(notice_s: float) -> None:
    for order, turns in [((0, 1, 2), {}), ((2, 1, 0), {}), ((0, 1, 2), {0: 3, 1: 2}), ((0, 2, 1), {2: 5})]:
        assert runs_with_each_kill(3, 0, False, order, turns, notice_s) > 40


@pytest.mark.parametrize("notice_s", [0.0, math.inf])
@pytest.mark.parametrize("claims", [False, True])
def test_a_process_dies_at_each_operation_while_others_join(claims: bool, notice_s: float) -> None:
    for order, turns in [((0, 1, 2, 3), {}), ((3, 1, 0, 2), {0: 3})]:
        assert runs_with_each_kill(2, 2, claims, order, turns, notice_s) > 40


# --- schedules that a test writes ------------------------------------------------------------------------------------------------


class Actor:
    """A process whose calls and steps a test chooses."""

    def __init__(self, world: World, settings: str = SETTINGS) -> None:
        self.world, self.calls, self.results = world, list[Callable[[], Any]](), list[Any]()
        self.process = world.start(self._serve)
        self.life = Life(world, self.process, random.Random(0))
        self.member = self.life.member = world.membership(self.process, settings)

    def _serve(self, process: Process) -> None:
        while True:
            while not self.calls:
                self.world.sleep(0.0)
            self.results.append(outcome(self.calls[0]))
            del self.calls[0]

    def begin(self, call: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Start a call, which makes its first operation later."""
        self.calls.append(functools.partial(call, *arguments, **options))

    def change(self, **vote: Any) -> Any:
        self.begin(self.life.change, **vote)
        return self.finish()

    def apply(self, slot: int | None = None, limit_s: float = LONG_S) -> None:
        """Begin to join, and write the application."""
        self.world.judge.asked[self.process.name] = -1 if slot is None else slot, self.member.settings
        self.begin(self.member.apply, slot, limit_s)
        self.to("compare_set", ROSTER)

    def to(self, method: str, key: str) -> None:
        """Go on until an operation is the next one."""
        for _ in range(10_000):
            found = self.process.pending
            if found and found[0] == method and key in (found[1] if method == "check" else found[1:2]):
                return
            self.world.step(self.process)
        raise AssertionError(f"{self.process.name} never does {method} {key}")

    def to_decision(self) -> None:
        """Go on until the next operation writes the roster."""
        while self.process.pending[:2] != ("compare_set", ROSTER) or self.process.pending[3] == membership._NO_VALUE:
            self.world.step(self.process)

    def finish(self) -> Any:
        """Go on until the calls have ended. Return the result of the last one, or raise its exception."""
        finish(self)
        if isinstance(self.results[-1], Exception):
            raise self.results[-1]
        return self.results[-1]

    def die(self) -> None:
        self.process.is_killed = True
        self.world.step(self.process)


def finish(*actors: Actor) -> list[Any]:
    """Let several processes go on in turn until their calls have ended. Return the results and exceptions."""
    for _ in range(10_000):
        for actor in actors:
            if actor.calls:
                actor.world.step(actor.process)
        if not any(actor.calls for actor in actors):
            break
    assert not any(actor.calls for actor in actors), "a call does not end"
    return [actor.results[-1] for actor in actors]


@pytest.fixture(name="world")
def make_world() -> Iterator[World]:
    with World(RoundRobin([]), 4, lambda observer, ended: math.inf) as made:
        yield made


def founders(world: World, number: int) -> list[Actor]:
    """Make members in the first slots."""
    actors = [Actor(world) for _ in range(number)]
    for actor in actors:
        actor.begin(actor.member.found, {slot: member.process.name for slot, member in enumerate(actors)})
        actor.finish()
    return actors


def admitted(world: World, *members: Actor, slot: int | None = None) -> Actor:
    """Make a process that joins the members."""
    actor = Actor(world)
    actor.apply(slot)
    for member in members:
        assert member.change(admits=True)
    actor.finish()
    return actor


def shrink(lost: Iterable[int], *members: Actor) -> list[Any]:
    """Let all members make a change with votes."""
    for member in members:
        member.begin(member.life.change, lost=lost)
    return finish(*members)


def test_a_vote_counts_that_came_before_the_limit(world: World) -> None:
    """Its reader may have looked before it came, and go on after the limit."""
    a, b = founders(world, 2)
    a.begin(a.life.change)
    a.to("compare_set", f"{NAME}/vote/{b.process.name}")
    a.world.step(a.process)  # finds no vote
    b.begin(b.life.change)
    b.to("check", f"{NAME}/gone/{a.process.name}")
    world.now_s += 2 * TIMEOUT_S
    assert finish(a, b) == [False, False]


def test_a_late_vote_for_an_earlier_change_hides_no_other(world: World) -> None:
    """A member that others leave out may write its vote when another process has its slot, and has voted."""
    a, old = founders(world, 2)
    old.begin(old.life.change)
    old.to("set", f"{NAME}/vote/{old.process.name}")
    assert a.change(lost=[1])
    new = admitted(world, a, slot=1)
    new.begin(new.life.change)
    new.to("check", f"{NAME}/gone/{a.process.name}")
    with pytest.raises(EPEvictedError):
        old.finish()
    assert not a.change()
    assert not new.finish()


def test_a_founder_may_come_late(world: World) -> None:
    early, late = Actor(world), Actor(world)
    processes = {0: early.process.name, 1: late.process.name}
    for actor in (early, late):
        actor.begin(actor.member.found, processes)
    early.finish()
    assert not early.change(admits=True)
    late.finish()
    assert [late.change(admits=True), late.change(admits=True), early.change(admits=True)] == [False] * 3
    other = Actor(world)
    other.begin(other.member.found, {0: other.process.name})
    with pytest.raises(EPConfigError, match=rf"another Buffer has the name {NAME} in this store"):
        other.finish()


def test_a_late_member_passes_through_the_changes(world: World) -> None:
    a, late = founders(world, 2)
    assert [a.change(admits=True) for _ in range(20)] == [False] * 20
    new = admitted(world, a)
    assert [late.change(admits=True) for _ in range(20)] == [False] * 20
    assert late.member.roster.slots == (0, 1)
    assert late.change(admits=True)
    assert late.member.roster == a.member.roster == new.member.roster
    assert late.member.roster.change == 21
    for member in (late, new, a):
        assert not member.change(admits=True)


def test_a_late_newcomer_passes_through_the_changes(world: World) -> None:
    (a,) = founders(world, 1)
    new = Actor(world)
    new.apply()
    assert [a.change(admits=True) for _ in range(4)] == [True, False, False, False]
    new.finish()
    assert new.member.roster.change == 1
    assert [new.change(admits=True) for _ in range(4)] == [False] * 4
    assert new.member.roster.change == 5
    assert a.member.roster.change == 4


def test_a_shrink_waits_only_for_those_that_may_live(world: World) -> None:
    """It learns of the end of a process from `is_dead`, from the store or from another member's vote."""
    a, b, *dead = founders(world, 4)
    for actor in dead:
        actor.die()
    b.begin(b.life.change, lost=[3])
    b.to("check", f"{NAME}/gone/p0")
    a.member.is_dead = lambda slot: slot == 2
    assert a.change()
    assert b.finish()
    assert world.now_s < TIMEOUT_S
    assert a.member.roster.slots == (0, 1)
    b.begin(b.member.go, "it ends")
    b.finish()
    assert a.change(lost=[0]), "itself is not lost"
    assert world.now_s < TIMEOUT_S
    assert dict(a.member.roster.processes) == {0: a.process.name}


def test_a_change_without_votes_leaves_votes_to_a_later_one(world: World) -> None:
    a, b, _ = founders(world, 3)
    b.begin(b.life.change, lost=[2])
    b.to("set", f"{NAME}/vote/{b.process.name}")
    assert not a.change(admits=True)
    assert not b.finish()
    assert not b.member.has_voted
    assert shrink([2], a, b) == [True, True]
    assert a.member.has_voted
    assert b.member.has_voted
    assert a.member.roster.slots == (0, 1)


def test_members_that_name_each_other(world: World) -> None:
    """The one in the lower slot stays."""
    a, b, c = founders(world, 3)
    for member, lost in ((a, 2), (b, 0), (c, 1)):
        member.begin(member.life.change, lost=[lost])
    results = finish(a, b, c)
    assert [type(result) for result in results] == [EPEvictedError, bool, EPEvictedError]
    assert b.member.roster.slots == (1,)


def test_an_applicant_dies_before_its_application_is_written(world: World) -> None:
    (a,) = founders(world, 1)
    dead = Actor(world)
    dead.begin(dead.member.apply, None, LONG_S)
    world.step(dead.process)
    world.step(dead.process)
    dead.die()
    new = Actor(world)
    new.apply()
    a.change(admits=True)
    while a.member.roster.slots and new.process.name not in a.member.roster.processes.values():
        assert a.change(admits=True), "an application that will never be there hides another one"
    new.finish()


def test_a_newcomer_takes_no_member_for_an_applicant(world: World) -> None:
    """It reads all applications, also those of members that this change leaves out."""
    (a,) = founders(world, 1)
    b = admitted(world, a)
    b.die()
    c = admitted(world, a)
    for actor, vote in ((c, {"lost": [1]}), (a, {"admits": True})):
        actor.begin(actor.life.change, **vote)
        actor.to("check", f"{NAME}/gone/{b.process.name}")  # it has voted
    assert c.finish()
    assert a.finish()
    assert a.member.roster == c.member.roster
    assert a.member.roster.slots == (0, 2)


def test_no_process_comes_back_in_its_old_name(world: World) -> None:
    """The members that have left it out may die before they tell that it has gone."""
    a, c = founders(world, 2)
    b = admitted(world, a, c)
    b.die()
    new = Actor(world)
    new.apply()
    c.begin(c.life.change, lost=[2])
    c.to("check", f"{NAME}/gone/{a.process.name}")
    a.begin(a.life.change, admits=True)
    a.to_decision()
    world.step(a.process)
    a.die()
    c.die()
    new.finish()
    assert new.member.roster.slots == (0, 1, 2)
    assert new.change(lost=[0, 1])
    assert not new.change(admits=True)


def test_a_process_that_is_left_out_before_it_knows_that_it_was_in(world: World) -> None:
    (a,) = founders(world, 1)
    slow = Actor(world)
    slow.apply()
    assert a.change(admits=True)
    assert a.change(lost=[1])
    with pytest.raises(EPEvictedError, match="gone on without"):
        slow.finish()


def test_a_process_that_withdraws_while_it_is_taken_in(world: World) -> None:
    (a,) = founders(world, 1)
    slow = Actor(world)
    slow.apply(limit_s=TIMEOUT_S)
    a.begin(a.life.change, admits=True)
    a.to_decision()
    with pytest.raises(EPTimeoutError, match=r"timeout_s=0\.5; expected the members of the Buffer buffer to call admit"):
        slow.finish()
    assert a.finish(), "they learn later that it has gone"
    assert a.change()
    assert a.member.roster.slots == (0,)


def test_a_process_that_has_withdrawn_is_not_taken_in(world: World) -> None:
    (a,) = founders(world, 1)
    for slot in (None, 2):
        actor = Actor(world)
        actor.apply(slot, limit_s=0.1)
        with pytest.raises(EPTimeoutError):
            actor.finish()
        assert not a.change(admits=True)
        assert not a.change(admits=True)


def test_other_settings_and_no_such_slot(world: World) -> None:
    (a,) = founders(world, 1)
    for settings, slot, reason in [
        (OTHER_SETTINGS, None, r"the settings differ \(hidden: the members have 64, this process 128\)"),
        (SETTINGS, 4, r"slot=4; expected 0 to 3"),
    ]:
        actor = Actor(world, settings)
        actor.apply(slot)
        assert not a.change(admits=True)
        with pytest.raises(EPConfigError, match=reason):
            actor.finish()
        assert not a.change(admits=True)
    assert admitted(world, a).member.slot == 1


def test_claims(world: World) -> None:
    founders(world, 2)
    first, second, third = (Actor(world) for _ in range(3))
    for actor, slot, expected in ((first, None, 2), (second, 3, 3)):
        actor.begin(actor.member.claim, slot, 0.1)
        assert actor.finish() == expected
    for slot in (None, 2, 0):
        third.begin(third.member.claim, slot, 0.1)
        with pytest.raises(EPTimeoutError, match=r"expected a free slot of the Buffer buffer within that time"):
            third.finish()
    first.begin(first.member.go, "it ends")
    first.finish()
    third.begin(third.member.claim, None, 0.1)
    assert third.finish() == 2
    third.begin(third.member.claim, 2, 0.1)
    assert third.finish() == 2, "again"


@pytest.mark.parametrize("settings", [SETTINGS, OTHER_SETTINGS])
def test_the_claim_of_a_process_that_is_not_taken_in_ends(world: World, settings: str) -> None:
    (a,) = founders(world, 1)
    first, second = Actor(world, settings), Actor(world)
    first.begin(first.member.claim, 3, 0.1)
    first.finish()
    first.apply(3, limit_s=0.1)
    if settings == OTHER_SETTINGS:
        assert not a.change(admits=True)
    with pytest.raises((EPTimeoutError, EPConfigError)):
        first.finish()
    second.begin(second.member.claim, 3, 0.1)
    assert second.finish() == 3


def test_members_leave(world: World) -> None:
    a, b, c = founders(world, 3)
    c.begin(c.life.change, leaves=True)
    for member in (a, b):
        member.begin(member.life.change)
    results = finish(a, b, c)
    assert results[:2] == [True, True]
    assert isinstance(results[2], EPEvictedError)
    assert a.member.roster == b.member.roster
    assert a.member.roster.slots == (0, 1)
    for member in (a, b):
        member.begin(member.life.change, leaves=True)
    assert all(isinstance(result, EPEvictedError) for result in finish(a, b)), "all have left"


def test_keys_do_not_pile_up(world: World) -> None:
    members = founders(world, 3)

    def make_changes() -> int:
        for _ in range(8):
            assert shrink([], *members) == [False] * 3
            for member in members:
                assert not member.change(admits=True)
        return len(world.store.values)

    assert make_changes() == make_changes()
    num_before = len(world.store.values)
    for _ in range(5):
        new = admitted(world, *members)
        assert shrink([], *members, new) == [False] * 4
        new.die()
        assert shrink([3], *members) == [True] * 3
        make_changes()
    assert len(world.store.values) <= num_before + 3 * 5, sorted(world.store.values)


# --- real stores -------------------------------------------------------------------------------------------------------------------

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch")


def test_a_store_that_has_lost_the_members_or_has_ended() -> None:
    store: Any = MemoryStore()
    member = Membership(store, NAME, 2, TIMEOUT_S)
    member.found({0: member.process})
    store.values.clear()
    with pytest.raises(EPUnavailableError, match="the store has lost the members of the Buffer buffer"):
        member.change()
    store.compare_set = unittest.mock.Mock(side_effect=RuntimeError("Connection reset\nand a trace"))
    with pytest.raises(EPUnavailableError, match=r"does not answer \(Connection reset\)"):
        member.change()


def live_shortly(store: Any, slot: int, limit_s: float = 20.0) -> list[tuple[int, ...]]:
    """Be a founder in slot 0 or 1, or join. The process in slot 1 leaves. Return the slots of each generation."""
    member = Membership(store, NAME, 3, limit_s, process=f"process {slot}")
    member.tell({"slot": slot})
    if slot < 2:
        member.found({0: "process 0", 1: "process 1"})
        while not member.change(admits=True):
            pass
    else:
        assert member.claim(None, 60) == 2
        member.apply(2, 60)
    found: list[tuple[int, ...]] = []

    def gather() -> list[int]:
        found.append(member.roster.slots)
        comm = member.communicator()
        comm.timeout_s = limit_s
        return comm.allgather(slot)

    assert gather() == [0, 1, 2]
    assert [member.told(number) for number in range(3)] == [{"slot": number} for number in range(3)]
    if slot != 1:
        assert member.change(lost=[1])
        assert gather() == [0, 2]
    return found


GENERATIONS = [[(0, 1, 2), (0, 2)], [(0, 1, 2)], [(0, 1, 2), (0, 2)]]


def in_threads(connect: Callable[[], Any]) -> list[Any]:
    slots: Any = range(3)
    return on_all(slots, lambda slot: outcome(lambda: live_shortly(connect(), slot)))


def test_store_of_this_package() -> None:
    server = StoreServer(token="")
    thread = server.serve_in_thread()
    assert in_threads(lambda: StoreClient("127.0.0.1", server.port)) == GENERATIONS
    server.close()
    thread.join(60)


@needs_torch
def test_hash_store() -> None:
    from torch.distributed import HashStore

    store = HashStore()
    assert in_threads(lambda: store) == GENERATIONS


def _in_a_process(port: int, slot: int, results: Any) -> None:
    from torch.distributed import TCPStore

    found = live_shortly(TCPStore("127.0.0.1", port, is_master=False), slot)
    if slot == 1:
        os._exit(9)
    results.put((slot, found))


@needs_torch
@pytest.mark.full
def test_tcp_store() -> None:
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=_in_a_process, args=(store.port, slot, results)) for slot in range(3)]
    for process in processes:
        process.start()
    assert sorted(results.get(timeout=120) for _ in range(2)) == [(0, GENERATIONS[0]), (2, GENERATIONS[2])]
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 9, 0]
