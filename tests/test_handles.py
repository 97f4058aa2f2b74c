"""`handles`: which streams may be asked when the call is over."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest

from deepep_rt import EPInputError, handles
from deepep_rt.handles import StreamHandle


class Stream(SimpleNamespace):
    """Of a library that destroys what nobody holds."""


class ExternalStream(Stream):
    """Somebody else's."""


def test_a_librarys_stream_is_kept() -> None:
    for name in ("cuda_stream", "ptr", "handle"):
        stream = Stream(**{name: 77})
        seen = weakref.ref(stream)
        handle = handles.of_stream(stream)
        del stream
        gc.collect()
        assert handle == 77
        assert handles.lasts(handle)
        assert seen() is not None
        del handle
        gc.collect()
        assert seen() is None


def test_nobody_keeps_the_stream_of_a_number() -> None:
    for stream in (77, ExternalStream(cuda_stream=77), ExternalStream(ptr=77)):
        handle = handles.of_stream(stream)
        assert (handle, handles.lasts(handle)) == (77, False)


def test_default_streams_last_where_they_are_one_for_all_threads() -> None:
    assert [handles.lasts(stream) for stream in (0, 1, 2)] == [True, True, False]
    assert not handles.lasts(StreamHandle.of(2, Stream())), "CuPy's per-thread default stream"


def test_what_is_no_handle() -> None:
    assert handles.of_event(Stream(cuda_event=5)) == 5
    assert handles.of_event(Stream(handle=None)) == 0, "an event of ours that stands for no CUDA event"
    with pytest.raises(EPInputError, match="stream is a str; expected one of an array library, or its integer handle"):
        handles.of_stream("main")
    with pytest.raises(EPInputError, match="previous_event is a list"):
        handles.of_event([])
