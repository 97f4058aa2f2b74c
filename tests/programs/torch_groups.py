"""Make MPI communicators of process groups of torch.distributed."""

from __future__ import annotations

import runpy
import sys
from unittest import mock

import torch.distributed as dist
from mpi4py import MPI
from paths import ROOT
from process_group import in_reverse
from spmd import main, make_buffer, raises

from deepep_rt import EPConfigError
from deepep_rt.torch import communicator

backend = "gloo"  # the GPU tests choose NCCL if each rank has a GPU


def check_without_torch_distributed(comm: MPI.Intracomm) -> None:
    assert not dist.is_initialized()
    assert communicator() == MPI.COMM_WORLD


def check_default_group(comm: MPI.Intracomm) -> None:
    with in_reverse(comm, backend):
        mine = communicator()
        assert mine.allgather(MPI.COMM_WORLD.Get_rank()) == list(reversed(range(comm.Get_size())))
        assert mine.Get_rank() == dist.get_rank()
        assert communicator() is communicator(dist.group.WORLD) is mine
        with make_buffer(mine, num_experts=4 * mine.Get_size()) as buffer:
            assert buffer.config.num_ranks == comm.Get_size()
        mine.Free()
        assert communicator().Get_size() == comm.Get_size()
    assert communicator() == MPI.COMM_WORLD


def check_groups_after_groups(comm: MPI.Intracomm) -> None:
    """A new group gets a new communicator, after another group was destroyed."""
    with in_reverse(comm, backend):
        before = communicator()
    with in_reverse(comm, backend):
        assert communicator() is not before


def check_subgroups(comm: MPI.Intracomm) -> None:
    """Make communicators of the groups of even and of odd ranks."""
    with in_reverse(comm, backend):
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


def check_the_example_takes_ranks_from_the_group(comm: MPI.Intracomm) -> None:
    """The example itself compares its losses with those of one rank."""
    examples = ROOT / "examples"
    arguments = {"path": [str(examples), *sys.path], "argv": ["moe_torch.py", "--steps", "30"]}
    with in_reverse(comm, backend), mock.patch.multiple(sys, **arguments):
        runpy.run_path(str(examples / "moe_torch.py"), run_name="__main__")


if __name__ == "__main__":
    main(__name__)
