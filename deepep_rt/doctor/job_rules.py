"""Define the rules about all ranks together: functions of the job's reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from .. import _env
from ..config import MAX_RANKS_PER_NODE
from ..errors import EPConfigError
from ..kernels.layout import Layout
from .facts import (
    CACHE_FOLDER,
    MPI_FAMILIES,
    VERSIONS,
    Finding,
    JobReport,
    access_between,
    differences,
    fact,
    first_few,
    format_ranges,
    free_bytes,
    gpu_of,
    gpus,
    nvml_access_between,
    path_between,
)
from .memory_facts import NVSHMEM, VIRTUAL_MEMORY, provider_of, setting_of, unshared

_OWN_VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVSHMEM_HCA_PE_MAPPING", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME")
"""Variables of `_env.SETTINGS` that may differ between ranks."""
_MUST_AGREE = ("deepep_rt", "NVSHMEM (host)", "NVSHMEM (device)")


def _mpi_start(job: JobReport) -> Iterator[Finding]:
    if job.mpi_failure is not None and not _has_wrong_launcher(job.reports[0]):
        yield Finding.of("mpi-does-not-start", "error", job.mpi_failure)


def _has_wrong_launcher(report: Mapping[str, Any]) -> bool:
    """Tell whether the launcher is known to belong to another MPI than mpi4py."""
    launcher, family = (report.get("launch") or {}).get("launcher"), fact(report, "mpi", "family")
    return family is not None and launcher in MPI_FAMILIES and launcher != family


def _launcher(job: JobReport) -> Iterator[Finding]:
    report = job.reports[0]
    launch, library, family = report.get("launch"), fact(report, "mpi", "library"), fact(report, "mpi", "family")
    if library is None:
        return
    if job.mpi_failure is not None:
        if launch and _has_wrong_launcher(report):
            yield Finding.of(
                "wrong-mpirun", "error", f"the launcher is of {launch['launcher']}, but mpi4py uses {library}; {job.mpi_failure}"
            )
    elif launch and launch["size"] > 1 and len(job.reports) == 1:
        yield Finding.of(
            "wrong-mpirun",
            "error",
            f"the launcher ({launch['launcher']}) started {launch['size']} processes, but to mpi4py's MPI ({library}, "
            f"{fact(report, 'mpi', 'path')}) this one is alone",
        )
    elif not launch:
        found, theirs = fact(report, "mpi", "mpirun"), fact(report, "mpi", "mpirun_family")
        if found is None:
            near_python = fact(report, "mpi", "mpirun_beside_python")
            yield Finding.of(
                "no-mpirun", "warning", "no mpirun on the PATH" + (f"; there is {near_python}" if near_python else "")
            )
        elif family and theirs and family != theirs:
            version = fact(report, "mpi", "mpirun_version")
            yield Finding.of("wrong-mpirun", "warning", f"{found} is of {theirs} {version}, but mpi4py uses {library}")


def _other_launcher(job: JobReport) -> Iterator[Finding]:
    report = job.reports[0]
    launch, other, library = report.get("launch"), report.get("other_launch"), fact(report, "mpi", "library")
    if len(job.reports) > 1 or job.mpi_failure is not None or library is None or (launch and launch["size"] > 1):
        return
    if other and other["size"] > 1:
        path = fact(report, "mpi", "path")
        yield Finding.of(
            "other-launcher",
            "warning",  # communicator(group) needs no MPI, and the environment of a container may define WORLD_SIZE
            f"WORLD_SIZE is {other['size']}, but to mpi4py's MPI ({library}, {path}) this process is alone",
        )


def _gpus_on_some_ranks(job: JobReport) -> Iterator[Finding]:
    without = [report["rank"] for report in job.reports if not gpus(report)]
    if job.backend != "host" and 0 < len(without) < len(job.reports):
        yield Finding.of("gpus-on-some-ranks", "error", f"no GPU on ranks {format_ranges(without)} of {len(job.reports)}")


def _shared_gpus(job: JobReport) -> Iterator[Finding]:
    if job.backend == "host":
        return
    users = _users(job)
    allowed = all(fact(report, "settings", "share_gpus") for report in job.reports)
    shared = [f"{_ranks(ranks)} would use GPU {uuid[:8]} of {host}" for (host, uuid), ranks in users.items() if len(ranks) > 1]
    if not shared:
        return
    if not allowed:
        level, outcome = "error", ""
    elif len(shared) < len(users) and provider_of(job) == NVSHMEM:
        level, outcome = "error", "; other ranks have one to themselves: NVSHMEM does not start so"
    else:
        level, outcome = "note", "; DEEPEP_RT_SHARE_GPUS=1: they take turns"
    yield Finding.of("shared-gpu", level, first_few(shared) + outcome)


def _users(job: JobReport) -> dict[tuple[str, str], list[int]]:
    """Group the ranks by the GPU that they take."""
    users: dict[tuple[str, str], list[int]] = {}
    for host, reports in job.hosts.items():
        for report in reports:
            if (gpu := gpu_of(report)) is not None:
                users.setdefault((host, gpu["uuid"]), []).append(report["rank"])
    return users


def _placement(job: JobReport) -> Iterator[Finding]:
    held = {host: [report["rank"] for report in reports] for host, reports in job.hosts.items()}
    sizes = {len(ranks) for ranks in held.values()}
    gaps = any(ranks[-1] - ranks[0] != len(ranks) - 1 for ranks in held.values())
    node = job.declared_ranks_per_node or max(sizes)
    if job.uses_gpus and (len(sizes) > 1 or gaps or node > MAX_RANKS_PER_NODE):
        yield Finding.of(
            "uneven-hosts", "error", "; ".join(f"{host} holds ranks {format_ranges(ranks)}" for host, ranks in held.items())
        )


def _memory(job: JobReport) -> Iterator[Finding]:
    try:
        need = Layout(job.config()).size_hint["total"]
    except EPConfigError as error:
        yield Finding.of("wrong-sizes", "error", str(error))
        return
    if job.backend == "host":
        return
    users = _users(job)
    for host, reports in job.hosts.items():
        short = []
        for uuid, free in {gpu["uuid"]: free_bytes(report, gpu["uuid"]) for report in reports for gpu in gpus(report)}.items():
            num_users = len(users.get((host, uuid), [])) if len(job.reports) > 1 else 1
            if free is not None and free < need * num_users:
                times = f"{num_users} times " if num_users > 1 else ""
                short.append(f"GPU {uuid[:8]} has {free / 1e9:.2f} GB free and is to hold {times}{need / 1e9:.2f} GB")
        if short:
            yield Finding.of("not-enough-memory", "error", f"on {host}, {first_few(short)}")


def _lost(job: JobReport) -> Iterator[Finding]:
    for host, reports in job.hosts.items():
        if lost := fact(reports[0], "nvml", "lost"):
            yield Finding.of("gpu-lost", "warning", f"on {host}, {first_few(lost)}")


def _peer_access(job: JobReport) -> Iterator[Finding]:
    for host, reports in job.hosts.items():
        pairs = [pair for pair in _neighbours(job, reports) if access_between(reports, *pair) is False]
        if pairs:
            yield Finding.of(
                "no-peer-access", "error" if len(reports) > 1 else "warning", f"on {host} between GPUs {_pairs(pairs)}"
            )


def _hidden_neighbours(job: JobReport) -> Iterator[Finding]:
    if job.backend == "host":
        return
    for host, reports in job.hosts.items():
        hidden: dict[bool | None, list[tuple[str, str]]] = {}  # by NVML's answer
        for pair in _neighbours(job, reports):
            if access_between(reports, *pair) is None:
                hidden.setdefault(nvml_access_between(reports, *pair), []).append(pair)
        for answer, pairs in hidden.items():
            if answer is not False and provider_of(job) != NVSHMEM:  # virtual memory needs no GPU of another rank to be visible
                continue
            level, text = _OF_HIDDEN_PAIRS[answer]
            yield Finding.of("neighbours-hidden", level, f"on {host}, no rank sees both of GPUs {_pairs(pairs)}; {text}")


_OF_HIDDEN_PAIRS = {
    True: ("note", "NVML says that they reach each other"),
    None: ("warning", "whether they reach each other is not known"),
    False: ("error", "to one of their ranks NVML does not show both, or it says that they do not reach each other"),
}
"""Level and text of `neighbours-hidden` by NVML's answer."""


