"""Steps that succeed on all ranks or on none, and ranks that arrive late at them."""

from __future__ import annotations

import time
import unittest.mock
import warnings
from types import SimpleNamespace

import spmd
from limits import seconds
from mpi4py import MPI
from spmd import TIMEOUT_S, main, raises

from deepep_rt import EPTimeoutError, EPUnavailableError
from deepep_rt.comm.consensus import Consensus, timed_allgather
from deepep_rt.comm.convert import communicator_of
from deepep_rt.cuda import nvshmem as symmetric
from deepep_rt.cuda.transport import MemoryRequest


def check_step_that_fails_on_one_rank(comm: MPI.Intracomm) -> None:
    """The other ranks raise at once, although the failed rank makes no more MPI calls."""
    if comm.Get_size() == 1:
        return
    consensus, start = Consensus(communicator_of(comm)), time.monotonic()
    with consensus.step():
        pass
    if comm.Get_rank() == 0:
        with raises(KeyError), consensus.step():
            raise KeyError
        time.sleep(seconds(2))
    else:
        with raises(EPUnavailableError, "another rank failed to make its part"), consensus.step():
            pass
        assert time.monotonic() - start < seconds(1.5)


def check_ranks_on_host(comm: MPI.Intracomm) -> None:
    """The identities of hosts count."""
    rank, size = comm.Get_rank(), comm.Get_size()
    ranks, identity = communicator_of(comm), "deepep_rt.comm.timed_collectives.host_identity"
    with unittest.mock.patch(identity, return_value=f"host {rank // 2}"):
        assert ranks.ranks_on_host() == [other for other in range(size) if other // 2 == rank // 2]
    assert ranks.ranks_on_host() == list(range(size))


def check_groups_of_ranks(comm: MPI.Intracomm) -> None:
    """Each group has messages of its own."""
    rank, size, ranks = comm.Get_rank(), comm.Get_size(), communicator_of(comm)
    mine = [other for other in range(size) if other // 2 == rank // 2]
    for _ in range(2):
        group = ranks.sub_comm(mine)
        assert (group.Get_rank(), group.Get_size()) == (rank % 2, len(mine))
        assert group.allgather(rank) == mine
        group.Free()
    assert ranks.allgather(rank) == list(range(size))


def check_late_rank_of_a_timed_allgather(comm: MPI.Intracomm) -> None:
    """It finds the values of the ranks that timed out, and times out too. The next step of all ranks succeeds."""
    rank, size, ranks = comm.Get_rank(), comm.Get_size(), communicator_of(comm).Dup()
    if size == 1:
        return
    time.sleep(seconds(0.8) if rank == size - 1 else 0)
    with raises(EPTimeoutError, "a step"):
        timed_allgather(ranks, (rank,), seconds(0.4), "a step", "all ranks to make it")
    comm.Barrier()
    assert timed_allgather(ranks, (rank, 7), TIMEOUT_S, "a step", "all ranks to make it") == [[other, 7] for other in range(size)]


def check_consensus(comm: MPI.Intracomm) -> None:
    """All ranks succeed or none does, also if one declines early or arrives late. No rank waits for one that has declined."""
    last, rank = comm.Get_size() - 1, comm.Get_rank()
    assert Consensus(communicator_of(comm)).all_ok(True, "be here", TIMEOUT_S)
    start, consensus = time.monotonic(), Consensus(communicator_of(comm))
    assert not consensus.all_ok(rank != last, "be here", TIMEOUT_S)
    assert not consensus.silent_ranks, "the last rank has declined"
    assert time.monotonic() - start < TIMEOUT_S / 2
    if last == 0:
        return
    consensus = Consensus(communicator_of(comm))
    assert consensus.all_ok(True, "be here", TIMEOUT_S)
    if rank == last:
        time.sleep(seconds(1.5))
    assert not consensus.all_ok(True, "be here", seconds(0.5))
    assert consensus.silent_ranks == ([last] if rank != last else list(range(last)))
    error = consensus.timeout_error()
    assert (error.peer, error.rank) == (consensus.silent_ranks[0], rank)
    assert f"for rank{'s' * (len(consensus.silent_ranks) > 1)} {consensus.silent_ranks[0]}" in str(error)


def check_memory_of_several_groups(comm: MPI.Intracomm) -> None:
    """NVSHMEM frees memory on all ranks of its runtime together. If one rank does not free, no group frees."""
    rank, size, freed = comm.Get_rank(), comm.Get_size(), []
    if size == 1 or spmd.backend != "host":
        return  # on GPUs: check_subcommunicators
    nvshmem = SimpleNamespace(malloc=lambda num_bytes: 1 << 40, ptr=lambda ptr, pe: ptr, free=freed.append)
    runtime = symmetric.Runtime(communicator_of(comm), rank, size)
    with unittest.mock.patch.multiple(symmetric, load=lambda: nvshmem, _runtime=runtime):
        for odd in (None, 0, size - 1):
            memory = symmetric.allocate(communicator_of(MPI.COMM_SELF), MemoryRequest(64, 5.0))
            assert memory.consensus is not None
            if memory.all_free(rank != odd, 5.0):
                memory.free()
            assert len(freed) == (odd is None)
            freed.clear()
            comm.Barrier()


def check_consensus_reminds(comm: MPI.Intracomm) -> None:
    """A rank that waits long warns, with the names of the ranks that have not arrived."""
    late = comm.Get_size() - 1
    if late == 0:
        return
    consensus = Consensus(communicator_of(comm))
    with (
        warnings.catch_warnings(record=True) as caught,
        unittest.mock.patch("deepep_rt.comm.consensus._REMINDER_S", seconds(0.4)),
    ):
        warnings.simplefilter("always")
        if comm.Get_rank() == late:
            time.sleep(seconds(1.2))
        assert consensus.all_ok(True, "be here", TIMEOUT_S)
    texts = [str(warning.message) for warning in caught]
    if comm.Get_rank() == late:
        assert not texts
    else:
        assert len(texts) >= 2, texts
        assert any(f"of {TIMEOUT_S:g} s for rank {late} to be here" in text for text in texts), texts


if __name__ == "__main__":
    main(__name__)
