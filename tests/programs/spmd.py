"""Run the checks of a program on all ranks.

A program is a file of functions `check_*(comm)`, and each runs on every rank. If a check fails on one rank, this rank prints its traceback,
and the other ranks may run into the time-out of their Buffer. All ranks go on together with the next check. `main` exits with 1 at the end.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes  # noqa: F401  (teaches NumPy bfloat16 and float8)
import numpy as np
import oracle
from expect import raises
from limits import seconds
from mpi4py import MPI

from deepep_rt import Buffer
from deepep_rt.comm.store import StoreCommunicator

__all__ = ["raises"]

TIMEOUT_S = seconds(20.0)
backend = "host"  # the GPU tests run the same checks on "cuda"
has_fp8 = True  # the GPU tests say what their GPUs have
more_settings: dict[str, Any] = {}  # of a Buffer; the GPU tests set them
ABORT_AFTER_S = TIMEOUT_S + 5  # after a failure, because the other ranks may hang in a collective of MPI


def main(*modules: str) -> None:
    """Run every `check_*` of the modules, in the order of the file. `--store` runs them over a store instead of MPI.

    `--sizes 8 4` runs them on 8 ranks and then on 4, so that the ranks load large libraries only once. `--ranks-per-node 2` declares nodes
    of 2 ranks for Buffers that declare none.
    """
    if "--ranks-per-node" in sys.argv:
        more_settings["ranks_per_node"] = int(sys.argv[sys.argv.index("--ranks-per-node") + 1])
    world = MPI.COMM_WORLD
    sizes = map(int, sys.argv[sys.argv.index("--sizes") + 1 :]) if "--sizes" in sys.argv else [world.Get_size()]
    passed = []
    for size in sizes:
        group = world.Split(world.Get_rank() < size)
        if world.Get_rank() < size:
            store = _store(group) if "--store" in sys.argv else None
            passed += [run_check(check, group, store) for module in modules for check in _checks(module)]
        idle_barrier(world)  # rank 0 holds the store
    sys.exit(0 if all(passed) else 1)


def _checks(module: str) -> list[Callable[[Any], None]]:
    found = inspect.getmembers(sys.modules.get(module) or importlib.import_module(module), inspect.isfunction)
    return sorted((f for name, f in found if name.startswith("check_")), key=lambda check: check.__code__.co_firstlineno)


def idle_barrier(comm: MPI.Intracomm) -> None:
    """Wait for all ranks without using a core. In MPI's own barrier, a rank that waits keeps a core busy that other ranks need."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)


def run_check(check: Callable[[Any], None], group: MPI.Intracomm, store: Any = None) -> bool:
    """Run a check with a new communicator over MPI or a store. Return whether it passed on all ranks."""
    comm = group.Dup() if store is None else _StoreComm(store, check.__name__, group)
    rank = group.Get_rank()
    abort = threading.Timer(ABORT_AFTER_S, MPI.COMM_WORLD.Abort, (3,))
    abort.daemon = True
    passed = True
    try:
        check(comm)
    except BaseException:
        passed = False
        print(f"--- {check.__name__} failed on rank {rank}\n{traceback.format_exc()}", flush=True)
        abort.start()
    idle_barrier(group)
    passed_on_all = group.allreduce(passed, MPI.LAND)
    abort.cancel()
    if rank == 0:
        print(f"{check.__name__} on {group.Get_size()}: {'passed' if passed_on_all else 'failed'}", flush=True)
    return passed_on_all


def _store(group: MPI.Intracomm) -> Any:
    """Make a store that rank 0 serves."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if group.Get_rank() == 0 else None
    port = group.bcast(store and store.port)
    return store or dist.TCPStore("127.0.0.1", port, is_master=False)


class _StoreComm(StoreCommunicator):
    """A communicator over a store for Buffers. The other collectives of checks go over MPI."""

    def __init__(self, store: Any, name: str, group: MPI.Intracomm) -> None:
        super().__init__(store, name, group.Get_rank(), group.Get_size())
        self._group = group.Dup()

    def __getattr__(self, name: str) -> Any:
        if name not in ("Split", "allreduce"):  # checks use these; a Buffer must not need more than the class has
            raise AttributeError(name)
        return getattr(self._group, name)


def make_buffer(comm: MPI.Intracomm, *, num_experts: int, **settings: Any) -> Buffer:
    """Make a small Buffer on the backend of this module."""
    defaults = dict(num_max_tokens_per_rank=64, hidden=32, num_topk=4, dtype="float32", timeout_s=TIMEOUT_S)
    return Buffer(comm, backend=backend, num_experts=num_experts, **{**defaults, **more_settings, **settings})


def groups_of_every_size(comm: MPI.Intracomm) -> Iterator[MPI.Intracomm]:
    """Yield this rank's group of 8, 4, 2 and 1 ranks. All ranks are in a group of the same size, as NVSHMEM wants."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    for size in (8, 4, 2, 1):
        if ranks % size == 0 and size % more_settings.get("ranks_per_node", 1) == 0:
            group = comm.Split(rank // size, rank)
            yield group
            group.Free()


def inputs_of_all(comm: MPI.Intracomm, seed: int, num_tokens: Callable[[int], int], **settings: Any) -> list[oracle.RankInputs]:
    """Make the inputs of all ranks, `num_tokens(rank)` tokens each."""
    ranks = comm.Get_size()
    return [oracle.make_inputs(seed, rank, num_tokens(rank), num_ranks=ranks, **settings) for rank in range(ranks)]


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
