"""What doctor knows: the situation of all ranks, the facts in it, and how a finding is written down."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import MAX_RANKS_PER_NODE, Config
from .catalog import KINDS, Kind

LEVELS = ("error", "warning", "note")
"""error: a Buffer cannot be made, or not as asked for. warning: it can, but something is slow, or about to break. note: to know."""

MPI_FAMILIES = ("Open MPI", "MPICH")
"""Names that launchers and libraries have in common; any other launcher (Slurm) can start both."""

SHOWN = 4
"""Of a long list."""


@dataclass(frozen=True)
class Situation:
    """What the rules judge.

    Args:
        reports: One for each rank: `facts` and `failures` (as `doctor_run.examine` gives them), `launch`, `rank`, `local_rank`, `group`;
            perhaps `other_launch`, of a launcher that is not MPI's.
        sizes: Arguments of `Config` except for `num_ranks`; `num_experts` may be left out (32 for each rank).
        num_ranks: Ranks of the Buffer; default: those that there are, or 8 if this is a process without others.
        backend: "auto", "cuda" or "host", as for `Buffer`.
        mpi_failure: Why MPI did not bring the other ranks' reports.
    """

    reports: Sequence[Mapping[str, Any]]
    sizes: Mapping[str, Any] = field(default_factory=dict)
    num_ranks: int | None = None
    backend: str = "auto"
    mpi_failure: str | None = None

    @property
    def uses_gpus(self) -> bool:
        """Whether a Buffer of this backend would use GPUs."""
        return self.backend == "cuda" or (self.backend == "auto" and any(gpus(report) for report in self.reports))

    @property
    def hosts(self) -> dict[str, list[Mapping[str, Any]]]:
        """The reports of each host, in the order of ranks. MPI says who is where: names may be equal, or differ in containers."""
        groups: dict[int, list[Mapping[str, Any]]] = {}
        for report in self.reports:
            groups.setdefault(report["group"], []).append(report)
        names = {group: fact(reports[0], "machine", "host") or "unknown" for group, reports in groups.items()}
        twice = {name for name, number in Counter(names.values()).items() if number > 1}
        return {f"{name} (rank {group})" if name in twice else name: groups[group] for group, name in names.items()}

    @property
    def has_network(self) -> bool:
        """Whether ranks reach each other over a network, as far as that can be told."""
        variables = [fact(report, "settings", "variables") or {} for report in self.reports]
        asked = any(v.get("NVSHMEM_REMOTE_TRANSPORT", "none") != "none" or "NVSHMEM_IB_ENABLE_IBGDA" in v for v in variables)
        return len(self.hosts) > 1 or asked

    def config(self) -> Config:
        """Raises EPConfigError if the sizes are wrong."""
        # settings with a default in the environment, which may be what is wrong
        fixed = {"timeout_s": 1.0, "check_inputs": False}
        there = len(self.reports) if len(self.reports) > 1 else MAX_RANKS_PER_NODE
        ranks = there if self.num_ranks is None else self.num_ranks
        config = Config(**{**fixed, "num_experts": 32 * ranks, **self.sizes, "num_ranks": ranks})
        host = len(next(iter(self.hosts.values())))
        if config.ranks_per_node is None and len(self.hosts) > 1 and ranks == len(self.reports) and ranks % host == 0:
            config = dataclasses.replace(config, ranks_per_node=host)  # as Buffer does
        return config


@dataclass(frozen=True)
class Finding:
    """Something to know about.

    Attributes:
        kind: What it means and what to do.
        level: One of `LEVELS`.
        what: What was found.
        ranks: Where; empty if it is about all of them.
    """

    kind: Kind
    level: str
    what: str
    ranks: tuple[int, ...] = ()

    @classmethod
    def of(cls, kind: str, level: str, what: str) -> Finding:
        """A finding about all ranks, or about the rank whose rule says it."""
        return cls(KINDS[kind], level, what)


def fact(report: Mapping[str, Any], probe: str, name: str) -> Any:
    """A fact, or None if it is not known."""
    return (report["facts"].get(probe) or {}).get(name)


def gpus(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The GPUs that the driver shows to a rank."""
    return fact(report, "driver", "gpus") or []


def gpu_of(report: Mapping[str, Any]) -> dict[str, Any] | None:
    """The GPU that a rank would take if the program does not choose one."""
    visible = gpus(report)
    return visible[report["local_rank"] % len(visible)] if visible else None