def _unshared_memory(job: JobReport) -> Iterator[Finding]:
    failed = unshared(job)
    if not failed or not job.uses_gpus or setting_of(job) == "nvshmem":
        return
    level = "error" if provider_of(job) == VIRTUAL_MEMORY else "warning"
    ranks = {why: [rank for rank, found in failed.items() if found == why] for why in failed.values()}
    yield Finding.of("no-virtual-memory", level, "; ".join(f"{why} on {_ranks(at)}" for why, at in ranks.items()))


def _pcie_paths(job: JobReport) -> Iterator[Finding]:
    for host, reports in job.hosts.items():
        slow = []
        for pair in _neighbours(job, reports):
            path = path_between(reports[0], *pair)
            if access_between(reports, *pair) is not False and path is not None and not path.startswith("NV"):
                slow.append((*pair, path))
        if slow:
            yield Finding.of("no-nvlink", "warning", f"on {host} between GPUs {_pairs(slow)}")


def _missing_nvlinks(job: JobReport) -> Iterator[Finding]:
    for host, reports in job.hosts.items():
        used = {uuid for pair in _neighbours(job, reports) for uuid in pair}
        models: dict[str, dict[str, int]] = {}
        for gpu in fact(reports[0], "nvml", "gpus") or []:
            if gpu["uuid"] in used:
                models.setdefault(gpu["name"], {})[gpu["uuid"][:8]] = gpu["nvlinks"]
        for name, numbers in models.items():
            if len(set(numbers.values())) > 1:
                most = max(numbers.values())
                fewer = ", ".join(f"{uuid} has {number}" for uuid, number in numbers.items() if number < most)
                yield Finding.of("nvlink-uneven", "warning", f"on {host}, of {name}: {fewer} active NVLinks of {most}")


