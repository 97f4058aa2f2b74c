"""Test what `MpiCommunicator` expects of an MPI."""

from types import SimpleNamespace

from deepep_rt.comm.mpi import MpiCommunicator


class LateMpi:
    """An MPI that makes progress only after it has looked, as Open MPI does."""

    def __init__(self, has_message: bool) -> None:
        self._has_message, self._num_looks = has_message, 0

    def iprobe(self, source: int, tag: int) -> bool:
        self._num_looks += 1
        return self._has_message and self._num_looks > 1


def channel_over(raw: LateMpi) -> MpiCommunicator:
    made = MpiCommunicator.__new__(MpiCommunicator)
    duplicate = SimpleNamespace(is_made=True, made=raw, first_tag=lambda number: 0)
    made.__dict__ |= {"_duplicate": duplicate, "_number": 0, "_rank": 0, "_members": [0, 1]}
    return made


def test_a_message_that_has_arrived_is_found_at_once():
    """A rank that reads its notices once, after a time-out of its GPU, finds those that came while it did not call MPI."""
    assert channel_over(LateMpi(True)).iprobe(1, 3)
    assert not channel_over(LateMpi(False)).iprobe(1, 3)
