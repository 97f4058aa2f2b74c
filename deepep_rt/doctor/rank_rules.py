"""Define the rules about one rank: functions of the job and of this rank's report."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ..kernels.tuning import MIN_ARCH, arch_number
from .catalog import MIN_MEMLOCK_BYTES, MIN_NVSHMEM, MIN_SHM_BYTES
from .facts import SHOWN, Finding, JobReport, fact, first_few, gpus, has_hardware, numbers_of
from .memory_facts import NVSHMEM, provider_of


def _mpi_library(job: JobReport, report: Mapping[str, Any]) -> Iterator[Finding]:
    if error := fact(report, "mpi", "error"):
        yield Finding.of("no-mpi4py", "note" if report.get("no_mpi") else "error", error)  # ranks that met without it need none


def _gpu(job: JobReport, report: Mapping[str, Any]) -> Iterator[Finding]:
    if gpus(report) or "driver" not in report["facts"]:
        return
    init, library = fact(report, "driver", "init"), fact(report, "driver", "library")
    if init not in (None, "CUDA_SUCCESS", "CUDA_ERROR_NO_DEVICE"):
        yield Finding.of("driver-fails", "note" if job.backend == "host" else "error", f"cuInit says {init} ({library})")
        return
    hiding = (fact(report, "settings", "variables") or {}).get("CUDA_VISIBLE_DEVICES")
    number = len(fact(report, "nvml", "gpus") or []) or fact(report, "machine", "pci_gpus")
    if number:
        why = f"CUDA_VISIBLE_DEVICES is {hiding!r}" if hiding is not None else "they were not passed to this container or job"
        why = fact(report, "driver", "error") or why
        level = {"cuda": "error", "auto": "warning", "host": "note"}[job.backend]
        yield Finding.of("gpu-hidden", level, f"the machine has {number} GPUs and none is visible: {why}")
    else:
        what = fact(report, "driver", "error") or "the CUDA driver sees no GPU"
        yield Finding.of("no-gpu", "error" if job.backend == "cuda" else "note", what)


def _level_without_cuda(job: JobReport) -> str:
    """Return the level of a finding that stops the CUDA backend."""
    return "error" if job.uses_gpus else "note"


def _level_without_nvshmem(job: JobReport) -> str:
    """Return the level of a finding that stops Buffers with memory of NVSHMEM."""
    return _level_without_cuda(job) if provider_of(job) == NVSHMEM else "note"


def _driver_version(job: JobReport, report: Mapping[str, Any]) -> Iterator[Finding]:
    serves, compiler = (numbers_of(fact(report, *where))[:2] for where in (("driver", "cuda"), ("nvrtc", "version")))
    if not serves or not compiler or not gpus(report):
        return
    arch = (fact(report, "settings", "variables") or {}).get("DEEPEP_RT_ARCH", "")
    # Within a major version, an older driver loads newer machine code, but not newer PTX.
    if compiler[0] > serves[0] or (arch.startswith("compute_") and compiler > serves):
        ptx = f", and DEEPEP_RT_ARCH={arch} asks for PTX" if arch.startswith("compute_") else ""
        what = f"the driver serves CUDA {fact(report, 'driver', 'cuda')}, NVRTC is {fact(report, 'nvrtc', 'version')}{ptx}"
        yield Finding.of("driver-too-old", _level_without_cuda(job), what)


def _architecture(job: JobReport, report: Mapping[str, Any]) -> Iterator[Finding]:
    known = fact(report, "nvrtc", "archs")
    for name, arch in sorted({(gpu["name"], gpu["arch"]) for gpu in gpus(report)}):
        if arch_number(arch) < arch_number(MIN_ARCH):
            yield Finding.of("gpu-too-old", _level_without_cuda(job), f"{name} is {arch}; expected {MIN_ARCH} or newer")
        elif known is not None and arch not in known:
            what = f"{name} is {arch}; NVRTC {fact(report, 'nvrtc', 'version')} knows {', '.join(known[-SHOWN:])}"
            yield Finding.of("compiler-too-old", _level_without_cuda(job), what)


def _mig(job: JobReport, report: Mapping[str, Any]) -> Iterator[Finding]:
    divided = {gpu["uuid"] for gpu in fact(report, "nvml", "gpus") or [] if gpu["mig"]}
    names = [gpu["name"] for gpu in gpus(report) if gpu["uuid"] in divided or " MIG " in gpu["name"]]
    if names:
        level = "error" if len(job.reports) > 1 and job.backend != "host" else "warning"
        yield Finding.of("mig", level, f"MIG is on: {', '.join(sorted(set(names)))}")


def _packages(job: JobReport, report: Mapping[str, Any]) -> Iterator[Finding]:
    failures = {
        probe: why.partition(". Run pip install")[0] for probe, why in report["failures"].items()
    }  # the remedy has this command too
    for probe, library in (("nvrtc", "NVRTC"), ("nvjitlink", "nvJitLink")):
        if probe in failures:
            yield Finding.of("no-cuda-packages", _level_without_cuda(job), f"{library}: {failures[probe]}")
    module, error = fact(report, "bindings", "module"), fact(report, "bindings", "error")
    nvshmem = {probe: failures[probe] for probe in ("nvshmem_host", "nvshmem_device") if probe in failures}
    if module and module != "nvshmem.bindings":
        yield Finding.of("no-cuda-packages", _level_without_cuda(job), f"{module}: {error}")
    elif module and not nvshmem:
        nvshmem["nvshmem4py"] = error
    if nvshmem:
        yield Finding.of("no-nvshmem", _level_without_nvshmem(job), "; ".join(dict.fromkeys(nvshmem.values())))


def _mixed_packages(job: JobReport, report: Mapping[str, Any]) -> Iterator[Finding]:
    majors: dict[str, str] = {}
    for name, version in (fact(report, "python", "packages") or {}).items():
        if match := re.search(r"-(?:cu|cuda)(1\d)x?$", name):
            majors[f"{name} {version}"] = match[1]
        elif name == "cuda-bindings" or (name.startswith("nvidia-") and name != "nvidia-ml-py"):  # NVML serves every CUDA version
            majors[f"{name} {version}"] = version.partition(".")[0]
    numbers = Counter(majors.values())
    if len(numbers) > 1:
        most, _ = numbers.most_common(1)[0]
        others = [name for name, major in majors.items() if major != most]
        what = f"most are for CUDA {most}, but not {', '.join(others)}"
        yield Finding.of("mixed-cuda-packages", "warning" if job.uses_gpus else "note", what)


def _nvshmem(job: JobReport, report: Mapping[str, Any]) -> Iterator[Finding]:
    versions = {part: fact(report, f"nvshmem_{part}", "version") for part in ("host", "device")}
    for part, version in versions.items():
        number = numbers_of(version)
        if number and number < numbers_of(MIN_NVSHMEM):
            where = fact(report, f"nvshmem_{part}", "path")
            yield Finding.of(
                "nvshmem-too-old",
                _level_without_nvshmem(job),
                f"the {part} library is {version} ({where}); expected {MIN_NVSHMEM} or newer",
            )
    if all(map(numbers_of, versions.values())) and versions["host"] != versions["device"]:
        parts = ", ".join(f"{part} {versions[part]} ({fact(report, f'nvshmem_{part}', 'path')})" for part in versions)
        yield Finding.of("nvshmem-mismatch", _level_without_nvshmem(job), parts)


def _network(job: JobReport, report: Mapping[str, Any]) -> Iterator[Finding]:
    nics = fact(report, "network", "nics")
    if not nics or job.backend == "host" or not has_hardware(report):
        return
    level = "warning" if job.has_network and job.transport not in ("nixl", "mpi") else "note"  # relays need no NIC
    down = [f"{nic['name']}:{port['port']} {port['state']}" for nic in nics for port in nic["ports"] if port["state"] != "ACTIVE"]
    if down:
        yield Finding.of("nic-down", level, first_few(down))
    if not fact(report, "network", "peermem") and not fact(report, "network", "open_driver"):
        yield Finding.of(
            "no-gpudirect", level, "nvidia-peermem is not loaded, and the driver's kernel modules are not the open ones"
        )
    parameters = fact(report, "network", "driver_parameters") or {}
    if any(nic["name"].startswith("mlx") for nic in nics) and parameters:
        missing = [] if parameters.get("EnableStreamMemOPs") == "1" else ["EnableStreamMemOPs is not 1"]
        if "PeerMappingOverride=1" not in parameters.get("RegistryDwords", ""):
            missing.append("RegistryDwords has no PeerMappingOverride=1")
        if missing:
            yield Finding.of("ibgda-parameters", level, f"in /proc/driver/nvidia/params, {' and '.join(missing)}")
    parts = {"the module gdrdrv": fact(report, "network", "gdrdrv"), "the library libgdrapi": fact(report, "network", "gdrapi")}
    if not all(parts.values()):
        yield Finding.of("no-gdrcopy", level, f"missing: {', '.join(part for part, there in parts.items() if not there)}")
    locked = fact(report, "machine", "memlock_bytes")
    if locked is not None and locked < MIN_MEMLOCK_BYTES:
        yield Finding.of("memlock", level, f"{locked / 1e6:.0f} MB may be locked")


def _settings(job: JobReport, report: Mapping[str, Any]) -> Iterator[Finding]:
    for mistake in fact(report, "settings", "mistakes") or []:
        yield Finding.of("wrong-setting", "error", mistake)
    if unknown := fact(report, "settings", "unknown"):
        yield Finding.of("unknown-setting", "warning", ", ".join(unknown))


def _cache(job: JobReport, report: Mapping[str, Any]) -> Iterator[Finding]:
    error, asserted = fact(report, "cache", "error"), fact(report, "settings", "assert_cached")
    if error:  # a cache that is asserted to be complete may be read-only on purpose
        level = "note" if asserted else "error" if job.uses_gpus else "warning"
        yield Finding.of("cache-not-writable", level, f"{fact(report, 'cache', 'folder')}: {error}")
    if corrupt := fact(report, "cache", "corrupt"):
        yield Finding.of("cache-corrupt", "warning", first_few(corrupt))


def _shared_memory(job: JobReport, report: Mapping[str, Any]) -> Iterator[Finding]:
    free = fact(report, "machine", "shm_free_bytes")
    if free is not None and free < MIN_SHM_BYTES:
        yield Finding.of("small-shm", "warning", f"/dev/shm has {free / 1e6:.0f} MB free")


_EXPLAINED = ("nvrtc", "nvjitlink", "nvshmem_host", "nvshmem_device")  # their failures have other findings


def _failures(job: JobReport, report: Mapping[str, Any]) -> Iterator[Finding]:
    for probe, why in report["failures"].items():
        if probe not in _EXPLAINED:
            yield Finding.of("probe-failed", "warning", f"{probe}: {why}")


RANK_RULES: tuple[Callable[[JobReport, Mapping[str, Any]], Iterator[Finding]], ...] = (
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
