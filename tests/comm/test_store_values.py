"""Values in a store, as JSON."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from deepep_rt.comm.store import pack, unpack

VALUES = [
    None, True, 0, -(2**70), 1.5, float("inf"), "text \U0001f600 \x1b", b"\x00\xff", (), [], {}, ((1, (2,)), ["a", b"b"]),
    {"a": (1, None), "b": {"c": [1.0]}}, {1: "one"},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_are_unpacked_as_they_were(value: Any) -> None:
    found = unpack(pack(value))
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "i4", "<i8", ">i8", "f2", "f4", "f8"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3)])
def test_arrays_are_unpacked_as_they_were(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.ones(shape, dtype)
    found = unpack(pack(array))
    assert (found.dtype, found.shape, found.flags.writeable) == (array.dtype, shape, True)
    assert (found == array).all()
    assert unpack(pack(np.float32(0.5))) == 0.5
    with pytest.raises(TypeError, match="value=<object>"):
        pack({"a": object()})
    with pytest.raises(TypeError, match="value=<ndarray>"):
        pack(np.array([object()]))


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xff", b"{", b"[" * 200_000, b"{}", b'{"a": 1, "b": 2}', b'{"other": []}', b'{"tuple": 3}', b'{"tuple": null}',
        b'{"dict": [1]}', b'{"dict": [[1, 2, 3]]}', b'{"dict": [[[], 1]]}', b'{"dict": {}}', b'{"bytes": 1}', b'{"bytes": "a"}',
        b'{"bytes": "\xc3\xa9"}', b'{"array": []}', b'{"array": ["O", [1], ""]}', b'{"array": ["|O8", [1], "AAAAAAAAAAA="]}',
        b'{"array": ["<i8", [-1], ""]}', b'{"array": ["<i8", 1, ""]}', b'{"array": ["<i8", [1.0], ""]}', b'{"array": ["<i8", [1], 2]}',
        b'{"array": ["<i8", [1], "AA=="]}', b'{"array": ["<i8", [true], "AAAAAAAAAAA="]}', b'{"array": [["<i8"], [0], ""]}',
        b'{"array": ["<i8", [4294967296, 4294967296, 4294967296], ""]}', b"9" * 5000,
    ],
    ids=lambda data: repr(data[:40]),
)  # fmt: skip
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        unpack(data)
