"""Collective steps that begin with a meeting of all ranks."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import EPInputError, EPOutOfMemoryError
from .communicator import Communicator
from .timed_collectives import format_ranks

COPY_CEILING = "copy_ceiling"
"""The usual measurement."""

_ALL_CALL = "all ranks to call it"


def timed_allgather(comm: Communicator, values: Sequence[int], timeout_s: float, phase: str, hint: str) -> list[list[int]]:
    """Gather numbers of all ranks, after a meeting: see `TimedCollectives.meet` for the arguments and errors.

    Returns:
        The numbers of each rank.
    """
    met = comm.meet(timeout_s, phase, hint)
    gathered = met.allgather(list(values))
    met.release()
    return gathered


def agree_on_measurement(
    comm: Communicator, timeout_s: float, measurement: str = COPY_CEILING, *, has_memory: bool = True, **arguments: int
) -> Communicator:
    """Compare the arguments of a measurement on all ranks. `measurement` is its name for messages.

    Returns:
        A communicator for the steps of this measurement. `release` it at the end.

    Raises:
        EPInputError: on every rank, if the arguments differ.
        EPOutOfMemoryError: on every rank, if one rank has no memory for it.
        EPTimeoutError: if a rank does not arrive.
    """
    met = comm.meet(timeout_s, measurement, _ALL_CALL)
    gathered = met.allgather([has_memory, *arguments.values()])
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
    return met


def begin_measurement(comm: Communicator, timeout_s: float, measurement: str = COPY_CEILING) -> None:
    """Wait until all ranks have arrived, and leave at almost the same time."""
    met = comm.meet(timeout_s, measurement, _ALL_CALL)
    met.Barrier()
    met.release()
