"""Make the first Buffer of this process and further ones, and write what they took. `bench/start.py` starts this file by its path.

It is no module of the package, which Python would import before it. So it measures that import too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic_ns
from typing import Any

_EXCHANGE, _MEMORY, _CUDA = "Buffer: exchanges between ranks", "Buffer: memory", "Buffer: start of CUDA"


class Clock:
    """Adds up the milliseconds of stages.

    Attributes:
        spent: The milliseconds of each stage, in the order of the stages.
    """

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Count the block as stage `name`."""
        begin = monotonic_ns()
        yield
        self.spent[name] = (monotonic_ns() - begin) / 1e6


def load_modules(clock: Clock, backend: str) -> None:
    """Import in stages what a Buffer imports when it is made, so that its functions can be wrapped before."""
    with clock.stage("import mpi4py.MPI, which starts MPI"):
        import mpi4py.MPI  # noqa: F401
    with clock.stage("import numpy"):
        import numpy  # noqa: F401
    with clock.stage("import deepep_rt"):
        import deepep_rt
    if backend == "cuda":
        with clock.stage("import cuda.bindings"):
            import cuda.bindings.driver  # noqa: F401
    with clock.stage("modules of the backend"):
        import deepep_rt.backends.factory
        import deepep_rt.comm.convert
        import deepep_rt.comm.mpi

        if backend == "cuda":
            import deepep_rt.backends.cuda.backend
        else:
            import deepep_rt.backends.host.backend  # noqa: F401


def functions_of(backend: str) -> list[tuple[str, Any, str]]:
    """Return what is wrapped: the name of the stage, a class or module, and the name of the function in it."""
    from deepep_rt.comm import consensus, mpi
    from deepep_rt.comm.timed_collectives import TimedCollectives

    functions = [
        *((_EXCHANGE, mpi.MpiCommunicator, name) for name in ("allgather", "Dup", "sub_comm")),
        *((_EXCHANGE, TimedCollectives, name) for name in ("finish", "meet")),
        (_EXCHANGE, consensus.Consensus, "all_ok"),
    ]
    if backend == "host":
        return functions
    from deepep_rt.backends import agreement
    from deepep_rt.backends.cuda import backend as cuda_backend
    from deepep_rt.cuda import driver, nvshmem
    from deepep_rt.jit import launch

    in_driver = ("allocate", "allocate_pinned", "fill", "free_bytes", "synchronize", "trim_memory_pool")
    return [
        (_CUDA, agreement, "why_no_gpu"),
        (_CUDA, driver, "use_device"),
        ("Buffer: kernels found in the cache", launch, "cached"),
        *functions,
        ("Buffer: NVSHMEM's bindings and library", nvshmem, "load"),
        ("Buffer: NVSHMEM's start", nvshmem, "runtime"),
        (_MEMORY, cuda_backend.CudaBackend, "_allocate"),
        *((_MEMORY, driver, name) for name in in_driver),
        ("Buffer: kernels found in the cache", launch, "build"),
        ("Buffer: kernels loaded by the driver", launch, "_load"),
    ]


