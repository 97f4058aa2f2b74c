"""How low-latency calls can reach other ranks. NVSHMEM stands in for a network between GPUs of one host."""

from __future__ import annotations

from deepep_rt.config import MAX_RANKS_PER_NODE


def transports():
    """(name, settings of a Buffer) for each way."""
    try:
        from mpi4py.MPI import COMM_WORLD
    except ImportError:  # no MPI: these tests are not for this machine, and pytest only collects here
        return []
    size = COMM_WORLD.Get_size()
    found = [("nvlink", {})] if size <= MAX_RANKS_PER_NODE else []
    found += [("nvshmem", {"ranks_per_node": 1})]
    found += [("groups", {"ranks_per_node": size // 2})] if size > 2 and size % 2 == 0 else []
    return found
