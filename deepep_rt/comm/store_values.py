"""What ranks leave for each other in a store, as JSON: numbers, text, bytes, arrays, and lists, tuples and dicts of them.

Anybody who reaches the store's port can write to it. So reading a value runs no code, as it would from a pickle, and checks everything.
"""

from __future__ import annotations

import base64
import json
import math
import re
from typing import Any

import numpy as np

_DTYPE = re.compile(r"\|b1|[<>|][iuf][1248]")


def pack(value: Any) -> bytes:
    """Make bytes of a value.

    Raises:
        TypeError: if it is something else than numbers, text and so on; a mistake of the caller.
    """
    return json.dumps(_plain(value)).encode()


def unpack(data: bytes) -> Any:
    """Get the value of some bytes.

    Raises:
        ValueError: if `pack` did not make them.
    """
    try:
        return _value(json.loads(data))
    except RecursionError as error:
        raise ValueError("too deep") from error


def _plain(value: Any) -> Any:
    """What JSON can hold. An object has one member, which names the kind of its value."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_plain(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_plain(name), _plain(item)] for name, item in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray) and _DTYPE.fullmatch(value.dtype.str):
        return {"array": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    raise TypeError(
        f"value is a {type(value).__name__}; expected numbers, text, bytes, arrays, or lists, tuples and dicts of them"
    )


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) != 1:
        raise ValueError("an object without a kind")
    ((kind, held),) = plain.items()
    if kind == "bytes":
        return _bytes(held)
    if kind == "array":
        return _array(held)
    if kind not in ("tuple", "dict") or not isinstance(held, list):
        raise ValueError("an object of another kind")
    if kind == "tuple":
        return tuple(_value(item) for item in held)
    return {_name(name): _value(item) for name, item in map(_pair, held)}


def _pair(held: Any) -> tuple[Any, Any]:
    if not isinstance(held, list) or len(held) != 2:
        raise ValueError("no name and value")
    return held[0], held[1]


def _name(plain: Any) -> Any:
    if not isinstance(plain, str | int):
        raise ValueError("a name that is none")
    return plain


def _bytes(held: Any) -> bytes:
    if not isinstance(held, str):
        raise ValueError("bytes that are none")
    return base64.b64decode(held, validate=True)


def _array(held: Any) -> np.ndarray:
    if not isinstance(held, list) or len(held) != 3:
        raise ValueError("an array without dtype, shape and bytes")
    dtype, shape, data = held[0], held[1], _bytes(held[2])
    if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype):
        raise ValueError("an array of no numbers")
    if not isinstance(shape, list) or not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError("an array without a shape")
    if len(data) != math.prod(shape) * np.dtype(dtype).itemsize:
        raise ValueError("an array of another size")
    return np.frombuffer(bytearray(data), dtype).reshape(shape)
