"""Apply doctor's rules to imaginary machines: each fault has its finding, and a healthy machine has none."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from doctor_machines import (
    SIZES,
    combined,
    fail_probe,
    hide_other_gpus,
    keep_one_rank,
    link,
    machine,
    measured,
    on_every_rank,
    remove_access,
    report,
    set_facts,
    set_facts_of_rank,
    set_gpus,
    set_nic,
    set_nvml,
    set_other_launch,
    set_paths,
    set_threads,
    set_without_mpi,
)
from paths import ROOT

from deepep_rt import _env
from deepep_rt.doctor.catalog import FINDING_TYPES, MIN_NVSHMEM
from deepep_rt.doctor.facts import JobReport, differences, first_few, format_ranges
from deepep_rt.doctor.report import findings


@pytest.fixture(autouse=True)
def usual_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let jobs that say nothing of their memory take that of NVSHMEM."""
    monkeypatch.setattr(_env, "DEFAULT_SYMMETRIC_MEMORY", "nvshmem")


def memory_is(setting: str) -> Callable[[JobReport], None]:
    return set_facts("settings", variables={"DEEPEP_RT_SYMMETRIC_MEMORY": setting})


def launched_by(launcher: str, survivors_end: str | None = None) -> Callable[[JobReport], None]:
    def change(one: dict[str, Any]) -> None:
        one["launch"]["launcher"] = launcher
        one["facts"]["mpi"].update(family="MPICH", survivors_end=survivors_end)

    return combined(memory_is("heap"), on_every_rank(change))


def store_answers(error: str) -> Callable[[JobReport], None]:
    return on_every_rank(lambda one: one.update(store={"place": "10.0.0.1:29600", "error": error}))


def found(job: JobReport) -> dict[str, str]:
    return {finding.type.name: finding.level for finding in findings(job)}


@pytest.mark.parametrize("ranks", [1, 2, 8, 16])
@pytest.mark.parametrize("backend", ["auto", "cuda", "host"])
def test_a_healthy_machine_has_no_findings(ranks: int, backend: str) -> None:
    assert found(machine(ranks, backend=backend)) == {}


def hide_gpus_but_from_nvml(access: bool | None) -> Callable[[JobReport], None]:
    """Hide all GPUs but one from the driver of each rank. `access`: what NVML on rank 0 says of the first two."""

    def change(job: JobReport) -> None:
        hide_other_gpus(job)
        job.reports[1]["facts"]["nvml"]["access"] = [[True] * 8] * 8
        job.reports[0]["facts"]["nvml"]["access"] = [[True, access] + [True] * 6, [access] + [True] * 7]

    return change


def give_each_rank_a_container(job: JobReport) -> None:
    """Hide all GPUs but one, from NVML too."""
    hide_other_gpus(job)
    for rank, one in enumerate(job.reports):
        nvml = one["facts"]["nvml"]
        nvml.update(gpus=nvml["gpus"][rank : rank + 1], paths=[["-"]], access=[[True]])


NONE = dict(gpus=[], access=[])
NO_DRIVER = combined(
    set_facts("driver", library=None, error="libcuda.so.1: no such file", init=None, **NONE), set_facts("nvml", gpus=[], paths=[])
)
DOWN = [{"port": "1", "state": "DOWN", "rate": "", "link": ""}]
ONE_PROCESS, TWO_HOSTS, NO_SHARING = dict(ranks=1), dict(ranks=16), dict(ranks=8, num_gpus=4)
SLOTS = dict(ranks=8, max_ranks=8)
GROUPS_OF_4 = dict(ranks=8, sizes={**SIZES, "ranks_per_node": 4})

