"""The members of a Buffer with slots: one decision for each change, over a key-value store that outlives the processes.

A slot is a number of a rank that may have a process. A generation is the time in which the same processes are the members. One value in the
store, the roster, says who they are. Only a compare-and-set changes it, so each change has one outcome, whatever dies or waits meanwhile.

Changes have numbers, and all members make the same ones in the same order, as they make calls. If no member has lost another or leaves,
the first one decides at once: it adds the processes that wait. Otherwise members vote. A vote says that its member lives, and which slots
it has lost. A member decides when all have voted that are neither lost nor known to be dead, or when the time is over. Others find that.
Most changes change nothing. The roster then only counts them, and a member that comes late sees in it that its change has passed.

A process has a new name each time it joins. So a process that was given up can not be taken for the one that took its slot.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ..errors import EPConfigError, EPEvictedError, EPTimeoutError, EPUnavailableError
from .store import StoreCommunicator

_LEAST_PAUSE_S, _MOST_PAUSE_S = 5e-4, 2e-2
_NO_VALUE = "none"  # no key has it


class Store(Protocol):
    """The methods that `torch.distributed.Store` and `store_server.StoreClient` share."""

    def set(self, key: str, value: Any, /) -> Any: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def delete_key(self, key: str, /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


@dataclass(frozen=True)
class Roster:
    """The members of a generation. Of the changes, which have numbers: the last one, the last one with votes, and the one that began this
    generation. It left out the processes in `left_out`.
    """

    generation: int
    change: int
    voted: int
    formed_by: int
    processes: Mapping[int, str]  # the name of the process in each slot that has one
    left_out: tuple[str, ...] = ()

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots of the members, ascending."""
        return tuple(sorted(self.processes))

    def text(self, writer: str) -> str:
        """Return the value for the store. `writer` makes the values of two members differ."""
        members = {str(slot): self.processes[slot] for slot in self.slots}
        return json.dumps([self.generation, self.change, self.voted, self.formed_by, members, self.left_out, writer])


def _roster_of(text: bytes | str) -> Roster:
    generation, change, voted, formed_by, members, left_out, _ = json.loads(text)
    processes = {int(slot): str(name) for slot, name in members.items()}
    return Roster(int(generation), int(change), int(voted), int(formed_by), processes, tuple(left_out))


@dataclass(frozen=True)
class _Vote:
    lost: tuple[int, ...]
    leaves: bool
    admits: bool  # takes in the processes that wait. Such a change alone needs no votes

    def text(self, number: int) -> str:
        """Return the value for the store, in which a vote replaces the one in an earlier change."""
        return json.dumps([number, list(self.lost), self.leaves, self.admits])


@dataclass(frozen=True)
class Applicant:
    """A process that waits to be taken in."""

    process: str
    slot: int  # that it asks for; -1: any
    settings: str


