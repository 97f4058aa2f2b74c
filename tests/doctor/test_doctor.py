"""Run doctor on this machine: facts, sizes and output."""

from __future__ import annotations

import importlib.metadata
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer")

from doctor_command import Doctor, found_text, program
from paths import ROOT

from deepep_rt import Buffer
from deepep_rt.doctor import report as doctor_report
from deepep_rt.doctor import runner


def test_facts_are_those_of_the_installation(doctor: Doctor) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    answer = doctor.json()
    (report,) = answer["ranks"]
    assert report["failures"] == {}
    facts = report["facts"]
    for name, version in facts["python"]["packages"].items():
        assert importlib.metadata.version(name) == version
    assert facts["python"]["executable"] == sys.executable
    from deepep_rt.jit import libraries

    assert facts["nvrtc"]["version"] == libraries.nvrtc_version()
    assert facts["nvshmem_device"]["version"] == facts["nvshmem_host"]["version"] == libraries.nvshmem().version
    for probe in ("nvrtc", "nvjitlink", "nvshmem_host", "nvshmem_device", "mpi"):
        assert Path(facts[probe]["path"]).is_file(), probe
    assert facts["mpi"]["mpi4py"] == importlib.metadata.version("mpi4py")
    assert facts["bindings"] == {"module": None}
    assert not doctor.environment["DEEPEP_RT_CACHE_DIR"] or not Path(doctor.environment["DEEPEP_RT_CACHE_DIR"]).exists()
    sizes = dict(num_max_tokens_per_rank=4096, hidden=7168, num_topk=8, num_experts=256)
    assert answer["size_hint"] == Buffer.size_hint(8, **sizes)


@pytest.fixture
def facts_at_once(probed: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let doctor take the facts that are there, and start no process."""
    monkeypatch.setattr(doctor_report, "run_probes", lambda: probed)
    monkeypatch.setattr(doctor_report, "gather", lambda report, network: (0, [{**report, **runner.ALONE}], None, None))


@pytest.mark.usefixtures("facts_at_once")
def test_sizes_are_options(doctor: Doctor) -> None:
    options = ["--ranks", "4", "--tokens", "128", "--hidden", "512", "--topk", "4", "--experts", "16"]
    options += ["--dtype", "float32", "--slots", "3", "--low-latency"]
    sizes = dict(
        num_max_tokens_per_rank=128, hidden=512, num_topk=4, num_experts=16, dtype="float32", num_slots=3, low_latency=True
    )
    assert doctor.json(*options)["size_hint"] == Buffer.size_hint(4, **sizes)
    answer = doctor.json("--ranks", "4", "--experts", "15", status=1)
    assert "num_experts=15" in found_text(answer, "wrong-sizes")
    assert answer["size_hint"] is None
    assert doctor.run(program("--backend", "gpu")).returncode == 1


@pytest.mark.parametrize("option", ["--ranks", "--tokens", "--hidden", "--topk", "--experts", "--slots", "--ranks-per-node"])
@pytest.mark.usefixtures("facts_at_once")
def test_a_size_of_zero_is_not_the_default(doctor: Doctor, option: str) -> None:
    assert "=0; expected" in found_text(doctor.json(option, "0", status=1), "wrong-sizes")


@pytest.mark.usefixtures("facts_at_once")
def test_the_last_line_names_the_page(doctor: Doctor) -> None:
    last = doctor.text("--ranks", "0", status=1).strip().splitlines()[-1]
    (page,) = re.findall(r"\S+\.md", last)
    assert (ROOT / page).is_file()
    assert "source distribution" in last
    assert "/docs" in (ROOT / "pyproject.toml").read_text().partition("sdist]")[2].partition("]")[0]


@pytest.mark.parametrize("options", [(), pytest.param(("--json",), marks=pytest.mark.full)])
@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("stdout", "message"), [("&-", "is closed."), ("/dev/full", "cannot be written: No space left on device.")]
)
def test_an_output_that_cannot_be_written(
    doctor: Doctor, options: tuple[str, ...], unbuffered: str, stdout: str, message: str
) -> None:
    command = f"{shlex.join(program('--backend', 'host', *options))} >{stdout}"
    done = doctor.run(["sh", "-c", command], PYTHONUNBUFFERED=unbuffered)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: standard output {message}")
    assert len(done.stderr.splitlines()) == 1


def test_a_terminal_with_few_characters(doctor: Doctor) -> None:
    assert "NVSHMEM_DEBUG_FILE=caf\\xe9" in doctor.text(NVSHMEM_DEBUG_FILE="caf\xe9", PYTHONIOENCODING="ascii")
