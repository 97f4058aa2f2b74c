"""Messages with descriptors between the ranks of a host, at any time: a thread of each rank receives them.

A rank asks all others something, and waits for their answers. They answer whatever their programs do meanwhile. Messages travel over pairs
of sockets without a name: each rank keeps one end of its pair, and passes the other end to its peers as a descriptor.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from .._finalizers import no_cuda_in_this_thread
from ..errors import EPError, EPPeerError, EPUnavailableError
from . import descriptors
from .communicator import Communicator

_MOST_BYTES = 2048
_PAUSE_S = 2e-3  # while a queue is full
_POLL_S = 0.02  # between two looks at what peers say elsewhere
_ASK, _YES, _NO = "ask", "yes", "no"

Handler = Callable[[int, Sequence[int], int], None]
"""Acts on what a peer asks: its rank, some numbers, and a descriptor or -1, which is closed afterwards. It runs in the thread. An EPError
that it raises is the answer."""


class Mailbox:
    """The messages of one rank. Making it is collective over the ranks of a host; the rest is not.

    `handle` is for what peers ask. The numbers of a question are the caller's own. `way` and `timeout_s` are those of
    `descriptors.exchange`, whose errors this raises.
    """

    def __init__(self, comm: Communicator, handle: Handler, way: str, timeout_s: float) -> None:
        self._rank = comm.Get_rank()
        self._handle, self._question, self._answers = handle, 0, dict[int, str]()
        self._news = threading.Condition()
        self._unsent: deque[tuple[int, bytes]] = deque()  # answers
        own, for_peers = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            with for_peers:
                found = descriptors.exchange(comm, for_peers.fileno(), way, timeout_s)
        except BaseException:
            own.close()
            raise
        self._peers = {peer: socket.socket(fileno=end) for peer, end in enumerate(found) if end >= 0}
        for end in (own, *self._peers.values()):
            end.setblocking(False)
        stop, to_stop = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=_serve, args=(weakref.ref(self), own, stop), daemon=True)
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
        self._question, self._answers = self._question + 1, {}
        words = f"{self._rank} {_ASK} {self._question} {' '.join(map(str, numbers))}".encode()
        end, unsent = time.monotonic() + timeout_s, list(self._peers)
        while True:
            unsent = [peer for peer in unsent if not self._send(peer, words, descriptor)]
            with self._news:
                self._news.wait_for(lambda: len(self._answers) == len(self._peers), _PAUSE_S if unsent else _POLL_S)
                answers = dict(self._answers)
            for peer, text in answers.items():
                if text:
                    raise EPUnavailableError(f"rank {peer}: {text}")
            if len(answers) == len(self._peers):
                return
            if (error := heard()) is not None:
                raise error
            if time.monotonic() > end:
                silent = min(self._peers.keys() - answers)
                raise EPUnavailableError(f"rank {silent} does not answer within {timeout_s:g} s; expected a process that runs")

    def close(self) -> None:
        """Receive nothing more. A handler that runs ends first."""
        if self._stop.alive:
            self._stop()
            self._thread.join()
            for end in self._peers.values():
                end.close()

    def _send(self, peer: int, words: bytes, descriptor: int = -1) -> bool:
        """Send a message, unless the queue of the peer is full. Return whether it was sent."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))] if descriptor >= 0 else []
        try:
            self._peers[peer].sendmsg([words], rights)
        except BlockingIOError:
            return False
        except OSError as error:
            raise EPUnavailableError(
                f"rank {peer} receives no messages ({error}); expected a Buffer that was not destroyed"
            ) from error
        return True

    def _receive(self, own: socket.socket) -> None:
        """Receive and treat one message."""
        body, ancillary, _, _ = own.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC)
        held = array.array("i")
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                held.frombytes(data[: len(data) - len(data) % held.itemsize])
        rank, what, number, text = body.decode().split(" ", 3)
        try:
            if what == _ASK:
                self._answer(int(rank), number, [int(word) for word in text.split()], held[0] if held else -1)
            else:
                with self._news:
                    if int(number) == self._question:
                        self._answers[int(rank)] = text if what == _NO else ""
                        self._news.notify_all()
        finally:
            descriptors.close_all(held)

    def _answer(self, peer: int, question: str, numbers: Sequence[int], descriptor: int) -> None:
        what, text = _YES, ""
        try:
            self._handle(peer, numbers, descriptor)
        except EPError as error:
            what, text = _NO, str(error)[: _MOST_BYTES // 8]
        self._unsent.append((peer, f"{self._rank} {what} {question} {text}".encode()))

    def _send_answers(self) -> bool:
        """Return whether all are sent. An answer to a peer that is gone is dropped."""
        for _ in range(len(self._unsent)):
            peer, words = self._unsent.popleft()
            with contextlib.suppress(EPUnavailableError):
                if not self._send(peer, words):
                    self._unsent.append((peer, words))
        return not self._unsent


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
                    mailbox._receive(own)
            all_sent = mailbox._send_answers()
            del mailbox
