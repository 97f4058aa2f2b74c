"""The MPI communicator of process groups of torch.distributed."""

from __future__ import annotations

import torch.distributed as dist
from mpi4py import MPI
from process_group import start_in_reverse
from spmd import main, make_buffer, raises

from deepep_rt import EPConfigError
from deepep_rt.torch import communicator

backend = "gloo"  # the GPU tests choose NCCL where each rank has a GPU


def _initialize(comm: MPI.Intracomm) -> None:
    start_in_reverse(comm, backend)


def check_without_torch_distributed(comm: MPI.Intracomm) -> None:
    assert not dist.is_initialized()
    assert communicator() == MPI.COMM_WORLD


def check_default_group(comm: MPI.Intracomm) -> None:
    _initialize(comm)
    try:
        mine = communicator()
        assert mine.allgather(MPI.COMM_WORLD.Get_rank()) == list(reversed(range(comm.Get_size())))
        assert mine.Get_rank() == dist.get_rank()
        assert communicator() is communicator(dist.group.WORLD) is mine
        with make_buffer(mine, num_experts=4 * mine.Get_size()) as buffer:
            assert buffer.config.num_ranks == comm.Get_size()
        mine.Free()
        assert communicator().Get_size() == comm.Get_size()
    finally:
        dist.destroy_process_group()
    assert communicator() == MPI.COMM_WORLD


def check_groups_after_groups(comm: MPI.Intracomm) -> None:
    """A group that was made after another one was destroyed gets a communicator of its own."""
    _initialize(comm)
    before = communicator()
    dist.destroy_process_group()
    _initialize(comm)
    try:
        assert communicator() is not before
    finally:
        dist.destroy_process_group()


def check_subgroups(comm: MPI.Intracomm) -> None:
    """Even and odd ranks."""
    _initialize(comm)
    try:
        size, rank = dist.get_world_size(), dist.get_rank()
        for members in ([r for r in range(size) if r % 2 == 0], [r for r in range(size) if r % 2]):
            group = dist.new_group(members) if members else None
            if rank not in members:
                if members:
                    with raises(EPConfigError, "not in the group"):
                        communicator(group)
                continue
            sub = communicator(group)
            assert sub.allgather(rank) == members
            assert communicator(group) is sub
            assert sub.allreduce(rank) == sum(members)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(__name__)
