"""Bad calls from a random number generator: a valid call of each kind, of which some arguments are replaced by wrong ones.

Each one has to raise an error of the documented class before it sends anything; what calls it says how a valid one is made. The same
seed gives the same calls.
"""

from __future__ import annotations

import inspect
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deepep_rt import EPConfigError, EPError, EPInputError


@dataclass
class Call:
    """A valid call.

    Attributes:
        name: For messages.
        function: What is called, always by keywords.
        arguments: What is valid.
        kinds: For each argument that may be replaced, how: a key of `WRONG`, or what makes a wrong one of the valid one.
        errors: What may be raised about a wrong argument.
    """

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    kinds: dict[str, str | Callable[[random.Random, Any], Any]]
    errors: tuple[type[EPError], ...] = (EPInputError,)


class Broken:
    """An array of a library whose DLPack side answers with an error, or with what is no answer."""

    def __init__(self, device: Any, capsule: Any) -> None:
        self.device, self.capsule = device, capsule

    def __dlpack_device__(self) -> Any:
        return _answer(self.device)

    def __dlpack__(self, **_: Any) -> Any:
        return _answer(self.capsule)


def _answer(given: Any) -> Any:
    if isinstance(given, Exception):
        raise given
    return given


class Hostile:
    """Answers every question with an error."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")

    __repr__ = __str__ = __bool__ = __int__ = __index__ = __len__ = lambda self: 1 / 0  # type: ignore[assignment]


ERRORS: tuple[type[Exception], ...] = (
    ValueError,
    TypeError,
    RuntimeError,
    BufferError,
    OSError,
    KeyError,
    AttributeError,
    ZeroDivisionError,
)
SCALARS: tuple[Callable[[random.Random], Any], ...] = (
    lambda r: r.choice(["", "x", "0", "true", "NaN", "\0", "\u2603" * 50, "long" * 5000]),
    lambda r: r.choice([b"", b"bytes", bytearray(3), memoryview(b"abc")]),
    lambda r: r.choice([float("nan"), float("inf"), -0.5, 1e300, 2.5, 3j]),
    lambda r: np.float32(r.uniform(-9, 9)),
    lambda r: r.choice([[], (), {}, set(), [1, 2], (None,), [[1], [2, 3]], range(3), iter(())]),
    lambda r: r.choice([object(), Ellipsis, NotImplemented, type, dict, len, lambda: None, Hostile, Exception("x")]),
    lambda r: Hostile(),
    lambda r: np.array(r.choice([[1, 2], [], [[0]], "a", 1.5, None])),
    lambda r: np.datetime64("2026-11-23"),
)


def _scalar(r: random.Random) -> Any:
    return r.choice(SCALARS)(r)


def _number(r: random.Random) -> Any:
    """No whole number that any argument takes."""
    if r.random() < 0.4:
        return _scalar(r)
    huge = r.choice([1 << 31, 1 << 40, 1 << 63, 1 << 64, 10**30, 10**5000])
    return r.choice(
        [True, False, np.True_, -1 - r.randrange(99), -huge, huge * 4, np.int64(-5), np.float64(2), np.uint64(1 << 63)]
    )


def _bytes(r: random.Random) -> Any:
    """The same where large numbers are right."""
    while type(wrong := _number(r)) is int and 0 <= wrong < 1 << 62:
        pass
    return wrong


def _flag(r: random.Random) -> Any:
    return _scalar(r) if r.random() < 0.6 else r.choice([None, 2, -1, 0.0, 1.0, np.int8(3), "False", "yes"])


def _stream(r: random.Random) -> Any:
    return _scalar(r) if r.random() < 0.6 else r.choice([True, -1, 1 << 64, 7.0, np.float32(7)])


WRONG: dict[str, Callable[[random.Random], Any]] = {
    "number": _number,
    "bytes": _bytes,
    "flag": _flag,
    "stream": _stream,
    "any": _scalar,
    "handle": lambda r: _scalar(r) if r.random() < 0.7 else r.choice([0, 7, True]),
}


def wrong_array(r: random.Random, good: np.ndarray) -> Any:
    """A wrong one in place of an array of NumPy: of another shape, dtype, order, place or kind."""
    shape, dtype = list(good.shape), good.dtype
    choice = r.randrange(12) if good.size > 1 else 8  # of one element, most are as good
    if choice == 0:  # another extent
        at = r.randrange(1, len(shape)) if len(shape) > 1 else 0  # another number of tokens may be right
        shape[at] = r.choice([extent for extent in (0, 1, shape[at] + 1, 2 * shape[at] + 3, 1000) if extent != shape[at]])
        return np.zeros(shape, dtype)
    if choice == 1:  # more dimensions, or fewer
        fewer = shape[:1] if len(shape) > 1 else []
        return np.zeros(r.choice([(*shape, 1), (1, *shape), fewer, []]), dtype)
    if choice == 2:
        kinds = ("complex64", "complex128", "object", "datetime64[s]", "timedelta64[s]", "S3", "U2", [("a", "i4")])
        return np.zeros(shape, r.choice(kinds))
    if choice == 3:  # not one row behind the other
        return r.choice([np.zeros([*shape[:-1], 2 * shape[-1]], dtype)[..., ::2], np.zeros(shape, dtype)[..., ::-1]])
    if choice == 4:
        return np.ma.masked_array(np.zeros(shape, dtype), np.zeros(shape, bool))
    if choice == 5:
        return good.astype(">i8")
    if choice in (6, 7):
        wrong = r.choice([*(kind("refused") for kind in ERRORS), None, 5, b"x", "cpu", (), (1,), (99, 0), object()])
        return r.choice([Broken(wrong, None), Broken((1, 0), wrong)])
    if choice == 8:
        return r.choice([np.ndarray, type(good), np.float32])
    if choice == 9:
        return good.tolist()
    return _scalar(r)


@dataclass
class Report:
    """What a run of bad calls did."""

    done: int = 0
    by_error: dict[str, int] = field(default_factory=dict)


class Caller:
    """Makes bad calls.

    Args:
        seed: Which ones.
        calls: Makes the valid calls anew; what calls give, such as handles, may be old.
        may_raise: More classes that any of them may raise.
    """

    def __init__(self, seed: Any, calls: Callable[[], Sequence[Call]], may_raise: Iterable[type[EPError]] = ()) -> None:
        self.random, self._calls, self._may_raise = random.Random(str(seed)), calls, tuple(may_raise)
        self.report = Report()

    def make(self, count: int) -> None:
        """Make so many; raise AssertionError, with all that is needed to see what happened, about one that does not raise as it should."""
        calls = self._calls()
        for _ in range(count):
            self._one(self.random.choice(calls))

    def _one(self, call: Call) -> None:
        r, arguments, expected = self.random, dict(call.arguments), (*call.errors, *self._may_raise)
        if r.random() < 0.03:  # the signature itself
            if (required := _required(call)) and r.random() < 0.5:
                del arguments[r.choice(required)]
            else:
                arguments[r.choice(["nothing", "X", "stream_", "topk"])] = 1
            expected, changed = (TypeError,), []
        else:
            changed = r.sample(sorted(call.kinds), min(r.choice([1, 1, 1, 2, 3]), len(call.kinds)))
            for name in changed:
                kind = call.kinds[name]
                arguments[name] = WRONG[kind](r) if isinstance(kind, str) else kind(r, call.arguments.get(name))
        told = ", ".join(f"{name}: {_told(arguments[name])}" for name in changed)
        story = f"{call.name}, call {self.report.done} of this seed, with {told}"
        raised: Exception | None = None
        try:
            call.function(**arguments)
        except Exception as error:
            raised = error
        if raised is None:
            raise AssertionError(f"{story}: nothing was raised")
        name = type(raised).__name__
        if not isinstance(raised, expected):
            raise AssertionError(f"{story}: raised {name}: {raised}") from raised
        if isinstance(raised, (EPConfigError, EPInputError)):
            _check_words(story, str(raised), call)
        self.report.done += 1
        self.report.by_error[name] = self.report.by_error.get(name, 0) + 1


def _required(call: Call) -> list[str]:
    parameters = inspect.signature(call.function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD and p.name in call.arguments]


def _check_words(story: str, message: str, call: Call) -> None:
    """It is short, and names an argument; nothing in it is an address or what an array holds."""
    assert 20 < len(message) < 1000, f"{story}: said {message[:2000]!r}"
    assert re.search(" at 0x[0-9a-f]+|Traceback", message) is None, f"{story}: said {message!r}"
    names = [*call.arguments, *call.kinds, "num_topk", "num_experts", "hidden", "row_bytes"]
    assert any(name in message for name in names), f"{story}: names no argument: {message!r}"


def _told(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{type(value).__name__} {value.dtype} {list(value.shape)}"
    try:
        return f"{type(value).__name__} {value!r}"[:100]
    except Exception:
        return type(value).__name__
