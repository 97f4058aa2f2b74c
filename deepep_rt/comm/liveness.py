"""Learn of the end of a peer's process at once: from the system for processes of this host, from the store for others.

The system tells it through a pidfd, milliseconds after a process has ended for any reason. A pidfd says that its descriptors are closed. It
is no fence: children of the process may still run.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .timed_collectives import host_identity

ENDED = "its process has ended"
"""Why a rank is lost, for errors."""
_POLL_S = 0.25  # of the store, for processes without a pidfd


def own_identity() -> dict[str, Any]:
    """Return what others need to watch this process, as plain values."""
    return {
        "host": host_identity(),
        "pids": os.stat("/proc/self/ns/pid").st_ino,
        "pid": os.getpid(),
        "started": _started_at(os.getpid()),
    }


def _started_at(pid: int) -> str:
    """Return when a process started, which no other process with its number shares."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def _open(identity: Any, here: dict[str, Any]) -> int | None:
    """Return a pidfd of a process on this host, which is `here`; None if there is no way to get one.

    Raise ProcessLookupError if the process has ended.
    """
    if not isinstance(identity, dict) or any(identity.get(name) != here[name] for name in ("host", "pids")):
        return None
    try:
        descriptor = os.pidfd_open(int(identity["pid"]))
    except ProcessLookupError:
        raise
    except (OSError, AttributeError):  # refused, or an old system
        return None
    try:
        if _started_at(int(identity["pid"])) != identity["started"]:  # another process has the number now
            raise ProcessLookupError
    except (OSError, ProcessLookupError):
        os.close(descriptor)
        raise ProcessLookupError from None
    return descriptor


class LivenessWatch:
    """A thread that calls `on_end(number)` once for each process that has ended.

    Args:
        processes: The identity of each process, by its number in `on_end`.
        has_gone: Says whether the store knows that a process has ended. Only processes without a pidfd are asked for. None: there is no
            store, and nothing is known of those.
        on_end: Runs in the thread.
    """

    def __init__(self, processes: dict[int, Any], has_gone: Callable[[int], bool] | None, on_end: Callable[[int], None]) -> None:
        self._on_end, self._has_gone = on_end, has_gone
        self._descriptors: dict[int, int] = {}
        self._others: list[int] = []
        self._ended: list[int] = []
        here = own_identity()
        for number, identity in processes.items():
            try:
                descriptor = _open(identity, here)
            except ProcessLookupError:
                self._ended.append(number)
                continue
            if descriptor is not None:
                self._descriptors[descriptor] = number
            elif has_gone is not None:
                self._others.append(number)
        stop, to_stop = os.pipe2(os.O_CLOEXEC)
        known = bool(self._ended or self._others)
        self._thread = threading.Thread(
            target=_serve, args=(weakref.ref(self), stop, list(self._descriptors), known), daemon=True
        )
        self._thread.name = "deepep_rt's watch of processes"
        self._thread.start()
        self._stop = weakref.finalize(self, os.close, to_stop)  # the thread ends
        self._stop.atexit = False

    def close(self) -> None:
        """Watch no more. `on_end` is not running any more, unless it calls this itself."""
        if self._stop.alive:
            self._stop()
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def _look(self, ready: list[int]) -> list[int]:
        """Tell of processes that have ended. Return the descriptors to watch no more."""
        found, self._ended = self._ended, []
        found += [self._descriptors[descriptor] for descriptor in ready]
        for number in list(self._others):
            with contextlib.suppress(Exception):  # without the store, time limits remain
                if self._has_gone is not None and self._has_gone(number):
                    self._others.remove(number)
                    found.append(number)
        for number in found:
            self._on_end(number)
        return ready

    @property
    def polls(self) -> bool:
        """Whether some processes have no pidfd."""
        return bool(self._others)


def _serve(owner: weakref.ref[LivenessWatch], stop: int, descriptors: list[int], looks: bool) -> None:
    """Watch until the other end of the pipe `stop` is closed: the thread does not keep the watch alive. `looks`: at once, too."""
    waiting = select.poll()
    for descriptor in descriptors:
        waiting.register(descriptor, select.POLLIN)
    waiting.register(stop, 0)  # only its end counts
    try:
        pause = 0.0 if looks else None
        while True:
            began = time.monotonic()
            ready = [descriptor for descriptor, _ in waiting.poll(pause)]
            watch = owner()
            if stop in ready or watch is None:
                return
            for descriptor in watch._look(ready):
                waiting.unregister(descriptor)
            pause = max(0.0, _POLL_S - (time.monotonic() - began)) * 1000 if watch.polls else None
            del watch
    finally:
        for descriptor in (*descriptors, stop):
            os.close(descriptor)
