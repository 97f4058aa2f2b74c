"""What a relay reads and writes, and what it knows of the relays of other ranks.

The ring of descriptors and the memory that mirrors a part of symmetric memory are host memory, pinned where a GPU reads and writes it.
Kernels write both, and NumPy or MPI may do so too. `RelayPeers` notes which relays have sent something lately, have failed, or have ended.
"""

from __future__ import annotations

import ctypes
import threading
from typing import NamedTuple

import numpy as np

from ..errors import EPTimeoutError

_SEQUENCE_MASK = (1 << 32) - 1
_fence_lock = threading.Lock()

HEARTBEATS_PER_TIMEOUT = 8
_SILENCE = 0.75  # share of the time limit after which a silent relay counts as lost: errors come before the limit is over
PHASE = "the relay"


class Put(NamedTuple):
    """Bytes for another rank, and the word that follows them. `from_`, `to` and `word` are offsets from the base of symmetric memory."""

    rank: int
    """The destination at the sender, the source at the receiver."""
    to: int
    from_: int
    num_bytes: int
    word: int
    value: int
    awaited: int | None = None
    """The number of the put in its ring, if a kernel waits until its bytes may change."""


def fence() -> None:
    """Order memory accesses around this call, also on CPUs that reorder them more than x86. Taking a lock does that in every Python."""
    with _fence_lock:
        pass


