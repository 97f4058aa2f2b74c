"""Make reports of imaginary machines for doctor's rules, and change their facts."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from deepep_rt.doctor.facts import JobReport

SIZES = dict(num_max_tokens_per_rank=4096, hidden=7168, num_topk=8)


def report(rank: int = 0, *, ranks: int = 8, per_host: int = 8, num_gpus: int = 8) -> dict[str, Any]:
    """Make the report of a rank of a healthy 8-GPU host."""
    uuids = [f"{index}0000000-{rank // per_host}" for index in range(num_gpus)]
    links = [["-" if a == b else "NV18" for b in uuids] for a in uuids]
    nic = {
        "name": "mlx5_0",
        "type": "MT4129",
        "ports": [{"port": "1", "state": "ACTIVE", "rate": "400 Gb/sec (4X NDR)", "link": "InfiniBand"}],
        "usable": True,
    }
    facts: dict[str, Any] = {
        "python": {
            "version": "3.12.3", "executable": "python", "deepep_rt": "0.1.0", "folder": "",
            "packages": {"numpy": "2.4", "cuda-bindings": "13.1.0", "nvidia-cuda-nvrtc": "13.1.8", "nvidia-ml-py": "12.575.51",
                         "nvshmem4py-cu13": "0.4"},
        },
        "settings": {"variables": {}, "mistakes": [], "unknown": [], "share_gpus": False, "assert_cached": False},
        "machine": {"host": f"host{rank // per_host}", "pci_gpus": 8, "shm_free_bytes": 1 << 34, "memlock_bytes": None},
        "mpi": {"mpi4py": "4.1", "library": "Open MPI v4.1.6", "family": "Open MPI", "path": "libmpi.so.40",
                "mpirun": "/usr/bin/mpirun", "mpirun_version": "4.1.6", "mpirun_family": "Open MPI"},
        "driver": {
            "library": "libcuda.so.580", "cuda": "13.1", "init": "CUDA_SUCCESS",
            "gpus": [{"ordinal": i, "uuid": uuid, "name": "NVIDIA H200", "arch": "sm_90", "total_bytes": 150 << 30}
                     for i, uuid in enumerate(uuids)],
            "access": [[True] * num_gpus for _ in uuids],
            "not_shared": "",
        },
        "nvml": {
            "library": "libnvidia-ml.so.580", "driver": "580.95",
            "gpus": [{"uuid": uuid, "name": "NVIDIA H200", "mig": False, "free_bytes": 149 << 30, "total_bytes": 150 << 30, "nvlinks": 18}
                     for uuid in uuids],
            "paths": links,
        },
        "nvrtc": {"version": "13.1", "path": "", "archs": ["sm_80", "sm_90", "sm_100"]},
        "nvjitlink": {"version": "13.1", "path": ""},
        "nvshmem_host": {"version": "3.8.0", "path": "a"},
        "nvshmem_device": {"version": "3.8.0", "path": "b"},
        "bindings": {"module": None},
        "nixl": {"version": "1.5.1", "path": "", "error": None},
        "network": {"nics": [nic], "peermem": True, "open_driver": True, "gdrdrv": True, "gdrapi": True,
                    "driver_parameters": {"EnableStreamMemOPs": "1", "RegistryDwords": "PeerMappingOverride=1;"},
                    "interfaces": [{"name": "eth0", "address": f"10.0.0.{1 + rank // per_host}/24", "speed_mbit": 100_000}],
                    "own_addresses": [f"10.0.0.{1 + rank // per_host}"]},
        "cache": {"folder": "/cache", "exists": True, "error": None, "entries": 10, "corrupt": [], "bytes": 1000},
    }  # fmt: skip
    launch = {"launcher": "Open MPI", "rank": rank, "size": ranks} if ranks > 1 else None
    return {
        "facts": facts,
        "failures": {},
        "launch": launch,
        "rank": rank,
        "local_rank": rank % per_host,
        "group": rank - rank % per_host,
        "mpi_threads": "multiple",
        "mpi_cuda": False,
    }


def machine(ranks: int = 8, *, per_host: int = 8, num_gpus: int = 8, **options: Any) -> JobReport:
    """Make the reports of a healthy machine."""
    reports = [report(rank, ranks=ranks, per_host=per_host, num_gpus=num_gpus) for rank in range(ranks)]
    return JobReport(reports, **{"sizes": SIZES, **options})


def link(where: str, a: int, b: int, gb_s: float, us: float = 2.0) -> dict[str, Any]:
    """Make what `doctor --network` measures between two ranks."""
    return {"where": where, "ranks": [a, b], "us": us, "gb_s": gb_s, "back_gb_s": 1.1 * gb_s, "together_gb_s": gb_s / 2}


def measured(*links: dict[str, Any], per_node: int = 8, ranks: int = 16, **more: Any) -> dict[str, Any]:
    """Make the result of `doctor --network`."""
    nodes = [list(range(first, first + per_node)) for first in range(0, ranks, per_node)]
    return {"nodes": nodes, "links": list(links), **more}


def on_every_rank(change: Callable[[dict[str, Any]], object]) -> Callable[[JobReport], None]:
    """Change the report of every rank."""

    def change_all(job: JobReport) -> None:
        for one in job.reports:
            change(one)

    return change_all


def set_facts(probe: str, **facts: Any) -> Callable[[JobReport], None]:
    """Change facts on every rank."""
    return on_every_rank(lambda one: one["facts"][probe].update(copy.deepcopy(facts)))


def fail_probe(probe: str, why: str = "RuntimeError: broken") -> Callable[[JobReport], None]:
    """Make a probe fail on every rank."""
    return on_every_rank(lambda one: (one["facts"].pop(probe), one["failures"].update({probe: why})))


def combined(*changes: Callable[[JobReport], None]) -> Callable[[JobReport], None]:
    """Combine changes."""

    def change(job: JobReport) -> None:
        for one in changes:
            one(job)

    return change


def set_gpus(**facts: Any) -> Callable[[JobReport], None]:
    """Change the GPUs that the driver shows."""
    return on_every_rank(lambda one: [gpu.update(facts) for gpu in one["facts"]["driver"]["gpus"]])


def set_nvml(index: int | None = None, **facts: Any) -> Callable[[JobReport], None]:
    """Change the GPUs that NVML shows: one, or all."""
    chosen = slice(None) if index is None else slice(index, index + 1)
    return on_every_rank(lambda one: [gpu.update(facts) for gpu in one["facts"]["nvml"]["gpus"][chosen]])


def set_facts_of_rank(rank: int, probe: str, **facts: Any) -> Callable[[JobReport], None]:
    """Change facts on one rank."""
    return lambda job: job.reports[rank]["facts"][probe].update(facts)


def remove_access(a: int, b: int) -> Callable[[JobReport], None]:
    """Remove the peer access between two GPUs."""

    def change(job: JobReport) -> None:
        for one in job.reports:
            one["facts"]["driver"]["access"][a][b] = one["facts"]["driver"]["access"][b][a] = False

    return change


def set_paths(path: str) -> Callable[[JobReport], None]:
    """Replace all paths between GPUs."""
    return set_facts("nvml", paths=[["-" if i == j else path for j in range(8)] for i in range(8)])


def keep_one_rank(job: JobReport) -> None:
    """Keep one report, as if MPI did not know the other ranks."""
    del job.reports[1:]


def set_other_launch(size: int, local_rank: int | None) -> Callable[[JobReport], None]:
    """Set the variables of a launcher that is not MPI's."""
    return on_every_rank(lambda one: one.update(other_launch={"size": size, "local_rank": local_rank}))


set_without_mpi = on_every_rank(lambda one: one.update(no_mpi="a store"))
"""Let the ranks meet without MPI."""


def set_threads(level: str) -> Callable[[JobReport], None]:
    """Change the level of threads that MPI grants."""
    return on_every_rank(lambda one: one.update(mpi_threads=level))


def set_nic(**facts: Any) -> Callable[[JobReport], None]:
    """Change the NIC of every rank."""
    return on_every_rank(lambda one: one["facts"]["network"]["nics"][0].update(facts))


def hide_other_gpus(job: JobReport) -> None:
    """Hide all GPUs but one from each rank."""
    for rank, one in enumerate(job.reports):
        one["facts"]["settings"]["variables"] = {"CUDA_VISIBLE_DEVICES": str(rank)}
        one["facts"]["driver"].update(gpus=[{**one["facts"]["driver"]["gpus"][rank], "ordinal": 0}], access=[[True]])
