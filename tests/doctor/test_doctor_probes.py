"""Test probes that fail or hang, and probes that read files of the kernel."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import limits
import pytest

pytest.importorskip("typer")

from doctor_command import Doctor, found_text
from launch import environment, mpirun
from paths import ROOT
from without import starting_with

from deepep_rt.doctor import gpus, probes, runner


def test_a_probe_that_crashes_is_a_finding(doctor: Doctor, gpu_machine: dict[str, str]) -> None:
    answer = doctor.json(FAKE_INIT="-2", **gpu_machine)
    (report,) = answer["ranks"]
    assert list(report["failures"]) == ["driver"]
    assert set(report["facts"]) | {"driver"} == set(probes.PROBES), "the other probes have run"
    assert "driver: its process was killed by SIGABRT" in found_text(answer, "probe-failed")


def test_a_probe_that_hangs_is_stopped(monkeypatch: pytest.MonkeyPatch, gpu_machine: dict[str, str]) -> None:
    for name, value in {**gpu_machine, "FAKE_INIT": "-1"}.items():
        monkeypatch.setenv(name, value)
    examined = runner.run_probes(["machine", "driver", "settings"], limit_s=4)
    assert examined["failures"] == {"driver": "did not end within 4 s"}
    assert set(examined["facts"]) == {"machine", "settings"}


def test_prints_of_libraries_are_ignored(tmp_path: Path, doctor: Doctor) -> None:
    noise = starting_with(tmp_path, 'print(\'{"name": "noise"}\', flush=True)')
    done = doctor.run(
        [sys.executable, "-c", "from deepep_rt.doctor import runner; print(runner.run_probes(['settings']))"], **noise
    )
    assert "'failures': {}" in done.stdout


def test_options_of_mpirun_are_read_from_processes(tmp_path: Path) -> None:
    """Process 4 is a child of a proxy of mpirun, 9 has a shell in between, and 6 has no mpirun."""
    processes = {
        2: (1, "mpiexec -n 2 python"),
        3: (2, "/usr/bin/hydra_pmi_proxy"),
        4: (3, "python"),
        5: (1, "bash"),
        6: (5, "python"),
        7: (3, "/bin/sh -c ..."),
        8: (7, "python"),
        9: (8, "python -m probe"),
    }
    for pid, (parent, words) in processes.items():
        (tmp_path / f"proc/{pid}").mkdir(parents=True)
        (tmp_path / f"proc/{pid}/stat").write_text(f"{pid} (a (b) c) S {parent} 1 1")
        (tmp_path / f"proc/{pid}/cmdline").write_text("\0".join([*words.split(), ""]))
    assert probes.survivors_end(tmp_path, 4) == probes.survivors_end(tmp_path, 9) == "runs without -disable-auto-cleanup"
    for option in ("-disable-auto-cleanup", "--disable-auto-cleanup"):
        (tmp_path / "proc/2/cmdline").write_text(f"/opt/bin/mpirun\0{option}\0-n\0002\0python\0")
        assert "without a shell" in probes.survivors_end(tmp_path, 4)
        assert probes.survivors_end(tmp_path, 9) == ""
    assert probes.survivors_end(tmp_path, 6) is None
    assert probes.survivors_end(tmp_path, 77) is None


SURVIVES = """
import os, pathlib, signal
import mpi4py
mpi4py.rc.finalize = False
import numpy as np
from mpi4py import MPI
from deepep_rt import Buffer, EPPeerLostError
from deepep_rt.doctor import probes

assert probes.survivors_end() == ""
sizes = dict(num_max_tokens_per_rank=4, hidden=64, num_topk=1, num_experts=4, dtype="float32", backend="host")
buffer = Buffer(MPI.COMM_WORLD, max_ranks=4, rendezvous="auto", **sizes)
x, idx = np.ones((4, 64), np.float32), np.arange(4)[:, None]
buffer.dispatch(x, idx)
if buffer.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        buffer.dispatch(x, idx)
except EPPeerLostError:
    buffer.shrink()
