"""Check single arguments: whole numbers, seconds, flags, choices and objects. Every public function checks its arguments with these.

These functions return Python's types, because NumPy's integers overflow: `numpy.uint16(32768) * 2` is 0. `inputs` in
`backends` checks arrays, and `arrays.frameworks` checks streams and events.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np

from .errors import EPError, EPInputError

_MAX_CHARACTERS, _MAX_ITEMS = 80, 4  # of a value and of a list in a message
_PRINTED_TYPES = (bool, int, float, complex, str, bytes, type(None))


def whole_number(
    value: Any, name: str, least: int, most: int, *, error: type[EPError] = EPInputError, remedy: str = "", multiple_of: int = 1
) -> int:
    """Return a whole number of Python or NumPy as a Python int. Refuse True, False, floats and arrays.

    `remedy` is a sentence that tells the caller what to do. Default: "Pass such a number."
    """
    number = _as_int(value)
    if number is None or not least <= number <= most or number % multiple_of:
        multiple = f", a multiple of {multiple_of}" if multiple_of > 1 else ""
        raise argument_error(
            value, name, f"a whole number from {least} to {most}{multiple}", remedy or "Pass such a number.", error
        )
    return number


def is_int_in_range(value: Any, least: int, most: int) -> bool:
    """Return whether `value` is a whole number of Python or NumPy in this range."""
    number = _as_int(value)
    return number is not None and least <= number <= most


def flag(value: Any, name: str, *, error: type[EPError] = EPInputError) -> bool:
    """Return True or False as a Python bool; NumPy's, 1 and 0 are allowed too. Refuse strings, arrays and None."""
    if value is True or value is False:
        return value
    if isinstance(value, np.bool_) or _as_int(value) in (0, 1):
        return bool(value)
    raise argument_error(value, name, "True or False", "Pass one of them.", error)


def choice(value: Any, name: str, allowed: Sequence[str], *, error: type[EPError] = EPInputError) -> str:
    """Return one of the allowed words. Refuse everything else."""
    if isinstance(value, str) and value in allowed:
        return str(value)
    raise argument_error(value, name, " or ".join(map(repr, allowed)), "Pass one of them.", error)


def seconds(value: Any, name: str, most: float, *, error: type[EPError] = EPInputError) -> float:
    """Return a positive number of seconds as a Python float. Refuse True, NaN and arrays."""
    if isinstance(value, Real) and not isinstance(value, bool) and bool(0 < value <= most):  # type: ignore[operator]
        return float(value)
    raise argument_error(value, name, f"a positive number of seconds, {most:g} (30 years) at most", "Pass such a number.", error)


def instance(value: Any, name: str, kind: type, remedy: str, *, error: type[EPError] = EPInputError) -> Any:
    """Return an instance of a class. Refuse everything else."""
    if isinstance(value, kind):
        return value
    raise argument_error(value, name, f"a {kind.__module__.partition('.')[0]}.{kind.__name__}", remedy, error)


def argument_error(value: Any, name: str, expected: str, remedy: str, error: type[EPError] = EPInputError) -> EPError:
    """Make the exception about a wrong argument, in the form `name=value; expected X. Do Y.`"""
    return error(f"{name}={format_value(value)}; expected {expected}. {remedy}")


def format_value(value: Any) -> str:
    """Return the text of a value for a message: numbers and words as they are, and only the class of other values, such as arrays."""
    if isinstance(value, int) and value.bit_length() > 256:  # Python refuses to print larger ones
        return f"<int of {value.bit_length()} bits>"
    if type(value) in _PRINTED_TYPES or isinstance(value, np.generic):
        text = repr(value[: _MAX_CHARACTERS + 1] if isinstance(value, (str, bytes)) else value)
        return text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."
    if type(value) in (list, tuple) and len(value) <= _MAX_ITEMS and all(type(item) in _PRINTED_TYPES for item in value):
        return f"[{', '.join(map(format_value, value))}]"
    return f"<class {value.__name__}>" if isinstance(value, type) else f"<{type(value).__name__}>"


def _as_int(value: Any) -> int | None:
    """Return a whole number as a Python int, or None for any other value, also for booleans."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):  # NumPy's booleans are not Integral
        return None
    try:
        return operator.index(value)
    except Exception:  # `__index__` is the caller's code
        return None
