"""From what doctor found out about the ranks to what that means: rules, which are functions of the data alone."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from . import layout
from .config import MAX_RANKS_PER_NODE, Config, arch_number
from .doctor_kinds import KINDS, MIN_ARCH, MIN_MEMLOCK_BYTES, MIN_NVSHMEM, MIN_SHM_BYTES, Kind
from .errors import EPConfigError

LEVELS = ("error", "warning", "note")
"""error: a Buffer cannot be made, or not as asked for. warning: it can, but something is slow, or about to break. note: to know."""

MPI_FAMILIES = ("Open MPI", "MPICH")
"""Names that launchers and libraries have in common; any other launcher (Slurm) can start both."""

_SHOWN = 4  # of a long list
_OWN_VARIABLES = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NVSHMEM_HCA_PE_MAPPING", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME")
"""Variables that may well differ between ranks."""


@dataclass(frozen=True)
class Situation:
    """What the rules judge.

    Args:
        reports: One for each rank: `facts` and `failures` (as `doctor_run.examine` gives them), `launch`, `rank`, `local_rank`, `group`.
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
        ranks = self.num_ranks or (len(self.reports) if len(self.reports) > 1 else MAX_RANKS_PER_NODE)
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


def findings(situation: Situation) -> list[Finding]:
    """Everything that the rules say, the worst first, kind by kind; what they say of several ranks alike is said once."""
    found: list[Finding] = [finding for rule in _RULES for finding in _judged(rule, situation)]
    ranks: dict[Finding, list[int]] = {}
    for report in situation.reports:
        for rule in _RANK_RULES:
            for finding in _judged(rule, situation, report):
                ranks.setdefault(finding, []).append(report["rank"])
    for finding, at in ranks.items():
        everywhere = len(at) == len(situation.reports)
        found.append(finding if everywhere else Finding(finding.kind, finding.level, finding.what, tuple(at)))
    kinds = list(KINDS)
    return sorted(found, key=lambda finding: (LEVELS.index(finding.level), kinds.index(finding.kind.name)))


def _judged(rule: Callable[..., Iterator[Finding]], *about: Any) -> list[Finding]:
    """What a rule says; a rule that stumbles over facts which nobody thought of says that."""
    try:
        return list(rule(*about))
    except Exception as error:
        return [_found("probe-failed", "warning", f"the rule {rule.__name__}: {type(error).__name__}: {error}")]


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


