"""The program in DeepEP V1's style on the host backend: with a communicator, and with a process group of torch.distributed."""

from __future__ import annotations

import os
import socket

import deepep_v1
import torch.distributed as dist
from mpi4py import MPI
from spmd import main

from deepep_rt.torch import communicator


def _world(comm: MPI.Intracomm, with_group: bool = False) -> deepep_v1.World:
    if not with_group:
        return deepep_v1.World(comm, None, "cpu")
    if not dist.is_initialized():
        port = None
        if comm.Get_rank() == 0:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
        os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(comm.bcast(port))
        dist.init_process_group("gloo", rank=comm.Get_size() - 1 - comm.Get_rank(), world_size=comm.Get_size())
    return deepep_v1.World(communicator(), dist.group.WORLD, "cpu")


def check_normal(comm: MPI.Intracomm) -> None:
    deepep_v1.run_normal(_world(comm))


def check_growth(comm: MPI.Intracomm) -> None:
    deepep_v1.run_growth(_world(comm))


def check_ranks_only(comm: MPI.Intracomm) -> None:
    deepep_v1.run_ranks_only(_world(comm))


def check_low_latency(comm: MPI.Intracomm) -> None:
    deepep_v1.run_low_latency(_world(comm))


def check_normal_with_a_group(comm: MPI.Intracomm) -> None:
    deepep_v1.run_normal(_world(comm, True))


def check_low_latency_with_a_group(comm: MPI.Intracomm) -> None:
    deepep_v1.run_low_latency(_world(comm, True))


if __name__ == "__main__":
    main(__name__)
