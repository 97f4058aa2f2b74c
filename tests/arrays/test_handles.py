"""`handles`: of streams and events of any library."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from deepep_rt import EPInputError
from deepep_rt.arrays import stream_handles as handles


class Handle(SimpleNamespace):
    """Of a library that destroys what nobody holds."""


def test_a_librarys_stream_is_kept() -> None:
    for name in ("cuda_stream", "ptr", "handle"):
        stream = Handle(**{name: 77})
        seen = weakref.ref(stream)
        handle = handles.of_stream(stream)
        del stream
        gc.collect()
        assert handle == 77
        assert seen() is not None
        del handle
        gc.collect()
        assert seen() is None


def test_numbers_stand_for_themselves() -> None:
    assert (handles.of_stream(77), handles.of_event(5)) == (77, 5)


def test_what_is_no_handle() -> None:
    assert handles.of_event(Handle(cuda_event=5)) == 5
    assert handles.of_event(Handle(handle=None)) == 0, "an event of ours that stands for no CUDA event"
    with pytest.raises(
        EPInputError, match=r"stream='main'; expected a stream of an array library, or its integer handle\. Pass one"
    ):
        handles.of_stream("main")
    with pytest.raises(EPInputError, match=r"previous_event=\[\]; expected an event"):
        handles.of_event([])
    for wrong in ("7", 7.0, True, -1, 1 << 64, np.array([7]), np.float64(7), object(), Handle(ptr="here"), [7]):
        for look in (handles.of_stream, handles.of_event):
            with pytest.raises(EPInputError, match=r"=\S+.*; expected an? (stream|event) of an array library"):
                look(wrong)


def test_streams_and_events_are_not_mistaken_for_each_other() -> None:
    """CuPy calls both handles `ptr`, cuda.core `handle`: the driver would crash over the other kind."""

    class Stream:
        ptr = handle = 7

    class Event:
        ptr = handle = 7

    assert (handles.of_stream(Stream()), handles.of_event(Event())) == (7, 7)
    for look, wrong in ((handles.of_stream, Event()), (handles.of_event, Stream())):
        with pytest.raises(EPInputError, match=r"=<(Event|Stream)>; expected an? (stream|event) of"):
            look(wrong)


def test_arrays_are_neither() -> None:
    from deepep_rt.arrays.view import View

    array = View(4096, (2,), "float32", 0, None, None)  # it has an address, too
    for look in (handles.of_stream, handles.of_event):
        with pytest.raises(EPInputError, match="=<View>; expected"):
            look(array)


def test_numbers_of_cuda_bindings() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    assert (handles.of_stream(driver.CUstream(7)), handles.of_event(driver.CUevent(8))) == (7, 8)
    with pytest.raises(EPInputError):
        handles.of_stream(driver.CUevent(8))
