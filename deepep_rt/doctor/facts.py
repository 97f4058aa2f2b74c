"""Hold the reports of all ranks, look facts up in them, and describe findings."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..config import MAX_RANKS_PER_NODE, Config
from ..errors import EPConfigError
from ..kernels.layout import Layout
from .catalog import FINDING_TYPES, FindingType

LEVELS = ("error", "warning", "note")
"""error: the Buffer cannot be made as asked for. warning: it can, but it is slow or may break. note: information."""

MPI_FAMILIES = ("Open MPI", "MPICH")
"""MPIs whose launcher starts only programs of the same MPI. Any other launcher (Slurm) starts both."""

SHOWN = 4
"""Items of a long list that are printed."""


@dataclass(frozen=True)
class JobReport:
    """The reports of all ranks, and the Buffer that they are to make. Input of the rules.

    A report has `facts` and `failures` of `runner.run_probes`, `launch`, and what `runner.gather` adds. `other_launch` is present if a
    launcher other than MPI's may have started the process. `store` is present if doctor has looked for one: its `place`, and the `error`.
    """

    reports: Sequence[Mapping[str, Any]]  # one for each rank
    sizes: Mapping[str, Any] = field(default_factory=dict)  # as for `Config`. `num_experts` is optional (32 for each rank)
    num_ranks: int | None = None  # of the Buffer. None: the ranks of the job, or 8 for a single process
    backend: str = "auto"  # as for `Buffer`
    mpi_failure: str | None = None  # the reason for which MPI did not deliver the other ranks' reports
    network: Mapping[str, Any] | None = None  # found by `network_rates.measure`, or `failure`. None: nothing was to be measured
    transport: str = "auto"  # as for `NetworkOptions`
    max_ranks: int | None = None  # as for `Buffer`. None: it has no slots

    @property
    def uses_gpus(self) -> bool:
        """Tell whether a Buffer of this backend would use GPUs."""
        return self.backend == "cuda" or (self.backend == "auto" and any(gpus(report) for report in self.reports))

    @property
    def hosts(self) -> dict[str, list[Mapping[str, Any]]]:
        """Group the reports by host, in the order of ranks.

        Names alone do not decide which ranks share a host, because two hosts may have the same name (`comm.timed_collectives`).
        """
        groups: dict[int, list[Mapping[str, Any]]] = {}
        for report in self.reports:
            groups.setdefault(report["group"], []).append(report)
        names = {group: fact(reports[0], "machine", "host") or "unknown" for group, reports in groups.items()}
        twice = {name for name, number in Counter(names.values()).items() if number > 1}
        return {f"{name} (rank {group})" if name in twice else name: groups[group] for group, name in names.items()}

    @property
    def has_network(self) -> bool:
        """Tell whether ranks reach each other over a network, as far as variables and hosts show it."""
        variables = [fact(report, "settings", "variables") or {} for report in self.reports]
        asked = any(v.get("NVSHMEM_REMOTE_TRANSPORT", "none") != "none" or "NVSHMEM_IB_ENABLE_IBGDA" in v for v in variables)
        return len(self.hosts) > 1 or asked

    @property
    def declared_ranks_per_node(self) -> int | None:
        """The ranks of a node that an option or the environment declares. None: those of a host."""
        if self.sizes.get("ranks_per_node") is not None:
            return self.sizes["ranks_per_node"]
        text = (fact(self.reports[0], "settings", "variables") or {}).get("DEEPEP_RT_RANKS_PER_NODE", "")
        return int(text) if text.isascii() and text.isdigit() and int(text) else None

    def config(self) -> Config:
        """Make the Buffer's configuration. Raise EPConfigError if the sizes are wrong."""
        # These two have defaults in environment variables. Other findings report mistakes in them.
        fixed = {"timeout_s": 1.0, "check_inputs": False}
        if self.max_ranks is not None:
            slots: dict[str, Any] = dict(num_ranks=self.max_ranks, ranks_per_node=self.max_ranks, has_slots=True)
            return Config(**{**fixed, "num_experts": 32 * self.max_ranks, **self.sizes, **slots})
        there = len(self.reports) if len(self.reports) > 1 else MAX_RANKS_PER_NODE
        ranks = there if self.num_ranks is None else self.num_ranks
        declared = self.declared_ranks_per_node
        if declared is not None and self.sizes.get("ranks_per_node") is None:
            declared = min(declared, ranks)  # a Buffer of fewer ranks is one node
        sizes = {**fixed, "num_experts": 32 * ranks, **self.sizes, "num_ranks": ranks, "ranks_per_node": declared}
        config = Config(**sizes)
        host = len(next(iter(self.hosts.values())))
        if config.ranks_per_node is None and len(self.hosts) > 1 and ranks == len(self.reports) and ranks % host == 0:
            config = dataclasses.replace(config, ranks_per_node=host)  # as Buffer does
        return config

    def size_hint(self) -> dict[str, int] | None:
        """Compute the bytes of the Buffer by region. None: the sizes are wrong."""
        try:
            return Layout(self.config()).size_hint
        except EPConfigError:
            return None


