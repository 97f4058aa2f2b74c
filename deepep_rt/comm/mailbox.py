"""Messages with descriptors between the ranks of a host, at any time: a thread of each rank receives them.

A rank asks all others something, and waits for their answers. They answer whatever their programs do meanwhile. A message counts only if
the process and the user of a peer have sent it, and if it holds the token of the receiver.
"""

from __future__ import annotations

import array
import contextlib
import os
import secrets
import select
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .._finalizers import no_cuda_in_this_thread
from ..errors import EPError, EPPeerError, EPUnavailableError
from .communicator import Communicator

_MOST_BYTES = 2048
_PAUSE_S = 2e-3  # while a queue is full
_POLL_S = 0.02  # between two looks at what peers say elsewhere
_CREDENTIALS = struct.Struct("3i")  # process, user, group
_ASK, _YES, _NO = "ask", "yes", "no"

Handler = Callable[[int, Sequence[int], int], None]
"""Acts on what a peer asks: its rank, some numbers, and a descriptor or -1, which is closed afterwards. It runs in the thread. An EPError
that it raises is the answer."""


class _Peer(NamedTuple):
    """What a rank tells the others."""

    pid: int
    uid: int
    pid_namespace: int  # a number of a process means the same to ranks of one namespace
    name: str  # of its socket
    token: str


