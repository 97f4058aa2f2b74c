"""Run doctor with wrong settings, a broken cache and missing packages."""

from __future__ import annotations

import importlib.metadata
import json
import re
import venv
from pathlib import Path

import pytest

pytest.importorskip("typer")

from doctor_command import Doctor, compile_library, found_text, levels, program
from entries import entry
from paths import ROOT
from without import starting_with, without

from deepep_rt import _env
from deepep_rt.doctor import probes
from deepep_rt.jit.store import SUFFIX, KernelCache


@pytest.mark.parametrize(
    ("name", "value", "mistake"),
    [
        ("DEEPEP_RT_TIMEOUT_S", "-3", "DEEPEP_RT_TIMEOUT_S='-3'; expected a number of seconds"),
        ("DEEPEP_RT_DEBUG", "maybe", "DEEPEP_RT_DEBUG='maybe'"),
        ("DEEPEP_RT_ASSERT_CACHED", "perhaps", "DEEPEP_RT_ASSERT_CACHED='perhaps'"),
        ("DEEPEP_RT_CACHE_DIR", "~nosuchuser/x", "DEEPEP_RT_CACHE_DIR="),
        ("DEEPEP_RT_ARCH", "hopper", "DEEPEP_RT_ARCH: arch='hopper'"),
        ("DEEPEP_RT_ARCH", "sm_70", "DEEPEP_RT_ARCH: arch='sm_70'; expected sm_80 or newer"),
        ("DEEPEP_RT_ARCH", "sm_999", r"DEEPEP_RT_ARCH: arch='sm_999'; expected one that NVRTC \S+ knows: .*sm_90"),
        ("DEEPEP_RT_ARCH", "compute_90", None),
        ("DEEPEP_RT_SYMMETRIC_MEMORY", "heap:files", None),
        (
            "DEEPEP_RT_SYMMETRIC_MEMORY",
            "heap:",
            "DEEPEP_RT_SYMMETRIC_MEMORY='heap:'; expected .*heap: with one of sockets, files",
        ),
        ("DEEPEP_RT_SYMMETRIC_MEMORY", "nvshmem:ipc", "DEEPEP_RT_SYMMETRIC_MEMORY='nvshmem:ipc'"),
        ("DEEPEP_RT_SOCKET_DIR", "sockets", "DEEPEP_RT_SOCKET_DIR='sockets'; expected an absolute path"),
        ("DEEPEP_RT_SOCKET_DIR", "/sockets", None),
    ],
)
def test_mistakes_in_settings(name: str, value: str, mistake: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    monkeypatch.setenv(name, value)
    mistakes = probes.settings()["mistakes"]
    assert len(mistakes) == (mistake is not None)
    assert not mistake or re.match(mistake, mistakes[0]), mistakes


def test_mistakes_become_findings(doctor: Doctor) -> None:
    answer = doctor.json(
        status=1, DEEPEP_RT_TIMEOUT_S="abc", DEEPEP_RT_DEBUG="maybe", DEEPEP_RT_ARCH="hopper", DEEPEP_RT_TIMEOUT="5"
    )
    text = found_text(answer, "wrong-setting")
    assert all(value in text for value in ("'abc'", "'maybe'", "'hopper'"))
    assert found_text(answer, "unknown-setting") == "DEEPEP_RT_TIMEOUT"
    assert "probe-failed" not in levels(answer)


@pytest.mark.parametrize("name", list(_env._READERS))
def test_an_empty_setting_is_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read = _env._READERS[name]
    monkeypatch.delenv(name, raising=False)
    unset = read()
    monkeypatch.setenv(name, "")
    assert read() == unset


def test_every_setting_is_read() -> None:
    documented = set(re.findall(r'"""`(DEEPEP_RT_[A-Z_]+)', Path(_env.__file__).read_text()))
    assert documented == set(_env._READERS)


def test_variables_that_change_something(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"DEEPEP_RT_DEBUG", "NVSHMEM_DEBUG", "CUDA_CACHE_PATH", "LD_LIBRARY_PATH", "NVIDIA_VISIBLE_DEVICES"}
    for name in (*names, "HOME"):
        monkeypatch.setenv(name, "x")
    assert names <= set(_env.variables())
    assert "HOME" not in _env.variables()


def test_a_launcher_that_does_not_say_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch system may set one of its variables for other ends."""
    for _, *names in _env._LAUNCHERS:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PMI_RANK", "0")
    assert _env.launch() is None
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert _env.launch() == _env.Launch("Slurm", 1, 4)
    monkeypatch.setenv("PMI_SIZE", "2")  # of an mpirun inside of the job
    assert _env.launch() == _env.Launch("MPICH", 0, 2)


def test_a_cache_that_cannot_be_written(doctor: Doctor, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")  # root cannot write below a file either
    answer = doctor.json("--backend", "host", DEEPEP_RT_CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert levels(answer)["cache-not-writable"] == "warning"
    assert str(tmp_path / "file") in found_text(answer, "cache-not-writable")


def test_a_cache_with_a_corrupt_entry(doctor: Doctor, tmp_path: Path) -> None:
    store = KernelCache(tmp_path / "cache")
    for key in ("ab" * 32, "cd" * 32):
        store.put(entry(key))
    path = store.folder / "sm_90" / ("ab" * 32 + SUFFIX)
    path.write_bytes(path.read_bytes()[:-1])
    answer = doctor.json()
    assert found_text(answer, "cache-corrupt") == "sm_90/abababababab: wrong checksum"
    facts = answer["ranks"][0]["facts"]["cache"]
    assert (facts["entries"], facts["exists"], facts["error"]) == (1, True, None)
    assert facts["bytes"] == sum(file.stat().st_size for file in store.folder.glob("*/*"))
    assert "writable, 1 kernels" in doctor.text()
    assert len(list(store.folder.glob("*"))) == 1, "the test for writing leaves no file"


def test_without_mpi4py(doctor: Doctor, tmp_path: Path) -> None:
    answer = doctor.json(status=1, **without(tmp_path, "mpi4py"))
    assert "No module named 'mpi4py'" in found_text(answer, "no-mpi4py")
    assert "mpi-does-not-start" not in levels(answer), "the consequence has no finding"


def test_without_cuda_packages(doctor: Doctor, tmp_path: Path, gpu_machine: dict[str, str]) -> None:
    blocked = without(tmp_path, "cuda")
    found = levels(doctor.json("--backend", "host", DEEPEP_RT_ARCH="sm_999", **blocked))
    assert (found["no-cuda-packages"], found["no-nvshmem"]) == ("note", "note"), "the host backend needs neither"
    assert found.keys().isdisjoint({"wrong-setting", "probe-failed"}), "without NVRTC its architectures are unknown"
    answer = doctor.json(status=1, **blocked, **gpu_machine, DEEPEP_RT_SYMMETRIC_MEMORY="nvshmem")
    assert (levels(answer)["no-cuda-packages"], levels(answer)["no-nvshmem"]) == ("error", "error")
    assert len(answer["ranks"][0]["facts"]["driver"]["gpus"]) == 8, "the driver is read without these packages"


def test_an_mpi_library_that_cannot_be_loaded(doctor: Doctor, tmp_path: Path) -> None:
    no_mpi = starting_with(tmp_path, "import sys\nsys.modules['mpi4py.MPI'] = None\n")
    assert levels(doctor.json(status=1, **no_mpi))["no-mpi4py"] == "error"


def test_an_old_nvshmem_that_is_found_first(doctor: Doctor, tmp_path: Path, gpu_machine: dict[str, str]) -> None:
    """Make an environment whose site folder has an old NVSHMEM."""
    pytest.importorskip("cuda.bindings.nvrtc")
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    real = importlib.metadata.distribution("cuda-pathfinder").locate_file("")
    (site / "more.pth").write_text(f"{real}\n")
    headers = site / "nvidia/nvshmem/include/non_abi"
    headers.mkdir(parents=True)
    (headers.parent / "nvshmem.h").touch()
    parts = zip(("MAJOR", "MINOR", "PATCH"), (3, 3, 9), strict=True)
    (headers / "nvshmem_version.h").write_text("".join(f"#define NVSHMEM_VENDOR_{name}_VERSION {n}\n" for name, n in parts))
    library = site / "nvidia/nvshmem/lib/libnvshmem_host.so.3"
    library.parent.mkdir()
    (library.parent / "libnvshmem_device.a").touch()
    source = tmp_path / "host.c"
    source.write_text("void nvshmemx_vendor_get_version_info(int* a, int* b, int* c) { *a = 3; *b = 3; *c = 9; }\n")
    compile_library(source, library)
    done = doctor.run(
        program("--json", python=str(tmp_path / "env/bin/python")),
        **gpu_machine,
        PYTHONPATH=str(ROOT),
        DEEPEP_RT_SYMMETRIC_MEMORY="nvshmem",
    )
    assert done.returncode == 1
    text = found_text(json.loads(done.stdout), "nvshmem-too-old")
    assert f"the host library is 3.3.9 ({library})" in text
    assert "the device library is 3.3.9" in text
