"""Run soak's rounds for GPUs, with graphs and streams, on the host backend. NumPy replaces CuPy.

`soak_as_on_gpus.py CALL OPTIONS...` flips a bit in the result of CALL on the last rank ("none": of no call).
"""

from __future__ import annotations

import itertools
import sys
from types import ModuleType, SimpleNamespace

import numpy as np

from deepep_rt import Buffer, EPOutOfMemoryError
from deepep_rt.arrays import frameworks
from deepep_rt.cli import app as cli
from deepep_rt.soak import runner
from deepep_rt.soak.graph import Graph
from deepep_rt.soak.session import Session


class Array(np.ndarray):
    """An array with CuPy's memory attributes, which refuses operations on types that CuPy does not support."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.__array_interface__["data"][0], array=self)

    def get(self):
        return np.asarray(self)

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        assert not any(getattr(one, "dtype", np.dtype("u1")).kind == "V" for one in inputs), "CuPy has no kernels for this type"
        plain = [np.asarray(one) if isinstance(one, Array) else one for one in inputs]
        if out is not None:
            options["out"] = tuple(np.asarray(one) if isinstance(one, Array) else one for one in out)
        made = getattr(ufunc, method)(*plain, **options)
        return out[0] if out is not None else np.asarray(made).view(Array)


def ndarray(shape, dtype, memory):
    raw = np.asarray(memory.array).reshape(-1).view(np.uint8)
    num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return raw[:num_bytes].view(dtype).reshape(shape).view(Array)


class Event:
    ptr = 5

    def record(self):
        self.seconds = next(clock)


class Stream:
    ptr = 7

    def __init__(self, non_blocking):
        assert non_blocking, "the default stream cannot be captured"

    def __enter__(self):
        current.append(self)

    def __exit__(self, *_):
        current.pop()

    def record(self):
        event = Event()
        event.record()
        return event

    def wait_event(self, event):
        assert isinstance(event, Event)

    def synchronize(self): ...
    def begin_capture(self): ...

    def end_capture(self):
        return SimpleNamespace(launch=replay)


def replay():
    """Imitate a replay: make the calls again, and copy their results to the graph's results."""
    graph = graphs[-1]
    for old, new in zip(graph.results, graph._calls(), strict=True):
        names = ("recv_x", "recv_topk_idx") if hasattr(old, "recv_src_idx") else ("recv_x",) if hasattr(old, "recv_x") else ("x",)
        for name in names:
            getattr(old, name)[...] = getattr(new, name)
    counted["replays"] += 1


clock, current, graphs, counted = itertools.count(1e-3, 1e-3), [], [], {"replays": 0, "spins": 0}


class HearsLater(Buffer):
    """As on GPUs, a dispatch without room for its rows raises at the rank that lacks room. Other ranks hear of it in a later call."""

    error = None

    def dispatch(self, *arguments, **options):
        self.hear()
        try:
            return super().dispatch(*arguments, **options)
        except EPOutOfMemoryError as error:
            if f"brings to rank {self._rank}." in str(error):
                raise
            self.error = error
            return SimpleNamespace(event=SimpleNamespace(wait=lambda: None))

    def synchronize(self):
        self.hear()
        super().synchronize()

    def hear(self):
        error, self.error = self.error, None
        if error is not None:
            raise error


def make_cupy():
    cupy = ModuleType("cupy")
    for name in ("arange", "asarray", "zeros", "full"):
        make = getattr(np, name)
        setattr(cupy, name, lambda *a, make=make, **k: np.ascontiguousarray(make(*a, **k)).view(Array))
    for name in ("where", "rint", "searchsorted", "concatenate", "stack", "clip"):
        make = getattr(np, name)
        setattr(cupy, name, lambda *a, make=make, **k: np.asarray(make(*map(plain, a), **k)).view(Array))
    for name in ("uint32", "uint64", "float32", "maximum", "minimum"):
        setattr(cupy, name, getattr(np, name))
    cupy.ndarray = ndarray

    def spin(grid, block, arguments):
        counted["spins"] += 1

    cupy.RawKernel = lambda source, name: spin
    cupy.get_default_memory_pool = lambda: SimpleNamespace(free_all_blocks=lambda: None)
    cupy.cuda = SimpleNamespace(
        Stream=Stream,
        Event=Event,
        get_current_stream=lambda: current[-1],
        get_elapsed_time=lambda start, end: 1e3 * (end.seconds - start.seconds),
    )
    return cupy


def plain(value):
    if isinstance(value, list):
        return [np.asarray(one) for one in value]
    return np.asarray(value) if isinstance(value, Array) else value


def on_host(comm, backend, **settings):
    assert backend == "cuda"
    return HearsLater(comm, backend="host", **settings)


def damage(call):
    timed = Session.timed

    def damaged(session, name, mode, make, **options):
        result = timed(session, name, mode, make, **options)
        if name == call and session.rank == session.options.num_ranks - 1 and not options.get("has_hook"):
            array = result.recv_x if "dispatch" in name else result.x
            session.arrays.raw(array)[:1] ^= 0x10
        return result

    Session.timed = damaged


def wrap_arrays():
    """Let calls return arrays with CuPy's attributes."""
    wrap = frameworks.NumpyFramework.wrap
    frameworks.NumpyFramework.wrap = lambda self, view: wrap(self, view).view(Array)


def main():
    damage(sys.argv[1])
    sys.modules["cupy"] = make_cupy()
    wrap_arrays()
    run, make_graph = runner.Run.choose_backend, Graph.__init__

    def backend(self):
        run(self)
        return "cuda", True

    def init(self, session):
        graphs.append(self)
        make_graph(self, session)

    runner.Run.choose_backend, runner.Buffer, Graph.__init__ = backend, on_host, init
    try:
        cli.run(["soak", "--backend", "host", *sys.argv[2:]])
    finally:
        assert sys.argv[1] != "none" or min(counted.values()) > 2, counted


if __name__ == "__main__":
    main()