_VERSIONS = {
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
_MUST_AGREE = ("deepep_rt", "NVSHMEM (host)", "NVSHMEM (device)")
CACHE_FOLDER = "kernel cache"


def _comparable(report: Mapping[str, Any]) -> dict[str, str]:
    facts = {item: fact(report, *where) for item, where in _VERSIONS.items()}
    facts |= {f"package {name}": version for name, version in (fact(report, "python", "packages") or {}).items()}
    facts |= fact(report, "settings", "variables") or {}
    facts[CACHE_FOLDER] = fact(report, "cache", "folder")
    return {item: value for item, value in facts.items() if value is not None}


# --- rules about all ranks -----------------------------------------------------------------------------------------------------------


def _mpi_start(s: Situation) -> Iterator[Finding]:
    if s.mpi_failure is not None and not _is_foreign(s.reports[0]):
        yield _found("mpi-does-not-start", "error", s.mpi_failure)


def _is_foreign(report: Mapping[str, Any]) -> bool:
    """Whether the launcher is known to belong to another MPI than mpi4py."""
    launcher, family = (report.get("launch") or {}).get("launcher"), fact(report, "mpi", "family")
    return family is not None and launcher in MPI_FAMILIES and launcher != family


def _launcher(s: Situation) -> Iterator[Finding]:
    report = s.reports[0]
    launch, library, family = report.get("launch"), fact(report, "mpi", "library"), fact(report, "mpi", "family")
    if library is None:
        return
    if s.mpi_failure is not None:
        if launch and _is_foreign(report):
            yield _found(
                "wrong-mpirun", "error", f"the launcher is of {launch['launcher']}, but mpi4py uses {library}; {s.mpi_failure}"
            )
    elif launch and launch["size"] > 1 and len(s.reports) == 1:
        yield _found(
            "wrong-mpirun",
            "error",
            f"the launcher ({launch['launcher']}) started {launch['size']} processes, but to mpi4py's MPI ({library}, "
            f"{fact(report, 'mpi', 'path')}) this one is alone",
        )
    elif not launch:
        found, theirs = fact(report, "mpi", "mpirun"), fact(report, "mpi", "mpirun_family")
        if found is None:
            beside = fact(report, "mpi", "mpirun_beside_python")
            yield _found("no-mpirun", "warning", "no mpirun on the PATH" + (f"; there is {beside}" if beside else ""))
        elif family and theirs and family != theirs:
            version = fact(report, "mpi", "mpirun_version")
            yield _found("wrong-mpirun", "warning", f"{found} is of {theirs} {version}, but mpi4py uses {library}")


def _gpus_on_some_ranks(s: Situation) -> Iterator[Finding]:
    without = [report["rank"] for report in s.reports if not gpus(report)]
    if s.backend != "host" and 0 < len(without) < len(s.reports):
        yield _found("gpus-on-some-ranks", "error", f"no GPU on ranks {ranges(without)} of {len(s.reports)}")


def _shared_gpus(s: Situation) -> Iterator[Finding]:
    if s.backend == "host":
        return
    users = _users(s)
    allowed = all(fact(report, "settings", "share_gpus") for report in s.reports)
    shared = [f"{_ranks(ranks)} would use GPU {uuid[:8]} of {host}" for (host, uuid), ranks in users.items() if len(ranks) > 1]
    if shared:
        turns = "; DEEPEP_RT_SHARE_GPUS=1: they take turns" if allowed else ""
        yield _found("shared-gpu", "note" if allowed else "error", _some(shared) + turns)


def _users(s: Situation) -> dict[tuple[str, str], list[int]]:
    """The ranks of each GPU."""
    users: dict[tuple[str, str], list[int]] = {}
    for host, reports in s.hosts.items():
        for report in reports:
            if (gpu := gpu_of(report)) is not None:
                users.setdefault((host, gpu["uuid"]), []).append(report["rank"])
    return users


def _placement(s: Situation) -> Iterator[Finding]:
    held = {host: [report["rank"] for report in reports] for host, reports in s.hosts.items()}
    sizes = {len(ranks) for ranks in held.values()}
    gaps = any(ranks[-1] - ranks[0] != len(ranks) - 1 for ranks in held.values())
    node = s.sizes.get("ranks_per_node") or max(sizes)
    if s.uses_gpus and (len(sizes) > 1 or gaps or node > MAX_RANKS_PER_NODE):
        yield _found("uneven-hosts", "error", "; ".join(f"{host} holds ranks {ranges(ranks)}" for host, ranks in held.items()))


def _memory(s: Situation) -> Iterator[Finding]:
    try:
        need = layout.size_hint(s.config())["total"]
    except EPConfigError as error:
        yield _found("wrong-sizes", "error", str(error))
        return
    if s.backend == "host":
        return
    users = _users(s)
    for host, reports in s.hosts.items():
        short = []
        for uuid, free in {gpu["uuid"]: free_bytes(report, gpu["uuid"]) for report in reports for gpu in gpus(report)}.items():
            num_users = len(users.get((host, uuid), [])) if len(s.reports) > 1 else 1
            if free is not None and free < need * num_users:
                times = f"{num_users} times " if num_users > 1 else ""
                short.append(f"GPU {uuid[:8]} has {free / 1e9:.2f} GB free and is to hold {times}{need / 1e9:.2f} GB")
        if short:
            yield _found("not-enough-memory", "error", f"on {host}, {_some(short)}")


def _lost(s: Situation) -> Iterator[Finding]:
    for host, reports in s.hosts.items():
        if lost := fact(reports[0], "nvml", "lost"):
            yield _found("gpu-lost", "warning", f"on {host}, {_some(lost)}")


def _peers(s: Situation) -> Iterator[Finding]:
    """GPUs that ranks of a host use together, or, without other ranks, all that this process sees."""
    for host, reports in s.hosts.items():
        report, together = reports[0], len(reports) > 1
        pairs = _neighbours(s, reports)
        used = {uuid for pair in pairs for uuid in pair}
        apart, slow, unseen = [], [], []
        for a, b in pairs:
            path, access = path_between(report, a, b), _access(reports, a, b)
            if access is False:
                apart.append((a, b))
            elif access is None:
                unseen.append((a, b))
            if access is not False and path is not None and not path.startswith("NV"):
                slow.append((a, b, path))
        if apart:
            yield _found("no-peer-access", "error" if together else "warning", f"on {host} between GPUs {_pairs(apart)}")
        if unseen and s.backend != "host":
            yield _found("neighbours-hidden", "warning", f"on {host}, no rank sees both of GPUs {_pairs(unseen)}")
        if slow:
            yield _found("no-nvlink", "warning", f"on {host} between GPUs {_pairs(slow)}")
        links = [gpu for gpu in fact(report, "nvml", "gpus") or [] if gpu["uuid"] in used]
        models: dict[str, dict[str, int]] = {}
        for gpu in links:
            models.setdefault(gpu["name"], {})[gpu["uuid"][:8]] = gpu["nvlinks"]
        for name, numbers in models.items():
            if len(set(numbers.values())) > 1:
                most = max(numbers.values())
                fewer = ", ".join(f"{uuid} has {number}" for uuid, number in numbers.items() if number < most)
                yield _found("nvlink-uneven", "warning", f"on {host}, of {name}: {fewer} active NVLinks of {most}")


def _neighbours(s: Situation, reports: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """Pairs of GPUs between which rows are to travel directly."""
    if len(reports) == 1:
        return list(combinations([gpu["uuid"] for gpu in gpus(reports[0])], 2))
    node = s.sizes.get("ranks_per_node") or len(reports)
    groups: dict[int, list[str]] = {}
    for report in reports:
        if (gpu := gpu_of(report)) is not None:
            groups.setdefault(report["rank"] // node, []).append(gpu["uuid"])
    return [(a, b) for uuids in groups.values() for a, b in combinations(sorted(set(uuids)), 2)]


def _access(reports: Sequence[Mapping[str, Any]], a: str, b: str) -> bool | None:
    """What the driver says, in whichever process sees both GPUs."""
    for report in reports:
        at = {gpu["uuid"]: gpu["ordinal"] for gpu in gpus(report)}
        if a in at and b in at:
            return bool(fact(report, "driver", "access")[at[a]][at[b]])
    return None


def _pairs(pairs: Sequence[tuple[str, ...]]) -> str:
    return _some([f"{a[:8]} and {b[:8]}" + "".join(f" ({path})" for path in more) for a, b, *more in pairs])


def _some(parts: Sequence[str]) -> str:
    """The first few of a long list."""
    return ", ".join(parts[:_SHOWN]) + (f", and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else "")


def _several_hosts(s: Situation) -> Iterator[Finding]:
    if len(s.hosts) > 1 and s.uses_gpus:
        without = [host for host, reports in s.hosts.items() if not any(map(_is_up, fact(reports[0], "network", "nics") or []))]
        if without:
            yield _found("no-nic", "error", f"no usable NIC on {_some(without)}")


def _is_up(nic: Mapping[str, Any]) -> bool:
    return nic["usable"] and any(port["state"] == "ACTIVE" for port in nic["ports"])


def _ranks_differ(s: Situation) -> Iterator[Finding]:
    different = differences(s.reports)
    versions = [item for item in different if item in _VERSIONS or item.startswith("package ")]
    if versions:
        level = "error" if set(versions) & set(_MUST_AGREE) else "warning"
        yield _found("versions-differ", level, _who_has_what(different, versions))
    prefixes = ("DEEPEP_RT_", "NVSHMEM_", "CUDA_")
    variables = [item for item in different if item.startswith(prefixes) and item not in _OWN_VARIABLES]
    if variables:
        yield _found("environment-differs", "warning", _who_has_what(different, variables))
    for host, reports in s.hosts.items():
        folders = differences(reports).get(CACHE_FOLDER)
        if folders:
            yield _found("caches-differ", "warning", f"on {host}: {_who_has_what({CACHE_FOLDER: folders}, [CACHE_FOLDER])}")


def _who_has_what(different: Mapping[str, Mapping[str, list[int]]], items: Sequence[str]) -> str:
    def one(item: str) -> str:
        return f"{item} " + " and ".join(f"{value} on {_ranks(ranks)}" for value, ranks in different[item].items())

    return _some([one(item) for item in items])


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"


# --- rules about one rank ------------------------------------------------------------------------------------------------------------


def _mpi_library(s: Situation, report: Mapping[str, Any]) -> Iterator[Finding]:
    if error := fact(report, "mpi", "error"):
        yield _found("no-mpi4py", "error", error)


def _gpu(s: Situation, report: Mapping[str, Any]) -> Iterator[Finding]:
    if gpus(report) or "driver" not in report["facts"]:
        return
    init, library = fact(report, "driver", "init"), fact(report, "driver", "library")
    if init not in (None, "CUDA_SUCCESS", "CUDA_ERROR_NO_DEVICE"):
        yield _found("driver-fails", "note" if s.backend == "host" else "error", f"cuInit says {init} ({library})")
        return
    hiding = (fact(report, "settings", "variables") or {}).get("CUDA_VISIBLE_DEVICES")
    number = len(fact(report, "nvml", "gpus") or []) or fact(report, "machine", "pci_gpus")
    if number:
        why = f"CUDA_VISIBLE_DEVICES is {hiding!r}" if hiding is not None else "they were not passed to this container or job"
        why = fact(report, "driver", "error") or why
        level = {"cuda": "error", "auto": "warning", "host": "note"}[s.backend]
        yield _found("gpu-hidden", level, f"the machine has {number} GPUs and none is visible: {why}")
    else:
        what = fact(report, "driver", "error") or "the CUDA driver sees no GPU"
        yield _found("no-gpu", "error" if s.backend == "cuda" else "note", what)


def _needed(s: Situation) -> str:
    """How bad it is that the CUDA backend does not work."""
    return "error" if s.uses_gpus else "note"


def _driver_version(s: Situation, report: Mapping[str, Any]) -> Iterator[Finding]:
    serves, compiler = _number(fact(report, "driver", "cuda")), _number(fact(report, "nvrtc", "version"))
    if not serves or not compiler or not gpus(report):
        return
    arch = (fact(report, "settings", "variables") or {}).get("DEEPEP_RT_ARCH", "")
    # Of one major version, older drivers load newer machine code, but not newer PTX.
    if compiler[0] > serves[0] or (arch.startswith("compute_") and compiler > serves):
        ptx = f", and DEEPEP_RT_ARCH={arch} asks for PTX" if arch.startswith("compute_") else ""
        what = f"the driver serves CUDA {fact(report, 'driver', 'cuda')}, NVRTC is {fact(report, 'nvrtc', 'version')}{ptx}"
        yield _found("driver-too-old", _needed(s), what)


def _architecture(s: Situation, report: Mapping[str, Any]) -> Iterator[Finding]:
    known = fact(report, "nvrtc", "archs")
    for name, arch in sorted({(gpu["name"], gpu["arch"]) for gpu in gpus(report)}):
        if arch_number(arch) < arch_number(MIN_ARCH):
            yield _found("gpu-too-old", _needed(s), f"{name} is {arch}; expected {MIN_ARCH} or newer")
        elif known is not None and arch not in known:
            what = f"{name} is {arch}; NVRTC {fact(report, 'nvrtc', 'version')} knows {', '.join(known[-_SHOWN:])}"
            yield _found("compiler-too-old", _needed(s), what)


def _mig(s: Situation, report: Mapping[str, Any]) -> Iterator[Finding]:
    divided = {gpu["uuid"] for gpu in fact(report, "nvml", "gpus") or [] if gpu["mig"]}
    names = [gpu["name"] for gpu in gpus(report) if gpu["uuid"] in divided or " MIG " in gpu["name"]]
    if names:
        level = "error" if len(s.reports) > 1 and s.backend != "host" else "warning"
        yield _found("mig", level, f"MIG is on: {', '.join(sorted(set(names)))}")


def _packages(s: Situation, report: Mapping[str, Any]) -> Iterator[Finding]:
    failures = {probe: why.partition("; pip install")[0] for probe, why in report["failures"].items()}  # the remedy says it
    for probe, library in (("nvrtc", "NVRTC"), ("nvjitlink", "nvJitLink")):
        if probe in failures:
            yield _found("no-cuda-packages", _needed(s), f"{library}: {failures[probe]}")
    module, error = fact(report, "bindings", "module"), fact(report, "bindings", "error")
    nvshmem = {probe: failures[probe] for probe in ("nvshmem_host", "nvshmem_device") if probe in failures}
    if module and module != "nvshmem.bindings":
        yield _found("no-cuda-packages", _needed(s), f"{module}: {error}")
    elif module and not nvshmem:
        nvshmem["nvshmem4py"] = error
    if nvshmem:
        yield _found("no-nvshmem", _needed(s), "; ".join(dict.fromkeys(nvshmem.values())))


def _mixed_packages(s: Situation, report: Mapping[str, Any]) -> Iterator[Finding]:
    majors: dict[str, str] = {}
    for name, version in (fact(report, "python", "packages") or {}).items():
        if match := re.search(r"-(?:cu|cuda)(1\d)x?$", name):
            majors[f"{name} {version}"] = match[1]
        elif name == "cuda-bindings" or name.startswith("nvidia-"):
            majors[f"{name} {version}"] = version.partition(".")[0]
    numbers = Counter(majors.values())
    if len(numbers) > 1:
        most, _ = numbers.most_common(1)[0]
        others = [name for name, major in majors.items() if major != most]
        what = f"most are for CUDA {most}, but not {', '.join(others)}"
        yield _found("mixed-cuda-packages", "warning" if s.uses_gpus else "note", what)


def _nvshmem(s: Situation, report: Mapping[str, Any]) -> Iterator[Finding]:
    versions = {part: fact(report, f"nvshmem_{part}", "version") for part in ("host", "device")}
    for part, version in versions.items():
        number = _number(version)
        if number and number < _number(MIN_NVSHMEM):
            where = fact(report, f"nvshmem_{part}", "path")
            yield _found(
                "nvshmem-too-old", _needed(s), f"the {part} library is {version} ({where}); expected {MIN_NVSHMEM} or newer"
            )
    if all(map(_number, versions.values())) and versions["host"] != versions["device"]:
        parts = ", ".join(f"{part} {versions[part]} ({fact(report, f'nvshmem_{part}', 'path')})" for part in versions)
        yield _found("nvshmem-mismatch", _needed(s), parts)


def _network(s: Situation, report: Mapping[str, Any]) -> Iterator[Finding]:
    nics = fact(report, "network", "nics")
    if not nics or s.backend == "host" or not has_hardware(report):
        return
    level = "warning" if s.has_network else "note"
    down = [f"{nic['name']}:{port['port']} {port['state']}" for nic in nics for port in nic["ports"] if port["state"] != "ACTIVE"]
    if down:
        yield _found("nic-down", level, _some(down))
    if not fact(report, "network", "peermem") and not fact(report, "network", "open_driver"):
        yield _found("no-gpudirect", level, "nvidia-peermem is not loaded, and the driver's kernel modules are not the open ones")
    parameters = fact(report, "network", "driver_parameters") or {}
    if any(nic["name"].startswith("mlx") for nic in nics) and parameters:
        missing = [] if parameters.get("EnableStreamMemOPs") == "1" else ["EnableStreamMemOPs is not 1"]
        if "PeerMappingOverride=1" not in parameters.get("RegistryDwords", ""):
            missing.append("RegistryDwords has no PeerMappingOverride=1")
        if missing:
            yield _found("ibgda-parameters", level, f"in /proc/driver/nvidia/params, {' and '.join(missing)}")
    parts = {"the module gdrdrv": fact(report, "network", "gdrdrv"), "the library libgdrapi": fact(report, "network", "gdrapi")}
    if not all(parts.values()):
        yield _found("no-gdrcopy", level, f"missing: {', '.join(part for part, there in parts.items() if not there)}")
    locked = fact(report, "machine", "memlock_bytes")
    if locked is not None and locked < MIN_MEMLOCK_BYTES:
        yield _found("memlock", level, f"{locked / 1e6:.0f} MB may be locked")


def _settings(s: Situation, report: Mapping[str, Any]) -> Iterator[Finding]:
    for mistake in fact(report, "settings", "mistakes") or []:
        yield _found("wrong-setting", "error", mistake)
    if unknown := fact(report, "settings", "unknown"):
        yield _found("unknown-setting", "warning", ", ".join(unknown))


def _cache(s: Situation, report: Mapping[str, Any]) -> Iterator[Finding]:
    error, asserted = fact(report, "cache", "error"), fact(report, "settings", "assert_cached")
    if error:  # whoever asserts that all is in the cache may mean it to be read-only
        level = "note" if asserted else "error" if s.uses_gpus else "warning"
        yield _found("cache-not-writable", level, f"{fact(report, 'cache', 'folder')}: {error}")
    if corrupt := fact(report, "cache", "corrupt"):
        yield _found("cache-corrupt", "warning", _some(corrupt))


def _shared_memory(s: Situation, report: Mapping[str, Any]) -> Iterator[Finding]:
    free = fact(report, "machine", "shm_free_bytes")
    if free is not None and free < MIN_SHM_BYTES:
        yield _found("small-shm", "warning", f"/dev/shm has {free / 1e6:.0f} MB free")


_EXPLAINED = ("nvrtc", "nvjitlink", "nvshmem_host", "nvshmem_device")  # probes whose failures have findings of their own


def _failures(s: Situation, report: Mapping[str, Any]) -> Iterator[Finding]:
    for probe, why in report["failures"].items():
        if probe not in _EXPLAINED:
            yield _found("probe-failed", "warning", f"{probe}: {why}")


_RULES: tuple[Callable[[Situation], Iterator[Finding]], ...] = (
    _mpi_start,
    _launcher,
    _gpus_on_some_ranks,
    _shared_gpus,
    _placement,
    _memory,
    _lost,
    _peers,
    _several_hosts,
    _ranks_differ,
)
_RANK_RULES: tuple[Callable[[Situation, Mapping[str, Any]], Iterator[Finding]], ...] = (
    _mpi_library,
    _gpu,
    _driver_version,
    _architecture,
    _mig,
    _packages,
    _mixed_packages,
    _nvshmem,
    _network,
    _settings,
    _cache,
    _shared_memory,
    _failures,
)


def _found(kind: str, level: str, what: str) -> Finding:
    return Finding(KINDS[kind], level, what)


def _number(version: str | None) -> tuple[int, ...]:
    """A version as numbers to compare; empty if it is not known."""
    return tuple(int(part) for part in re.findall(r"\d+", version or "")[:3])
