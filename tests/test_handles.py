"""`handles`: of streams and events of any library."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest

from deepep_rt import EPInputError, handles


class Stream(SimpleNamespace):
    """Of a library that destroys what nobody holds."""


def test_a_librarys_stream_is_kept() -> None:
    for name in ("cuda_stream", "ptr", "handle"):
        stream = Stream(**{name: 77})
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
    assert handles.of_event(Stream(cuda_event=5)) == 5
    assert handles.of_event(Stream(handle=None)) == 0, "an event of ours that stands for no CUDA event"
    with pytest.raises(EPInputError, match="stream is a str; expected one of an array library, or its integer handle"):
        handles.of_stream("main")
    with pytest.raises(EPInputError, match="previous_event is a list"):
        handles.of_event([])
