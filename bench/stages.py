"""Time the nested stages of a call by wrapping functions. The time that the wrappers take is subtracted.

A stage has the time of its functions, less that of the stages inside of it.
"""

from __future__ import annotations

import contextlib
import inspect
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

_NUM_PROBES = 20_000


@dataclass
class Spent:
    """What one stage took in all calls: its nanoseconds with those of its wrappers, its calls, and the calls of stages inside of it."""

    ns: int = 0
    calls: int = 0
    inner_calls: int = 0


class Stages:
    """Wraps functions, and adds up the time of each stage.

    Attributes:
        spent: What each stage has taken so far, by name.
    """

    def __init__(self) -> None:
        self.spent: dict[str, Spent] = {}
        self._inside = [0, 0]  # nanoseconds and calls of the stages inside of the open one, so far

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that does the same and counts as a part of stage `name`."""
        spent, inside, clock = self.spent.setdefault(name, Spent()), self._inside, perf_counter_ns

        def wrapped(*arguments: Any, **options: Any) -> Any:
            others_ns, others_calls = inside
            inside[0] = inside[1] = 0
            begin = clock()
            try:
                return function(*arguments, **options)
            finally:
                ns = clock() - begin
                spent.ns += ns - inside[0]
                spent.calls += 1
                spent.inner_calls += inside[1]
                inside[0], inside[1] = others_ns + ns, others_calls + 1

        return wrapped

    @contextlib.contextmanager
    def installed(self, functions: Sequence[tuple[str, Any, str]], modules: Sequence[tuple[Any, str]] = ()) -> Iterator[None]:
        """Wrap functions for the block.

        Args:
            functions: Name of the stage, the class or module, and the name of the function in it.
            modules: A module, and the name by which it knows the bindings of the CUDA driver. Each of their functions is a stage.
        """
        with contextlib.ExitStack() as undo:
            for name, owner, attribute in functions:
                original = vars(owner)[attribute]
                undo.callback(setattr, owner, attribute, original)
                setattr(owner, attribute, self.wrap(name, original))
            for owner, attribute in modules:
                original = vars(owner)[attribute]
                undo.callback(setattr, owner, attribute, original)
                setattr(owner, attribute, self._wrapped_bindings(original))
            yield

    def _wrapped_bindings(self, bindings: Any) -> SimpleNamespace:
        """Copy a module, with its functions `cu...` as stages. Types such as `CUstream` stay."""
        members = {name: getattr(bindings, name) for name in dir(bindings) if not name.startswith("__")}
        return SimpleNamespace(
            **{
                name: self.wrap(name, member)
                if name.startswith("cu") and not inspect.isclass(member) and callable(member)
                else member
                for name, member in members.items()
            }
        )

    def reset(self) -> None:
        """Forget all times."""
        for spent in self.spent.values():
            spent.ns = spent.calls = spent.inner_calls = 0

    def corrected(self, costs: tuple[float, float], total_ns: float) -> dict[str, tuple[float, int]]:
        """Return nanoseconds and calls of each stage that ran, without the time of its own wrappers and of those inside of it.

        Args:
            costs: What a wrapper adds to its own stage and to the stage around it; only their ratio counts.
            total_ns: What all stages together take without wrappers.
        """
        inner, outer = costs
        shares = {name: spent.calls * inner + spent.inner_calls * outer for name, spent in self.spent.items() if spent.calls}
        scale = (sum(self.spent[name].ns for name in shares) - total_ns) / sum(shares.values()) if shares else 0.0
        return {name: (self.spent[name].ns - scale * share, self.spent[name].calls) for name, share in shares.items()}


def wrapper_costs() -> tuple[float, float]:
    """Measure the nanoseconds that a wrapper adds to its own stage, and to the stage around it: the median of a few tries.

    They are those of a function that does nothing. Around other functions wrappers take longer, in about the same ratio.
    """

    def nothing(one: Any, other: Any) -> None: ...

    def loop(call: Callable[..., Any]) -> float:
        begin = perf_counter_ns()
        for _ in range(_NUM_PROBES):
            call(begin, None)
        return (perf_counter_ns() - begin) / _NUM_PROBES

    tries = []
    for _ in range(5):
        stages = Stages()
        all_ns, plain_ns = loop(stages.wrap("nothing", nothing)), loop(nothing)
        measured_ns = stages.spent["nothing"].ns / _NUM_PROBES
        tries.append((max(measured_ns - plain_ns, 1.0), max(all_ns - measured_ns, 1.0)))
    return statistics.median(inner for inner, _ in tries), statistics.median(outer for _, outer in tries)
