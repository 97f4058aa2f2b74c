"""Pass file descriptors between the ranks of a host.

A rank sends its descriptor with a message over a Unix socket, or its peer copies the descriptor out of its process. A message counts only
if the peer's process and user have sent it, and if it holds the receiver's token. The ranks tell each other these over their communicator.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import errno
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from ..errors import EPUnavailableError
from .communicator import Communicator

_PHASE, _HINT = "the exchange of descriptors of symmetric memory", "all ranks of the host to make this Buffer"
_PAUSE_MS = 2
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_PIDFD_GETFD = 438  # of Linux 5.6 and newer, on every architecture


class _Peer(NamedTuple):
    """What a rank tells the others."""

    pid: int
    uid: int
    pid_namespace: int  # a number of a process means the same to ranks of one namespace
    name: str  # of its socket
    token: str
    descriptor: int


def exchange(comm: Communicator, descriptor: int, way: str, timeout_s: float) -> list[int]:
    """Give every other rank a descriptor. Return one of each rank, which the caller closes; this rank's own place holds -1. Collective.

    Args:
        comm: Ranks of one host.
        descriptor: That of this rank. It stays open.
        way: One of `WAYS`.
        timeout_s: The limit.

    Raises:
        EPUnavailableError: on every rank, if this way cannot work between some ranks.
        EPTimeoutError: if a rank does not come.
        EPPeerError: if a rank has said why it leaves.
    """
    return _WAYS[way](comm, descriptor, timeout_s)


def _over_sockets(comm: Communicator, descriptor: int, timeout_s: float) -> list[int]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        name = f"deepep_rt-{secrets.token_hex(16)}"
        own.bind(f"\0{name}")
        own.setblocking(False)
        peers = _introduce(comm, name, descriptor)
        received: dict[int, int] = {}
        try:
            problem = _send_and_receive(comm, own, peers, descriptor, received, timeout_s)
        except BaseException:
            close_all(received.values())
            raise
        return _agreed(comm, received, problem)


def _send_and_receive(
    comm: Communicator, own: socket.socket, peers: Sequence[_Peer], descriptor: int, received: dict[int, int], timeout_s: float
) -> str:
    """Send to all peers and receive from all. Return why that cannot work, or an empty text.

    A socket's queue holds few messages (10 by default), so sends must not block: a rank that waits for room also receives. A rank that
    cannot reach a peer tells the others so, without its descriptor, and they wait no longer.
    """
    rank, problem, end = comm.Get_rank(), "", time.monotonic() + timeout_s
    unsent = [peer for peer in range(len(peers)) if peer != rank]
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
    waiting = select.poll()
    waiting.register(own, select.POLLIN)
    while unsent or (not problem and len(received) < len(peers) - 1):
        for peer in list(unsent):
            body = f"{peers[peer].token} {rank}".encode()
            try:
                own.sendmsg([body], [] if problem else rights, 0, f"\0{peers[peer].name}")
            except BlockingIOError:
                continue  # its queue is full
            except OSError as error:
                if not problem:
                    problem = f"rank {rank} cannot send to rank {peer}: {errno.errorcode.get(error.errno or 0, str(error))}"
                    continue  # it may hear of it
            unsent.remove(peer)
        if waiting.poll(_PAUSE_MS):
            _receive(own, peers, rank, received)
            problem = problem or next((f"rank {peer} cannot send" for peer, found in received.items() if found < 0), "")
        elif comm.heard is not None and (heard := comm.heard()) is not None:
            raise heard
        if time.monotonic() > end:
            missing = [peer for peer in range(len(peers)) if peer != rank and peer not in received]
            raise comm.timeout_error(missing or unsent, _PHASE, _HINT, timeout_s)
    return problem


def _receive(own: socket.socket, peers: Sequence[_Peer], rank: int, received: dict[int, int]) -> None:
    """Receive one message: a peer's descriptor, or none (-1). A message that is not of a peer is dropped, with its descriptors."""
    room = socket.CMSG_SPACE(array.array("i").itemsize) + socket.CMSG_SPACE(_CREDENTIALS.size)
    body, ancillary, flags, _ = own.recvmsg(256, room, socket.MSG_CMSG_CLOEXEC)
    descriptors, sender = array.array("i"), (-1, -1, -1)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            sender = _CREDENTIALS.unpack(data[: _CREDENTIALS.size])
    token, _, number = body.partition(b" ")
    peer = int(number) if number.isdigit() and len(number) < 6 else -1
    is_new = 0 <= peer < len(peers) and peer != rank and peer not in received and len(descriptors) <= 1
    if is_new and not flags & socket.MSG_CTRUNC and secrets.compare_digest(token, peers[rank].token.encode()):
        pid, uid, _ = sender
        theirs = peers[peer]
        if uid == theirs.uid and (pid == theirs.pid or theirs.pid_namespace != peers[rank].pid_namespace):
            received[peer] = descriptors[0] if descriptors else -1
            return
    close_all(descriptors)


def _from_processes(comm: Communicator, descriptor: int, timeout_s: float) -> list[int]:
    """Copy the descriptors out of the processes of the peers. The system allows it to those that may trace them."""
    peers, rank = _introduce(comm, "", descriptor), comm.Get_rank()
    received: dict[int, int] = {}
    problem = ""
    for number, peer in enumerate(peers):
        if number == rank or problem:
            continue
        try:
            received[number] = _copy_out(peer.pid, peer.descriptor)
        except OSError as error:
            problem = (
                f"rank {rank} may not copy descriptors of rank {number}: {errno.errorcode.get(error.errno or 0, str(error))}"
            )
    return _agreed(comm, received, problem)


def _copy_out(pid: int, descriptor: int) -> int:
    process = os.pidfd_open(pid)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        found = libc.syscall(ctypes.c_long(_PIDFD_GETFD), ctypes.c_long(process), ctypes.c_long(descriptor), ctypes.c_long(0))
        if found < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return int(found)
    finally:
        os.close(process)


def _introduce(comm: Communicator, name: str, descriptor: int) -> list[_Peer]:
    mine = _Peer(os.getpid(), os.getuid(), os.stat("/proc/self/ns/pid").st_ino, name, secrets.token_hex(16), descriptor)
    told = comm.allgather(tuple(mine))  # a store may hold anything
    if not all(isinstance(found, tuple) and list(map(type, found)) == [int, int, int, str, str, int] for found in told):
        raise EPUnavailableError(
            "a rank told nothing valid about its descriptors; expected ranks of one version of this library."
        )
    return [_Peer(*found) for found in told]


def _agreed(comm: Communicator, received: dict[int, int], problem: str) -> list[int]:
    """Return the descriptors in rank order, if all ranks have theirs. Otherwise close them, and raise the first problem."""
    try:
        problems = [text for text in comm.allgather(problem) if text]
        if problems:
            first = next((text for text in problems if " to rank " in text), problems[0])  # the others only heard of it
            raise EPUnavailableError(f"{first}; expected ranks that may pass descriptors to each other")
    except BaseException:
        close_all(received.values())
        raise
    return [received.get(rank, -1) for rank in range(comm.Get_size())]


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors; -1 stands for none."""
    for descriptor in descriptors:
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)


_WAYS: dict[str, Callable[[Communicator, int, float], list[int]]] = {"sockets": _over_sockets, "pidfd": _from_processes}
WAYS = tuple(_WAYS)
"""The ways, in the order in which they are tried."""