def make_buffer(clock: Clock, backend: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Make the Buffer in stages, make further ones, and destroy them. Return what they run on, and what the further ones took."""
    from mpi4py import MPI
    from stages import Stages

    import deepep_rt

    stages, functions = Stages(), functions_of(backend)
    MPI.COMM_WORLD.Barrier()  # the ranks do not start at once
    with stages.installed(functions), clock.stage("Buffer: rest"):
        buffer = deepep_rt.Buffer(MPI.COMM_WORLD, backend=backend, **sizes)
    with buffer:
        gpus, num_ranks = buffer.describe().gpus, buffer.config.num_ranks
        later_ms = make_later_buffers(backend, sizes)
        if _stands_alone(backend):
            later_ms |= sleep_and_wake(buffer, MPI.COMM_WORLD)
    whole_ms = clock.spent.pop("Buffer: rest")
    spent_ms = {name: stages.spent[name].ns / 1e6 for name, _, _ in functions}
    clock.spent |= {**spent_ms, "Buffer: rest": whole_ms - sum(spent_ms.values())}
    return {"gpu": gpus[0], "num_ranks": num_ranks, "later_ms": later_ms, "is_first": MPI.COMM_WORLD.rank == 0}


def make_later_buffers(backend: str, sizes: dict[str, Any]) -> dict[str, float]:
    """Make and destroy Buffers while the first one lives. Return their milliseconds on rank 0.

    With memory of NVSHMEM, all ranks make Buffers of one size at the same time. So these are in two halves, and no group leaves one out.
    """
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rank, size = world.rank, world.size
    groups = {"second Buffer": [True] * size, "third Buffer": [True] * size}
    if size % 2 == 0:
        groups["new Buffer over half of the ranks"] = [peer < size // 2 for peer in range(size)]
    if size > 1 and _stands_alone(backend):
        groups["new Buffer over all ranks but the last"] = [peer < size - 1 for peer in range(size)]
    return {name: _make_in_group(world.Split(members[rank], rank), backend, sizes, world) for name, members in groups.items()}


def _stands_alone(backend: str) -> bool:
    """Return whether the memory of a Buffer does not belong to NVSHMEM."""
    return backend == "host" or os.environ.get("DEEPEP_RT_SYMMETRIC_MEMORY") == "heap"


def sleep_and_wake(buffer: Any, world: Any) -> dict[str, float]:
    """Let the first Buffer sleep and wake. Return the milliseconds on rank 0. The first time of each does not count."""
    spent: dict[str, float] = {}
    for _ in range(2):
        for name, step in (("sleep of the first Buffer", buffer.sleep), ("wake of the first Buffer", buffer.wake)):
            world.Barrier()
            begin = monotonic_ns()
            step()
            spent[name] = (monotonic_ns() - begin) / 1e6
    return spent


def make_whole(backend: str, sizes: dict[str, Any]) -> dict[str, Any]:
    """Make the Buffer as a program does. Return what it took from the import of this package on."""
    import numpy  # noqa: F401
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()
    begin = monotonic_ns()
    import deepep_rt

    buffer = deepep_rt.Buffer(MPI.COMM_WORLD, backend=backend, **sizes)
    ms = (monotonic_ns() - begin) / 1e6
    buffer.destroy()
    return {"whole_ms": ms, "is_first": MPI.COMM_WORLD.rank == 0}


def _make_in_group(group: Any, backend: str, sizes: dict[str, Any], world: Any) -> float:
    """Return the milliseconds of a Buffer over a group. All groups make theirs at the same time, with as many experts on a rank."""
    import deepep_rt

    more = {"num_experts": sizes["num_experts"] // world.size * group.size}
    more["num_topk"] = min(sizes["num_topk"], more["num_experts"])
    world.Barrier()
    begin = monotonic_ns()
    buffer = deepep_rt.Buffer(group, backend=backend, **{**sizes, **more})
    ms = (monotonic_ns() - begin) / 1e6
    buffer.destroy()
    group.Free()
    return ms


def main() -> None:
    """Measure, and write the result of rank 0 to a file. The arguments are nanoseconds, the file, the backend and sizes in JSON.

    With a fifth argument, the Buffer is made in one piece.
    """
    launched_ns, path, backend, sizes, *whole = sys.argv[1:]
    if whole:
        measured = make_whole(backend, json.loads(sizes))
        if measured.pop("is_first"):
            Path(path).write_text(json.dumps(measured))
        return
    clock = Clock()
    clock.spent["launcher and interpreter"] = (monotonic_ns() - int(launched_ns)) / 1e6
    load_modules(clock, backend)
    found = make_buffer(clock, backend, json.loads(sizes))
    if found.pop("is_first"):
        Path(path).write_text(json.dumps({**found, "ms": clock.spent}))


if __name__ == "__main__":
    # The modules of this folder must hide no other library. With PYTHONSAFEPATH, Python does not put it on the path.
    folder = str(Path(__file__).parent)
    sys.path[:] = [*(path for path in sys.path if path != folder), folder]
    main()
