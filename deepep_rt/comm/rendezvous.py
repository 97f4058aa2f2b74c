"""Collective steps in which each rank first makes sure that all ranks have arrived."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import EPInputError, EPOutOfMemoryError
from .communicator import Communicator
from .timed_collectives import format_ranks

_ARRIVING, _ARRIVED = 1, 2
_NUM_WORDS = 8  # always the same, because an allgather that some ranks gave up may meet the next one of other ranks
COPY_CEILING = "copy_ceiling"
"""The usual measurement."""

_ALL_CALL = "all ranks to call it"


def timed_allgather(comm: Communicator, values: Sequence[int], timeout_s: float, phase: str, hint: str) -> list[list[int]]:
    """Gather numbers of all ranks within `timeout_s`.

    A late rank finds the values of ranks that have given up, and must not continue alone. So the ranks repeat the allgather until all of
    them confirm at once that they have seen all values.

    Args:
        comm: The ranks.
        values: This rank's numbers, at most 7. All ranks pass as many.
        timeout_s: The limit of each repetition.
        phase: What the allgather is a part of, for the message.
        hint: What all ranks have to do, for the message.

    Returns:
        The numbers of each rank.

    Raises:
        EPTimeoutError: if a rank does not arrive; it names those ranks.
    """
    state, gathered = _ARRIVING, np.zeros((comm.Get_size(), _NUM_WORDS), np.int64)
    while True:
        mine = np.zeros(_NUM_WORDS, np.int64)
        mine[: 1 + len(values)] = state, *values
        comm.finish(comm.Iallgather(mine, gathered), (mine, gathered), phase, hint, timeout_s)
        if (gathered[:, 0] == _ARRIVED).all():
            return gathered[:, 1 : 1 + len(values)].tolist()
        state = _ARRIVED


def private_comm(comm: Communicator, timeout_s: float, phase: str, hint: str) -> Communicator:
    """Return the library's own communicator over the same ranks.

    A rank that gives up waiting leaves an unfinished collective. On the caller's communicator, the next collective of the caller would
    match it.
    """
    own, request = comm.begin_private_comm()
    comm.finish(request, own, phase, hint, timeout_s)
    own.timeout_s, own.heard = timeout_s, comm.heard
    return own


def agree_on_measurement(
    comm: Communicator, timeout_s: float, measurement: str = COPY_CEILING, *, has_memory: bool = True, **arguments: int
) -> None:
    """Compare the arguments of a measurement on all ranks. `measurement` is its name for messages.

    Raises:
        EPInputError: on every rank, if the arguments differ.
        EPOutOfMemoryError: on every rank, if one rank has no memory for it.
        EPTimeoutError: if a rank does not arrive.
    """
    gathered = timed_allgather(comm, (has_memory, *arguments.values()), timeout_s, measurement, _ALL_CALL)
    if any(values[1:] != gathered[0][1:] for values in gathered):
        listed = "; ".join(
            f"rank {rank}: " + ", ".join(f"{name}={value}" for name, value in zip(arguments, values[1:], strict=True))
            for rank, values in enumerate(gathered)
        )
        raise EPInputError(f"{listed}; expected the same on all ranks. Pass the same arguments to {measurement} everywhere.")
    if without := [rank for rank, values in enumerate(gathered) if not values[0]]:
        raise EPOutOfMemoryError(
            f"{measurement} has no memory for the rows on {format_ranks(without)}; expected room on all ranks. Pass a smaller num_rows."
        )


def begin_measurement(comm: Communicator, timeout_s: float, measurement: str = COPY_CEILING) -> None:
    """Wait until all ranks have arrived, and leave at almost the same time."""
    timed_allgather(comm, (), timeout_s, measurement, _ALL_CALL)
    comm.Barrier()
