"""The members of a Buffer with slots: who they are, and how a Buffer goes on with others.

All changes take the same steps. The members agree on a generation (`comm/membership.py`). Each ends its calls, and takes fresh memory at
the same addresses, so a process that was given up cannot reach it. Then they share the memory, and begin anew. If a member is lost
meanwhile, the others agree on the next generation.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from ..comm.communicator import Communicator
from ..comm.failure_notice import FailureNotice, making
from ..comm.liveness import ENDED, LivenessWatch
from ..comm.membership import Membership
from ..comm.rendezvous import Rendezvous
from ..config import Config
from ..errors import EPConfigError, EPEvictedError, EPTimeoutError, EPUnavailableError
from .agreement import creation_comm
from .base import Backend

_SLACK_S = 2.0
_log = logging.getLogger("deepep_rt")


class Members:
    """The part of one process. `rendezvous` is where the members meet."""

    def __init__(self, rendezvous: Rendezvous, membership: Membership) -> None:
        self.rendezvous, self._membership = rendezvous, membership
        membership.is_dead = self._has_ended
        self._ended: set[int] = set()
        self._watch: LivenessWatch | None = None
        self.has_left = False
        """Whether this process has left the members, and may come back."""

    @classmethod
    def found(cls, comm: Communicator, rendezvous: Rendezvous, num_slots: int, timeout_s: float, settings: str) -> Members:
        """Begin with the ranks of `comm`, in the slots from 0 on. Collective."""
        if comm.Get_size() > num_slots:
            raise EPConfigError(f"max_ranks={num_slots}; expected at least the {comm.Get_size()} ranks of the communicator.")
        membership = rendezvous.membership(num_slots, timeout_s, settings)
        membership.found(dict(zip(comm.numbers, comm.allgather(membership.process), strict=True)))
        return cls(rendezvous, membership)

    @classmethod
    def alone(
        cls, rendezvous: Rendezvous, num_slots: int, timeout_s: float, settings: str, slot: int | None, limit_s: float
    ) -> Members:
        """Reserve a slot, and be its only member until `join`."""
        membership = rendezvous.membership(num_slots, timeout_s, settings)
        membership.slot = membership.claim(slot, limit_s)
        return cls(rendezvous, membership)

    @classmethod
    def begin(cls, comm: Communicator | None, joining: Any, place: Any, config: Config, choices: dict[str, Any]) -> Members:
        """Begin with the ranks of `comm`, or alone in a slot if there are none. `choices`: settings that `config` lacks."""
        settings = json.dumps({**config.settings(), **choices}, sort_keys=True, default=str)
        limits = (
            config.num_ranks,
            2 * config.timeout_s + _SLACK_S,
            settings,
        )  # a member may have to wait in a call before it votes
        if comm is None:
            rendezvous = Rendezvous(place, None, config.timeout_s)
            return cls.alone(rendezvous, *limits, joining.slot, joining.limit_s or config.timeout_s)
        met = creation_comm(comm, config.timeout_s)
        with making(comm, met, "the making of a Buffer"):
            mine = f"it has max_ranks={config.num_ranks}"  # a rank without slots raises it; see `agreement.agree`
            if met.allgather(mine) != [mine] * met.Get_size():
                raise EPConfigError(f"{mine}, and another rank has not; expected the same on all ranks. Pass the same max_ranks.")
            made = cls.found(met, Rendezvous(place, met, config.timeout_s), *limits)
        met.release()
        return made

    def start(self, backend: Backend, joining: Any) -> None:
        """Begin to watch the other members. A process that joins waits here for them."""
        if joining is None:
            self._follow(backend.lose)
            return
        try:
            self._membership.apply(self._membership.slot, joining.limit_s or self._membership.timeout_s)
            with backend.call_lock:
                self._settle(backend, set())
        except BaseException as error:
            backend.destroy(False, error)
            raise

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots of the members, ascending."""
        return self._membership.roster.slots

    @property
    def generation(self) -> int:
        return self._membership.roster.generation

    def communicator(self) -> Communicator:
        """Make the communicator of the members, or of this process alone before it joins."""
        return self._membership.communicator()

    def shrink(self, backend: Backend, lost: Iterable[int]) -> None:
        """Go on without some members. Collective over the others."""
        slots = {*lost, *self._ended} - {self._membership.slot}
        if slots and backend.call_lock.notice is not None:
            backend.call_lock.notice.give_up(sorted(slots))
        given_up = self._processes_in(slots)
        while True:
            if self._membership.change(lost=self._slots_of(given_up)):
                self._settle(backend, given_up)
            if self._membership.has_voted and not self._slots_of(given_up):
                return

    def _processes_in(self, slots: Iterable[int]) -> set[str]:
        """Return the names of the processes in slots: another process may take a slot later."""
        processes = self._membership.roster.processes
        return {processes[slot] for slot in slots if slot in processes}

    def _slots_of(self, processes: set[str]) -> set[int]:
        """Return the slots that some processes have now."""
        return {slot for slot, process in self._membership.roster.processes.items() if process in processes}

    def leave(self, backend: Backend) -> None:
        """Leave the members, who go on, and give the memory back. Collective over them: the others call `shrink`."""
        try:
            while self._membership.slot in self.slots:
                self._membership.change(leaves=True)
        except EPEvictedError:
            self.has_left = True
        self.close()
        backend.leave_members()

    def come_back(self, backend: Backend) -> None:
        """Ask the members to take this process in again, in the same slot, and go on with them."""
        membership = self._membership
        membership.renew()
        self.rendezvous.introduce(membership)
        membership.claim(membership.slot, membership.timeout_s)
        membership.apply(membership.slot, membership.timeout_s)
        self._settle(backend, set())
        self.has_left = False

    def admit(self, backend: Backend) -> None:
        """Take in the processes that wait. Collective."""
        if self._membership.change(admits=True):
            self._settle(backend, set(), aborts=False)

    def close(self) -> None:
        """Watch no more."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def end(self) -> None:
        """Leave for good, after the Buffer has ended."""
        with suppress(EPUnavailableError):  # the store may have ended before
            self._membership.go("it has destroyed its Buffer")
        self.rendezvous.close()

    def _settle(self, backend: Backend, given_up: set[str], aborts: bool = True) -> None:
        """Begin the generation that the members have agreed on, or a later one. `given_up` gets those that are lost on the way."""
        while True:
            comm, progress = self.communicator(), backend.call_lock.progress
            progress.num_made, progress.name = 0, ""
            notice = FailureNotice(comm, progress)
            comm.timeout_s = self._membership.timeout_s
            comm.heard = lambda notice=notice: notice.heard("a change of the members")
            self._follow(notice.lose)
            try:
                backend.change_members(comm, notice, self.generation, aborts)
            except EPTimeoutError as error:
                notice.close()
                aborts = True
                lost = {*getattr(error, "ranks", ()), error.peer, *self._ended} - {self._membership.slot}
                given_up |= self._processes_in(lost)
                if not self._slots_of(given_up):
                    raise
                _log.warning("a member was lost while the members changed: %s", error)
                while self._slots_of(given_up) and not self._membership.change(lost=self._slots_of(given_up)):
                    pass
                continue
            self._follow(backend.lose)
            return

    def _follow(self, lose: Any) -> None:
        """Let `lose` hear of members of this generation that end, also of those that have ended already."""
        self.close()
        membership, mine = self._membership, self._membership.slot
        self._ended = set()
        others = {slot: membership.told(slot) for slot in self.slots if slot != mine}
        processes = dict(membership.roster.processes)

        def on_end(slot: int) -> None:
            self._ended.add(slot)
            lose(slot, ENDED)

        self._watch = LivenessWatch(others, lambda slot: membership.has_gone(processes[slot]), on_end)

    def _has_ended(self, slot: int) -> bool:
        return slot in self._ended
