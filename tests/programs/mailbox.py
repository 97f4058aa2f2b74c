"""Messages with descriptors between ranks at any time: `comm.mailbox`."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from mpi4py import MPI
from spmd import idle_barrier, main, raises

from deepep_rt import EPOutOfMemoryError, EPPeerError, EPUnavailableError
from deepep_rt.comm import convert
from deepep_rt.comm.mailbox import Mailbox

LIMIT_S = 20.0


def _open() -> int:
    return len(os.listdir("/proc/self/fd"))


def check_all_ranks_ask_at_once(comm: MPI.Intracomm) -> None:
    """The queue of a socket holds 10 messages. Each question has a descriptor, and the answer comes after the handler has ended."""
    before, found = _open(), []

    def handle(peer: int, numbers: Sequence[int], descriptor: int) -> None:
        found.append((peer, *numbers, os.read(descriptor, 1)))

    mailbox = Mailbox(convert.communicator_of(comm), handle, "sockets", LIMIT_S)
    rank, size = comm.Get_rank(), comm.Get_size()
    idle_barrier(comm)
    for number in range(30):
        read, write = os.pipe()
        os.write(write, bytes([number]) * size)
        mailbox.ask([number, -rank], read, LIMIT_S)
        os.close(read)
        os.close(write)
    idle_barrier(comm)
    assert sorted(found) == sorted(
        (peer, number, -peer, bytes([number])) for peer in range(size) if peer != rank for number in range(30)
    )
    mailbox.close()
    mailbox.close()
    assert _open() == before
    dropped = Mailbox(convert.communicator_of(comm), handle, "sockets", LIMIT_S)
    idle_barrier(comm)
    thread = dropped._thread
    del dropped
    gc.collect()
    thread.join(LIMIT_S)
    assert _open() == before


def check_answers(comm: MPI.Intracomm) -> None:
    """A peer may say no, not answer in time, be gone, or have said elsewhere that it leaves."""
    rank, size = comm.Get_rank(), comm.Get_size()
    if size == 1:
        return
    slow = threading.Event()

    def handle(peer: int, numbers: Sequence[int], descriptor: int) -> None:
        if numbers[0] == 1 and rank == size - 1:
            raise EPOutOfMemoryError("no room for 7 bytes")
        if numbers[0] == 2 and rank == size - 1:
            slow.wait(LIMIT_S)

    mailbox = Mailbox(convert.communicator_of(comm), handle, "sockets", LIMIT_S)
    idle_barrier(comm)
    if rank == 0:
        with raises(EPUnavailableError, f"rank {size - 1}: no room for 7 bytes"):
            mailbox.ask([1], -1, LIMIT_S)
        mailbox.ask([0], -1, LIMIT_S)
        with raises(EPUnavailableError, f"rank {size - 1} does not answer within 0.2 s"):
            mailbox.ask([2], -1, 0.2)
        left = EPPeerError("rank 1 has left", rank=0, peer=1, phase="")
        with raises(EPPeerError, "rank 1 has left"):
            mailbox.ask([2], -1, LIMIT_S, lambda: left)
    idle_barrier(comm)
    slow.set()
    if rank == 0:
        mailbox.ask([0], -1, LIMIT_S)  # a late answer to an earlier question is not taken for this one
    idle_barrier(comm)
    if rank == size - 1:
        mailbox.close()
    idle_barrier(comm)
    if rank == 0:
        with raises(EPUnavailableError, f"rank {size - 1} receives no messages"):
            mailbox.ask([0], -1, LIMIT_S)
    idle_barrier(comm)
    mailbox.close()


def _own_names() -> str:
    """Return the lines of this process's sockets in the list of the network namespace, which names those of other processes too."""
    links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    own = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    return "\n".join(line for line in Path("/proc/net/unix").read_text().splitlines() if own & set(line.split()))


def check_no_way_in_for_strangers(comm: MPI.Intracomm) -> None:
    """The sockets have no names, in every way in which their ends were passed."""
    for way in ("sockets", "pidfd"):
        mailbox = Mailbox(convert.communicator_of(comm), lambda *_: None, way, LIMIT_S)
        idle_barrier(comm)
        assert "deepep_rt" not in _own_names()
        mailbox.ask([1], -1, LIMIT_S)
        idle_barrier(comm)
        mailbox.close()


if __name__ == "__main__":
    main(__name__)
