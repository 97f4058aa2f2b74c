"""The making of something by all ranks, such as a Buffer: all of them succeed, or all raise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import EPPeerError
from . import process_end
from .communicator import Communicator
from .failure_notice import FailureNotice


@contextmanager
def making(comm: Communicator, own: Communicator, phase: str) -> Iterator[list[FailureNotice]]:
    """Run the block on all ranks. If a rank raises in it, waits of the others on `own` and its duplicates raise at once.

    Args:
        comm: The ranks. Their meetings in the block listen too.
        own: What `comm.meet` returned for this making.
        phase: What the block does, for the message.

    Yields:
        A list for the notice of what the block has made. Ranks may have left the block when another one is interrupted at its end.

    Raises:
        EPPeerError: if another rank raises in the block, or its program ends there.
    """
    notice, outer, before = FailureNotice(own), own.heard, comm.heard
    own.heard = comm.heard = lambda: notice.heard(phase) or (outer and outer())
    made: list[FailureNotice] = []
    try:
        yield made
        own.Barrier()  # a rank may have failed after its last collective
    except BaseException as error:
        if not isinstance(error, EPPeerError):  # all ranks have the notice of that peer
            process_end.leave_after(error, notice, *made)
        raise
    finally:
        notice.close()
        own.heard, comm.heard = outer, before
