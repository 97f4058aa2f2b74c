"""The host relay: a thread of each rank that carries puts between hosts, over NIXL or MPI. It makes no CUDA call.

A kernel writes bytes into host memory and a descriptor into a ring there. The relay of its rank sends the bytes. The relay of the
destination writes them into host memory at the same offset, and then the word of the put, for which a kernel waits. Puts arrive in any
order: a word follows the bytes of its own put, and nothing else is promised.

A relay lives as long as its Buffer. Each relay sends heartbeats, so that a rank can tell a relay that has ended from a slow network.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from .._finalizers import no_cuda_in_this_thread
from ..errors import EPError, EPUnavailableError
from .communicator import Communicator
from .relay_puts import HEARTBEATS_PER_TIMEOUT, Mirror, PutRing, RelayPeers
from .relay_traffic import RelayTraffic

_SWITCH_INTERVAL_S = 1e-4  # with Python's 5 ms, each turn of the relay would wait that long for a main thread that computes
# After traffic the relay polls without a pause, then with short ones. Transports move bytes only while they are polled, also those of sends
# that they call complete, so pauses grow only after a while.
_SPIN_S, _SHORT_PAUSES_S = 5e-3, 0.1
_FIRST_PAUSE_S, _MAX_PAUSE_S = 2e-5, 5e-4
_LAST_WORDS_S = 1.0  # for the messages of a relay that fails
_CLOSE_AFTER_FAILURE_S = 1.0
_EXIT_S = 2.0  # at the end of a program that does not close its relay


class Relay:
    """Carries the puts of this rank, and brings those of other ranks into its memory. Collective.

    Args:
        comm: The ranks.
        address: The host memory that mirrors a part of symmetric memory, a multiple of 8. It stays allocated until `close` returns True.
        num_bytes: Its size, a multiple of 8.
        first: The offset from the base of symmetric memory at which it begins, a multiple of 8.
        ring: Address of the ring of descriptors, all zero. Put i of this rank lies at i % depth; it is complete once its `sequence` is
            i + 1, modulo 2**32.
        depth: Entries of the ring, a power of two.
        descriptor: The structure of an entry, with the members `from`, `to`, `num_bytes`, `word`, `value`, `rank` and `sequence`.
        timeout_s: The Buffer's time limit. A relay that is silent for three quarters of it is an error.
        node_size: Consecutive ranks of a node, which errors name.
        transport: What carries the puts: "nixl" or "mpi".
        first_put: The number of the first put, for tests.

    Raises:
        EPUnavailableError: if the transport cannot work.
        EPTimeoutError: if a rank does not arrive.

    Example:
        >>> relay = Relay(comm, memory.ctypes.data, memory.nbytes, 0, ring.ctypes.data, 64, ring.dtype, 30.0, node_size=8,
        ...               transport='nixl')  # doctest: +SKIP
        >>> relay.check()  # while the host waits; raises if a relay has failed  # doctest: +SKIP
        >>> relay.close()  # on all ranks  # doctest: +SKIP
        True
    """

    def __init__(
        self,
        comm: Communicator,
        address: int,
        num_bytes: int,
        first: int,
        ring: int,
        depth: int,
        descriptor: np.dtype,
        timeout_s: float,
        *,
        node_size: int,
        transport: str,
        first_put: int = 0,
    ) -> None:
        self.rank, self.timeout_s, self._transport = comm.Get_rank(), timeout_s, transport
        self._ring, self._mirror = PutRing(ring, depth, descriptor, first_put), Mirror(address, num_bytes, first)
        self._peers = RelayPeers(self.rank, comm.Get_size(), timeout_s, time.monotonic(), node_size)
        self._error: EPError | None = None
        self._woken = threading.Event()
        self._close_at: float | None = None  # when to stop waiting for the other ranks
        self._has_sent_end = self._is_finished = self._is_closed = False
        self._traffic = self.make_traffic(comm)
        self._thread = threading.Thread(target=self._run_without_cuda, name=f"deepep_rt relay of rank {self.rank}", daemon=True)
        _SwitchInterval.hold()
        atexit.register(self._close_at_exit)  # before MPI_Finalize, which mpi4py calls last
        self._thread.start()

    def make_traffic(self, comm: Communicator) -> RelayTraffic:
        """Make the part that sends and receives. Tests replace it by a bad network. Collective."""
        return traffic_of(self._transport)(comm, self._ring, self._mirror, self._peers)

    # --- the owner's side --------------------------------------------------------------------------------------------------------

    @property
    def error(self) -> EPError | None:
        """Why this Buffer's relays cannot go on, or None: the failure of this rank's relay, or that of another rank."""
        if self._error is None and not self._is_closed:
            stuck_s = self._peers.stuck_s(time.monotonic())
            if stuck_s > self.timeout_s:
                return self._own_error(
                    f"has made no turn for {stuck_s:.3g} s; a call of {self._transport.upper()} does not return, or holds Python's lock"
                )
            return self._peers.error()
        return self._error

    def check(self) -> None:
        """Raise if a relay has failed, has ended, or is silent. Call it while the host waits.

        The error is EPUnavailableError about the relay of this rank, and EPTimeoutError about that of another rank, which it names.
        """
        if (error := self.error) is not None:
            raise error

    @property
    def num_taken(self) -> int:
        """The puts of the ring that this relay has read."""
        return self._ring.num_taken

    @property
    def progress(self) -> str:
        """What this relay has carried, in words."""
        traffic = self._traffic
        return (
            f"its relay has sent {traffic.puts_sent} puts and received {traffic.puts_received}; {traffic.num_outgoing} messages to other "
            f"ranks and {traffic.num_incoming} large puts to this rank are on their way"
        )

    def wake(self) -> None:
        """End the pause of a relay that had nothing to do. A call of the Buffer does this, so that its first put leaves at once."""
        self._woken.set()

    def close(self, limit_s: float | None = None) -> bool:
        """End the relay after its last put has left, and all puts of the other ranks have arrived. Collective; a second call does nothing.

        Args:
            limit_s: How long to wait for the other ranks. Default: `timeout_s`. After a failure the wait is a second at most.

        Returns:
            Whether nothing uses the memory any more. If not, a message was on its way to or from a rank that is lost, and the memory has to
            stay allocated as long as the process.
        """
        if not self._is_closed:
            self._close_at = time.monotonic() + (self.timeout_s if limit_s is None else limit_s)
            self.wake()
            self._thread.join(self._close_at - time.monotonic() + _LAST_WORDS_S + _CLOSE_AFTER_FAILURE_S)
            if self._peers.any_failed:
                self._error = self._error or self._peers.error()
            self._is_closed = True
            atexit.unregister(self._close_at_exit)
            _SwitchInterval.release()
            self._is_finished = self._is_finished and not self._thread.is_alive()
            self._traffic.leave(self._is_finished and self._error is None and self._all_ended())
        return self._is_finished

    def _close_at_exit(self) -> None:
        self.close(_EXIT_S)

    # --- the relay's thread ------------------------------------------------------------------------------------------------------

    def _run_without_cuda(self) -> None:
        with no_cuda_in_this_thread():
            self._run()

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            cause = f"{type(error).__name__}: {error}"
            self._error = self._own_error(f"failed: {cause}")
            self._error.__cause__ = error
            with suppress(Exception):  # the transport itself may be the cause
                self._traffic.send_failure(cause)
        finally:
            self._finish()

    def _serve(self) -> None:
        """Work until the relay is closed."""
        traffic, busy_at, pause = self._traffic, time.monotonic(), _FIRST_PAUSE_S
        while not self._may_end():
            moved = traffic.turn()
            now = time.monotonic()
            if self._peers.heartbeat_is_due(now) and not self._has_sent_end:  # the end is the last message
                traffic.send_heartbeats()
            if moved:
                busy_at, pause = now, _FIRST_PAUSE_S
            elif (idle_s := now - busy_at) > _SPIN_S:
                self._woken.wait(pause)
                self._woken.clear()
                if idle_s > _SHORT_PAUSES_S:
                    pause = min(1.1 * pause, _MAX_PAUSE_S, self.timeout_s / HEARTBEATS_PER_TIMEOUT)

    def _may_end(self) -> bool:
        """Whether the relay was closed, and all ranks have everything that they sent each other."""
        if self._close_at is None:
            return False
        now = time.monotonic()
        if self._peers.any_failed:
            self._close_at = min(self._close_at, now + _CLOSE_AFTER_FAILURE_S)
        if now > self._close_at:
            return True
        if not self._has_sent_end and self._traffic.all_sent:
            self._has_sent_end = True
            self._traffic.send_end()
        return self._has_sent_end and self._all_ended() and self._traffic.all_received and not self._traffic.is_sending

    def _all_ended(self) -> bool:
        return self._peers.ended.issuperset(self._peers.ranks)

    def _finish(self) -> None:
        """Cancel all receives, and note whether the transport has stopped to use the memory."""
        end = time.monotonic() + _LAST_WORDS_S
        with suppress(Exception):
            self._traffic.cancel()
            while not (finished := self._traffic.is_finished()) and time.monotonic() < end:
                time.sleep(1e-3)
            self._is_finished = finished

    def _own_error(self, found: str) -> EPError:
        return EPUnavailableError(
            f"the relay of {self._peers.describe(self.rank)}, which sends over {self._transport.upper()} for "
            f"transport={self._transport!r}, {found}. "
            f"Fix the cause, then make a new Buffer."
        )


def traffic_of(transport: str) -> Callable[..., RelayTraffic]:
    """Return the class that sends over a transport. Only the library of this one is loaded."""
    if transport == "nixl":
        from .nixl_traffic import NixlTraffic

        return NixlTraffic
    from .mpi_traffic import MpiTraffic

    return MpiTraffic


class _SwitchInterval:
    """Python's switch interval while relays live. It is a setting of the process, so the last relay restores it."""

    _lock = threading.Lock()
    _num_relays = 0
    _before = 0.0

    @classmethod
    def hold(cls) -> None:
        with cls._lock:
            if cls._num_relays == 0:
                cls._before = sys.getswitchinterval()
                sys.setswitchinterval(min(cls._before, _SWITCH_INTERVAL_S))
            cls._num_relays += 1

    @classmethod
    def release(cls) -> None:
        with cls._lock:
            cls._num_relays -= 1
            if cls._num_relays == 0 and sys.getswitchinterval() <= _SWITCH_INTERVAL_S:
                sys.setswitchinterval(cls._before)
