"""Parse the content of files that other users or other versions may have written, and check every member before it is used.

`jit/trusted_files.py` opens and reads such files. Its errors are `UnusableFile` too, so a reader handles one exception.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

OTHER_VERSION = "it is not one that this version wrote"

MAX_COUNT = (1 << 63) - 1
MAX_SECONDS = 1e12  # 30,000 years

Check = Callable[[Any], bool]
_Made = TypeVar("_Made")


class UnusableFile(Exception):
    """A file cannot be read, must not be trusted, or holds something else. The text is the reason, in printable characters."""


def parse(data: bytes, make: Callable[[dict[str, Any]], _Made]) -> _Made:
    """Parse a JSON object. Return what `make` makes of its members; it may raise any exception for members that are wrong.

    Numbers are finite, and integers have 64 bits at most.

    Raises:
        UnusableFile: for every failure, because the content may be anything: too deep, no text, or a number that no type can hold.
    """
    try:
        found = json.loads(data, parse_int=_integer, parse_float=_finite, parse_constant=_refuse)
        if type(found) is dict:
            return make(found)
    except Exception as error:
        raise UnusableFile(OTHER_VERSION) from error
    raise UnusableFile(OTHER_VERSION)


def _integer(text: str) -> int:
    if len(text) > 20 or abs(found := int(text)) > MAX_COUNT:
        raise ValueError("more than 64 bits")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(found := float(text)):
        raise ValueError("out of the range of a float")
    return found


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def is_text(value: Any) -> bool:
    """Return whether a value is a string that can be printed without effects on a terminal."""
    return type(value) is str and len(value) <= 1000 and value.isprintable()


def is_flag(value: Any) -> bool:
    return type(value) is bool


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_COUNT


def is_count_or_none(value: Any) -> bool:
    return value is None or is_count(value)


def is_seconds(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < MAX_SECONDS


def is_in(least: int, most: int) -> Check:
    """Return a check for whole numbers of a range."""
    return lambda value: type(value) is int and least <= value <= most


def is_list_of(is_item: Check, length: int | None = None) -> Check:
    """Return a check for lists, of this length if one is given."""
    return lambda value: type(value) is list and length in (None, len(value)) and all(map(is_item, value))


def is_dict_of(is_item: Check) -> Check:
    """Return a check for dictionaries with any names."""
    return lambda value: type(value) is dict and all(is_text(name) and is_item(item) for name, item in value.items())


def has_fields(fields: Mapping[str, Check]) -> Check:
    """Return a check for dictionaries with exactly these names, whose values pass their checks."""
    return lambda value: type(value) is dict and value.keys() == fields.keys() and not wrong_fields(value, fields)


def wrong_fields(value: Mapping[str, Any], fields: Mapping[str, Check]) -> list[str]:
    """Return the names whose values fail their checks."""
    return [name for name, is_valid in fields.items() if not is_valid(value[name])]


def check_document(found: dict[str, Any], fields: Mapping[str, Check]) -> None:
    """Raise ValueError unless a document has exactly these fields, and their values pass the checks."""
    if not has_fields(fields)(found):
        raise ValueError("other fields")
