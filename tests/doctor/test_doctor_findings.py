"""Doctor's rules, fed with made-up machines: each finding appears where it should, and a healthy machine has none."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from paths import ROOT

from deepep_rt.doctor.catalog import FINDING_TYPES, MIN_NVSHMEM
from deepep_rt.doctor.facts import JobReport, differences, first_few, format_ranges
from deepep_rt.doctor.findings import findings

SIZES = dict(num_max_tokens_per_rank=4096, hidden=7168, num_topk=8)


def report(rank: int = 0, *, ranks: int = 8, per_host: int = 8, num_gpus: int = 8) -> dict[str, Any]:
    """What a rank of a healthy 8-GPU host reports."""
    uuids = [f"{index}0000000-{rank // per_host}" for index in range(num_gpus)]
    links = [["-" if a == b else "NV18" for b in uuids] for a in uuids]
    nic = {
        "name": "mlx5_0",
        "type": "MT4129",
        "ports": [{"port": "1", "state": "ACTIVE", "rate": "", "link": ""}],
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
        "network": {"nics": [nic], "peermem": True, "open_driver": True, "gdrdrv": True, "gdrapi": True,
                    "driver_parameters": {"EnableStreamMemOPs": "1", "RegistryDwords": "PeerMappingOverride=1;"}},
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
    }


def machine(ranks: int = 8, *, per_host: int = 8, num_gpus: int = 8, **options: Any) -> JobReport:
    reports = [report(rank, ranks=ranks, per_host=per_host, num_gpus=num_gpus) for rank in range(ranks)]
    return JobReport(reports, **{"sizes": SIZES, **options})


def found(job: JobReport) -> dict[str, str]:
    return {finding.type.name: finding.level for finding in findings(job)}


@pytest.mark.parametrize("ranks", [1, 2, 8, 16])
@pytest.mark.parametrize("backend", ["auto", "cuda", "host"])
def test_a_healthy_machine_has_no_findings(ranks: int, backend: str) -> None:
    assert found(machine(ranks, backend=backend)) == {}


def _set(probe: str, **facts: Any) -> Callable[[JobReport], None]:
    """Change facts on every rank."""

    def change(job: JobReport) -> None:
        for one in job.reports:
            one["facts"][probe].update(copy.deepcopy(facts))

    return change


def _drop(probe: str, why: str = "RuntimeError: broken") -> Callable[[JobReport], None]:
    def change(job: JobReport) -> None:
        for one in job.reports:
            del one["facts"][probe]
            one["failures"][probe] = why

    return change


def _all(*changes: Callable[[JobReport], None]) -> Callable[[JobReport], None]:
    def change(job: JobReport) -> None:
        for one in changes:
            one(job)

    return change


def _gpus(**facts: Any) -> Callable[[JobReport], None]:
    def change(job: JobReport) -> None:
        for one in job.reports:
            for gpu in one["facts"]["driver"]["gpus"]:
                gpu.update(facts)

    return change


def _nvml(index: int | None = None, **facts: Any) -> Callable[[JobReport], None]:
    def change(job: JobReport) -> None:
        for one in job.reports:
            for number, gpu in enumerate(one["facts"]["nvml"]["gpus"]):
                if index in (None, number):
                    gpu.update(facts)

    return change


def _rank(rank: int, probe: str, **facts: Any) -> Callable[[JobReport], None]:
    return lambda job: job.reports[rank]["facts"][probe].update(facts)


def _access(a: int, b: int) -> Callable[[JobReport], None]:
    def change(job: JobReport) -> None:
        for one in job.reports:
            one["facts"]["driver"]["access"][a][b] = one["facts"]["driver"]["access"][b][a] = False

    return change


def _paths(path: str) -> Callable[[JobReport], None]:
    def change(job: JobReport) -> None:
        for one in job.reports:
            one["facts"]["nvml"]["paths"] = [["-" if i == j else path for j in range(8)] for i in range(8)]

    return change


def _alone(job: JobReport) -> None:
    """MPI of another kind: every process sees itself."""
    del job.reports[1:]


def _other_launch(size: int, local_rank: int | None) -> Callable[[JobReport], None]:
    def change(job: JobReport) -> None:
        for one in job.reports:
            one["other_launch"] = {"size": size, "local_rank": local_rank}

    return change


def _nic(**facts: Any) -> Callable[[JobReport], None]:
    return lambda job: [one["facts"]["network"]["nics"][0].update(facts) for one in job.reports]  # type: ignore[func-returns-value]


NONE = dict(gpus=[], access=[])
NO_DRIVER = _all(
    _set("driver", library=None, error="libcuda.so.1: no such file", init=None, **NONE), _set("nvml", gpus=[], paths=[])
)
DOWN = [{"port": "1", "state": "DOWN", "rate": "", "link": ""}]
ONE_PROCESS, TWO_HOSTS, NO_SHARING = dict(ranks=1), dict(ranks=16), dict(ranks=8, num_gpus=4)

# What is wrong, in which job, and which finding of which level that makes.
CASES: list[tuple[str, str, dict[str, Any], Callable[[JobReport], None], str]] = [
    ("no-mpi4py", "error", ONE_PROCESS, _set("mpi", error="ModuleNotFoundError: No module named 'mpi4py'", library=None), "mpi4py"),
    ("no-mpirun", "warning", ONE_PROCESS, _set("mpi", mpirun=None, mpirun_family=None), "no mpirun"),
    ("wrong-mpirun", "warning", ONE_PROCESS, _set("mpi", mpirun_family="MPICH", mpirun_version="5.0"), "is of MPICH 5.0"),
    ("wrong-mpirun", "error", dict(ranks=2), _alone, "started 2 processes"),
    ("wrong-mpirun", "error", dict(ranks=2, mpi_failure="unsupported PMI version"), _all(_alone, _set("mpi", family="MPICH")),
     "the launcher is of Open MPI"),
    ("other-launcher", "warning", ONE_PROCESS, _other_launch(2, 0), "WORLD_SIZE is 2, but to mpi4py's MPI (Open MPI v4.1.6"),
    ("other-launcher", "warning", ONE_PROCESS, _other_launch(2, None), "WORLD_SIZE is 2"),
    ("mpi-does-not-start", "error", dict(ranks=2, mpi_failure="no memory"), _alone, "no memory"),
    ("mpi-does-not-start", "error", dict(ranks=1, mpi_failure="its process was killed by SIGSEGV"), _all(), "SIGSEGV"),
    ("no-gpu", "note", ONE_PROCESS, _all(NO_DRIVER, _set("machine", pci_gpus=0)), "libcuda"),
    ("no-gpu", "error", dict(ranks=1, backend="cuda"), _all(NO_DRIVER, _set("machine", pci_gpus=0)), "libcuda"),
    ("gpu-hidden", "warning", ONE_PROCESS,
     _all(_set("driver", init="CUDA_ERROR_NO_DEVICE", **NONE), _set("settings", variables={"CUDA_VISIBLE_DEVICES": ""})),
     "CUDA_VISIBLE_DEVICES is ''"),
    ("gpu-hidden", "error", dict(ranks=8, backend="cuda"), _set("driver", init="CUDA_ERROR_NO_DEVICE", **NONE), "8 GPUs"),
    ("gpu-hidden", "note", dict(ranks=8, backend="host"), NO_DRIVER, "8 GPUs"),
    ("driver-fails", "error", dict(ranks=8), _set("driver", init="CUDA_ERROR_SYSTEM_NOT_READY", **NONE), "SYSTEM_NOT_READY"),
    ("driver-fails", "note", dict(ranks=8, backend="host"), _set("driver", init="CUDA_ERROR_UNKNOWN", **NONE), "UNKNOWN"),
    ("gpu-lost", "warning", ONE_PROCESS, _set("nvml", lost=["GPU 3: GPU is lost"]), "on host0, GPU 3"),
    ("driver-too-old", "error", ONE_PROCESS, _set("driver", cuda="12.8"), "serves CUDA 12.8, NVRTC is 13.1"),
    ("driver-too-old", "error", ONE_PROCESS,
     _all(_set("driver", cuda="13.0"), _set("settings", variables={"DEEPEP_RT_ARCH": "compute_80"})), "asks for PTX"),
    ("gpu-too-old", "error", ONE_PROCESS, _gpus(name="Tesla V100", arch="sm_70"), "V100 is sm_70"),
    ("compiler-too-old", "error", ONE_PROCESS, _gpus(name="B300", arch="sm_103"), "B300 is sm_103"),
    ("mig", "warning", ONE_PROCESS, _nvml(mig=True), "H200"),
    ("mig", "error", dict(ranks=2), _gpus(name="NVIDIA H200 MIG 1g.18gb"), "MIG 1g.18gb"),
    ("no-peer-access", "error", dict(ranks=8), _access(2, 5), "20000000 and 50000000"),
    ("no-peer-access", "warning", ONE_PROCESS, _access(2, 5), "20000000 and 50000000"),
    ("no-nvlink", "warning", dict(ranks=8), _paths("SYS"), "(SYS)"),
    ("nvlink-uneven", "warning", dict(ranks=8), _nvml(3, nvlinks=16), "30000000 has 16 active NVLinks of 18"),
    ("shared-gpu", "error", NO_SHARING, _all(), "ranks 0, 4 would use GPU"),
    ("shared-gpu", "note", NO_SHARING, _set("settings", share_gpus=True), "they take turns"),
    ("gpus-on-some-ranks", "error", dict(ranks=4), _rank(2, "driver", **NONE), "no GPU on ranks 2 of 4"),
    ("uneven-hosts", "error", dict(ranks=12, per_host=8), _all(), "host1 holds ranks 8 to 11"),
    ("uneven-hosts", "error", dict(ranks=4, per_host=4),
     lambda job: [one.update(group=one["rank"] % 2) for one in job.reports], "host0 (rank 0) holds ranks 0, 2"),  # type: ignore[func-returns-value]
    ("uneven-hosts", "error", dict(ranks=16, per_host=16, num_gpus=16), _all(), "0 to 15"),
    ("not-enough-memory", "error", dict(ranks=8), _nvml(6, free_bytes=10**9),
     "on host0, GPU 60000000 has 1.00 GB free and is to hold 1.56 GB"),
    ("not-enough-memory", "error", NO_SHARING, _nvml(free_bytes=2 * 10**9), "has 2.00 GB free and is to hold 2 times 1.56 GB"),
    ("not-enough-memory", "error", ONE_PROCESS, _nvml(6, free_bytes=10**9), "GPU 60000000"),
    ("wrong-sizes", "error", dict(ranks=1, num_ranks=3, sizes={**SIZES, "num_experts": 256}), _all(), "num_experts=256"),
    ("no-cuda-packages", "error", ONE_PROCESS, _drop("nvrtc"), "NVRTC: RuntimeError"),
    ("no-cuda-packages", "error", ONE_PROCESS, _drop("nvjitlink"), "nvJitLink: RuntimeError"),
    ("no-cuda-packages", "error", ONE_PROCESS, _set("bindings", module="cuda.core", error="ImportError: x"), "cuda.core: ImportError"),
    ("no-cuda-packages", "note", ONE_PROCESS, _all(NO_DRIVER, _drop("nvrtc")), "NVRTC"),
    ("mixed-cuda-packages", "warning", ONE_PROCESS,
     lambda job: job.reports[0]["facts"]["python"]["packages"].update({"cupy-cuda12x": "13.6"}), "not cupy-cuda12x 13.6"),
    ("mixed-cuda-packages", "warning", ONE_PROCESS,
     lambda job: job.reports[0]["facts"]["python"]["packages"].update({"cuda-bindings": "12.9.0"}), "not cuda-bindings 12.9.0"),
    ("no-nvshmem", "error", ONE_PROCESS, _drop("nvshmem_host"), "broken"),
    ("no-nvshmem", "error", ONE_PROCESS, _drop("nvshmem_device"), "broken"),
    ("no-nvshmem", "error", ONE_PROCESS, _set("bindings", module="nvshmem.bindings", error="ImportError: y"), "ImportError: y"),
    ("nvshmem-too-old", "error", ONE_PROCESS, _all(_set("nvshmem_host", version="3.3.9"), _set("nvshmem_device", version="3.3.9")),
     "host library is 3.3.9"),
    ("nvshmem-too-old", "error", ONE_PROCESS, _set("nvshmem_device", version="3.4.4"), "device library is 3.4.4"),
    ("nvshmem-mismatch", "error", ONE_PROCESS, _set("nvshmem_device", version="3.7.0"), "device 3.7.0"),
    ("no-nic", "error", TWO_HOSTS, _set("network", nics=[]), "host0, host1"),
    ("no-nic", "error", TWO_HOSTS, _nic(usable=False), "host0, host1"),
    ("nic-down", "warning", TWO_HOSTS, _set("network", nics=[
        {"name": "mlx5_0", "type": "", "usable": True, "ports": [{"port": "1", "state": "ACTIVE"}, {"port": "2", "state": "DOWN"}]}]),
     "mlx5_0:2 DOWN"),
    ("nic-down", "note", dict(ranks=8), _nic(ports=DOWN), "mlx5_0:1 DOWN"),
    ("no-gpudirect", "warning", TWO_HOSTS, _set("network", peermem=False, open_driver=False), "nvidia-peermem"),
    ("ibgda-parameters", "note", ONE_PROCESS, _set("network", driver_parameters={"EnableStreamMemOPs": "1", "RegistryDwords": ""}),
     "RegistryDwords has no"),
    ("ibgda-parameters", "warning", dict(ranks=8), _all(
        _set("network", driver_parameters={"EnableStreamMemOPs": "0", "RegistryDwords": "PeerMappingOverride=1;"}),
        _set("settings", variables={"NVSHMEM_IB_ENABLE_IBGDA": "1"})), "EnableStreamMemOPs is not 1"),
    ("no-gdrcopy", "warning", TWO_HOSTS, _set("network", gdrapi=False), "libgdrapi"),
    ("memlock", "warning", TWO_HOSTS, _set("machine", memlock_bytes=64 << 10), "0 MB"),
    ("wrong-setting", "error", ONE_PROCESS, _set("settings", mistakes=["DEEPEP_RT_TIMEOUT_S='abc'"]), "'abc'"),
    ("unknown-setting", "warning", ONE_PROCESS, _set("settings", unknown=["DEEPEP_RT_TIMEOUT"]), "DEEPEP_RT_TIMEOUT"),
    ("cache-not-writable", "error", ONE_PROCESS, _set("cache", error="Permission denied"), "Permission denied"),
    ("cache-not-writable", "warning", dict(ranks=1, backend="host"), _set("cache", error="Permission denied"), "denied"),
    ("cache-not-writable", "note", ONE_PROCESS, _all(_set("cache", error="x"), _set("settings", assert_cached=True)), "/cache"),
    ("cache-corrupt", "warning", ONE_PROCESS, _set("cache", corrupt=["sm_90/ab: wrong checksum"]), "wrong checksum"),
    ("small-shm", "warning", ONE_PROCESS, _set("machine", shm_free_bytes=64 << 20), "67 MB free"),
    ("versions-differ", "error", dict(ranks=4), _rank(3, "python", deepep_rt="0.0.9"), "0.0.9 on rank 3"),
    ("versions-differ", "error", dict(ranks=4), _rank(3, "nvshmem_host", version="3.9.0"), "3.9.0 on rank 3"),
    ("versions-differ", "error", dict(ranks=4), _rank(3, "nvshmem_device", version="3.9.0"), "3.9.0 on rank 3"),
    ("versions-differ", "warning", TWO_HOSTS, _all(*(_rank(r, "nvml", driver="570.1") for r in range(8, 16))), "ranks 8 to 15"),
    ("environment-differs", "warning", dict(ranks=2), _rank(1, "settings", variables={"NVSHMEM_IB_SL": "3"}), "3 on rank 1"),
    ("caches-differ", "warning", dict(ranks=2), _rank(1, "cache", folder="/other"), "/other on rank 1"),
    ("probe-failed", "warning", ONE_PROCESS, _drop("network", "did not end within 30 s"), "network: did not end"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "level", "options", "change", "text"), CASES, ids=[f"{c[0]}-{n}" for n, c in enumerate(CASES)])
def test_what_is_wrong_is_found(kind: str, level: str, options: dict, change: Callable[[JobReport], None], text: str) -> None:
    job = machine(**options)
    change(job)
    matching = [finding for finding in findings(job) if finding.type.name == kind]
    assert matching, found(job)
    assert {finding.level for finding in matching} == {level}
    assert any(text in finding.what for finding in matching), matching


# What is no fault, or is none with this backend, and what all that is said then.
QUIET: dict[str, tuple[dict[str, Any], Callable[[JobReport], None], dict[str, str]]] = {
    "one rank under mpirun": (ONE_PROCESS, lambda job: job.reports[0].update(launch={"launcher": "Open MPI", "rank": 0, "size": 1}), {}),  # type: ignore[attr-defined]
    "the wrong mpirun, of which mpi4py's MPI hears nothing": (
        dict(ranks=2, mpi_failure="unsupported PMI version"), _all(_alone, _set("mpi", family="MPICH")), {"wrong-mpirun": "error"}),
    "no GPU on a rank that needs none": (dict(ranks=4, backend="host"), _rank(2, "driver", **NONE), {"gpu-hidden": "note"}),
    "GPUs that nobody takes": (dict(NO_SHARING, backend="host"), _all(), {}),
    "full GPUs that nobody takes": (dict(ranks=8, backend="host"), _nvml(free_bytes=10**6), {}),
    "GPUs that nobody sees or takes": (dict(ranks=2, backend="host"), lambda job: _each_its_own(job), {}),
    "uneven hosts without GPUs": (dict(ranks=12, per_host=8, backend="host"), _all(), {}),
    "hosts without NICs that need none": (dict(TWO_HOSTS, backend="host"), _set("network", nics=[]), {}),
    "NICs that are down and not needed": (dict(ranks=8, backend="host"), _nic(ports=DOWN), {}),
    "NICs that are down beside no GPU": (
        ONE_PROCESS, _all(NO_DRIVER, _set("machine", pci_gpus=0), _nic(ports=DOWN)), {"no-gpu": "note"}),
    "NICs that are down where NVSHMEM is told to do without": (
        dict(ranks=8), _all(_nic(ports=DOWN), _set("settings", variables={"NVSHMEM_REMOTE_TRANSPORT": "none"})), {"nic-down": "note"}),
    "uneven hosts have no group": (dict(ranks=12, per_host=8), _all(), {"uneven-hosts": "error"}),
    "small groups on a large host": (
        dict(ranks=16, per_host=16, num_gpus=16, sizes={**SIZES, "num_max_tokens_per_rank": 128, "ranks_per_node": 8}), _all(), {}),
    "no path, whatever its kind": (dict(ranks=2), _all(_access(0, 1), _paths("SYS")), {"no-peer-access": "error"}),
    "fewer links of a GPU that nobody takes": (dict(ranks=2), _nvml(3, nvlinks=16), {}),
    "a cache on each host": (TWO_HOSTS, _all(*(_rank(r, "cache", folder="/other") for r in range(8, 16))), {}),
    "an older driver of the same major version": (ONE_PROCESS, _set("driver", cuda="13.0"), {}),
    "open kernel modules": (ONE_PROCESS, _set("network", peermem=False), {}),
    "parameters for other NICs": (ONE_PROCESS, _all(_nic(name="irdma0"), _set("network", driver_parameters={"A": "1"})), {}),
    "parameters that are not known": (ONE_PROCESS, _set("network", driver_parameters={}), {}),
    "an NVSHMEM whose version is not known": (ONE_PROCESS, _set("nvshmem_device", version="unknown"), {}),
    "a library that is missing is no probe that failed": (ONE_PROCESS, _drop("nvrtc"), {"no-cuda-packages": "error"}),
}  # fmt: skip


@pytest.mark.parametrize(("options", "change", "said"), QUIET.values(), ids=QUIET)
def test_nothing_is_found_where_nothing_is_wrong(
    options: dict, change: Callable[[JobReport], None], said: dict[str, str]
) -> None:
    job = machine(**options)
    change(job)
    assert found(job) == said


@pytest.mark.parametrize(("ranks", "size"), [(2, 2), (2, 4), (1, 1)])
def test_ranks_that_mpi_knows_have_no_other_launcher(ranks: int, size: int) -> None:
    """A program's WORLD_SIZE may well be set under mpirun, and be that of several jobs."""
    job = machine(ranks)
    _other_launch(size, 0)(job)
    assert found(job) == {}


