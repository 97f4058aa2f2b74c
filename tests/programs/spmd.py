"""Runs the checks of a program on all ranks, and gathers who failed and why instead of leaving ranks behind.

A program is a file of functions `check_*(comm)`; each runs on every rank. A rank that fails prints its traceback. The
others run into a time-out of their Buffer at worst, and all meet again after the check; `main` exits with 1 in the end.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import ml_dtypes  # noqa: F401  (teaches NumPy bfloat16 and float8)
import numpy as np
import oracle
from expect import raises
from mpi4py import MPI

from deepep_rt import Buffer
from deepep_rt.comm.store import StoreCommunicator

__all__ = ["raises"]

TIMEOUT_S = 20.0
backend = "host"  # the GPU tests run the same checks on "cuda",
more: dict[str, Any] = {}  # and with other settings of a Buffer
MEETING_S = TIMEOUT_S + 5  # how long a rank that failed waits for the others, which may hang in a collective of MPI itself


def main(*modules: str) -> None:
    """Run every `check_*` of the modules, in the order of the file; with --store, over a store instead of MPI.

    With --sizes, on as many ranks as each of the numbers says that follow: ranks that load large libraries do so once.
    """
    world = MPI.COMM_WORLD
    sizes = map(int, sys.argv[sys.argv.index("--sizes") + 1 :]) if "--sizes" in sys.argv else [world.Get_size()]
    passed = []
    for size in sizes:
        meeting = world.Split(world.Get_rank() < size)
        if world.Get_rank() < size:
            store = _store(meeting) if "--store" in sys.argv else None
            passed += [run_check(check, meeting, store) for module in modules for check in _checks(module)]
        meet(world)  # rank 0 holds the store
    sys.exit(0 if all(passed) else 1)


def _checks(module: str) -> list[Callable[[Any], None]]:
    found = inspect.getmembers(sys.modules.get(module) or importlib.import_module(module), inspect.isfunction)
    return sorted((f for name, f in found if name.startswith("check_")), key=lambda check: check.__code__.co_firstlineno)


def meet(comm: MPI.Intracomm) -> None:
    """A barrier for ranks that may come seconds apart: MPI's own keeps a core busy that the others need."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(1e-3)


def run_check(check: Callable[[Any], None], meeting: MPI.Intracomm, store: Any = None) -> bool:
    """Run a check on all ranks, with a communicator of its own over MPI or a store; whether it passed on all of them."""
    comm = meeting.Dup() if store is None else _OverStore(store, check.__name__, meeting)
    rank = meeting.Get_rank()
    last_resort = threading.Timer(MEETING_S, MPI.COMM_WORLD.Abort, (3,))
    last_resort.daemon = True
    passed = True
    try:
        check(comm)
    except BaseException:
        passed = False
        print(f"--- {check.__name__} failed on rank {rank}\n{traceback.format_exc()}", flush=True)
        last_resort.start()
    meet(meeting)
    everywhere = meeting.allreduce(passed, MPI.LAND)
    last_resort.cancel()
    if rank == 0:
        print(f"{check.__name__} on {meeting.Get_size()}: {'passed' if everywhere else 'failed'}", flush=True)
    return everywhere


def _store(meeting: MPI.Intracomm) -> Any:
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if meeting.Get_rank() == 0 else None
    port = meeting.bcast(store and store.port)
    return store or dist.TCPStore("127.0.0.1", port, is_master=False)


class _OverStore(StoreCommunicator):
    """Buffers speak over the store; what else a check does goes over MPI."""

    def __init__(self, store: Any, name: str, meeting: MPI.Intracomm) -> None:
        super().__init__(store, name, meeting.Get_rank(), meeting.Get_size())
        self._meeting = meeting.Dup()

    def __getattr__(self, name: str) -> Any:
        if name not in ("Split", "allreduce"):  # of the checks; what a Buffer lacks shall be missed
            raise AttributeError(name)
        return getattr(self._meeting, name)


def make_buffer(comm: MPI.Intracomm, *, num_experts: int, **settings: Any) -> Buffer:
    """A small Buffer, on the host backend or on the one that the GPU tests choose."""
    defaults = dict(num_max_tokens_per_rank=64, hidden=32, num_topk=4, dtype="float32", timeout_s=TIMEOUT_S)
    return Buffer(comm, backend=backend, num_experts=num_experts, **{**defaults, **more, **settings})


def inputs_of_all(comm: MPI.Intracomm, seed: int, num_tokens: Callable[[int], int], **settings: Any) -> list[oracle.RankInputs]:
    """The inputs of all ranks; `num_tokens(rank)` tokens each."""
    ranks = comm.Get_size()
    return [oracle.make_inputs(seed, rank, num_tokens(rank), num_ranks=ranks, **settings) for rank in range(ranks)]


def outputs_of_all(
    inputs: list[oracle.RankInputs],
    num_experts: int,
    seed: int,
    hidden: int,
    dtype: str,
    *,
    worst: list[int | None] | None = None,
    integers: bool = False,
) -> list[np.ndarray]:
    """For each rank, what its experts are taken to have computed: random rows, as many as it received."""
    made = []
    for rank in range(len(inputs)):
        received = oracle.expected_dispatch(rank, inputs, num_experts, num_worst_tokens=worst[rank] if worst else None)
        rng = np.random.default_rng([seed, rank, 7])
        shape = (len(received.x), hidden)
        values = rng.integers(-8, 9, shape).astype(np.float32) if integers else rng.standard_normal(shape, np.float32)
        made.append(values.astype(dtype))
    return made


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
