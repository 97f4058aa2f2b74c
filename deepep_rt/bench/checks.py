"""Check files that benchmarks read. A check takes a value and its place in the file, and raises `InvalidValue`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any, str], None]

_LONGEST_TEXT, _DEEPEST, _MOST_VALUES, _LARGEST = 1000, 20, 1_000_000, 1e15
_MOST_SIZES = 64  # numbers of tokens in a result: each is a row of pictures


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


# --- types of values ---------------------------------------------------------------------------------------------------------------


def anything(value: Any, where: str) -> None:
    """Accept every value."""


def text(value: Any, where: str) -> None:
    """Check that a value is text."""
    if not isinstance(value, str):
        raise _invalid(value, where, "text")


def flag(value: Any, where: str) -> None:
    """Check that a value is true or false."""
    if not isinstance(value, bool):
        raise _invalid(value, where, "true or false")


def whole(low: int, high: int) -> Check:
    """Make a check for whole numbers from `low` to `high`."""

    def check(value: Any, where: str) -> None:
        if type(value) is not int or not low <= value <= high:
            raise _invalid(value, where, f"a whole number from {low} to {high}")

    return check


def number(low: float, high: float) -> Check:
    """Make a check for numbers from `low` to `high`."""

    def check(value: Any, where: str) -> None:
        if type(value) not in (int, float) or not low <= value <= high:
            raise _invalid(value, where, f"a number from {low:g} to {high:g}")

    return check


def numeral(value: Any, where: str) -> None:
    """Check that a name is a number of tokens or SMs."""
    if not re.fullmatch(r"[1-9][0-9]{0,8}", value):
        raise _invalid(value, where, "a whole number from 1 to 999999999 as a name")


def matching(pattern: str) -> Check:
    """Make a check for text that matches all of a pattern."""

    def check(value: Any, where: str) -> None:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise _invalid(value, where, f"text like {pattern}")

    return check


def optional(check: Check) -> Check:
    """Make a check that also accepts null."""
    return lambda value, where: None if value is None else check(value, where)


def either(is_first: Callable[[Any], bool], first: Check, second: Check) -> Check:
    """Make a check that depends on the value."""
    return lambda value, where: (first if is_first(value) else second)(value, where)


def each(check: Check) -> Check:
    """Make a check for lists of at least one item."""

    def check_all(value: Any, where: str) -> None:
        if not isinstance(value, list) or not value:
            raise _invalid(value, where, "a list that is not empty")
        for i, item in enumerate(value):
            check(item, f"{where}[{i}]")

    return check_all


def mapping(name: Check, check: Check) -> Check:
    """Make a check for objects. One check applies to all names, another to all values."""

    def check_all(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise _invalid(value, where, "an object")
        for key, item in value.items():
            name(key, where)
            check(item, f"{where}.{key}")

    return check_all


def record(needed: Mapping[str, Check], others: Mapping[str, Check] | None = None, *, is_closed: bool = False) -> Check:
    """Make a check for objects with all members in `needed`.

    Members in `others` are optional. With `is_closed`, there are no further members.
    """

    def check(value: Any, where: str) -> None:
        if not isinstance(value, dict):
            raise _invalid(value, where, "an object")
        if missing := needed.keys() - value.keys():
            raise InvalidValue(f"{where} has no {', '.join(sorted(missing))}")
        known = {**needed, **(others or {})}
        if is_closed and (more := value.keys() - known.keys()):
            raise InvalidValue(f"{where} has {', '.join(map(ascii, sorted(more)))}; expected only {', '.join(known)}")
        for name, item in value.items():
            known.get(name, anything)(item, f"{where}.{name}")

    return check


# --- files -------------------------------------------------------------------------------------------------------------------------

_TIME_US, _GB_S = number(1e-6, 1e12), number(0, 1e9)
_TOKENS, _SMS = whole(1, 999_999_999), whole(1, 999_999_999)
_SIZES = {"hidden": whole(1, 1 << 24), "topk": whole(1, 1024), "experts": whole(1, 1 << 16)}
_NUM_RANKS = whole(1, 1 << 16)

_THROUGHPUT_ROW = record(
    {
        "work": matching(
            "dispatch_(bf16|fp8)_(unknown|known|worst)|dispatch_expert_(unknown|known)|(copy|permute)_expert|"
            "combine_(bf16|expert|topk|fp8|log10)|nccl_all_to_all"
        ),
        "tokens": _TOKENS,
        "sms": _SMS,
        "us": _TIME_US,
        "gb_s": _GB_S,
        "remote_gb_s": _GB_S,
    },
    {
        **dict.fromkeys(("host_us", "host_prepared_us"), optional(_TIME_US)),
        "row_bytes": optional(whole(1, 1 << 30)),
        "percent_of_combine": optional(number(1e-6, 1e12)),
    },
    is_closed=True,
)
_ALWAYS = ("call_us", "host_dispatch_us", "host_combine_us")
_GRAPHS = ("graph_dispatch_us", "graph_combine_us", "graph_both_us")
_COMPRESSED = ("graph_combine_fp8_us", "graph_combine_log10_us")
_PREPARED = ("prepared_call_us", "host_prepared_dispatch_us", "host_prepared_combine_us")
_PARTS = ("step_p50_us", "step_p99_us", "dispatch_send_us", "dispatch_receive_us", "combine_send_us", "combine_receive_us")


def _low_latency_row(always: tuple[str, ...], perhaps: tuple[str, ...]) -> Check:
    needed = {"tokens": _TOKENS, **dict.fromkeys(always, _TIME_US)}
    return record(needed, dict.fromkeys(perhaps, optional(_TIME_US)), is_closed=True)


def _result(row: Check, **more: Check) -> Check:
    settings = {"backend": matching("cuda|host"), **_SIZES}
    needed = {
        "num_ranks": _NUM_RANKS,
        **dict.fromkeys(("machine", "date", "boundary", "deepep_rt"), text),
        "commit": record({}, {"id": optional(text), "dirty": flag}),
        "settings": record(settings, {"ranks_per_node": optional(_NUM_RANKS), "bf16": flag, "quick": flag}),
        "copy_ceiling_gb_s": record({"used": _GB_S, "by_sms": mapping(numeral, _GB_S)}, {"by_method": mapping(text, _GB_S)}),
        "rows": each(row),
        **more,
    }
    perhaps = {
        "left_out": optional(mapping(text, text)),
        **dict.fromkeys(("drivers", "versions"), optional(mapping(text, anything))),
    }
    return record(needed, perhaps)


_REFERENCES = record(
    {
        **dict.fromkeys(("machine", "date", "boundary"), text),
        "systems": mapping(
            text,
            record(
                {},
                {
                    "throughput_us": mapping(
                        numeral,
                        mapping(text, either(lambda value: isinstance(value, dict), mapping(numeral, _TIME_US), _TIME_US)),
                    ),
                    "low_latency_us": mapping(numeral, mapping(text, _TIME_US)),
                },
            ),
        ),
    },
    {"num_ranks": _NUM_RANKS, "settings": record(_SIZES)},
)


def check_result(found: Any) -> None:
    """Check the contents of a result file.

    Raises:
        InvalidValue: if they are not a result of the benchmarks.
    """
    plain(found, "file")
    rows = found.get("rows")
    is_throughput = isinstance(rows, list) and any(isinstance(row, dict) and "work" in row for row in rows)
    on_gpu = isinstance(found.get("settings"), dict) and found["settings"].get("backend") == "cuda"
    if is_throughput:
        _result(_THROUGHPUT_ROW)(found, "file")
    elif on_gpu:
        _result(_low_latency_row((*_ALWAYS, *_GRAPHS), (*_PARTS, *_COMPRESSED, *_PREPARED)), low_latency_sms=whole(1, 1 << 16))(
            found, "file"
        )
    else:
        _result(_low_latency_row(_ALWAYS, (*_GRAPHS, *_PARTS, *_COMPRESSED, *_PREPARED)))(found, "file")
    check_problem(found["num_ranks"], found["settings"])
    if len({row["tokens"] for row in found["rows"]}) > _MOST_SIZES:
        raise InvalidValue(f"file.rows has more than {_MOST_SIZES} numbers of tokens")


def check_references(found: Any) -> None:
    """Check the contents of a file of references.

    Raises:
        InvalidValue: if they are not references.
    """
    plain(found, "file")
    _REFERENCES(found, "file")


def check_problem(num_ranks: int, settings: Mapping[str, Any]) -> None:
    """Check that valid sizes fit together."""
    experts, topk = settings["experts"], settings["topk"]
    if topk > experts or experts % num_ranks:
        raise InvalidValue(
            f"file has top-{topk} of {experts} experts on {num_ranks} ranks; expected as many experts on each rank, and as top-k"
        )
