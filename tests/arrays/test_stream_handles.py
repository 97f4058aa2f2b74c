"""Handles of streams and events of every library."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from deepep_rt import EPInputError
from deepep_rt.arrays.frameworks import of_event, of_stream


class LibraryObject(SimpleNamespace):
    """A stream or event of a library that destroys it with its last reference."""


def test_a_handle_keeps_its_stream_alive() -> None:
    for name in ("cuda_stream", "ptr", "handle"):
        stream = LibraryObject(**{name: 77})
        seen = weakref.ref(stream)
        handle = of_stream(stream)
        del stream
        gc.collect()
        assert handle == 77
        assert seen() is not None
        del handle
        gc.collect()
        assert seen() is None


def test_integers_are_handles() -> None:
    assert (of_stream(77), of_event(5)) == (77, 5)


def test_other_objects_raise() -> None:
    assert of_event(LibraryObject(cuda_event=5)) == 5
    assert of_event(LibraryObject(handle=None)) == 0, "an event of this library without a CUDA event"
    with pytest.raises(
        EPInputError, match=r"stream='main'; expected a stream of an array library, or its integer handle\. Pass one"
    ):
        of_stream("main")
    with pytest.raises(EPInputError, match=r"previous_event=\[\]; expected an event"):
        of_event([])
    for wrong in ("7", 7.0, True, -1, 1 << 64, np.array([7]), np.float64(7), object(), LibraryObject(ptr="here"), [7]):
        for look in (of_stream, of_event):
            with pytest.raises(EPInputError, match=r"=\S+.*; expected an? (stream|event) of an array library"):
                look(wrong)


def test_a_stream_is_no_event() -> None:
    """CuPy names both handles `ptr`, and cuda.core `handle`. The driver would crash with a handle of the other kind."""

    class Stream:
        ptr = handle = 7

    class Event:
        ptr = handle = 7

    assert (of_stream(Stream()), of_event(Event())) == (7, 7)
    for look, wrong in ((of_stream, Event()), (of_event, Stream())):
        with pytest.raises(EPInputError, match=r"=<(Event|Stream)>; expected an? (stream|event) of"):
            look(wrong)


def test_arrays_raise() -> None:
    from deepep_rt.arrays.view import View

    array = View(4096, (2,), "float32", 0, None, None)  # a View has the attribute ptr too
    for look in (of_stream, of_event):
        with pytest.raises(EPInputError, match="=<View>; expected"):
            look(array)


def test_objects_of_cuda_bindings() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    assert (of_stream(driver.CUstream(7)), of_event(driver.CUevent(8))) == (7, 8)
    with pytest.raises(EPInputError):
        of_stream(driver.CUevent(8))
