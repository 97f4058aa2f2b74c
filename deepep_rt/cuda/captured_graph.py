"""A CUDA graph that calls are captured in, and the memory that its replays read."""

from __future__ import annotations

import ctypes
import logging
from typing import Any

from cuda.bindings import driver as bindings

from ..errors import EPUnavailableError
from . import driver
from .stream_tracking import Allocation

_log = logging.getLogger("deepep_rt")

_libc = ctypes.CDLL(None)
_libc.malloc.restype, _libc.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
_libc.sem_init.argtypes, _libc.sem_trywait.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint), (ctypes.c_void_p,)
_SEMAPHORE_BYTES = 64  # at least those of sem_t
_idle_semaphores: list[int] = []


class GraphEnd:
    """The end of the graph that a stream is captured in: it, its copies and its executable graphs are destroyed, and no launch runs.

    Ask for it only if memory depends on it. On H100, a launch of such a graph takes the host 22 us instead of 2 and the GPU 3 us more, and
    only 28 of them fit into a stream's queue.

    CUDA then calls a function in a thread of its own, also at the end of the process, when Python is gone. So this function is
    `sem_post` of the C library, and no semaphore is ever freed. If CUDA refuses, the end never comes.
    """

    def __init__(self, stream: int) -> None:
        semaphore = _idle_semaphores.pop() if _idle_semaphores else _libc.malloc(_SEMAPHORE_BYTES)
        _libc.sem_init(semaphore, 0, 0)
        self._semaphore: int | None = semaphore
        post = bindings.CUhostFn(ctypes.cast(_libc.sem_post, ctypes.c_void_p).value)
        no_sync = bindings.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
        move = bindings.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
        try:
            made = driver.ok(bindings.cuUserObjectCreate(semaphore, post, 1, no_sync))
            graph = driver.ok(bindings.cuStreamGetCaptureInfo(stream))[2]
            driver.ok(bindings.cuGraphRetainUserObject(graph, made, 1, move))
        except EPUnavailableError as error:
            _log.warning("the memory of a captured CUDA graph stays with the Buffer, because %s", error)

    def has_come(self) -> bool:
        """Return whether no replay can run any more."""
        if self._semaphore is not None and _libc.sem_trywait(self._semaphore) == 0:
            _idle_semaphores.append(self._semaphore)
            self._semaphore = None
        return self._semaphore is None


class CapturedGraph:
    """The graph that a stream is captured in, by the number of the capture.

    CUDA does not report the end of a capture, and its stream may not exist any more.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.arguments: list[Any] = []
        """The callers' memory that calls use. Otherwise, during the capture, its allocator could give it to a parallel branch."""
        self.end: driver.CudaEvent | None = None  # of the last call
        self._held: list[Any] = []
        self._end: GraphEnd | None = None

    def hold(self, allocation: Any, stream: int) -> bool:
        """Keep memory of the Buffer as long as the graph can be replayed. Return whether the graph holds it.

        What the capture has acquired stays with captures anyway. `stream` belongs to the capture, which has not ended.
        """
        if not isinstance(allocation, Allocation) or allocation.graph is self:
            return False
        if self._end is None:
            self._end = GraphEnd(stream)
        self._held.append(allocation)
        return True

    def has_ended(self) -> bool:
        """Return whether a graph that holds memory cannot be replayed any more. Drop the memory then."""
        if self._end is None or not self._end.has_come():
            return False
        self.drop_memory()
        return True

    def drop_memory(self) -> None:
        """Drop the memory that replays read."""
        self._held = []
