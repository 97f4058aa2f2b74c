"""Generate bad calls: take a valid call, and replace some arguments at random.

Each bad call must raise an error of a documented class before it sends anything. The user of this module lists the valid calls. The same
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
        function: The function to call, with keywords.
        arguments: Valid arguments.
        kinds: How to replace an argument: a key of `WRONG`, or a function that turns the valid argument into a wrong one.
        errors: Classes of errors that a wrong argument may raise.
    """

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    kinds: dict[str, str | Callable[[random.Random, Any], Any]]
    errors: tuple[type[EPError], ...] = (EPInputError,)


class Broken:
    """An array whose DLPack methods raise an error, or return a wrong value."""

    def __init__(self, device: Any, capsule: Any) -> None:
        self.device, self.capsule = device, capsule

    def __dlpack_device__(self) -> Any:
        return _return_or_raise(self.device)

    def __dlpack__(self, **_: Any) -> Any:
        return _return_or_raise(self.capsule)


def _return_or_raise(given: Any) -> Any:
    if isinstance(given, Exception):
        raise given
    return given


class Hostile:
    """An object whose methods all raise."""

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
    """Return a value that no argument accepts as a whole number."""
    if r.random() < 0.4:
        return _scalar(r)
    huge = r.choice([1 << 31, 1 << 40, 1 << 63, 1 << 64, 10**30, 10**5000])
    return r.choice(
        [True, False, np.True_, -1 - r.randrange(99), -huge, huge * 4, np.int64(-5), np.float64(2), np.uint64(1 << 63)]
    )


def _bytes(r: random.Random) -> Any:
    """Return a value that no argument accepts as a number of bytes, which may be large."""
    while type(wrong := _number(r)) is int and 0 <= wrong < 1 << 62:
        pass
    return wrong


def _flag(r: random.Random) -> Any:
    return _scalar(r) if r.random() < 0.6 else r.choice([None, 2, -1, 0.0, 1.0, np.int8(3), "False", "yes"])


def _seconds(r: random.Random) -> Any:
    """Return a value that no argument accepts as a time."""
    good = (float, int, np.floating, np.integer)
    while isinstance(wrong := _number(r), good) and not isinstance(wrong, bool) and 0 < wrong <= 1e9:
        pass
    return wrong


def _word(r: random.Random) -> Any:
    """Return a value that no argument accepts as a word."""
    return _scalar(r) if r.random() < 0.6 else r.choice(["Token", "TOPK", "fp4", "rank ", b"topk", b"fp8", "\ud800", 0, 1, True])


def _stream(r: random.Random) -> Any:
    return _scalar(r) if r.random() < 0.6 else r.choice([True, -1, 1 << 64, 7.0, np.float32(7)])


WRONG: dict[str, Callable[[random.Random], Any]] = {
    "number": _number,
    "bytes": _bytes,
    "flag": _flag,
    "word": _word,
    "seconds": _seconds,
    "stream": _stream,
    "any": _scalar,
    "handle": lambda r: _scalar(r) if r.random() < 0.7 else r.choice([0, 7, True]),
}


def wrong_array(r: random.Random, good: np.ndarray) -> Any:
    """Return a wrong value in place of a NumPy array: another shape, dtype, layout or type."""
    shape, dtype = list(good.shape), good.dtype
    choice = r.randrange(12) if good.size > 1 else 8  # most changes to an array of one element leave it valid
    if choice == 0:  # another extent
        at = r.randrange(1, len(shape)) if len(shape) > 1 else 0  # another number of tokens may be valid
        shape[at] = r.choice([extent for extent in (0, 1, shape[at] + 1, 2 * shape[at] + 3, 1000) if extent != shape[at]])
        return np.zeros(shape, dtype)
    if choice == 1:  # more dimensions, or fewer
        fewer = shape[:1] if len(shape) > 1 else []
        return np.zeros(r.choice([(*shape, 1), (1, *shape), fewer, []]), dtype)
    if choice == 2:
        kinds = ("complex64", "complex128", "object", "datetime64[s]", "timedelta64[s]", "S3", "U2", [("a", "i4")])
        return np.zeros(shape, r.choice(kinds))
    if choice == 3:  # rows that are not contiguous
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
    """Counts of a run of bad calls."""

    done: int = 0
    by_error: dict[str, int] = field(default_factory=dict)


class Caller:
    """Makes bad calls.

    Args:
        seed: Decides the calls.
        calls: Lists valid calls, with new handles.
        may_raise: More classes of errors that any call may raise.
    """

    def __init__(self, seed: Any, calls: Callable[[], Sequence[Call]], may_raise: Iterable[type[EPError]] = ()) -> None:
        self.random, self._calls, self._may_raise = random.Random(str(seed)), calls, tuple(may_raise)
        self.report = Report()

    def make(self, count: int) -> None:
        """Make some calls. Raise AssertionError, with the arguments, if a call does not raise as it should."""
        calls = self._calls()
        for _ in range(count):
            self._make_one(self.random.choice(calls))

    def _make_one(self, call: Call) -> None:
        r, arguments, expected = self.random, dict(call.arguments), (*call.errors, *self._may_raise)
        if r.random() < 0.03:  # a wrong signature
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
        shown = ", ".join(f"{name}: {_show(arguments[name])}" for name in changed)
        context = f"{call.name}, call {self.report.done} of this seed, with {shown}"
        raised: Exception | None = None
        try:
            call.function(**arguments)
        except Exception as error:
            raised = error
        if raised is None:
            raise AssertionError(f"{context}: nothing was raised")
        name = type(raised).__name__
        if not isinstance(raised, expected):
            raise AssertionError(f"{context}: raised {name}: {raised}") from raised
        if isinstance(raised, (EPConfigError, EPInputError)):
            _check_message(context, str(raised), call)
        self.report.done += 1
        self.report.by_error[name] = self.report.by_error.get(name, 0) + 1


def _required(call: Call) -> list[str]:
    parameters = inspect.signature(call.function).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD and p.name in call.arguments]


def _check_message(context: str, message: str, call: Call) -> None:
    """Check that a message is short, names an argument, and shows no address and no contents of an array."""
    assert 20 < len(message) < 1000, f"{context}: raised {message[:2000]!r}"
    assert "disagree" not in message, f"{context}: the call was made, and differed from that of another rank: {message}"
    assert re.search(" at 0x[0-9a-f]+|Traceback", message) is None, f"{context}: raised {message!r}"
    names = [
        *call.arguments,
        *call.kinds,
        "num_topk",
        "num_experts",
        "hidden",
        "row_bytes",
        "y",
    ]  # y: the experts' rows of wrappers
    assert re.search(rf"\b({'|'.join(names)})\b", message), f"{context}: names no argument: {message!r}"


def _show(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"{type(value).__name__} {value.dtype} {list(value.shape)}"
    try:
        return f"{type(value).__name__} {value!r}"[:100]
    except Exception:
        return type(value).__name__
