"""Tell the other ranks that this process ends while it holds Buffers: when Python exits, and when SIGTERM arrives.

Python runs its exit functions before MPI is finalised, because mpi4py finalises it after Python has ended.

A process that a signal ends runs no exit functions. Launchers send SIGTERM, so this library handles it, under two conditions: the
program has no handler of its own, and the first Buffer is made in the main thread. The handler tells the other ranks, and then SIGTERM ends
the process as without it. Python runs handlers between two steps of the main thread, which may be in a long call of another library. So a
thread reads the signals from a pipe (`signal.set_wakeup_fd`), and ends the process if the handler does not run.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from types import FrameType
from typing import Any, Protocol

EXCEPTION, SIGNAL, END = "exception", "signal", "end"
"""Why a rank leaves: an exception, a signal, or a program that ended or dropped its Buffer."""
POLL_PERIOD_S, MAX_TEXT = 0.02, 500
"""How often a rank that waits reads notices, and their longest text."""
_DELIVERY_S = 1.0
_HANDLER_S = 0.3  # for the handler in the main thread, before the thread of the pipe acts

_ending = threading.RLock()  # a signal may arrive while it is held
_is_set_up = False


class Leaver(Protocol):
    """Can tell the other ranks of a Buffer that this rank leaves it."""

    def leave(self, kind: str, reason: str) -> None:
        """Tell them, unless this rank has done so before."""

    def is_delivered(self) -> bool:
        """Return whether all of them know it, or have left too."""


_leavers: weakref.WeakSet[Any] = weakref.WeakSet()
_leaving: list[Leaver] = []  # they have told the other ranks, which may not have read it


def watch(leaver: Leaver) -> None:
    """Let a Buffer's ranks hear of the end of this process, until `unwatch`."""
    global _is_set_up
    _leavers.add(leaver)
    if not _is_set_up:
        _is_set_up = True
        atexit.register(_at_exit)
        os.register_at_fork(after_in_child=_forget)
        multiprocessing = sys.modules.get("multiprocessing")
        if multiprocessing is not None and multiprocessing.parent_process() is not None:
            # Forked processes of multiprocessing end without Python's exit functions.
            sys.modules["multiprocessing.util"].Finalize(None, _at_exit, exitpriority=0)
        _handle_sigterm()


def unwatch(leaver: Leaver) -> None:
    """Forget a Buffer that has ended."""
    _leavers.discard(leaver)


def leave_after(error: BaseException, *leavers: Leaver) -> None:
    """Let this rank leave after an exception. A store may end with this process, so wait a moment for the readers."""
    for leaver in leavers:
        leaver.leave(EXCEPTION, describe(error))
    if not await_delivery(leavers):
        _leaving.extend(leavers)


def deliver_at_exit(leaver: Leaver) -> None:
    """Wait for the readers of this notice when the process ends."""
    _leaving.append(leaver)


def _at_exit() -> None:
    error = sys.exc_info()[1] or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None:
        _leave_all(END, "its program ended without destroy()")
    else:  # it ended the program, and Python has printed it
        _leave_all(EXCEPTION, describe(error))


def _leave_all(kind: str, reason: str) -> None:
    with _ending:
        for leaver in list(_leavers):
            leaver.leave(kind, reason)
            _leaving.append(leaver)
        await_delivery(_leaving)
        _leaving.clear()


def await_delivery(leavers: Sequence[Leaver]) -> bool:
    """Wait a moment until all peers have read the notices, and return whether they have. A store may end with this process."""
    end = time.monotonic() + _DELIVERY_S
    while not all(leaver.is_delivered() for leaver in leavers):
        if time.monotonic() > end:
            return False
        time.sleep(1e-3)
    return True


def describe(error: BaseException) -> str:
    """Return the type and the text of an exception."""
    try:
        text = str(error)
    except Exception as broken:  # `__str__` is the caller's code, and the notice must go out all the same
        text = f"(its __str__ raises {type(broken).__name__})"
    return f"{type(error).__name__}: {text}"


def _forget() -> None:
    """In a forked process, leave the Buffers and their signals to its parent."""
    global _leavers
    _leavers = weakref.WeakSet()
    _leaving.clear()
    if signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)


def _handle_sigterm() -> None:
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    signal.signal(signal.SIGTERM, _on_sigterm)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    if (before := signal.set_wakeup_fd(writer, warn_on_full_buffer=False)) != -1:  # the program reads signals itself
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)
        return
    threading.Thread(target=_read_signals, args=(reader,), daemon=True, name="deepep_rt's signals").start()


def _read_signals(reader: int) -> None:
    while numbers := os.read(reader, 64):
        if signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) is _on_sigterm:
            time.sleep(_HANDLER_S)
            _end_by_sigterm()


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    _end_by_sigterm()


def _end_by_sigterm() -> None:
    with contextlib.suppress(Exception):  # the process must end, whatever happens to the notice
        _leave_all(SIGNAL, "SIGTERM ended its process")
    set_handler = ctypes.CDLL(None).signal  # Python's own function is for the main thread only
    set_handler.argtypes, set_handler.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    set_handler(signal.SIGTERM, None)
    os.kill(os.getpid(), signal.SIGTERM)
