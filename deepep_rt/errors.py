"""Every exception of deepep_rt.

::

    EPError
    ├── EPConfigError        (ValueError)    a size or a setting is wrong, or the ranks disagree on it
    ├── EPInputError         (ValueError)    an array or a handle of a call is wrong, or the ranks disagree on them
    ├── EPCompileError       (RuntimeError)  a kernel did not compile or link
    │   └── EPCacheError                     the kernel cache cannot be used, or lacks a kernel that must not be compiled
    ├── EPUnavailableError   (RuntimeError)  a GPU, a library or a connection is not available
    ├── EPOutOfMemoryError   (MemoryError)   GPU or host memory is full, or no slot is left for a result
    ├── EPDestroyedError     (RuntimeError)  the Buffer was destroyed
    ├── EPAsleepError        (RuntimeError)  the Buffer sleeps
    ├── EPEvictedError       (RuntimeError)  the members of a Buffer with slots have gone on without this process
    └── EPTimeoutError       (TimeoutError)  a peer did not answer within `timeout_s`; the Buffer is broken
        └── EPPeerError                      a peer left or refused its call, and said why
            └── EPPeerLostError              the process of a peer has ended, or a Buffer with slots has lost touch with it
"""

from __future__ import annotations

import functools
from typing import Any


class EPError(Exception):
    """Base class of the exceptions of deepep_rt."""

    call_made = False
    """Whether the call still ran. The GPU found the error during the call, and the other ranks continue.

    This can happen with `check_inputs`, if ranks disagree, or if there is no memory for the rows that arrived."""


class EPConfigError(EPError, ValueError):
    """A size or a setting is wrong, or the ranks disagree on it."""


class EPInputError(EPError, ValueError):
    """An array or a handle of a call is wrong, or the ranks disagree on them. The Buffer stays usable unless the message denies it."""


class EPCompileError(EPError, RuntimeError):
    """A kernel did not compile or link. The message holds the compiler's log with file names and line numbers."""


class EPCacheError(EPCompileError):
    """The kernel cache cannot be used, or lacks a kernel while `DEEPEP_RT_ASSERT_CACHED=1` forbids compilation."""


class EPUnavailableError(EPError, RuntimeError):
    """A GPU, NVSHMEM, MPI, a library or a direct path is not available, or the CUDA driver reports a failure."""


class EPOutOfMemoryError(EPError, MemoryError):
    """There is not enough GPU memory for a Buffer, no slot for a result, or not enough host memory for a result."""

    num_recv_tokens = 0
    """The rows that a dispatch would have brought to a rank, if they are more than `num_max_recv_tokens` of the Buffer; otherwise 0.
    All ranks raise that error."""


class EPDestroyedError(EPError, RuntimeError):
    """The Buffer was destroyed before this call."""


class EPAsleepError(EPError, RuntimeError):
    """The Buffer sleeps (`Buffer.sleep`). Call `wake()` on all ranks first."""


class EPEvictedError(EPError, RuntimeError):
    """The other members of a Buffer with slots have gone on without this process. `Buffer.join` takes a free slot again."""


class EPTimeoutError(EPError, TimeoutError):
    """A peer did not answer in time. `EPPeerError` is raised where the peer has said why.

    Attributes:
        rank: The rank that waited.
        peer: The rank that it waited for; -1 if no single rank is known.
        phase: The step of the call in which it waited.
        expected: The value that it waited for, the sequence number of a call.
        seen: The last value that it read.
        call_idx: Sequence number of the call on this rank, counted from 1.
        node: The node of the peer, if the Buffer has several nodes; otherwise None.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: int,
        peer: int,
        phase: str,
        expected: int = 0,
        seen: int = 0,
        call_idx: int = 0,
        node: int | None = None,
    ) -> None:
        super().__init__(message)
        self.rank, self.peer, self.phase, self.node = rank, peer, phase, node
        self.expected, self.seen, self.call_idx = expected, seen, call_idx

    def __reduce__(self) -> Any:
        """Pickle the keyword arguments too. Exceptions are pickled with their positional arguments and attributes only."""
        make = functools.partial(type(self), rank=self.rank, peer=self.peer, phase=self.phase)
        return make, self.args, vars(self)


class EPPeerError(EPTimeoutError):
    """A peer left the Buffer or refused its call, and said why. The message quotes it. Ranks hear it long before `timeout_s`.

    It has the attributes of `EPTimeoutError`, too.

    Attributes:
        reason: What the peer said, such as the type and text of its exception.
    """

    def __init__(self, message: str, *, reason: str = "", **attributes: Any) -> None:
        super().__init__(message, **attributes)
        self.reason = reason


class EPPeerLostError(EPPeerError):
    """The processes of some ranks have ended, or a Buffer with slots has lost touch with them. `Buffer.shrink` of such a one goes on.

    It has the attributes of `EPPeerError`, too.

    Attributes:
        ranks: The ranks that this rank knows to be lost, ascending.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...] = (), **attributes: Any) -> None:
        super().__init__(message, **attributes)
        self.ranks = ranks
