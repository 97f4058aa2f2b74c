"""Warn of rows that did not fit into a result, and refuse a dispatch that would bring too many."""

from __future__ import annotations

import logging

from ..errors import EPOutOfMemoryError

_log = logging.getLogger("deepep_rt")


def too_many_rows(rank: int, num_recv: int, room: int, *, grows: bool = False) -> EPOutOfMemoryError:
    """Make the error of all ranks about a dispatch over several nodes that would bring more rows to `rank` than it has memory for.

    `room` is `num_max_recv_tokens`. If the rows are no more, earlier results take the memory for them. If memory `grows`, the GPU has none
    left.
    """
    if grows:
        error = EPOutOfMemoryError(
            f"the GPU of rank {rank} has no memory for the {num_recv} rows that this dispatch brings to it; expected memory for them. Drop "
            f"earlier results, free other memory, or pass num_worst_tokens to dispatch, which drops further rows. No row was sent"
        )
        error.num_recv_tokens = num_recv
        return error
    if num_recv <= room:
        return EPOutOfMemoryError(
            f"rank {rank} has no room in its pool for the result of this dispatch ({num_recv} rows); expected room on all ranks. Drop "
            f"earlier results, make the Buffer with a larger num_slots, or with on_exhausted='copy'. No row was sent"
        )
    error = EPOutOfMemoryError(
        f"num_max_recv_tokens={room}; expected at least {num_recv}, the rows that this dispatch brings to rank {rank}. Make the Buffer "
        f"with a larger num_max_recv_tokens, or pass num_worst_tokens to dispatch, which drops further rows. No row was sent"
    )
    error.num_recv_tokens = num_recv
    return error


class OverflowLog:
    """Log the first overflow of a Buffer as a warning. Later ones show only in the counts of each call."""

    def __init__(self, rank: int) -> None:
        self._rank, self._has_warned = rank, False

    def warn_of_rows(self, num_recv: int, room: int) -> None:
        """Warn that a dispatch received more rows than `num_worst_tokens`."""
        self._warn(
            f"dispatch received {num_recv} rows; num_worst_tokens={room}. The last {num_recv - room} were dropped. Raise num_worst_tokens"
        )

    def warn_of_expert(self, expert: int, num_recv: int) -> None:
        """Warn that a low-latency dispatch received more rows for a local expert than fit."""
        self._warn(
            f"low_latency_dispatch received {num_recv} rows for local expert {expert}, which has room for num_ranks * num_max_tokens. The "
            f"last ones were dropped, because tokens named the expert repeatedly"
        )

    def _warn(self, text: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("rank %d: %s. This Buffer warns once", self._rank, text)