def _neighbours(job: JobReport, reports: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """List the pairs of GPUs that exchange rows directly. For a single process: all pairs that it sees."""
    if len(reports) == 1:
        return list(combinations([gpu["uuid"] for gpu in gpus(reports[0])], 2))
    node = job.declared_ranks_per_node or len(reports)
    groups: dict[int, list[str]] = {}
    for report in reports:
        if (gpu := gpu_of(report)) is not None:
            groups.setdefault(report["rank"] // node, []).append(gpu["uuid"])
    return [(a, b) for uuids in groups.values() for a, b in combinations(sorted(set(uuids)), 2)]


def _pairs(pairs: Sequence[tuple[str, ...]]) -> str:
    return first_few([f"{a[:8]} and {b[:8]}" + "".join(f" ({path})" for path in more) for a, b, *more in pairs])


def _ranks_differ(job: JobReport) -> Iterator[Finding]:
    different = differences(job.reports)
    versions = [item for item in different if item in VERSIONS or item.startswith("package ")]
    if versions:
        level = "error" if set(versions) & set(_MUST_AGREE) else "warning"
        yield Finding.of("versions-differ", level, _values_by_rank(different, versions))
    variables = [item for item in different if item.startswith(_env.SETTINGS) and item not in _OWN_VARIABLES]
    if variables:
        yield Finding.of("environment-differs", "warning", _values_by_rank(different, variables))
    for host, reports in job.hosts.items():
        folders = differences(reports).get(CACHE_FOLDER)
        if folders:
            yield Finding.of("caches-differ", "warning", f"on {host}: {_values_by_rank({CACHE_FOLDER: folders}, [CACHE_FOLDER])}")


def _values_by_rank(different: Mapping[str, Mapping[str, list[int]]], items: Sequence[str]) -> str:
    def one(item: str) -> str:
        return f"{item} " + " and ".join(f"{value} on {_ranks(ranks)}" for value, ranks in different[item].items())

    return first_few([one(item) for item in items])


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {format_ranges(ranks)}"


RULES: tuple[Callable[[JobReport], Iterator[Finding]], ...] = (
    _mpi_start,
    _launcher,
    _other_launcher,
    _gpus_on_some_ranks,
    _shared_gpus,
    _placement,
    _memory,
    _lost,
    _peer_access,
    _hidden_neighbours,
    _unshared_memory,
    _pcie_paths,
    _missing_nvlinks,
    _ranks_differ,
)