def has_hardware(report: Mapping[str, Any]) -> bool:
    """Whether there are NVIDIA GPUs, usable or not."""
    return bool(gpus(report) or fact(report, "nvml", "gpus") or fact(report, "machine", "pci_gpus"))


def free_bytes(report: Mapping[str, Any], uuid: str) -> int | None:
    """Free memory of a GPU, if NVML knows it."""
    return next((gpu["free_bytes"] for gpu in fact(report, "nvml", "gpus") or [] if gpu["uuid"] == uuid), None)


def path_between(report: Mapping[str, Any], a: str, b: str) -> str | None:
    """How two GPUs are connected: "NV18", "PIX", ...; None if it is not known."""
    at = {gpu["uuid"]: index for index, gpu in enumerate(fact(report, "nvml", "gpus") or [])}
    return fact(report, "nvml", "paths")[at[a]][at[b]] if a in at and b in at else None


def access_between(reports: Iterable[Mapping[str, Any]], a: str, b: str) -> bool | None:
    """Whether two GPUs reach each other's memory, as the driver tells whichever process sees both; None if none does."""
    for report in reports:
        at = {gpu["uuid"]: gpu["ordinal"] for gpu in gpus(report)}
        if a in at and b in at:
            return bool(fact(report, "driver", "access")[at[a]][at[b]])
    return None


def nvml_access_between(reports: Iterable[Mapping[str, Any]], a: str, b: str) -> bool | None:
    """Whether the ranks of two GPUs find in NVML that these reach each other; None if NVML does not say."""
    answers: list[bool | None] = []
    for report in reports:
        if (own := gpu_of(report)) is None or own["uuid"] not in (a, b):
            continue
        at = {gpu["uuid"]: index for index, gpu in enumerate(fact(report, "nvml", "gpus") or [])}
        access = fact(report, "nvml", "access")
        if not at:
            answers.append(None)
        elif not {a, b} <= set(at):
            answers.append(False)
        else:
            answers.append(access[at[a]][at[b]] if access else None)
    return False if False in answers else None if None in answers else True


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as "0 to 3, 5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = ((str(run[0]),) if len(run) == 1 else (f"{run[0]} to {run[-1]}",) if len(run) > 2 else map(str, run) for run in runs)
    return ", ".join(part for some in parts for part in some)


def differences(reports: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """What differs between ranks: for each item, each value and the ranks that have it."""
    items: dict[str, dict[int, str]] = {}
    for report in reports:
        for item, value in _comparable(report).items():
            items.setdefault(item, {})[report["rank"]] = value
    found: dict[str, dict[str, list[int]]] = {}
    for item, values in items.items():
        by_value: dict[str, list[int]] = {}
        for report in reports:
            by_value.setdefault(values.get(report["rank"], "(none)"), []).append(report["rank"])
        if len(by_value) > 1:
            found[item] = by_value
    return found


VERSIONS = {
    "Python": ("python", "version"),
    "python executable": ("python", "executable"),
    "deepep_rt": ("python", "deepep_rt"),
    "MPI library": ("mpi", "library"),
    "NVIDIA driver": ("nvml", "driver"),
    "CUDA of the driver": ("driver", "cuda"),
    "NVRTC": ("nvrtc", "version"),
    "nvJitLink": ("nvjitlink", "version"),
    "NVSHMEM (host)": ("nvshmem_host", "version"),
    "NVSHMEM (device)": ("nvshmem_device", "version"),
}
CACHE_FOLDER = "kernel cache"


def _comparable(report: Mapping[str, Any]) -> dict[str, str]:
    facts = {item: fact(report, *where) for item, where in VERSIONS.items()}
    facts |= {f"package {name}": version for name, version in (fact(report, "python", "packages") or {}).items()}
    facts |= fact(report, "settings", "variables") or {}
    facts[CACHE_FOLDER] = fact(report, "cache", "folder")
    return {item: value for item, value in facts.items() if value is not None}


def numbers_of(version: str | None) -> tuple[int, ...]:
    """A version as numbers to compare; empty if it is not known."""
    return tuple(int(part) for part in re.findall(r"\d+", version or "")[:3])


def some(parts: Sequence[str]) -> str:
    """The first few of a long list."""
    return ", ".join(parts[:SHOWN]) + (f", and {len(parts) - SHOWN} more" if len(parts) > SHOWN else "")
