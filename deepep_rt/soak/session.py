"""Hold the data that the rounds of one Buffer share: the Buffer, the checker, kept results and times."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..buffer import Buffer
from ..errors import EPUnavailableError
from .arrays import Arrays
from .buffers import BufferPlan, Options
from .check import Checker
from .plan import RoundPlan, experts_of

CALLS = ("dispatch", "combine", "low_latency_dispatch", "low_latency_combine")

_Result = TypeVar("_Result")
_WHAT = {name: number for number, name in enumerate(("x", "scales", "weights", "y", "sums_weights", "bias0", "bias1"))}
_MOST_KEPT = 6  # more results would fill the pool, and each dispatch would be copied


class Times:
    """Seconds of each call on this rank, in the order of calls. All ranks have the same number."""

    def __init__(self) -> None:
        self.seconds = {name: array("d") for name in CALLS}
        self._running: list[tuple[str, Any, Any]] = []

    def add(self, name: str, start: Any, end: Any) -> None:
        self._running.append((name, start, end))

    def settle(self, arrays: Arrays) -> None:
        """Read the clocks after the work has ended."""
        for name, start, end in self._running:
            self.seconds[name].append(arrays.seconds(start, end))
        self._running.clear()


class _Kept(NamedTuple):
    made_in: int
    until: int
    result: Any
    check: Callable[[], None]
    names: Sequence[str]


class Session:
    """One Buffer and the data of its rounds. `align` waits for all ranks."""

    def __init__(
        self,
        options: Options,
        plan: BufferPlan,
        buffer: Buffer,
        arrays: Arrays,
        check: Checker,
        times: Times,
        rank: int,
        align: Callable[[], Any],
    ) -> None:
        self.options, self.plan, self.buffer, self.arrays = options, plan, buffer, arrays
        self.check, self.times, self.rank, self.align = check, times, rank, align
        self.graph: Any = None  # a `graph.Graph`
        self.on_host = arrays if not arrays.on_gpu else Arrays(on_gpu=False)
        self.is_timed = False  # this round has no planned delays
        self.activity = "the start"
        self._kept: list[_Kept] = []

    def choices(self, plan: RoundPlan, step: int = 0) -> list[np.ndarray]:
        """Draw the choices of each rank that count, as for `experts_of`.

        In a Buffer with slots, a choice of a slot without a process is -1, and such a slot has no tokens.
        """
        members, local = self.buffer.members, self.plan.shape.local_experts
        drawn = [experts_of(self.options, plan, step, rank) for rank in range(self.options.num_ranks)]
        if len(members) == len(drawn):
            return drawn
        counting = [np.where(np.isin(idx // local, members), idx, -1) for idx in drawn]
        return [idx if rank in members else idx[:0] for rank, idx in enumerate(counting)]

    def own_choices(self, plan: RoundPlan, step: int = 0) -> np.ndarray:
        """Draw the choices that this rank passes to its calls, those of slots without a process included."""
        return experts_of(self.options, plan, step, self.rank)

    def key(self, plan: RoundPlan, call: int, what: str) -> int:
        """Make the key for the contents of one array of a call on all ranks."""
        words = (self.options.seed, plan.number, call, _WHAT[what])
        return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])

    def timed(self, name: str, mode: str, call: Callable[[dict[str, Any]], _Result], *, has_hook: bool = False) -> _Result:
        """Make a call on the stream of `mode` (`Arrays.stream_arguments`), and make the current stream wait for it.

        `call` gets the arguments of the stream. With `has_hook`, the call only sends, so that there is nothing to wait for.
        """
        self.activity = name
        where = self.arrays.stream_arguments(mode)
        start = self.arrays.clock() if self.is_timed and mode == "plain" and not has_hook else None
        result: Any = call(where)
        if not has_hook:
            result.event.wait()
        if start is not None:
            self.times.add(name, start, self.arrays.clock())
        return result

    def keep_or_poison(self, plan: RoundPlan, result: Any, check: Callable[[], None], names: Sequence[str]) -> None:
        """Keep a result for some rounds, or overwrite it now, because its memory is the library's next output.

        `check` checks the result again. `names` are those of its arrays.
        """
        if plan.keep_rounds and len(self._kept) < _MOST_KEPT:
            self._kept.append(_Kept(plan.number, plan.number + plan.keep_rounds, result, check, names))
        else:
            self._overwrite(result, names)

    def check_kept(self, number: int | None = None) -> None:
        """Check kept results that are due in this round, and overwrite them. None: all kept results."""
        due = [held for held in self._kept if number is None or held.until <= number]
        self._kept = [held for held in self._kept if held not in due]
        for held in due:
            held.check()
            self._overwrite(held.result, held.names)

    def drop(self, number: int) -> None:
        """Forget the results and the differences of a round in which a rank was lost."""
        self._kept = [held for held in self._kept if held.made_in != number]
        self.settle()
        self.check.forget(number)

    def sleep(self, kept: str) -> bool:
        """Let the Buffer sleep and wake. `kept` says what becomes of kept results. Return whether its memory can sleep."""
        description = self.buffer.describe()
        can_sleep = description.backend == "host" or "virtual memory" in description.provider
        self.activity = "sleep and wake"
        if kept == "lose":
            self.check_kept()
        self.settle()
        try:
            self.buffer.sleep(keep_results=kept == "keep")
        except EPUnavailableError:
            if can_sleep:
                raise
            return False
        self.buffer.wake()
        return True

    def settle(self) -> None:
        """Wait for all comparisons and times."""
        self.arrays.synchronize()
        self.check.settle()
        self.times.settle(self.arrays)

    def _overwrite(self, result: Any, names: Sequence[str]) -> None:
        for name in names:
            self.arrays.poison(getattr(result, name))
