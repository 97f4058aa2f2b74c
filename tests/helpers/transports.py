"""Transports of low-latency calls, and nodes of throughput calls. Between GPUs of one host, NVSHMEM or MPI replaces a network."""

from __future__ import annotations

from deepep_rt.config import MAX_RANKS_PER_NODE


def transports():
    """Return a name and the settings of a Buffer for each transport."""
    try:
        from mpi4py.MPI import COMM_WORLD
    except ImportError:  # without MPI, pytest only collects these tests
        return []
    size = COMM_WORLD.Get_size()
    found = [("nvlink", {})] if size <= MAX_RANKS_PER_NODE else []
    found += [("nvshmem", {"ranks_per_node": 1})]
    found += [("groups", {"ranks_per_node": size // 2})] if size > 2 and size % 2 == 0 else []
    return found


def nodes():
    """Return a name and the settings of a Buffer on one node, and on two nodes for each path."""
    try:
        from mpi4py.MPI import COMM_WORLD
    except ImportError:
        return []
    size = COMM_WORLD.Get_size()
    paths = ("hierarchical", "direct") if size % 2 == 0 else ()
    return [("nvlink", {}), *((path, {"ranks_per_node": size // 2, "path": path}) for path in paths)]
