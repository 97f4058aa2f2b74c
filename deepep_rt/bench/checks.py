"""Check a value of a JSON file by a table of its fields. The message of an error names the place of the value in the file."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_LONGEST_TEXT, _DEEPEST, _MOST_VALUES, _LARGEST = 1000, 20, 1_000_000, 1e15


class InvalidValue(ValueError):
    """A value differs from the expectation. The message gives both in printable characters."""


def _invalid(value: Any, where: str, expected: str) -> InvalidValue:
    text = ascii(value)
    return InvalidValue(f"{where}={text if len(text) <= 60 else text[:57] + '...'}; expected {expected}")


def plain(value: Any, where: str) -> None:
    """Check that a value can be printed and drawn: texts are short and printable, numbers are finite, and it is not too deep or large."""
    waiting, seen = [(value, where, 0)], 0
    while waiting:
        value, where, depth = waiting.pop()
        seen += 1
        if depth > _DEEPEST or seen > _MOST_VALUES:
            raise InvalidValue(f"{where} is too deep or too large; expected a file that a benchmark wrote")
        if isinstance(value, str) and not (len(value) <= _LONGEST_TEXT and value.isprintable()):
            raise _invalid(value, where, f"printable text of at most {_LONGEST_TEXT} characters")
        if isinstance(value, int | float) and not (abs(value) <= _LARGEST):
            raise _invalid(value, where, "a finite number")
        if isinstance(value, list):
            waiting += [(item, where, depth + 1) for item in value]
        if isinstance(value, dict):
            waiting += [(name, where, depth) for name in value]
            waiting += [(item, f"{where}.{ascii(name)[1:-1]}"[:_LONGEST_TEXT], depth + 1) for name, item in value.items()]


# --- tables ------------------------------------------------------------------------------------------------------------------------


class Kind(NamedTuple):
    """A text or a number: what is expected, and whether a value fits."""

    expected: str
    fits: Callable[[Any], bool]


class Fields(NamedTuple):
    """An object with all members in `needed`. Members in `others` are optional. With `is_closed`, there are no further members."""

    needed: Mapping[str, Any]
    others: Mapping[str, Any] = {}
    is_closed: bool = False


class Names(NamedTuple):
    """An object in which all names and all values are alike."""

    name: Kind
    value: Any


class Either(NamedTuple):
    """A value whose type decides what is expected of it."""

    is_first: type
    first: Any
    second: Any


def optional(expected: Any) -> Either:
    """Expect null, or a value of a table."""
    return Either(type(None), ANYTHING, expected)


def whole(low: int, high: int) -> Kind:
    """Expect a whole number from `low` to `high`."""
    return Kind(f"a whole number from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


def number(low: float, high: float) -> Kind:
    """Expect a number from `low` to `high`."""
    return Kind(f"a number from {low:g} to {high:g}", lambda value: type(value) in (int, float) and low <= value <= high)


def matching(pattern: str, expected: str | None = None) -> Kind:
    """Expect text that matches all of a pattern."""
    return Kind(expected or f"text like {pattern}", lambda value: isinstance(value, str) and bool(re.fullmatch(pattern, value)))


ANYTHING = Kind("", lambda value: True)
TEXT = Kind("text", lambda value: isinstance(value, str))
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
NUMERAL = matching(r"[1-9][0-9]{0,8}", "a whole number from 1 to 999999999 as a name")
"""The name of a number of tokens or SMs."""


def check(value: Any, expected: Any, where: str) -> None:
    """Check a value by a table: a `Kind`, `Fields`, `Names`, `Either`, or a list of one of them for lists of at least one item.

    Raise InvalidValue, which names the place, if it differs.
    """
    if isinstance(expected, Either):
        check(value, expected.first if isinstance(value, expected.is_first) else expected.second, where)
    elif isinstance(expected, Kind):
        if not expected.fits(value):
            raise _invalid(value, where, expected.expected)
    elif isinstance(expected, list):
        if not isinstance(value, list) or not value:
            raise _invalid(value, where, "a list that is not empty")
        for i, item in enumerate(value):
            check(item, expected[0], f"{where}[{i}]")
    elif not isinstance(value, dict):
        raise _invalid(value, where, "an object")
    elif isinstance(expected, Names):
        for name, item in value.items():
            check(name, expected.name, where)
            check(item, expected.value, f"{where}.{name}")
    else:
        known = {**expected.needed, **expected.others}
        if missing := expected.needed.keys() - value.keys():
            raise InvalidValue(f"{where} has no {', '.join(sorted(missing))}")
        if expected.is_closed and (more := value.keys() - known.keys()):
            raise InvalidValue(f"{where} has {', '.join(map(ascii, sorted(more)))}; expected only {', '.join(known)}")
        for name, item in value.items():
            check(item, known.get(name, ANYTHING), f"{where}.{name}")


# --- the measured problem ----------------------------------------------------------------------------------------------------------

SIZES = {"hidden": whole(1, 1 << 24), "topk": whole(1, 1024), "experts": whole(1, 1 << 16)}
NUM_RANKS = whole(1, 1 << 16)
TIME_US = number(1e-6, 1e12)


def check_problem(num_ranks: int, settings: Mapping[str, Any]) -> None:
    """Check that valid sizes fit together."""
    experts, topk = settings["experts"], settings["topk"]
    if topk > experts or experts % num_ranks:
        raise InvalidValue(
            f"file has top-{topk} of {experts} experts on {num_ranks} ranks; expected as many experts on each rank, and as top-k"
        )
