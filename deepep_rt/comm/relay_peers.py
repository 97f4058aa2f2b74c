"""What a relay knows of the relays of other ranks: which have sent something lately, which have failed, and which have ended."""

from __future__ import annotations

from ..errors import EPTimeoutError

HEARTBEATS_PER_TIMEOUT = 8
_SILENCE = 0.75  # share of the time limit after which a silent relay counts as lost: errors come before the limit is over
PHASE = "the relay"


class RelayPeers:
    """Watches the other ranks' relays. Time counts only while this rank's relay runs, so a process that was stopped blames no other rank.

    Args:
        rank: This rank.
        num_ranks: All ranks.
        timeout_s: The time limit of the Buffer.
        now: The time.
        node_size: Consecutive ranks of a node, which errors name.
    """

    def __init__(self, rank: int, num_ranks: int, timeout_s: float, now: float, node_size: int) -> None:
        self._rank, self._timeout_s, self._node_size = rank, timeout_s, node_size
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
        limit_s = _SILENCE * self._timeout_s
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
        text = f"timeout_s={self._timeout_s:g}; expected a relay that runs on every rank, but the relay of {self.describe(peer)} {found}."
        return EPTimeoutError(text, rank=self._rank, peer=peer, phase=PHASE, node=self.node_of(peer))
