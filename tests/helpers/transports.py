"""Transports of low-latency calls, and nodes of throughput calls. Between GPUs of one host, NVSHMEM or MPI replaces a network."""

from __future__ import annotations

from deepep_rt import NetworkOptions
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
    found += [("relay", {"ranks_per_node": 1, "network": NetworkOptions(transport="mpi")})] if size > 1 else []
    found += [("groups", {"ranks_per_node": size // 2})] if size > 2 and size % 2 == 0 else []
    return found


def nodes():
    """Return a name and the settings of a Buffer on one node, and on two nodes for each path, and over a relay."""
    try:
        from mpi4py.MPI import COMM_WORLD
    except ImportError:
        return []
    size = COMM_WORLD.Get_size()
    paths = ("hierarchical", "direct") if size % 2 == 0 else ()
    found = [("nvlink", {}), *((path, {"ranks_per_node": size // 2, "path": path}) for path in paths)]
    return found + [("relay", {**settings, "network": NetworkOptions(transport="mpi")}) for _, settings in found[1:2]]