# Type, level, machine, fault and text of each finding.
CASES: list[tuple[str, str, dict[str, Any], Callable[[JobReport], None], str]] = [
    ("no-mpi4py", "error", ONE_PROCESS, set_facts("mpi", error="ModuleNotFoundError: No module named 'mpi4py'", library=None), "mpi4py"),
    ("no-mpi4py", "note", TWO_HOSTS, combined(set_facts("mpi", error="No module", library=None), set_without_mpi), "No module"),
    ("no-mpirun", "warning", ONE_PROCESS, set_facts("mpi", mpirun=None, mpirun_family=None), "no mpirun"),
    ("wrong-mpirun", "warning", ONE_PROCESS, set_facts("mpi", mpirun_family="MPICH", mpirun_version="5.0"), "is of MPICH 5.0"),
    ("wrong-mpirun", "error", dict(ranks=2), keep_one_rank, "started 2 processes"),
    ("wrong-mpirun", "error", dict(ranks=2, mpi_failure="unsupported PMI version"),
     combined(keep_one_rank, set_facts("mpi", family="MPICH")),
     "the launcher is of Open MPI"),
    ("other-launcher", "warning", ONE_PROCESS, set_other_launch(2, 0), "WORLD_SIZE is 2, but to mpi4py's MPI (Open MPI v4.1.6"),
    ("other-launcher", "warning", ONE_PROCESS, set_other_launch(2, None), "WORLD_SIZE is 2"),
    ("mpi-does-not-start", "error", dict(ranks=2, mpi_failure="no memory"), keep_one_rank, "no memory"),
    ("mpi-does-not-start", "error", dict(ranks=1, mpi_failure="its process was killed by SIGSEGV"), combined(), "SIGSEGV"),
    ("no-gpu", "note", ONE_PROCESS, combined(NO_DRIVER, set_facts("machine", pci_gpus=0)), "libcuda"),
    ("no-gpu", "error", dict(ranks=1, backend="cuda"), combined(NO_DRIVER, set_facts("machine", pci_gpus=0)), "libcuda"),
    ("gpu-hidden", "warning", ONE_PROCESS,
     combined(set_facts("driver", init="CUDA_ERROR_NO_DEVICE", **NONE), set_facts("settings", variables={"CUDA_VISIBLE_DEVICES": ""})),
     "CUDA_VISIBLE_DEVICES is ''"),
    ("gpu-hidden", "error", dict(ranks=8, backend="cuda"), set_facts("driver", init="CUDA_ERROR_NO_DEVICE", **NONE), "8 GPUs"),
    ("gpu-hidden", "note", dict(ranks=8, backend="host"), NO_DRIVER, "8 GPUs"),
    ("driver-fails", "error", dict(ranks=8), set_facts("driver", init="CUDA_ERROR_SYSTEM_NOT_READY", **NONE), "SYSTEM_NOT_READY"),
    ("driver-fails", "note", dict(ranks=8, backend="host"), set_facts("driver", init="CUDA_ERROR_UNKNOWN", **NONE), "UNKNOWN"),
    ("gpu-lost", "warning", ONE_PROCESS, set_facts("nvml", lost=["GPU 3: GPU is lost"]), "on host0, GPU 3"),
    ("driver-too-old", "error", ONE_PROCESS, set_facts("driver", cuda="12.8"), "serves CUDA 12.8, NVRTC is 13.1"),
    ("driver-too-old", "error", ONE_PROCESS,
     combined(set_facts("driver", cuda="13.0"), set_facts("settings", variables={"DEEPEP_RT_ARCH": "compute_80"})), "asks for PTX"),
    ("gpu-too-old", "error", ONE_PROCESS, set_gpus(name="Tesla V100", arch="sm_70"), "V100 is sm_70"),
    ("compiler-too-old", "error", ONE_PROCESS, set_gpus(name="B300", arch="sm_103"), "B300 is sm_103"),
    ("mig", "warning", ONE_PROCESS, set_nvml(mig=True), "H200"),
    ("mig", "error", dict(ranks=2), set_gpus(name="NVIDIA H200 MIG 1g.18gb"), "MIG 1g.18gb"),
    ("no-peer-access", "error", dict(ranks=8), remove_access(2, 5), "20000000 and 50000000"),
    ("no-peer-access", "warning", ONE_PROCESS, remove_access(2, 5), "20000000 and 50000000"),
    ("neighbours-hidden", "warning", dict(ranks=2), hide_other_gpus, "00000000 and 10000000"),
    ("neighbours-hidden", "error", dict(ranks=2), give_each_rank_a_container, "00000000 and 10000000"),
    ("no-virtual-memory", "error", dict(ranks=2),
     combined(memory_is("heap"), set_facts("driver", not_shared="EPERM")), "EPERM on ranks 0, 1"),
    ("no-virtual-memory", "warning", dict(ranks=2),
     combined(memory_is("auto"), set_facts_of_rank(1, "driver", not_shared="EPERM")), "EPERM on rank 1"),
    ("no-nvlink", "warning", dict(ranks=8), set_paths("SYS"), "(SYS)"),
    ("nvlink-uneven", "warning", dict(ranks=8), set_nvml(3, nvlinks=16), "30000000 has 16 active NVLinks of 18"),
    ("shared-gpu", "error", NO_SHARING, combined(), "ranks 0, 4 would use GPU"),
    ("shared-gpu", "note", NO_SHARING, set_facts("settings", share_gpus=True), "they take turns"),
    ("gpus-on-some-ranks", "error", dict(ranks=4), set_facts_of_rank(2, "driver", **NONE), "no GPU on ranks 2 of 4"),
    ("uneven-hosts", "error", dict(ranks=12, per_host=8), combined(), "host1 holds ranks 8 to 11"),
    ("uneven-hosts", "error", dict(ranks=4, per_host=4),
     on_every_rank(lambda one: one.update(group=one["rank"] % 2)), "host0 (rank 0) holds ranks 0, 2"),
    ("uneven-hosts", "error", dict(ranks=16, per_host=16, num_gpus=16), combined(), "0 to 15"),
    ("not-enough-memory", "error", dict(ranks=8), set_nvml(6, free_bytes=10**9),
     "on host0, GPU 60000000 has 1.00 GB free and is to hold 1.56 GB"),
    ("not-enough-memory", "error", NO_SHARING, set_nvml(free_bytes=2 * 10**9), "has 2.00 GB free and is to hold 2 times 1.56 GB"),
    ("not-enough-memory", "error", ONE_PROCESS, set_nvml(6, free_bytes=10**9), "GPU 60000000"),
    ("wrong-sizes", "error", dict(ranks=1, num_ranks=3, sizes={**SIZES, "num_experts": 256}), combined(), "num_experts=256"),
    ("no-cuda-packages", "error", ONE_PROCESS, fail_probe("nvrtc"), "NVRTC: RuntimeError"),
    ("no-cuda-packages", "error", ONE_PROCESS, fail_probe("nvjitlink"), "nvJitLink: RuntimeError"),
    ("no-cuda-packages", "error", ONE_PROCESS, set_facts("bindings", module="cuda.core", error="ImportError: x"), "cuda.core: ImportError"),
    ("no-cuda-packages", "note", ONE_PROCESS, combined(NO_DRIVER, fail_probe("nvrtc")), "NVRTC"),
    ("mixed-cuda-packages", "warning", ONE_PROCESS,
     lambda job: job.reports[0]["facts"]["python"]["packages"].update({"cupy-cuda12x": "13.6"}), "not cupy-cuda12x 13.6"),
    ("mixed-cuda-packages", "warning", ONE_PROCESS,
     lambda job: job.reports[0]["facts"]["python"]["packages"].update({"cuda-bindings": "12.9.0"}), "not cuda-bindings 12.9.0"),
    ("no-nvshmem", "error", ONE_PROCESS, fail_probe("nvshmem_host"), "broken"),
    ("no-nvshmem", "error", ONE_PROCESS, fail_probe("nvshmem_device"), "broken"),
    ("no-nvshmem", "error", ONE_PROCESS, set_facts("bindings", module="nvshmem.bindings", error="ImportError: y"), "ImportError: y"),
    ("nvshmem-too-old", "error", ONE_PROCESS,
     combined(set_facts("nvshmem_host", version="3.3.9"), set_facts("nvshmem_device", version="3.3.9")),
     "host library is 3.3.9"),
    ("nvshmem-too-old", "error", ONE_PROCESS, set_facts("nvshmem_device", version="3.4.4"), "device library is 3.4.4"),
    ("nvshmem-mismatch", "error", ONE_PROCESS, set_facts("nvshmem_device", version="3.7.0"), "device 3.7.0"),
    ("no-transport", "error", dict(ranks=16, transport="nvshmem"), set_facts("network", nics=[]), "rank 0 on host0 has no RDMA NIC"),
    ("no-transport", "error", dict(ranks=16, transport="mpi"), set_threads("serialized"), "host0 has an MPI that allows no calls"),
    ("no-transport", "error", TWO_HOSTS,
     combined(set_threads("single"), set_facts("network", nics=[]), set_facts("nixl", error="no NIXL (x)")), "no transport can work"),
    ("no-transport", "error", dict(ranks=16, transport="nixl"), set_facts("nixl", error="no NIXL (x)"), "host0 has no NIXL (x)"),
    ("no-nic", "warning", TWO_HOSTS, set_facts("network", nics=[]), "host0 has no RDMA NIC, host1 has no RDMA NIC. The relay over NIXL"),
    ("no-nic", "warning", TWO_HOSTS,
     combined(set_facts("network", nics=[]), set_facts("nixl", error="no NIXL (x)")), "The relay over MPI"),
    ("no-nic", "warning", TWO_HOSTS, set_nic(usable=False), "host1 has NICs that this user may not open in /dev/infiniband (mlx5_0)"),
    ("no-nic", "warning", TWO_HOSTS, set_nic(name="rdmap0s6"), "host0 has EFA NICs only"),
    ("no-nic", "error", dict(ranks=16, transport="nvshmem"), set_nic(ports=DOWN), "host0 has NICs without an active port"),
    ("no-mpi-threads", "note", TWO_HOSTS, set_threads("funneled"), "the level funneled"),
    ("nic-down", "warning", TWO_HOSTS, set_facts("network", nics=[
        {"name": "mlx5_0", "type": "", "usable": True, "ports": [{"port": "1", "state": "ACTIVE"}, {"port": "2", "state": "DOWN"}]}]),
     "mlx5_0:2 DOWN"),
    ("nic-down", "note", dict(ranks=8), set_nic(ports=DOWN), "mlx5_0:1 DOWN"),
    ("no-gpudirect", "warning", TWO_HOSTS, set_facts("network", peermem=False, open_driver=False), "nvidia-peermem"),
    ("ibgda-parameters", "note", ONE_PROCESS, set_facts("network", driver_parameters={"EnableStreamMemOPs": "1", "RegistryDwords": ""}),
     "RegistryDwords has no"),
    ("ibgda-parameters", "warning", dict(ranks=8), combined(
        set_facts("network", driver_parameters={"EnableStreamMemOPs": "0", "RegistryDwords": "PeerMappingOverride=1;"}),
        set_facts("settings", variables={"NVSHMEM_IB_ENABLE_IBGDA": "1"})), "EnableStreamMemOPs is not 1"),
    ("no-gdrcopy", "warning", TWO_HOSTS, set_facts("network", gdrapi=False), "libgdrapi"),
    ("memlock", "warning", TWO_HOSTS, set_facts("machine", memlock_bytes=64 << 10), "0 MB"),
    ("own-name-is-local", "warning", TWO_HOSTS, set_facts("network", own_addresses=["127.0.1.1", "::1"]), "host0 (127.0.1.1, ::1), host1"),
    ("different-subnets", "note", TWO_HOSTS,
     lambda job: [one["facts"]["network"]["interfaces"][0].update(address="10.9.0.2/16") for one in job.reports[8:]],  # type: ignore[func-returns-value]
     "host0 has 10.0.0.0/24; host1 has 10.9.0.0/16"),
    ("network-stuck", "error", dict(ranks=16, network={"failure": "did not end within 180 s, in this part: far, rank 0 with rank 8"}),
     combined(), "rank 0 with rank 8"),
    ("relay-not-measured", "warning", dict(ranks=16, network=measured(relay={"reason": "rank 3: no agent"})), combined(), "no agent"),
    ("gpus-not-measured", "warning", dict(ranks=16, network=measured(gpus={"reason": "rank 3: no memory"})), combined(),
     "rank 3: no memory"),
    ("slow-network", "warning", dict(ranks=16, network=measured(link("far", 0, 8, 2.0))), combined(),
     "far, MPI: 2 GB/s; expected 45 GB/s, below 4 us (InfiniBand NDR"),
    ("slow-network", "warning", dict(ranks=16, network=measured(link("far", 0, 8, 0.1))),
     combined(set_facts("network", nics=[])), "expected 3.12 GB/s, below 60 us (Ethernet, 100 Gb/s, TCP"),
    ("slow-network", "warning", dict(ranks=8, network=measured(link("near", 0, 1, 0.5), ranks=8)), combined(), "near, MPI: 0.5 GB/s"),
    ("slow-network", "warning", dict(ranks=8, network=measured(ranks=8, gpus={"near": {"0": 90.0}})), combined(), "near, GPU: 90 GB/s"),
    ("slow-network", "warning", dict(ranks=16, network=measured(gpus={"far": {"gb_s": 3.0, "transport": "mpi"}})), combined(),
     "far, GPU over mpi: 3 GB/s; expected 45 GB/s"),
    ("slow-pair", "warning",
     dict(ranks=24, network=measured(link("far", 0, 8, 44), link("far", 8, 16, 44), link("far", 16, 0, 20), ranks=24)),
     combined(), "far, MPI: ranks 16 and 0 reach 20 GB/s, the median is 44"),
    ("slow-pair", "warning", dict(ranks=24, network=measured(ranks=24, gpus={"near": {"0": 330, "1": 335, "2": 120}})), combined(),
     "near, GPU: node 2 reaches 120 GB/s"),
    ("no-slots", "error", dict(TWO_HOSTS, backend="host", max_ranks=16), combined(), "the ranks are on 2 hosts"),
    ("no-slots", "error", dict(GROUPS_OF_4, max_ranks=8), memory_is("heap"), "nodes of 4 ranks are declared"),
    ("no-slots", "error", dict(ranks=8, max_ranks=4), memory_is("heap"), "there are 8 ranks for 4 slots"),
    ("no-slots", "error", dict(ranks=8, max_ranks=16), memory_is("heap"), "NVLink connects 8 ranks, and there are 16 slots"),
    ("no-slots", "error", SLOTS, memory_is("nvshmem"), "DEEPEP_RT_SYMMETRIC_MEMORY=nvshmem"),
    ("no-slots", "error", SLOTS,
     combined(memory_is("auto"), set_facts_of_rank(1, "driver", not_shared="EPERM")), "no virtual memory (rank 1: EPERM)"),
    ("store-unreachable", "error", dict(ranks=1, max_ranks=8), combined(memory_is("heap"), store_answers("refused")), "refused"),
    ("store-unreachable", "error", SLOTS, combined(launched_by("MPICH", ""), store_answers("refused")), "ranks 0 to 7: refused"),
    ("survivors-end", "warning", SLOTS, memory_is("heap"), "Open MPI started the ranks"),
    ("survivors-end", "note", SLOTS,
     combined(memory_is("heap"), set_facts("mpi", library="Open MPI v5.0.3")), "what Open MPI v5.0.3 does was not tried"),
    ("survivors-end", "warning", SLOTS, launched_by("MPICH", "runs without it"), "mpirun runs without it"),
    ("survivors-end", "note", SLOTS, launched_by("MPICH"), "cannot be seen"),
    ("survivors-end", "note", SLOTS, launched_by("Slurm"), "--kill-on-bad-exit=0"),
    ("survivors-end", "warning", dict(ranks=1, max_ranks=8), combined(memory_is("heap"), set_other_launch(2, 0)), "torchrun started"),
    ("wrong-setting", "error", ONE_PROCESS, set_facts("settings", mistakes=["DEEPEP_RT_TIMEOUT_S='abc'"]), "'abc'"),
    ("unknown-setting", "warning", ONE_PROCESS, set_facts("settings", unknown=["DEEPEP_RT_TIMEOUT"]), "DEEPEP_RT_TIMEOUT"),
    ("cache-not-writable", "error", ONE_PROCESS, set_facts("cache", error="Permission denied"), "Permission denied"),
    ("cache-not-writable", "warning", dict(ranks=1, backend="host"), set_facts("cache", error="Permission denied"), "denied"),
    ("cache-not-writable", "note", ONE_PROCESS,
     combined(set_facts("cache", error="x"), set_facts("settings", assert_cached=True)), "/cache"),
    ("cache-corrupt", "warning", ONE_PROCESS, set_facts("cache", corrupt=["sm_90/ab: wrong checksum"]), "wrong checksum"),
    ("small-shm", "warning", ONE_PROCESS, set_facts("machine", shm_free_bytes=64 << 20), "67 MB free"),
    ("versions-differ", "error", dict(ranks=4), set_facts_of_rank(3, "python", deepep_rt="0.0.9"), "0.0.9 on rank 3"),
    ("versions-differ", "error", dict(ranks=4), set_facts_of_rank(3, "nvshmem_host", version="3.9.0"), "3.9.0 on rank 3"),
    ("versions-differ", "error", dict(ranks=4), set_facts_of_rank(3, "nvshmem_device", version="3.9.0"), "3.9.0 on rank 3"),
    ("versions-differ", "warning", TWO_HOSTS,
     combined(*(set_facts_of_rank(r, "nvml", driver="570.1") for r in range(8, 16))), "ranks 8 to 15"),
    ("environment-differs", "warning", dict(ranks=2), set_facts_of_rank(1, "settings", variables={"NVSHMEM_IB_SL": "3"}), "3 on rank 1"),
    ("caches-differ", "warning", dict(ranks=2), set_facts_of_rank(1, "cache", folder="/other"), "/other on rank 1"),
    ("probe-failed", "warning", ONE_PROCESS, fail_probe("network", "did not end within 30 s"), "network: did not end"),
]  # fmt: skip