class Mailbox:
    """The messages of one rank. Making it is collective over the ranks of a host; the rest is not.

    `handle` is for what peers ask. The numbers of a question are the caller's own.
    """

    def __init__(self, comm: Communicator, handle: Handler) -> None:
        self._rank = comm.Get_rank()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        name = f"deepep_rt-{secrets.token_hex(16)}"
        self._socket.bind(f"\0{name}")
        stop, to_stop = os.pipe2(os.O_CLOEXEC)
        self._handle, self._question, self._answers = handle, 0, dict[int, str]()
        self._news = threading.Condition()
        self._unsent: deque[tuple[int, bytes]] = deque()  # answers
        try:
            mine = os.getpid(), os.getuid(), os.stat("/proc/self/ns/pid").st_ino, name, secrets.token_hex(16)
            self._peers = [_Peer(*told) for told in comm.allgather(mine)]
        except BaseException:
            self._socket.close()
            os.close(stop)
            os.close(to_stop)
            raise
        self._thread = threading.Thread(target=_serve, args=(weakref.ref(self), self._socket, stop), daemon=True)
        self._thread.name = "deepep_rt's mailbox"
        self._thread.start()
        self._stop = weakref.finalize(self, os.close, to_stop)  # the thread ends
        self._stop.atexit = False  # it ends with the process

    def ask(
        self, numbers: Sequence[int], descriptor: int, timeout_s: float, heard: Callable[[], EPPeerError | None] = lambda: None
    ) -> None:
        """Ask all peers, and wait until all have said yes. `heard` returns the error of a peer that has left.

        Raises:
            EPUnavailableError: if a peer says no, or does not answer.
            EPPeerError: if `heard` returns it.
        """
        peers = [peer for peer in range(len(self._peers)) if peer != self._rank]
        self._question, self._answers = self._question + 1, {}
        words = f"{_ASK} {self._question} {' '.join(map(str, numbers))}"
        end, unsent = time.monotonic() + timeout_s, list(peers)
        while True:
            unsent = [peer for peer in unsent if not self._send(peer, words.encode(), descriptor)]
            with self._news:
                self._news.wait_for(lambda: len(self._answers) == len(peers), _PAUSE_S if unsent else _POLL_S)
                answers = dict(self._answers)
            for peer, text in answers.items():
                if text:
                    raise EPUnavailableError(f"rank {peer}: {text}")
            if len(answers) == len(peers):
                return
            if (error := heard()) is not None:
                raise error
            if time.monotonic() > end:
                silent = [peer for peer in peers if peer not in answers]
                raise EPUnavailableError(f"rank {silent[0]} does not answer within {timeout_s:g} s; expected a process that runs")

    def close(self) -> None:
        """Receive nothing more. A handler that runs ends first."""
        self._stop()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _send(self, peer: int, words: bytes, descriptor: int = -1) -> bool:
        """Send a message, unless the queue of the peer is full. Return whether it was sent."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))] if descriptor >= 0 else []
        to = self._peers[peer]
        try:
            self._socket.sendmsg([f"{to.token} {self._rank} ".encode() + words], rights, 0, f"\0{to.name}")
        except BlockingIOError:
            return False
        except OSError as error:
            raise EPUnavailableError(
                f"rank {peer} receives no messages ({error}); expected a Buffer that was not destroyed"
            ) from error
        return True

    def _receive(self) -> None:
        """Receive and treat one message. One that is not of a peer is dropped, with its descriptors."""
        body, descriptors, sender = receive(self._socket)
        try:
            token, rank, kind, number, *rest = body.decode(errors="replace").split(" ", 4)
            peer = int(rank) if rank.isdigit() and len(rank) < 6 else -1
            if not (0 <= peer < len(self._peers) and peer != self._rank and len(descriptors) <= 1 and number.isdigit()):
                return
            theirs, mine = self._peers[peer], self._peers[self._rank]
            if not secrets.compare_digest(token.encode(), mine.token.encode()):
                return
            pid, uid, _ = sender
            if uid != theirs.uid or (pid != theirs.pid and theirs.pid_namespace == mine.pid_namespace):
                return
            text = rest[0] if rest else ""
            if kind == _ASK:
                self._answer(peer, number, [int(word) for word in text.split()], descriptors[0] if descriptors else -1)
            elif kind in (_YES, _NO):
                with self._news:
                    if int(number) == self._question:
                        self._answers[peer] = text if kind == _NO else ""
                        self._news.notify_all()
        except ValueError:
            pass
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _answer(self, peer: int, question: str, numbers: Sequence[int], descriptor: int) -> None:
        kind, text = _YES, ""
        try:
            self._handle(peer, numbers, descriptor)
        except EPError as error:
            kind, text = _NO, str(error)[: _MOST_BYTES // 2]
        self._unsent.append((peer, f"{kind} {question} {text}".encode()))

    def _send_answers(self) -> bool:
        """Return whether all are sent. An answer to a peer that is gone is dropped."""
        for _ in range(len(self._unsent)):
            peer, words = self._unsent.popleft()
            with contextlib.suppress(EPUnavailableError):
                if not self._send(peer, words):
                    self._unsent.append((peer, words))
        return not self._unsent


def receive(own: socket.socket) -> tuple[bytes, array.array[int], tuple[int, int, int]]:
    """Receive a message: its words, its descriptors, and the process, user and group of its sender.

    If the message was cut, it has no words.
    """
    room = socket.CMSG_SPACE(2 * array.array("i").itemsize) + socket.CMSG_SPACE(_CREDENTIALS.size)
    body, ancillary, flags, _ = own.recvmsg(_MOST_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    descriptors, sender = array.array("i"), (-1, -1, -1)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
            sender = _CREDENTIALS.unpack(data[: _CREDENTIALS.size])
    return b"" if flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC) else body, descriptors, sender


def _serve(owner: weakref.ref[Mailbox], own: socket.socket, stop: int) -> None:
    """Receive until the other end of the pipe `stop` is closed, as when the mailbox is dropped: the thread does not keep it alive."""
    waiting, all_sent = select.poll(), True
    waiting.register(own, select.POLLIN)
    waiting.register(stop, 0)  # only its end counts
    with contextlib.ExitStack() as at_end:
        at_end.callback(os.close, stop)
        at_end.callback(own.close)
        # A finalizer could wait for a kernel that waits for the peer that asks.
        at_end.enter_context(no_cuda_in_this_thread())
        while True:
            ready = [descriptor for descriptor, _ in waiting.poll(None if all_sent else _PAUSE_S * 1000)]
            mailbox = owner()
            if stop in ready or mailbox is None:
                return
            if ready:
                with contextlib.suppress(BlockingIOError):
                    mailbox._receive()
            all_sent = mailbox._send_answers()
            del mailbox