class PutRing:
    """Reads the descriptors of a ring in order. `depth` is a power of two. Only tests of large numbers pass `first_put`.

    A descriptor has the members `from`, `to`, `num_bytes`, `word`, `value`, `rank`, `is_awaited`, `sent` and `sequence`.
    """

    def __init__(self, address: int, depth: int, descriptor: np.dtype, first_put: int = 0) -> None:
        if depth < 1 or depth & (depth - 1):
            raise ValueError(f"depth={depth}; expected a power of two, because numbers of puts wrap around at 2**32. Choose one.")
        memory = host_memory(address, depth * descriptor.itemsize)
        self._u64, self._u32, self._i32 = memory.cast("Q"), memory.cast("I"), memory.cast("i")
        self._depth, self._num_bytes = depth, descriptor.itemsize
        fields = descriptor.fields
        assert fields is not None
        at = {name: int(field[1]) for name, field in fields.items()}
        self._from, self._to, self._count = at["from"] // 8, at["to"] // 8, at["num_bytes"] // 8
        self._word, self._value = at["word"] // 8, at["value"] // 8
        self._rank, self._sequence = at["rank"] // 4, at["sequence"] // 4
        self._is_awaited, self._sent = at["is_awaited"] // 4, at["sent"] // 4
        self.num_taken = first_put
        """The puts that were read since the start of the ring."""

    def is_next_complete(self) -> bool:
        """Whether the ring holds a put that was not read."""
        at = (self.num_taken % self._depth) * self._num_bytes // 4 + self._sequence
        return self._u32[at] == (self.num_taken + 1) & _SEQUENCE_MASK

    def take(self, limit: int) -> list[Put]:
        """Return the next complete puts, at most `limit`. Raise RuntimeError if a kernel has overwritten an entry that was not read."""
        taken: list[Put] = []
        while len(taken) < limit:
            start = (self.num_taken % self._depth) * self._num_bytes
            expected = (self.num_taken + 1) & _SEQUENCE_MASK
            seen = self._u32[start // 4 + self._sequence]
            if seen != expected:
                self._check_sequence(seen, expected)
                break
            if not taken:
                fence()  # the kernel wrote the sequence last, so read it first
            taken.append(self._read(start))
            self.num_taken += 1
        return taken

    def _read(self, start: int) -> Put:
        q, u64 = start // 8, self._u64
        rank = self._i32[start // 4 + self._rank]
        awaited = self.num_taken if self._u32[start // 4 + self._is_awaited] else None
        to, from_, num_bytes = u64[q + self._to], u64[q + self._from], u64[q + self._count]
        return Put(rank, to, from_, num_bytes, u64[q + self._word], u64[q + self._value], awaited)

    def mark_sent(self, put: Put) -> None:
        """Tell the kernel that waits for a put, if one does, that the bytes may change."""
        if put.awaited is not None:
            fence()
            start = (put.awaited % self._depth) * self._num_bytes
            self._u32[start // 4 + self._sent] = (put.awaited + 1) & _SEQUENCE_MASK

    def _check_sequence(self, seen: int, expected: int) -> None:
        before = (expected - self._depth) & _SEQUENCE_MASK
        if seen not in (0, before):
            raise RuntimeError(
                f"the ring entry of put {self.num_taken} has the sequence {seen}; expected {expected}, or {before} of the "
                f"put before it. A kernel overwrote an entry that was not sent yet, so a ring of {self._depth} entries is too small"
            )


class Mirror:
    """Host memory that mirrors the part of symmetric memory at the offset `first` from its base. All numbers are multiples of 8."""

    def __init__(self, address: int, num_bytes: int, first: int) -> None:
        if address % 8 or num_bytes % 8 or first % 8:
            raise ValueError(f"address={address:#x}, num_bytes={num_bytes}, first={first}; expected multiples of 8. Align them.")
        self._bytes = host_memory(address, num_bytes)
        self._words = self._bytes.cast("Q")
        self.address, self.num_bytes, self.first = address, num_bytes, first

    def part(self, offset: int, num_bytes: int) -> memoryview:
        """Return the bytes at an offset from the base of symmetric memory. Raise ValueError if they are not all in this memory."""
        start = offset - self.first
        if not 0 <= start <= start + num_bytes <= self.num_bytes:
            self._raise_outside(offset, num_bytes)
        return self._bytes[start : start + num_bytes]

    def store(self, word: int, value: int) -> None:
        """Write a word of 8 bytes at an offset from the base of symmetric memory, after all bytes that were written before.

        A memoryview of 8-byte items writes an item with one store on 64-bit CPUs, so a kernel never reads half of a word.
        """
        start = word - self.first
        if start % 8 or not 0 <= start <= self.num_bytes - 8:
            self._raise_outside(word, 8)
        fence()
        self._words[start // 8] = value

    def _raise_outside(self, offset: int, num_bytes: int) -> None:
        raise ValueError(
            f"a put names {num_bytes} bytes at offset {offset}; expected a place from {self.first} to {self.first + self.num_bytes}, "
            f"and words at multiples of 8"
        )


def host_memory(address: int, num_bytes: int) -> memoryview:
    """Return memory of this process as a memoryview of bytes. The caller keeps the memory allocated."""
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


class RelayPeers:
    """Watches the other ranks' relays.

    Time counts only while this rank's relay runs, so a process that was stopped blames no other rank.
    """

    def __init__(self, rank: int, num_ranks: int, timeout_s: float, now: float, node_size: int) -> None:
        self._rank, self.timeout_s, self._node_size = rank, timeout_s, node_size
        self.ranks = [peer for peer in range(num_ranks) if peer != rank]
        self._period_s = timeout_s / HEARTBEATS_PER_TIMEOUT
        self._turn_at, self._elapsed_s, self._heartbeat_at = now, 0.0, 0.0
        self._heard_at = [0.0] * num_ranks
        self._failures: dict[int, str] = {}
        self.ended: set[int] = set()
        """The ranks whose relays have said that they end."""

    def heartbeat_is_due(self, now: float) -> bool:
        """Note a turn of this rank's relay, and return whether to send heartbeats now."""
        self._elapsed_s += min(now - self._turn_at, self._period_s)
        self._turn_at = now
        if self._elapsed_s < self._heartbeat_at:
            return False
        self._heartbeat_at = self._elapsed_s + self._period_s
        return True

    def heard(self, rank: int) -> None:
        """Note a message of a rank's relay."""
        self._heard_at[rank] = self._elapsed_s

    def failed(self, rank: int, cause: str) -> None:
        """Note that a rank's relay has failed."""
        self._failures.setdefault(rank, cause)

    def node_of(self, rank: int) -> int:
        """Return the node of a rank."""
        return rank // self._node_size

    def describe(self, rank: int) -> str:
        """Return the number of a rank and of its node for messages, such as "rank 3 on node 1"."""
        return f"rank {rank} on node {self.node_of(rank)}"

    @property
    def any_failed(self) -> bool:
        return bool(self._failures)

    def stuck_s(self, now: float) -> float:
        """Return for how long this rank's relay has made no turn."""
        return now - self._turn_at

    def error(self) -> EPTimeoutError | None:
        """Return the error about a relay that failed, ended, or is silent."""
        for rank, cause in self._failures.items():
            return self._error(rank, f"failed: {cause}. Fix the cause on rank {rank}")
        limit_s = _SILENCE * self.timeout_s
        silence_s, rank = max(((self._elapsed_s - self._heard_at[peer], peer) for peer in self.ranks), default=(0.0, -1))
        if silence_s <= limit_s:
            return None
        if rank in self.ended:
            return self._error(
                rank, f"ended {silence_s:.3g} s ago. Check why rank {rank} destroyed its Buffer, or left the program"
            )
        return self._error(
            rank,
            f"has sent nothing for {silence_s:.3g} s; expected a heartbeat every {self._period_s:.3g} s. Check whether rank {rank} runs, "
            f"whether a call there holds Python's lock, and whether its host can be reached. If it is only slow, raise timeout_s",
        )

    def _error(self, peer: int, found: str) -> EPTimeoutError:
        text = f"timeout_s={self.timeout_s:g}; expected a relay that runs on every rank, but the relay of {self.describe(peer)} {found}."
        return EPTimeoutError(text, rank=self._rank, peer=peer, phase=PHASE, node=self.node_of(peer))
