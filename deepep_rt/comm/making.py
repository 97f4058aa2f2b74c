"""The making of something by all ranks, such as a Buffer: all of them succeed, or all raise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import EPPeerError
from .communicator import Communicator
from .failure_notice import FailureNotice


@contextmanager
def making(comm: Communicator, own: Communicator, phase: str) -> Iterator[None]:
    """Run the block on all ranks. If a rank raises in it, waits of the others on `own` and its duplicates raise at once.

    Args:
        comm: The ranks. Their meetings in the block listen too.
        own: What `comm.meet` returned for this making.
        phase: What the block does, for the message.

    Raises:
        EPPeerError: if another rank raises in the block, or its program ends there.
    """
    notice, outer = FailureNotice(own), own.heard
    own.heard = comm.heard = lambda: notice.heard(phase) or (outer() if outer is not None else None)
    try:
        yield
        own.Barrier()  # a rank may have failed after its last collective
    except BaseException as error:
        if not isinstance(error, EPPeerError):  # all ranks have the notice of that peer
            notice.notify(error)
        raise
    finally:
        notice.close()
        own.heard = comm.heard = outer