assert len(buffer.dispatch(x, idx).recv_x) == 3
buffer.destroy()
pathlib.Path(f"lives{buffer.rank}").touch()
"""


def test_survivors_under_mpirun_of_mpich(tmp_path: Path) -> None:
    """The command of the documentation lets the others live when a signal kills a rank."""
    from mpi4py import MPI

    if "MPICH" not in MPI.Get_library_version():
        pytest.skip("mpirun is not that of MPICH")
    (command,) = re.findall(r"^mpirun -disable-auto-cleanup .*$", (ROOT / "docs/slurm-and-mpirun.md").read_text(), re.MULTILINE)
    (tmp_path / "program.py").write_text(SURVIVES)
    words = [mpirun()[0], *shlex.split(command.replace("python program.py", f"{sys.executable} program.py"))[1:]]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=limits.seconds(100), check=False
    )
    assert sorted(path.name for path in tmp_path.glob("lives*")) == ["lives0", "lives2", "lives3"], done.stdout + done.stderr


def test_nics_and_driver_parameters(tmp_path: Path) -> None:
    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    for name, state in (("mlx5_0", "4: ACTIVE\n"), ("mlx5_1", "1: DOWN\n")):
        folder = f"sys/class/infiniband/{name}"
        write(f"{folder}/hca_type", "MT4129\n")
        write(f"{folder}/ports/1/state", state)
        write(f"{folder}/ports/1/rate", "400 Gb/sec (4X NDR)\n")
        write(f"{folder}/ports/1/link_layer", "InfiniBand\n")
        write(f"{folder}/device/infiniband_verbs/uverbs{name[-1]}/dev", "231:192\n")
    write("dev/infiniband/uverbs0", "")
    write("proc/modules", "nvidia_peermem 16384 0 - Live\ngdrdrv 24576 0 - Live\n")
    write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  590.12.01\n")
    write("proc/driver/nvidia/params", 'EnableMSI: 1\nEnableStreamMemOPs: 1\nRegistryDwords: "PeerMappingOverride=1;"\n')
    found = probes.network(tmp_path)
    port = {"port": "1", "rate": "400 Gb/sec (4X NDR)", "link": "InfiniBand"}
    assert found["nics"] == [
        {"name": "mlx5_0", "type": "MT4129", "ports": [{**port, "state": "ACTIVE"}], "usable": True},
        {"name": "mlx5_1", "type": "MT4129", "ports": [{**port, "state": "DOWN"}], "usable": False},
    ]
    assert (found["peermem"], found["gdrdrv"], found["open_driver"]) == (True, True, True)
    assert found["driver_parameters"]["RegistryDwords"] == "PeerMappingOverride=1;"
    assert probes.network(tmp_path / "nothing")["nics"] == []


def test_gpus_on_the_bus(tmp_path: Path) -> None:
    for number, (vendor, kind) in enumerate(
        [("0x10de", "0x030200"), ("0x10de", "0x030000"), ("0x10de", "0x068000"), ("0x8086", "0x030000")]
    ):
        folder = tmp_path / f"sys/bus/pci/devices/{number}"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
    assert probes.machine(tmp_path)["pci_gpus"] == 2, "NVSwitches and GPUs of other vendors do not count"


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ("mpirun (Open MPI) 4.1.6", "Open MPI"),
        ("mpirun (OpenRTE) 4.0.3", "Open MPI"),
        ("Open MPI v5.0.8, package: x", "Open MPI"),
        ("HYDRA build details:\n    Version: 4.2", "MPICH"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13", "MPICH"),
        ("MVAPICH2 Version      :\t2.3.7", "MPICH"),
        ("something else", None),
    ],
)
def test_families_of_launchers_and_libraries(text: str, family: str | None) -> None:
    assert probes.mpi_family(text) == family


def test_paths_of_loaded_libraries() -> None:
    assert gpus.loaded("libc.so") is not None
    assert gpus.loaded("libnothing.so") is None
