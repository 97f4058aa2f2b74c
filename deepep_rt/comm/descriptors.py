"""Pass file descriptors between the ranks of a host.

A rank sends its descriptor with a message over a Unix socket, or its peer copies the descriptor out of its process. A message counts only
if the peer's process and user have sent it, and if it holds the receiver's token. The ranks tell each other these over their communicator.

The socket has a name in the network namespace ("sockets"), or a file in the folder `DEEPEP_RT_SOCKET_DIR` ("files"). Only this user may be
able to write to that folder: another one could put a socket in the place of a peer's, and get the memory of a rank.
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
import stat
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from .. import _env
from ..errors import EPConfigError, EPUnavailableError
from .communicator import Communicator

_PHASE, _HINT = "the exchange of descriptors of symmetric memory", "all ranks of the host to make this Buffer"
_PAUSE_MS = 2
_MOST_MESSAGES = 100
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_PIDFD_GETFD = 438  # of Linux 5.6 and newer, on every architecture
_PREFIX = "deepep_rt-"
_LEFTOVER_S = 60.0  # a file is older than its socket for a moment


class _Peer(NamedTuple):
    """What a rank tells the others."""

    pid: int
    uid: int
    pid_namespace: int  # a number of a process means the same to ranks of one namespace
    user_namespace: int  # the same for a number of a user
    name: str  # of its socket
    token: str
    descriptor: int
    problem: str  # the reason why it cannot take part


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


def _over_sockets(comm: Communicator, descriptor: int, timeout_s: float, *, with_files: bool = False) -> list[int]:
    with contextlib.ExitStack() as opened:
        own = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK))
        own.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        name, place, problem = f"{_PREFIX}{secrets.token_hex(16)}", "\0", ""
        try:
            if with_files:
                place = opened.enter_context(_socket_folder())
                opened.enter_context(_file_of(own, place, name))
            else:
                own.bind(f"\0{name}")
        except (OSError, EPConfigError, EPUnavailableError) as error:
            problem = f"cannot open a socket: {_name_of(error)}"
        peers = _introduce(comm, name, descriptor, problem)
        received: dict[int, int] = {}
        try:
            problem = _send_and_receive(comm, own, place, peers, descriptor, received, timeout_s)
        except BaseException:
            close_all(received.values())
            raise
        return _agreed(comm, received, problem)


def _over_files(comm: Communicator, descriptor: int, timeout_s: float) -> list[int]:
    return _over_sockets(comm, descriptor, timeout_s, with_files=True)


@contextlib.contextmanager
def _socket_folder() -> Iterator[str]:
    """Open the folder of sockets, and yield a path that stays the same folder. It is short: an address has at most 107 bytes.

    Raise EPUnavailableError if there is no such folder, or if other users can write to it.
    """
    path = _env.socket_dir()
    if path is None:
        raise EPUnavailableError("DEEPEP_RT_SOCKET_DIR is not set")
    number = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        status = os.fstat(number)
        objection = ""
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            objection = f"other users may write to it (mode {stat.S_IMODE(status.st_mode):o})"
        elif status.st_uid not in (os.geteuid(), 0):
            objection = f"user {status.st_uid} owns it"
        if objection:
            raise EPUnavailableError(
                f"DEEPEP_RT_SOCKET_DIR={str(path)!r}: {objection}; expected a folder that only this user can write. Make one in it with "
                f"mkdir -m 700"
            )
        place = f"/proc/self/fd/{number}/"
        _remove_leftovers(place)
        yield place
    finally:
        os.close(number)


@contextlib.contextmanager
def _file_of(own: socket.socket, place: str, name: str) -> Iterator[None]:
    """Bind a socket to a file that only this user can use, and remove the file afterwards."""
    os.fchmod(own.fileno(), 0o600)  # the file gets this mode, and never has another one
    own.bind(place + name)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.unlink(place + name)


def _remove_leftovers(place: str) -> None:
    """Remove the files of ranks that were killed: no socket listens there."""
    with contextlib.suppress(OSError), os.scandir(place) as found:
        for entry in found:
            status = entry.stat(follow_symlinks=False)
            is_old = time.time() - status.st_mtime > _LEFTOVER_S
            if entry.name.startswith(_PREFIX) and stat.S_ISSOCK(status.st_mode) and status.st_uid == os.geteuid() and is_old:
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
                    if probe.connect_ex(place + entry.name) == errno.ECONNREFUSED:
                        os.unlink(place + entry.name)


def _name_of(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno:
        return errno.errorcode.get(error.errno, str(error))
    return str(error)


def _send_and_receive(
    comm: Communicator,
    own: socket.socket,
    place: str,
    peers: Sequence[_Peer],
    descriptor: int,
    received: dict[int, int],
    timeout_s: float,
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
                own.sendmsg([body], [] if problem else rights, 0, place + peers[peer].name)
            except BlockingIOError:
                continue  # its queue is full
            except BrokenPipeError:
                problem = problem or f"rank {peer} cannot pass descriptors"  # it has left the loop
            except OSError as error:
                if not problem:
                    problem = f"rank {rank} cannot send to rank {peer}: {_name_of(error)}"
                    continue  # it may hear of it
            unsent.remove(peer)
        if waiting.poll(_PAUSE_MS):
            with contextlib.suppress(BlockingIOError):
                for _ in range(_MOST_MESSAGES):  # strangers may send faster than one message for each round
                    _receive(own, peers, rank, received)
            problem = problem or next((f"rank {peer} cannot send" for peer, found in received.items() if found < 0), "")
        elif comm.heard is not None and (heard := comm.heard()) is not None:
            raise heard
        if time.monotonic() > end:
            missing = [peer for peer in range(len(peers)) if peer != rank and peer not in received]
            raise comm.timeout_error(missing or unsent, _PHASE, _HINT, timeout_s)
    if problem:
        own.shutdown(socket.SHUT_RD)  # otherwise a peer would wait for room in the queue, which nothing empties any more
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
        mine, theirs = peers[rank], peers[peer]
        is_process = pid == theirs.pid or theirs.pid_namespace != mine.pid_namespace
        if is_process and (uid == theirs.uid or theirs.user_namespace != mine.user_namespace):
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
            problem = f"rank {rank} may not copy descriptors of rank {number}: {_name_of(error)}"
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


def _introduce(comm: Communicator, name: str, descriptor: int, problem: str = "") -> list[_Peer]:
    """Tell the other ranks about this one, and return all of them. Raise on every rank if one cannot take part."""
    pids, users = (os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "user"))
    mine = _Peer(os.getpid(), os.getuid(), pids, users, name, secrets.token_hex(16), descriptor, problem)
    told = comm.allgather(tuple(mine))  # a store may hold anything
    types = list(map(type, mine))
    if not all(isinstance(found, tuple) and list(map(type, found)) == types and _is_name(found) for found in told):
        raise EPUnavailableError(
            "a rank told nothing valid about its descriptors; expected ranks of one version of this library."
        )
    peers = [_Peer(*found) for found in told]
    for rank, peer in enumerate(peers):
        if peer.problem:
            raise EPUnavailableError(f"rank {rank} {peer.problem}")
    return peers


def _is_name(told: tuple) -> bool:
    """Return whether the name of a socket names no file elsewhere."""
    return "/" not in _Peer(*told).name


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


_WAYS: dict[str, Callable[[Communicator, int, float], list[int]]] = {
    "sockets": _over_sockets,
    "files": _over_files,
    "pidfd": _from_processes,
}
WAYS = tuple(_WAYS)
"""The ways, in the order in which they are tried."""