ALONE = {
    "no-gpu", "driver-fails", "driver-too-old", "gpu-too-old", "no-nvlink", "shared-gpu", "nvshmem-mismatch", "cache-corrupt",
    "no-mpirun", "other-launcher", "store-unreachable",
}  # fmt: skip
"""Faults that make no other findings."""


@pytest.mark.parametrize(("kind", "level", "options", "change", "text"), CASES, ids=[f"{c[0]}-{n}" for n, c in enumerate(CASES)])
def test_faults_are_found(kind: str, level: str, options: dict, change: Callable[[JobReport], None], text: str) -> None:
    job = machine(**options)
    change(job)
    matching = [finding for finding in findings(job) if finding.type.name == kind]
    assert matching, found(job)
    assert {finding.level for finding in matching} == {level}
    assert any(text in finding.what for finding in matching), matching
    assert kind not in ALONE or list(found(job)) == [kind]


# States that are no fault, or none with this backend, and all findings.
QUIET: dict[str, tuple[dict[str, Any], Callable[[JobReport], None], dict[str, str]]] = {
    "ranks that may come and go": (SLOTS, combined(launched_by("MPICH", ""), store_answers("")), {}),
    "slots that no launcher fills": (dict(ranks=1, max_ranks=8), memory_is("heap"), {}),
    "slots on the host backend": (dict(SLOTS, backend="host"), combined(launched_by("MPICH", ""), memory_is("nvshmem")), {}),
    "one rank under mpirun": (ONE_PROCESS, lambda job: job.reports[0].update(launch={"launcher": "Open MPI", "rank": 0, "size": 1}), {}),  # type: ignore[attr-defined]
    "the wrong mpirun, which mpi4py's MPI does not know": (
        dict(ranks=2, mpi_failure="unsupported PMI version"),
        combined(keep_one_rank, set_facts("mpi", family="MPICH")), {"wrong-mpirun": "error"}),
    "no GPU on a rank that needs none": (dict(ranks=4, backend="host"), set_facts_of_rank(2, "driver", **NONE), {"gpu-hidden": "note"}),
    "GPUs that no rank takes": (dict(NO_SHARING, backend="host"), combined(), {}),
    "full GPUs that no rank takes": (dict(ranks=8, backend="host"), set_nvml(free_bytes=10**6), {}),
    "GPUs that no rank sees or takes": (dict(ranks=2, backend="host"), lambda job: hide_other_gpus(job), {}),
    "uneven hosts without GPUs": (dict(ranks=12, per_host=8, backend="host"), combined(), {}),
    "hosts without NICs that need none": (dict(TWO_HOSTS, backend="host"), set_facts("network", nics=[]), {}),
    "NICs that are down and not needed": (dict(ranks=8, backend="host"), set_nic(ports=DOWN), {}),
    "NICs that are down on a machine without a GPU": (
        ONE_PROCESS, combined(NO_DRIVER, set_facts("machine", pci_gpus=0), set_nic(ports=DOWN)), {"no-gpu": "note"}),
    "NICs that are down where NVSHMEM is told to do without": (
        dict(ranks=8),
        combined(set_nic(ports=DOWN), set_facts("settings", variables={"NVSHMEM_REMOTE_TRANSPORT": "none"})), {"nic-down": "note"}),
    "uneven hosts have no group": (dict(ranks=12, per_host=8), combined(), {"uneven-hosts": "error"}),
    "small groups on a large host": (
        dict(ranks=16, per_host=16, num_gpus=16, sizes={**SIZES, "num_max_tokens_per_rank": 128, "ranks_per_node": 8}), combined(), {}),
    "no path of any type": (dict(ranks=2), combined(remove_access(0, 1), set_paths("SYS")), {"no-peer-access": "error"}),
    "fewer links of a GPU that no rank takes": (dict(ranks=2), set_nvml(3, nvlinks=16), {}),
    "a cache on each host": (TWO_HOSTS, combined(*(set_facts_of_rank(r, "cache", folder="/other") for r in range(8, 16))), {}),
    "an older driver of the same major version": (ONE_PROCESS, set_facts("driver", cuda="13.0"), {}),
    "open kernel modules": (ONE_PROCESS, set_facts("network", peermem=False), {}),
    "parameters for other NICs": (ONE_PROCESS, combined(set_nic(name="irdma0"), set_facts("network", driver_parameters={"A": "1"})), {}),
    "parameters that are not known": (ONE_PROCESS, set_facts("network", driver_parameters={}), {}),
    "a name of its own on one host": (dict(ranks=8), set_facts("network", own_addresses=["127.0.0.1"]), {}),
    "a host with an address of each network": (
        TWO_HOSTS, on_every_rank(lambda one: one["facts"]["network"]["interfaces"].append(
            {"name": "ib0", "address": "10.9.0.2/16", "speed_mbit": None})), {}),
    "rates as expected": (
        dict(ranks=16, network=measured(link("near", 0, 1, 5), link("far", 0, 8, 40), gpus={"near": {"0": 330, "1": 335}})),
        combined(), {}),
    "rates of links that are not known": (
        dict(ranks=16, network=measured(link("far", 0, 8, 0.01))), set_facts("network", nics=[], interfaces=[]), {"no-nic": "warning"}),
    "the relay needs no NIC": (dict(ranks=16, transport="mpi"), set_facts("network", nics=[]), {}),
    "the relay needs no GPUDirect": (
        dict(ranks=16, transport="mpi"), set_facts("network", peermem=False, open_driver=False), {"no-gpudirect": "note"}),
    "a transport of NVSHMEM that needs no RDMA NIC": (
        TWO_HOSTS, combined(set_facts("network", nics=[]), set_facts("settings", variables={"NVSHMEM_REMOTE_TRANSPORT": "ucx"})), {}),
    "threads that no node needs": (dict(ranks=8), set_threads("single"), {}),
    "an NVSHMEM whose version is not known": (ONE_PROCESS, set_facts("nvshmem_device", version="unknown"), {}),
    "a library that is missing is no probe that failed": (ONE_PROCESS, fail_probe("nvrtc"), {"no-cuda-packages": "error"}),
    # WORLD_SIZE may be set under mpirun, and may count the ranks of several jobs.
    "a launch that MPI knows": (dict(ranks=2), set_other_launch(2, 0), {}),
    "a launch of several jobs": (dict(ranks=2), set_other_launch(4, 0), {}),
    "a launch of one rank": (ONE_PROCESS, set_other_launch(1, 0), {}),
    "a wrong mpirun, and another launcher": (
        dict(ranks=2), combined(keep_one_rank, set_other_launch(2, 0)), {"wrong-mpirun": "error"}),
    "patch releases of NVRTC, which a driver does not report": (
        ONE_PROCESS,
        combined(set_facts("nvrtc", version="13.1.115"), set_facts("settings", variables={"DEEPEP_RT_ARCH": "compute_80"})), {}),
    "groups that NVSHMEM connects need no path": (GROUPS_OF_4, remove_access(3, 4), {}),
    "a group without a path": (GROUPS_OF_4, remove_access(4, 5), {"no-peer-access": "error"}),
    # NVSHMEM asks NVML about GPUs that only one rank sees. Different variables make no other finding.
    "GPUs that only one rank sees": (dict(ranks=2), hide_other_gpus, {"neighbours-hidden": "warning"}),
    "GPUs that no other rank needs to see": (dict(ranks=2), combined(hide_other_gpus, memory_is("heap")), {}),
    "GPUs that some ranks share without NVSHMEM": (
        dict(ranks=3, num_gpus=2), combined(memory_is("heap"), set_facts("settings", share_gpus=True)), {"shared-gpu": "note"}),
    "an NVSHMEM that is not needed": (
        dict(ranks=2), combined(memory_is("auto"), fail_probe("nvshmem_host")), {"no-nvshmem": "note"}),
    "an NVSHMEM that a network needs": (
        TWO_HOSTS, combined(memory_is("heap"), fail_probe("nvshmem_host")), {"no-nvshmem": "error"}),
    "virtual memory that is not needed": (
        dict(ranks=2), combined(memory_is("nvshmem"), set_facts("driver", not_shared="EPERM")), {}),
    "an NVSHMEM that takes the place of virtual memory": (
        dict(ranks=2), combined(memory_is("auto"), set_facts("driver", not_shared="EPERM"), fail_probe("nvshmem_host")),
        {"no-virtual-memory": "warning", "no-nvshmem": "error"}),
    "GPUs that only NVML sees": (dict(ranks=2), hide_gpus_but_from_nvml(True), {"neighbours-hidden": "note"}),
    "GPUs of which NVML does not know the access": (dict(ranks=2), hide_gpus_but_from_nvml(None), {"neighbours-hidden": "warning"}),
    "GPUs without access": (dict(ranks=2), hide_gpus_but_from_nvml(False), {"neighbours-hidden": "error"}),
    "paths of GPUs that NVML sees": (
        dict(ranks=2), combined(hide_other_gpus, set_paths("PIX")), {"neighbours-hidden": "warning", "no-nvlink": "warning"}),
}  # fmt: skip


