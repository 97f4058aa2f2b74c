"""torch.distributed for tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist
from ports import free_port

if TYPE_CHECKING:
    from mpi4py import MPI


@contextmanager
def in_reverse(comm: MPI.Intracomm, backend: str = "gloo") -> Iterator[None]:
    """Start torch.distributed over the ranks of `comm` in reverse, so that a test fails if code confuses the two orders."""
    port = free_port() if comm.Get_rank() == 0 else None
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(comm.bcast(port))
    dist.init_process_group(backend, rank=comm.Get_size() - 1 - comm.Get_rank(), world_size=comm.Get_size())
    try:
        yield
    finally:
        dist.destroy_process_group()
