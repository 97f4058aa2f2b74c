"""Values in a store, as JSON: numbers, text, bytes, arrays, and lists, tuples and dicts of them.

Any process that reaches the store's port can write to it. Reading a pickle would run its code. Reading these values runs no code, and
checks every part.
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
    """Return a value as bytes.

    Raises:
        TypeError: if the value has another type. This is an error of the caller.
    """
    return json.dumps(_plain(value)).encode()


def unpack(data: bytes) -> Any:
    """Return the value that bytes stand for.

    Raises:
        ValueError: if `pack` did not make them.
    """
    try:
        return _value(json.loads(data))
    except RecursionError as error:
        raise ValueError("too many nested values") from error


def _plain(value: Any) -> Any:
    """Return a value as one that JSON can hold. A JSON object has one member, whose name is the type."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_plain(item) for item in value]}
    if isinstance(value, dict):
        return {"dict": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray) and _DTYPE.fullmatch(value.dtype.str):
        return {"array": [value.dtype.str, list(value.shape), base64.b64encode(value.tobytes()).decode()]}
    raise TypeError(
        f"value=<{type(value).__name__}>; expected numbers, text, bytes, arrays, or lists, tuples and dicts of them. Convert it."
    )


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_value(item) for item in plain]
    if not isinstance(plain, dict):
        return plain
    if len(plain) != 1:
        raise ValueError("an object without one type")
    ((kind, content),) = plain.items()
    if kind == "bytes":
        return _bytes(content)
    if kind == "array":
        return _array(content)
    if kind not in ("tuple", "dict") or not isinstance(content, list):
        raise ValueError("an object of another type")
    if kind == "tuple":
        return tuple(_value(item) for item in content)
    return {_key(key): _value(item) for key, item in map(_pair, content)}


def _pair(content: Any) -> tuple[Any, Any]:
    if not isinstance(content, list) or len(content) != 2:
        raise ValueError("a dict entry without a key and a value")
    return content[0], content[1]


def _key(plain: Any) -> Any:
    if not isinstance(plain, str | int):
        raise ValueError("a dict key of another type")
    return plain


def _bytes(content: Any) -> bytes:
    if not isinstance(content, str):
        raise ValueError("bytes of another type")
    return base64.b64decode(content, validate=True)


def _array(content: Any) -> np.ndarray:
    if not isinstance(content, list) or len(content) != 3:
        raise ValueError("an array without dtype, shape and bytes")
    dtype, shape, data = content[0], content[1], _bytes(content[2])
    if not isinstance(dtype, str) or not _DTYPE.fullmatch(dtype):
        raise ValueError("an array of another dtype")
    if not isinstance(shape, list) or not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError("an array without a shape")
    if len(data) != math.prod(shape) * np.dtype(dtype).itemsize:
        raise ValueError("an array of another size")
    return np.frombuffer(bytearray(data), dtype).reshape(shape)