def test_a_wrong_mpirun_is_said_once() -> None:
    job = machine(2)
    _all(_alone, _other_launch(2, 0))(job)
    assert found(job) == {"wrong-mpirun": "error"}


@pytest.mark.parametrize("kind", ["no-gpu", "gpu-hidden"])
def test_what_it_means_that_there_is_no_gpu_is_said_for_each_backend(kind: str) -> None:
    """The same text stands under a note and, with --backend cuda, under an error."""
    meaning = FINDING_TYPES[kind].meaning
    assert "With backend='auto'" in meaning
    assert re.search(r"[Ww]ith backend='cuda', making one raises EPUnavailableError", meaning)
    assert "if that is meant" not in FINDING_TYPES[kind].remedy


def test_patch_releases_of_nvrtc_are_no_newer_cuda() -> None:
    """A driver tells none."""
    job = machine(1)
    _all(_set("nvrtc", version="13.1.115"), _set("settings", variables={"DEEPEP_RT_ARCH": "compute_80"}))(job)
    assert found(job) == {}


def test_every_kind_has_a_case() -> None:
    assert {case[0] for case in CASES} | {"neighbours-hidden"} == set(FINDING_TYPES)


# A change that is not among the findings' kinds must leave nothing else behind: what follows from one fault is said once.
ALONE = {
    "no-gpu",
    "driver-fails",
    "driver-too-old",
    "gpu-too-old",
    "no-nvlink",
    "shared-gpu",
    "nvshmem-mismatch",
    "cache-corrupt",
    "no-mpirun",
    "other-launcher",
}


