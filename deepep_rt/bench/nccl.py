"""Run NCCL's all-to-all through torch.distributed, as a plain copy to compare dispatch with (`bench/throughput.py --nccl`)."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..comm.convert import communicator_of
from ..errors import EPUnavailableError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

WORK = "nccl_all_to_all"
_NUM_SETS = 2  # calls alternate between inputs, as those of the Buffer do


@contextlib.contextmanager
def started(comm: Intracomm, on_gpu: bool) -> Iterator[None]:
    """Start NCCL over all ranks for the block. The current GPU is that of CuPy. Collective.

    Raise EPUnavailableError on all ranks, with the reason, if one of them cannot use NCCL.
    """
    ranks_on_host = communicator_of(comm).ranks_on_host()
    reasons = comm.allgather(_why_not(len(ranks_on_host), on_gpu))
    for rank, reason in enumerate(reasons):
        if reason:
            raise EPUnavailableError(f"--nccl: rank {rank}: {reason}")
    import cupy
    import torch.distributed

    torch.cuda.set_device(cupy.cuda.Device().id)
    host = "127.0.0.1" if len(ranks_on_host) == comm.size else socket.gethostname()
    host, port = comm.bcast((host, _free_port()) if comm.rank == 0 else None)
    torch.distributed.init_process_group("nccl", init_method=f"tcp://{host}:{port}", rank=comm.rank, world_size=comm.size)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def _why_not(num_ranks_on_host: int, on_gpu: bool) -> str:
    """Return why this rank cannot use NCCL, and what to do. Empty if it can."""
    if not on_gpu:
        return "the host backend has no NCCL; expected --backend=cuda. Leave --nccl out"
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported ({error}); expected PyTorch with CUDA. Install it, or leave --nccl out"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU; expected PyTorch with CUDA. Install it, or leave --nccl out"
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return f"torch {torch.__version__} has no NCCL; expected a build with NCCL. Install one, or leave --nccl out"
    if torch.cuda.device_count() < num_ranks_on_host:
        return f"{num_ranks_on_host} ranks share {torch.cuda.device_count()} GPUs; expected a GPU for each rank. Leave --nccl out"
    return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def rows_for_each_peer(num_rows: float, num_ranks: int) -> int:
    """Return how many rows each rank sends to each rank, so that it receives about `num_rows`. The all-to-all has equal shares."""
    return max(1, round(num_rows / num_ranks))


def all_to_all(num_ranks: int, num_bytes: int) -> Callable[[int], Any]:
    """Return a call that sends `num_bytes` to each rank, own rank included. It gets its number, which selects the inputs."""
    import torch

    sets: list[Any] = [
        [torch.zeros(num_ranks * num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2)] for _ in range(_NUM_SETS)
    ]
    return lambda i: torch.distributed.all_to_all_single(*sets[i % _NUM_SETS])