@pytest.mark.parametrize(("options", "change", "expected"), QUIET.values(), ids=QUIET)
def test_states_without_fault_have_no_finding(
    options: dict, change: Callable[[JobReport], None], expected: dict[str, str]
) -> None:
    job = machine(**options)
    change(job)
    assert found(job) == expected


@pytest.mark.parametrize("kind", ["no-gpu", "gpu-hidden"])
def test_the_meaning_of_a_missing_gpu_names_each_backend(kind: str) -> None:
    """The text belongs to a note and, with --backend cuda, to an error."""
    meaning = FINDING_TYPES[kind].meaning
    assert "With backend='auto'" in meaning
    assert re.search(r"[Ww]ith backend='cuda', making one raises EPUnavailableError", meaning)
    assert "if that is meant" not in FINDING_TYPES[kind].remedy


def test_every_kind_has_a_case() -> None:
    assert {case[0] for case in CASES} == set(FINDING_TYPES)


@pytest.mark.parametrize("backend", ["auto", "cuda", "host"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_no_rule_needs_a_fact(ranks: int, backend: str) -> None:
    """If one probe or all probes fail, no rule raises, and the screen is printed."""
    pytest.importorskip("rich")
    from rich.console import Console

    from deepep_rt.doctor.report import as_json, is_broken, show

    probes = list(report()["facts"])
    for lost in [*([probe] for probe in probes), probes]:
        job = machine(ranks, backend=backend)
        for probe in lost:
            fail_probe(probe)(job)
        made = findings(job)
        assert not [finding.what for finding in made if finding.what.startswith("the rule ")]
        with (console := Console(width=150)).capture() as screen:
            show(job, made, console)
        assert ("Broken" if is_broken(made) else "Usable") in screen.get()
        json.dumps(as_json(job, made))


def test_unexpected_facts_are_a_finding() -> None:
    job = machine(1)
    set_facts("nvrtc", archs=7)(job)
    (finding,) = findings(job)
    assert finding.type.name == "probe-failed"
    assert finding.what.startswith("the rule _architecture: TypeError: ")


def test_equal_findings_are_joined_and_the_worst_comes_first() -> None:
    job = machine(8)
    set_facts("machine", shm_free_bytes=1)(job)
    for rank in (1, 2, 3, 6):
        set_facts_of_rank(rank, "settings", mistakes=["DEEPEP_RT_DEBUG='x'"])(job)
    first, second = findings(job)
    assert (first.type.name, first.ranks) == ("wrong-setting", (1, 2, 3, 6))
    assert (second.type.name, second.ranks) == ("small-shm", ())


def test_differences_name_every_value_and_its_ranks() -> None:
    job = machine(4)
    set_facts_of_rank(1, "settings", variables={"NVSHMEM_DEBUG": "INFO"})(job)
    set_facts_of_rank(3, "cache", folder="/other")(job)
    assert differences(job.reports) == {
        "NVSHMEM_DEBUG": {"(none)": [0, 2, 3], "INFO": [1]},
        "kernel cache": {"/cache": [0, 1, 2], "/other": [3]},
    }


def test_memory_is_that_of_a_buffer_over_several_hosts() -> None:
    sizes = {**SIZES, "num_max_tokens_per_rank": 128, "low_latency": True}
    assert machine(16, sizes=sizes).config().ranks_per_node == 8
    assert machine(8, sizes=sizes).config().ranks_per_node is None
    assert machine(16, sizes={**sizes, "ranks_per_node": 2}).config().ranks_per_node == 2
    assert machine(16, sizes=sizes, num_ranks=32).config().ranks_per_node is None, "their hosts are not known"


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