@dataclass(frozen=True)
class Finding:
    """A result of a rule."""

    type: FindingType  # its meaning and remedy
    level: str  # one of `LEVELS`
    what: str  # the observed facts
    ranks: tuple[int, ...] = ()  # the ranks concerned. Empty: all of them

    @classmethod
    def of(cls, name: str, level: str, what: str) -> Finding:
        """Make a finding about all ranks, or about the rank that a rule examines."""
        return cls(FINDING_TYPES[name], level, what)


def is_broken(found: Iterable[Finding]) -> bool:
    """Tell whether a Buffer cannot be made as asked for."""
    return any(finding.level == "error" for finding in found)


def fact(report: Mapping[str, Any], probe: str, name: str) -> Any:
    """Look up a fact. Return None if it is unknown."""
    return (report["facts"].get(probe) or {}).get(name)


def gpus(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """List the GPUs that the driver shows to a rank."""
    return fact(report, "driver", "gpus") or []


def gpu_of(report: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the GPU that a rank takes if the program does not choose one."""
    visible = gpus(report)
    return visible[report["local_rank"] % len(visible)] if visible else None


def has_hardware(report: Mapping[str, Any]) -> bool:
    """Tell whether the machine has NVIDIA GPUs, usable or not."""
    return bool(gpus(report) or fact(report, "nvml", "gpus") or fact(report, "machine", "pci_gpus"))


def free_bytes(report: Mapping[str, Any], uuid: str) -> int | None:
    """Return the free memory of a GPU. None: NVML does not report it."""
    return next((gpu["free_bytes"] for gpu in fact(report, "nvml", "gpus") or [] if gpu["uuid"] == uuid), None)


def path_between(report: Mapping[str, Any], a: str, b: str) -> str | None:
    """Return the connection of two GPUs, such as "NV18" or "PIX". None: unknown."""
    at = {gpu["uuid"]: index for index, gpu in enumerate(fact(report, "nvml", "gpus") or [])}
    return fact(report, "nvml", "paths")[at[a]][at[b]] if a in at and b in at else None


def access_between(reports: Iterable[Mapping[str, Any]], a: str, b: str) -> bool | None:
    """Ask the driver of the first rank that sees both GPUs whether they reach each other's memory. None: no rank sees both."""
    for report in reports:
        at = {gpu["uuid"]: gpu["ordinal"] for gpu in gpus(report)}
        if a in at and b in at:
            return bool(fact(report, "driver", "access")[at[a]][at[b]])
    return None


def nvml_access_between(reports: Iterable[Mapping[str, Any]], a: str, b: str) -> bool | None:
    """Combine the NVML answers of the two GPUs' ranks: whether the GPUs reach each other. None: NVML does not say."""
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


def format_ranges(numbers: Iterable[int]) -> str:
    """Format numbers as "0 to 3, 5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = ((str(run[0]),) if len(run) == 1 else (f"{run[0]} to {run[-1]}",) if len(run) > 2 else map(str, run) for run in runs)
    return ", ".join(itertools.chain.from_iterable(parts))


def differences(reports: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """Find items that differ between ranks. Return each value of an item with its ranks."""
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
    "NIXL": ("nixl", "version"),
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
    """Convert a version to numbers that can be compared. Empty: unknown."""
    return tuple(int(part) for part in re.findall(r"\d+", version or "")[:3])


def first_few(parts: Sequence[str]) -> str:
    """Join the first items of a long list, and count the others."""
    return ", ".join(parts[:SHOWN]) + (f", and {len(parts) - SHOWN} more" if len(parts) > SHOWN else "")