@pytest.mark.parametrize(("kind", "options", "change"), [(c[0], c[2], c[3]) for c in CASES if c[0] in ALONE])
def test_one_fault_makes_one_finding(kind: str, options: dict, change: Callable[[JobReport], None]) -> None:
    job = machine(**options)
    change(job)
    assert list(found(job)) == [kind]


@pytest.mark.parametrize("backend", ["auto", "cuda", "host"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_no_rule_needs_a_fact(ranks: int, backend: str) -> None:
    """Whatever probes failed, singly or all: no rule stumbles, and there is a screen."""
    pytest.importorskip("rich")
    from rich.console import Console

    from deepep_rt.doctor.report import as_json, is_broken, show

    probes = list(report()["facts"])
    for lost in [*([probe] for probe in probes), probes]:
        job = machine(ranks, backend=backend)
        for probe in lost:
            _drop(probe)(job)
        said = findings(job)
        assert not [finding.what for finding in said if finding.what.startswith("the rule ")]
        with (console := Console(width=150)).capture() as screen:
            show(job, said, console)
        assert ("Broken" if is_broken(said) else "Usable") in screen.get()
        json.dumps(as_json(job, said))


def test_facts_that_nobody_thought_of_are_no_end() -> None:
    job = machine(1)
    _set("nvrtc", archs=7)(job)
    (finding,) = findings(job)
    assert finding.type.name == "probe-failed"
    assert finding.what.startswith("the rule _architecture: TypeError: ")


def test_what_ranks_have_in_common_is_said_once_and_the_worst_comes_first() -> None:
    job = machine(8)
    _set("machine", shm_free_bytes=1)(job)
    for rank in (1, 2, 3, 6):
        _rank(rank, "settings", mistakes=["DEEPEP_RT_DEBUG='x'"])(job)
    first, second = findings(job)
    assert (first.type.name, first.ranks) == ("wrong-setting", (1, 2, 3, 6))
    assert (second.type.name, second.ranks) == ("small-shm", ())


def test_differences_name_every_value_and_its_ranks() -> None:
    job = machine(4)
    _rank(1, "settings", variables={"NVSHMEM_DEBUG": "INFO"})(job)
    _rank(3, "cache", folder="/other")(job)
    assert differences(job.reports) == {
        "NVSHMEM_DEBUG": {"(none)": [0, 2, 3], "INFO": [1]},
        "kernel cache": {"/cache": [0, 1, 2], "/other": [3]},
    }


def _each_its_own(job: JobReport) -> None:
    for rank, one in enumerate(job.reports):
        one["facts"]["settings"]["variables"] = {"CUDA_VISIBLE_DEVICES": str(rank)}
        one["facts"]["driver"].update(gpus=[{**one["facts"]["driver"]["gpus"][rank], "ordinal": 0}], access=[[True]])


def test_gpus_that_only_one_rank_sees() -> None:
    job = machine(2)
    _each_its_own(job)
    (finding,) = findings(job)
    assert (finding.type.name, finding.level) == ("neighbours-hidden", "warning"), (
        "and different variables are no finding of their own"
    )
    assert "00000000 and 10000000" in finding.what
    _paths("PIX")(job)  # NVML sees all of them
    assert set(found(job)) == {"neighbours-hidden", "no-nvlink"}


@pytest.mark.parametrize(("access", "level"), [(True, "note"), (None, "warning"), (False, "error")])
def test_gpus_that_nvml_sees_and_cuda_does_not(access: bool | None, level: str) -> None:
    """NVSHMEM asks NVML about them."""
    job = machine(2)
    _each_its_own(job)
    job.reports[1]["facts"]["nvml"]["access"] = [[True] * 8] * 8
    job.reports[0]["facts"]["nvml"]["access"] = [[True, access] + [True] * 6, [access] + [True] * 7]
    assert found(job) == {"neighbours-hidden": level}


def test_gpus_that_nvml_does_not_see_either() -> None:
    """Containers that hold a GPU each."""
    job = machine(2)
    _each_its_own(job)
    for rank, one in enumerate(job.reports):
        nvml = one["facts"]["nvml"]
        nvml.update(gpus=nvml["gpus"][rank : rank + 1], paths=[["-"]], access=[[True]])
    assert found(job)["neighbours-hidden"] == "error"


def test_groups_that_speak_through_nvshmem_need_no_path() -> None:
    job = machine(8, sizes={**SIZES, "ranks_per_node": 4})
    _access(3, 4)(job)
    assert found(job) == {}
    _access(4, 5)(job)
    assert found(job) == {"no-peer-access": "error"}


def test_memory_is_that_of_a_buffer_over_several_hosts() -> None:
    sizes = {**SIZES, "num_max_tokens_per_rank": 128, "low_latency": True}
    assert machine(16, sizes=sizes).config().ranks_per_node == 8
    assert machine(8, sizes=sizes).config().ranks_per_node is None
    assert machine(16, sizes={**sizes, "ranks_per_node": 2}).config().ranks_per_node == 2
    assert machine(16, sizes=sizes, num_ranks=32).config().ranks_per_node is None, "where those would be is not known"


def test_ranges() -> None:
    assert [format_ranges(numbers) for numbers in ([], [3], [0, 1], [0, 1, 2, 5], [7, 5, 6, 1])] == [
        "",
        "3",
        "0, 1",
        "0 to 2, 5",
        "1, 5 to 7",
    ]


def test_long_lists_are_cut() -> None:
    assert [first_few("abcdef"[:length]) for length in (0, 4, 6)] == ["", "a, b, c, d", "a, b, c, d, and 2 more"]


def test_the_oldest_nvshmem_is_the_one_that_is_asked_for() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    assert set(re.findall(r'"nvidia-nvshmem-cu1\d>=([\d.]+)"', text)) == {MIN_NVSHMEM}
