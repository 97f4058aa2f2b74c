"""Every exception of deepep_rt.

::

    EPError
    ├── EPConfigError        (ValueError)    a size or a setting is wrong, or the ranks disagree on it
    ├── EPInputError         (ValueError)    an array or a handle given to a call is wrong, or the ranks give different ones
    ├── EPCompileError       (RuntimeError)  a kernel did not compile or link
    │   └── EPCacheError                     the kernel cache cannot be used, or must not be missed and was
    ├── EPUnavailableError   (RuntimeError)  something that the request needs is not on this machine
    ├── EPOutOfMemoryError   (MemoryError)   not enough GPU or host memory, or no slot is left for a result
    ├── EPDestroyedError     (RuntimeError)  the buffer was destroyed
    └── EPTimeoutError       (TimeoutError)  a peer did not answer within `timeout_s`, or left; the buffer is broken
"""

from __future__ import annotations

import functools
from typing import Any


class EPError(Exception):
    """Base of every exception that deepep_rt raises on purpose."""

    call_made = False
    """Whether the call was made all the same: what was wrong came to light behind it (GPUs: `check_inputs`, ranks that differ, no memory
    for what came), and the other ranks go on."""


class EPConfigError(EPError, ValueError):
    """A size or a setting is wrong, or the ranks disagree on it."""


class EPInputError(EPError, ValueError):
    """An array or a handle given to a call is wrong, or the ranks give different ones; the buffer stays usable, or the message says no."""


class EPCompileError(EPError, RuntimeError):
    """A kernel did not compile or link; the message holds the compiler's log with the real file and line."""


class EPCacheError(EPCompileError):
    """The kernel cache cannot be used, or `DEEPEP_RT_ASSERT_CACHED=1` forbade the compilation that was needed."""


class EPUnavailableError(EPError, RuntimeError):
    """Something that is needed (a GPU, NVSHMEM, MPI, a library, a direct path) is not there, or the CUDA driver reports a failure."""


class EPOutOfMemoryError(EPError, MemoryError):
    """Not enough GPU memory for a buffer, no slot is left for a result, or not enough host memory for what a call returns."""


class EPDestroyedError(EPError, RuntimeError):
    """The buffer was destroyed before this call."""


class EPTimeoutError(EPError, TimeoutError):
    """A peer did not answer in time, or an exception threw it out of its `with` block.

    Attributes:
        rank: The rank that waited.
        peer: The rank it waited for.
        phase: What it waited for, in words.
        expected: The value it waited for (a call's sequence number).
        seen: The value it saw last.
        call_idx: Sequence number of the operation on this rank, counted from 1.
    """

    def __init__(
        self, message: str, *, rank: int, peer: int, phase: str, expected: int = 0, seen: int = 0, call_idx: int = 0
    ) -> None:
        super().__init__(message)
        self.rank, self.peer, self.phase = rank, peer, phase
        self.expected, self.seen, self.call_idx = expected, seen, call_idx

    def __reduce__(self) -> Any:
        """Exceptions are pickled (a process pool does it) by their positional arguments, and then by what was set on them."""
        make = functools.partial(type(self), rank=self.rank, peer=self.peer, phase=self.phase)
        return make, self.args, vars(self)