@dataclass
class Membership:
    """What one process knows of the members, and its part in changes.

    Args:
        store: Outlives the processes.
        name: Begins all keys. It is the same in all processes, and no other Buffer has it.
        num_slots: The most members.
        timeout_s: How long a change waits for a member that is not known to be dead.
        settings: A process with other settings is not taken in.
        is_dead: Says whether the process of a slot is known to have ended.
    """

    store: Store
    name: str
    num_slots: int
    timeout_s: float
    settings: str = ""
    is_dead: Callable[[int], bool] = lambda slot: False
    process: str = field(default_factory=lambda: secrets.token_hex(8))
    slot: int = -1
    roster: Roster = field(default_factory=lambda: Roster(-1, -1, -1, -1, {}))
    """The members as of the last change that this process has made."""
    _num_read: int = 0  # applications
    _applicants: dict[str, Applicant] = field(default_factory=dict)

    # --- the start ---------------------------------------------------------------------------------------------------------------

    def found(self, processes: Mapping[int, str]) -> None:
        """Begin the first generation. All its members call this with the same processes, after they have told each other.

        Raises:
            EPConfigError: if the name is in use.
        """
        self.slot = next(slot for slot, process in processes.items() if process == self.process)
        self.roster = Roster(0, 0, 0, 0, dict(processes))
        mine = self.roster.text("founders")
        held = self._ask("compare_set", self._key("roster"), "", mine)
        if self.process not in _roster_of(held).processes.values():  # founders that came first may have made changes
            raise EPConfigError(
                f"rendezvous: another Buffer has the name {self.name} in this store; expected a name of its own. Name it in the address "
                f"(host:port/name), or pass a torch.distributed.PrefixStore."
            )

    def claim(self, slot: int | None, limit_s: float) -> int:
        """Reserve a slot that is free, or becomes free within the time. `slot`: None for any. Return it.

        Raises:
            EPTimeoutError: if there is none.
        """
        for _ in _until(limit_s):
            roster = self._read()
            if roster is None:
                continue
            for number in range(self.num_slots) if slot is None else [slot]:
                if number not in roster.processes and self._reserve(number):
                    return number
        raise EPTimeoutError(
            f"timeout_s={limit_s:g}; expected a free slot of the Buffer {self.name} within that time"
            f"{'' if slot is None else f', slot {slot}'}. Check that its members run, and that max_ranks is large enough",
            rank=-1,
            peer=-1,
            phase="Buffer.join",
        )

    def _reserve(self, slot: int) -> bool:
        """Return whether the reservation of a slot is this process's. That of a process that has ended does not count."""
        key, before = self._key("claim", slot), ""
        if (holder := self._found(key)) is not None:
            before = holder.decode()
            if before == self.process:
                return True
            if not self.has_gone(before):
                return False
        return self._ask("compare_set", key, before, self.process).decode() == self.process

    def apply(self, slot: int | None, limit_s: float) -> Roster:
        """Ask to be taken in, and wait for the members to do so. `slot`: None for any that is free.

        Raises:
            EPTimeoutError: if that takes longer than `limit_s`.
            EPConfigError: if the members have other settings, or no such slot.
            EPEvictedError: if they have taken it in, and have gone on without it before it saw that.
        """
        asked = json.dumps([self.process, -1 if slot is None else slot, self.settings])
        number = 1 + int(self._ask("add", self._key("applications"), 0))
        while self._ask("compare_set", self._key("application", number), "", asked).decode() != asked:  # no number is left out
            number += 1
        self._ask("add", self._key("applications"), 1)
        for _ in _until(limit_s):
            roster = self._read()
            if roster is not None and self.process in roster.processes.values():
                self.slot = next(slot for slot, process in roster.processes.items() if process == self.process)
                self.roster = replace(roster, change=roster.formed_by)
                self._tell_left_out()
                return self.roster
            if (answer := self._found(self._key("refused", self.process))) is not None:
                self.go("was refused")
                raise EPConfigError(answer.decode())
            if self.has_gone(self.process):
                raise EPEvictedError(
                    f"the members of the Buffer {self.name} have taken this process in, and have gone on without it; expected a process "
                    f"that answers within timeout_s. Join again."
                )
        self.go("withdrew")
        raise EPTimeoutError(
            f"timeout_s={limit_s:g}; expected the members of the Buffer {self.name} to call admit() within that time. Check that they "
            f"run and that all of their slots are not taken",
            rank=-1,
            peer=-1,
            phase="Buffer.join",
        )

    def renew(self) -> None:
        """Get another name, to be taken in again after this process has left."""
        self.process, self.roster = secrets.token_hex(8), Roster(-1, -1, -1, -1, {})

    # --- changes -----------------------------------------------------------------------------------------------------------------

    def change(self, *, lost: Iterable[int] = (), leaves: bool = False, admits: bool = False) -> bool:
        """Make the next change together with the other members. Return whether it begins a generation.

        Another member may have made this change without votes. Then `has_voted` is false, and votes go to a later change.

        Raises:
            EPEvictedError: if the others have left this process out.
        """
        number, mine = self.roster.change + 1, _Vote(tuple(sorted(set(lost) - {self.slot})), leaves, admits)
        end, has_voted = time.monotonic() + self.timeout_s, False
        for _ in _until(None):
            text, now = self._read_existing()
            if now.change >= number:
                break
            is_over = time.monotonic() > end  # asked before the votes are read, which count if they came in time
            others = {slot: process for slot, process in now.processes.items() if slot != self.slot}
            votes = {slot: vote for slot, process in others.items() if (vote := self._vote(number, process)) is not None}
            votes[self.slot] = mine
            if not all(vote.admits for vote in votes.values()) and not has_voted:
                has_voted = True
                self._ask("set", self._key("vote", self.process), mine.text(number))
            if (decision := self._decision(now, number, votes, is_over)) is not None:
                self._ask("compare_set", self._key("roster"), text, decision.text(self.process))
        return self._follow(now, number)

    def _follow(self, now: Roster, number: int) -> bool:
        """Take over the outcome of a change."""
        before = self.roster
        if now.processes.get(self.slot) != self.process:
            self.roster = now
            raise EPEvictedError(
                f"the other members have gone on without slot {self.slot} (generation {now.generation}); expected a process that answers "
                f"within timeout_s. Buffer.join takes a free slot again."
            )
        if now.formed_by != number:  # this change passed, and others after it may have
            self.roster = replace(before, change=number, voted=number if now.voted == number else before.voted)
            return False
        self.roster = replace(now, change=number)
        self._tell_left_out()
        for process in now.processes.values():
            self._applicants.pop(process, None)
        return True

    def _tell_left_out(self) -> None:
        """Mark the processes that the last generation left out. All members do so before they begin the next one, so no mark is missing."""
        for process in self.roster.left_out:
            self._ask("set", self._key("gone", process), "left out")
            self._ask("delete_key", self._key("vote", process))

    def _decision(self, now: Roster, number: int, votes: Mapping[int, _Vote], is_over: bool) -> Roster | None:
        """Return the roster after a change, or None while votes are awaited."""
        staying, voted = dict(now.processes), now.voted
        if not all(vote.admits for vote in votes.values()):
            voted = number
            out = {slot for slot in now.slots if slot not in votes and self._is_gone(now, slot)}
            for slot in sorted(votes):  # whoever is out has no say in who else is
                if slot not in out:
                    out |= set(votes[slot].lost)
            if not is_over and any(slot not in votes and slot not in out for slot in now.slots):
                return None
            staying = {
                slot: process
                for slot, process in now.processes.items()
                if slot in votes and slot not in out and not votes[slot].leaves
            }
        added = self._admitted(now, staying) if any(vote.admits for vote in votes.values()) else {}
        is_empty = not staying and not any(vote.leaves for vote in votes.values())
        if is_empty or (staying == now.processes and not added):
            return replace(now, change=number, voted=voted)
        left_out = tuple(process for slot, process in now.processes.items() if slot not in staying)
        return Roster(now.generation + 1, number, voted, number, {**staying, **added}, left_out)

    @property
    def has_voted(self) -> bool:
        """Whether the last change of this process was made with votes."""
        return self.roster.voted == self.roster.change

    def _vote(self, number: int, process: str) -> _Vote | None:
        """Return the vote of a process in a change, or None."""
        text = self._found(self._key("vote", process))
        if text is None:
            return None
        voted_in, lost, leaves, admits = json.loads(text)
        return _Vote(tuple(lost), leaves, admits) if voted_in == number else None

    def _is_gone(self, roster: Roster, slot: int) -> bool:
        return self.is_dead(slot) or self.has_gone(roster.processes[slot])

    def has_gone(self, process: str) -> bool:
        """Return whether the store knows that a process has ended."""
        return self._ask("check", [self._key("gone", process)])

    def go(self, reason: str) -> None:
        """Tell all others that this process leaves."""
        self._ask("set", self._key("gone", self.process), reason)

    # --- processes that wait -----------------------------------------------------------------------------------------------------

    def _admitted(self, now: Roster, staying: Mapping[int, str]) -> dict[int, str]:
        """Return the slots of processes that wait. One with other settings hears so, and waits no longer."""
        for applicant in self._new_applications():
            self._applicants[applicant.process] = applicant
        added: dict[int, str] = {}
        for process, applicant in list(self._applicants.items()):
            if self.has_gone(process) or process in now.processes.values():
                del self._applicants[process]
                continue
            if reason := self._objection(applicant):
                del self._applicants[process]
                self._ask("set", self._key("refused", process), reason)
                continue
            free = [slot for slot in range(self.num_slots) if slot not in staying and slot not in added]
            if applicant.slot in free or (applicant.slot < 0 and free):
                added[applicant.slot if applicant.slot >= 0 else free[0]] = process
        return added

    def _new_applications(self) -> list[Applicant]:
        found = []
        while (text := self._found(self._key("application", self._num_read + 1))) is not None:
            self._num_read += 1
            process, slot, settings = json.loads(text)
            found.append(Applicant(process, slot, settings))
        return found

    def _objection(self, applicant: Applicant) -> str:
        if applicant.settings != self.settings:
            mine, theirs = (json.loads(text) if text else {} for text in (self.settings, applicant.settings))
            named = [name for name in mine if mine[name] != theirs.get(name)]
            rows = "; ".join(f"{name}: the members have {mine[name]!r}, this process {theirs.get(name)!r}" for name in named)
            return f"Buffer.join: the settings differ ({rows}); expected those of the members. Pass the same settings."
        if applicant.slot >= self.num_slots:
            return f"slot={applicant.slot}; expected 0 to {self.num_slots - 1}, the slots of this Buffer. Leave it out for any free slot."
        return ""

    # --- the store ---------------------------------------------------------------------------------------------------------------

    def communicator(self) -> StoreCommunicator:
        """Make the communicator of the members of this generation. Its ranks have the numbers of their slots.

        Before the process is a member, it is alone there.
        """
        slots = self.roster.slots
        if not slots:
            return StoreCommunicator(self.store, self._key("alone", self.process), 0, 1, numbers=[self.slot])
        name = self._key("generation", self.roster.generation)
        return StoreCommunicator(self.store, name, slots.index(self.slot), len(slots), numbers=slots)

    def tell(self, facts: Any) -> None:
        """Let the others read facts about this process."""
        self._ask("set", self._key("process", self.process), json.dumps(facts))

    def told(self, slot: int) -> Any:
        """Return what the process of a member has told, or None."""
        text = self._found(self._key("process", self.roster.processes[slot]))
        return None if text is None else json.loads(text)

    def _read(self) -> Roster | None:
        text = self._found(self._key("roster"))
        return None if text is None else _roster_of(text)

    def _read_existing(self) -> tuple[str, Roster]:
        """Return the roster and its value in the store."""
        text = self._found(self._key("roster"))
        if text is None:
            raise EPUnavailableError(f"the store has lost the members of the Buffer {self.name}; expected one store that runs")
        return text.decode(), _roster_of(text)

    def _found(self, key: str) -> bytes | None:
        """Return a value, or None. `get` would wait for one that is missing, or that another process has just deleted."""
        value = self._ask("compare_set", key, _NO_VALUE, _NO_VALUE)  # changes nothing
        return None if value == _NO_VALUE.encode() else value

    def _key(self, *parts: object) -> str:
        return "/".join((self.name, *map(str, parts)))

    def _ask(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self.store, method)(*arguments)
        except RuntimeError as error:
            raise EPUnavailableError(
                f"the store of the Buffer {self.name} does not answer ({str(error).splitlines()[0]}); expected one that outlives its "
                f"processes. Check whether the process that holds it has ended."
            ) from error


def _until(limit_s: float | None) -> Any:
    """Yield until the time is over, with pauses that grow."""
    end, pause = None if limit_s is None else time.monotonic() + limit_s, _LEAST_PAUSE_S
    while True:
        yield
        if end is not None and time.monotonic() > end:
            return
        time.sleep(pause)
        pause = min(1.5 * pause, _MOST_PAUSE_S)
