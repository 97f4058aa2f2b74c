"""`Framework.form`: which arrays a call takes for arrays of a form that it knows."""

from __future__ import annotations

import gc
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deepep_rt.arrays import frameworks

KINDS = ["torch", "cupy"]


class _Memory:
    def __init__(self, ptr: int, device_id: int) -> None:
        self.ptr, self.device_id = ptr, device_id


class _Ndarray:
    """Has what this library asks of an array of CuPy."""

    def __init__(self, array: np.ndarray, device: int = 0) -> None:
        self.dtype, self.shape, self.flags = array.dtype, array.shape, SimpleNamespace(c_contiguous=array.flags.c_contiguous)
        self.data = _Memory(array.ctypes.data if array.size else 0, device)


class _Other(_Ndarray): ...


@pytest.fixture(params=KINDS)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a framework, an array of it, and arrays that differ from it in one property each."""
    memory = np.zeros(4096, np.float32)
    memory = memory[-memory.ctypes.data // 4 % 16 :]
    x = memory[:1024].reshape(8, 128)
    others = {
        "shape": memory[:1024].reshape(4, 256),
        "rank": memory[:1024],
        "dtype": memory[:1024].view(np.int32).reshape(8, 128),
        "layout": memory[:1024].reshape(128, 8).T,
        "address": memory[1:1025].reshape(8, 128),
        "no elements": memory[:0].reshape(0, 128),
    }
    if request.param == "torch":
        torch = pytest.importorskip("torch")

        class Subclass(torch.Tensor): ...

        made: dict[str, Any] = {name: torch.from_numpy(array) for name, array in others.items()}
        made |= {
            "class": torch.zeros(8, 128).as_subclass(Subclass),
            "gradient": torch.zeros(8, 128, requires_grad=True),
            "device": torch.zeros(8, 128, device="meta"),
        }
        return SimpleNamespace(
            framework=frameworks.TorchFramework(), x=torch.from_numpy(x), same=torch.zeros(8, 128), others=made
        )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(get_current_stream=None)))
    arrays = {name: _Ndarray(array) for name, array in others.items()} | {"class": _Other(x), "device": _Ndarray(x, 1)}
    same = memory[1024:2048].reshape(8, 128)
    found = {"x": _Ndarray(x), "same": _Ndarray(same), "others": arrays, "memory": memory}
    return SimpleNamespace(framework=frameworks.CupyFramework(), **found)


def test_arrays_of_a_form_differ_in_their_address_only(library: SimpleNamespace) -> None:
    address_of = library.framework.form(library.x)
    for array in (library.x, library.same):
        assert address_of(array) == library.framework.view(array, "x", 0).ptr
    assert {name for name, other in library.others.items() if address_of(other) is not None} == set()
    assert address_of([library.x]) is None


def test_a_form_keeps_no_array(library: SimpleNamespace) -> None:
    address_of, kept = library.framework.form(library.x), weakref.ref(library.x)
    del library.x
    gc.collect()
    assert kept() is None
    assert address_of is not None


def test_libraries_that_do_not_tell_their_stream_have_no_forms() -> None:
    assert frameworks.NumpyFramework().form(np.zeros(4)) is None
    assert frameworks.JaxFramework().form(object()) is None
    assert frameworks.VIEWS.form(object()) is None
