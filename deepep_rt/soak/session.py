"""What the rounds of one Buffer share: the Buffer, the checker, kept results and times."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..buffer import Buffer
from .arrays import Arrays
from .buffers import BufferPlan, Options
from .check import Checker
from .plan import RoundPlan

CALLS = ("dispatch", "combine", "low_latency_dispatch", "low_latency_combine")

_Result = TypeVar("_Result")
_WHAT = {name: number for number, name in enumerate(("x", "scales", "weights", "y", "sums_weights", "bias0", "bias1"))}
_MOST_HELD = 6  # results; more would fill the pool, and each dispatch would be copied


class Times:
    """Seconds of each call on this rank, in the order of calls; all ranks have as many."""

    def __init__(self) -> None:
        self.seconds = {name: array("d") for name in CALLS}
        self._running: list[tuple[str, Any, Any]] = []

    def add(self, name: str, start: Any, end: Any) -> None:
        self._running.append((name, start, end))

    def settle(self, arrays: Arrays) -> None:
        """Read the clocks; the work has ended."""
        for name, start, end in self._running:
            self.seconds[name].append(arrays.seconds(start, end))
        self._running.clear()


class _Held(NamedTuple):
    until: int
    result: Any
    check: Callable[[], None]
    names: Sequence[str]


class Session:
    """One Buffer and what its rounds need.

    Args:
        options: Of the run.
        plan: Of the Buffer.
        buffer: The Buffer.
        arrays: Where it works.
        check: Collects differences.
        times: Collects times.
        rank: This one.
        meet: Waits for all ranks.
    """

    def __init__(
        self,
        options: Options,
        plan: BufferPlan,
        buffer: Buffer,
        arrays: Arrays,
        check: Checker,
        times: Times,
        rank: int,
        meet: Callable[[], Any],
    ) -> None:
        self.options, self.plan, self.buffer, self.arrays = options, plan, buffer, arrays
        self.check, self.times, self.rank, self.meet = check, times, rank, meet
        self.graph: Any = None  # of soak_graph
        self.on_host = arrays if not arrays.on_gpu else Arrays(on_gpu=False)
        self.is_timed = False  # this round has no planned delays
        self.doing = "the start"
        self._held: list[_Held] = []

    def key(self, plan: RoundPlan, call: int, what: str) -> int:
        """The key of all ranks' contents of one array of a call."""
        words = (self.options.seed, plan.number, call, _WHAT[what])
        return int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])

    def timed(self, name: str, way: str, call: Callable[[dict[str, Any]], _Result], *, has_hook: bool = False) -> _Result:
        """Make a call on the stream that `way` says, and have the current stream wait for it.

        Args:
            name: Of the call.
            way: Of `Arrays.where`.
            call: Makes it, with more arguments.
            has_hook: The call only sends; nothing waits.
        """
        self.doing = name
        where = self.arrays.where(way)
        start = self.arrays.clock() if self.is_timed and way == "plain" and not has_hook else None
        result: Any = call(where)
        if not has_hook:
            result.event.wait()
        if start is not None:
            self.times.add(name, start, self.arrays.clock())
        return result

    def let_go(self, plan: RoundPlan, result: Any, check: Callable[[], None], names: Sequence[str]) -> None:
        """Keep a result for some rounds and check it again, or overwrite it now: its memory is the library's next output.

        Args:
            plan: Of the round.
            result: What a call returned.
            check: Checks it once more.
            names: Its arrays.
        """
        if plan.hold and len(self._held) < _MOST_HELD:
            self._held.append(_Held(plan.number + plan.hold, result, check, names))
        else:
            self._overwrite(result, names)

    def check_held(self, number: int | None = None) -> None:
        """Check results that were kept up to this round, or all of them, and let them go."""
        due = [held for held in self._held if number is None or held.until <= number]
        self._held = [held for held in self._held if held not in due]
        for held in due:
            held.check()
            self._overwrite(held.result, held.names)

    def settle(self) -> None:
        """Wait for all comparisons and times."""
        self.arrays.synchronize()
        self.check.settle()
        self.times.settle(self.arrays)

    def _overwrite(self, result: Any, names: Sequence[str]) -> None:
        for name in names:
            self.arrays.poison(getattr(result, name))
