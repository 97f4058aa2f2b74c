"""Warns of rows that did not fit a result: in the log, once for each Buffer. Counts on the device tell of each call."""

from __future__ import annotations

import logging

_log = logging.getLogger("deepep_rt")


class OverflowLog:
    """What one Buffer has to say of rows that were dropped.

    Args:
        rank: This rank, which the warning names.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self._has_warned = rank, False

    def rows(self, arrived: int, room: int) -> None:
        """Warn that a dispatch brought more rows than `num_worst_tokens`."""
        self._warn(
            f"dispatch received {arrived} rows; num_worst_tokens={room}. The last {arrived - room} were dropped. Raise num_worst_tokens"
        )

    def expert(self, expert: int, arrived: int, room: int) -> None:
        """Warn that a low-latency dispatch brought a local expert more rows than fit."""
        self._warn(
            f"low_latency_dispatch received {arrived} rows for local expert {expert}; room for {room} (num_ranks * "
            f"num_max_tokens_per_rank). The last {arrived - room} were dropped: tokens named the expert repeatedly"
        )

    def _warn(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("rank %d: %s. This Buffer warns once", self._rank, what)
