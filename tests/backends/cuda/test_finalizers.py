"""Finalizers of results and events in a thread that must not call CUDA, such as that of a relay."""

from __future__ import annotations

import ctypes
import gc
import threading
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from calls_on_fake_gpu import CALLS
from fake_gpu import FakeGpu, arguments, fake, make

from deepep_rt import NetworkOptions
from deepep_rt._finalizers import no_cuda_in_this_thread, waiting
from deepep_rt.backends.cuda import network_memory
from deepep_rt.cuda import driver

__all__ = ["fake", "make"]


def collect_in_a_relay() -> None:
    """Run Python's garbage collector in a thread that must not call CUDA."""

    def run() -> None:
        with no_cuda_in_this_thread():
            gc.collect()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


def make_cycle(*kept: Any) -> None:
    cycle = [*kept]
    cycle.append(cycle)


@pytest.mark.parametrize("kind", ["dispatch of a fixed size", "combine", "prepared dispatch"])
def test_they_wait_for_the_next_call(fake: FakeGpu, make: Any, kind: str) -> None:
    gc.collect()
    gc.disable()
    try:
        with make(ranks_per_node=2, network=NetworkOptions(transport="mpi")) as buffer:
            call = CALLS[kind](fake, buffer, async_finish=True)
            make_cycle(call())  # the end of its memory is an event
            del call
            requests = list(fake.requests)
            collect_in_a_relay()
            assert fake.requests == requests
            assert waiting
            buffer.dispatch(*arguments(fake), num_worst_tokens=40)
            assert not waiting
    finally:
        gc.enable()


def test_events_wait_too(monkeypatch: pytest.MonkeyPatch) -> None:
    destroyed: list[int] = []
    monkeypatch.setattr(driver.CudaEvent, "__init__", lambda event: setattr(event, "handle", 7))
    monkeypatch.setattr(driver.CudaEvent.__del__, "__defaults__", (driver.finalize, destroyed.append))
    gc.collect()
    make_cycle(driver.CudaEvent())  # type: ignore[call-arg]
    collect_in_a_relay()
    assert destroyed == []
    function, values = waiting.popleft()
    function(*values)
    assert destroyed == [7]
    del function


class Native:
    """An object that C code destroys, such as an event of PyTorch: a capsule whose destructor notes its thread."""

    def __init__(self, threads: list[int]) -> None:
        destroy = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        self.destroy = destroy(lambda _: threads.append(threading.get_ident()))
        new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, destroy)(("PyCapsule_New", ctypes.pythonapi))
        self.capsule = new(1, None, self.destroy)


def test_objects_of_other_libraries_wait_too(fake: FakeGpu, make: Any) -> None:
    threads: list[int] = []
    native = Native(threads)
    kept, found = native.destroy, native.capsule
    gc.collect()
    make_cycle(found)
    del native, found
    garbage, flags = list(gc.garbage), gc.get_debug()
    collect_in_a_relay()
    assert threads == []
    assert (gc.garbage, gc.get_debug()) == (garbage, flags)
    assert waiting
    with make() as buffer:
        buffer.dispatch(*arguments(fake), num_worst_tokens=40)
    assert threads == [threading.get_ident()]
    assert not waiting
    del kept


def test_a_program_that_saves_its_garbage_keeps_it() -> None:
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        make_cycle("mine")
        collect_in_a_relay()
        assert gc.get_debug() == gc.DEBUG_SAVEALL
        assert [found for found in gc.garbage if isinstance(found, list) and found[:1] == ["mine"]]
        assert not waiting
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


def test_the_end_of_a_buffer_leaves_nothing(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that a relay's thread has left for the next call, when there is no next call."""
    done: list[int] = []

    class Relay:
        progress = ""

        def __init__(self, *_: object, node_size: int, transport: str) -> None: ...
        def check(self) -> None: ...
        def wake(self) -> None: ...
        def close(self) -> bool:
            waiting.append((done.append, (threading.get_ident(),)))
            return True

    monkeypatch.setattr(network_memory, "start_relay", Relay)
    make(ranks_per_node=2, network=NetworkOptions(transport="mpi")).destroy()
    assert done == [threading.get_ident()]
    assert not waiting


def test_an_exception_does_not_reach_the_call(fake: FakeGpu, make: Any, caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []
    with make() as buffer:
        waiting.extend([(int, ("no number",)), (done.append, (1,))])
        buffer.dispatch(*arguments(fake), num_worst_tokens=40)
    assert done == [1]
    assert [record.message for record in caplog.records] == ["a finalizer has failed"]
