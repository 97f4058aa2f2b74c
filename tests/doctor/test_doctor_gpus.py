"""Run doctor on machines with GPUs, which C libraries imitate."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

pytest.importorskip("typer")

from doctor_command import Doctor, found_text, levels, program
from launch import mpirun
from without import without


def test_eight_gpus(doctor: Doctor, gpu_machine: dict[str, str]) -> None:
    pytest.importorskip("pynvml")
    answer = doctor.json("--backend", "cuda", **gpu_machine)
    facts = answer["ranks"][0]["facts"]
    assert facts["driver"]["cuda"] == "13.1"
    assert facts["driver"]["library"].startswith(gpu_machine["LD_LIBRARY_PATH"].split(os.pathsep)[0])
    assert facts["nvml"]["driver"] == "590.12.01"
    assert [gpu["uuid"] for gpu in facts["driver"]["gpus"]] == [gpu["uuid"] for gpu in facts["nvml"]["gpus"]]
    assert facts["driver"]["gpus"][2] == {
        "ordinal": 2, "uuid": "20212223-2425-2627-2829-2a2b2c2d2e2f", "name": "NVIDIA H200", "arch": "sm_90",
        "total_bytes": 150754820096,
    }  # fmt: skip
    assert [gpu["free_bytes"] for gpu in facts["nvml"]["gpus"]] == [*(150000000000 + i for i in range(7)), None]
    assert [gpu["mig"] for gpu in facts["nvml"]["gpus"]] == [False] * 7 + [None]
    assert facts["nvml"]["paths"] == [["-" if a == b else "NV18" for b in range(8)] for a in range(8)]
    assert facts["nvml"]["access"] == [[True] * 8] * 8
    assert not set(levels(answer)) & {"no-gpu", "gpu-hidden", "no-nvlink", "no-peer-access", "mig", "not-enough-memory"}
    text = doctor.text("--backend", "cuda", **gpu_machine)
    assert all(gpu["uuid"] in text for gpu in facts["driver"]["gpus"])
    assert text.count("NV18") == 56
    assert "590.12.01, CUDA 13.1" in text
    narrow = doctor.text("--backend", "cuda", **gpu_machine, COLUMNS="90", FORCE_COLOR="1", FAKE_NO_ACCESS="1")
    assert narrow.count("NV18") == 54
    assert narrow.count("none\x1b") == 2, "GPUs 0 and 1 do not reach each other"
    assert "Paths between them" in narrow
    assert "\u2026" not in narrow, "no text is cut off"


@pytest.mark.parametrize(
    ("fault", "kinds", "level"),
    [
        ({"FAKE_INIT": "802"}, "driver-fails", "error"),
        ({"FAKE_INIT": "100", "CUDA_VISIBLE_DEVICES": ""}, "gpu-hidden", "warning"),
        ({"FAKE_CUDA": "11080"}, "driver-too-old", "error"),
        ({"FAKE_NVLINKS": "17", "FAKE_NO_ACCESS": "1", "FAKE_LOST": "6"}, "nvlink-uneven no-peer-access gpu-lost", "warning"),
        ({"FAKE_PCIE": "1"}, "no-nvlink", "warning"),
    ],
)
def test_faults_of_gpus(doctor: Doctor, gpu_machine: dict[str, str], fault: dict[str, str], kinds: str, level: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    pytest.importorskip("pynvml")
    found = levels(doctor.json(status=int(level == "error"), **gpu_machine, **fault))
    assert {found.get(kind) for kind in kinds.split()} == {level}


def test_only_nvml_is_broken(doctor: Doctor, gpu_machine: dict[str, str]) -> None:
    pytest.importorskip("pynvml")
    text = doctor.text(FAKE_NVML="18", **gpu_machine)
    assert "? of 150.8" in text
    assert "version mismatch" in text


def test_pynvml_may_be_missing(doctor: Doctor, gpu_machine: dict[str, str], tmp_path: Path) -> None:
    text = doctor.text(**{**gpu_machine, **without(tmp_path, "pynvml")})
    assert "pip install nvidia-ml-py" in text
    assert text.count("? of 150.8") == 8
    assert "probe-failed" not in text


def test_too_little_memory(doctor: Doctor, gpu_machine: dict[str, str]) -> None:
    pytest.importorskip("pynvml")
    answer = doctor.json("--tokens", "100000", "--slots", "40", status=1, **gpu_machine)
    assert re.search(r"GPU 00010203 has 150.00 GB free and is to hold [\d.]+ GB", found_text(answer, "not-enough-memory"))


@pytest.mark.full
def test_two_ranks_on_one_gpu(doctor: Doctor, gpu_machine: dict[str, str]) -> None:
    two_gpus = {"FAKE_GPUS": "2", **gpu_machine}
    three, four = ([*mpirun(), "-n", number, *program("--json")] for number in "34")
    answer = doctor.json(command=three, status=1, **two_gpus)
    assert "ranks 0, 2 would use GPU 00010203" in found_text(answer, "shared-gpu")
    assert [(report["local_rank"], report["group"]) for report in answer["ranks"]] == [(0, 0), (1, 0), (2, 0)]
    two_gpus["DEEPEP_RT_SHARE_GPUS"] = "1"
    assert "they take turns" in found_text(doctor.json(command=four, **two_gpus), "shared-gpu")
    two_gpus["DEEPEP_RT_SYMMETRIC_MEMORY"] = "nvshmem"
    assert "have one to themselves" in found_text(doctor.json(command=three, status=1, **two_gpus), "shared-gpu")


def test_sharing_of_virtual_memory_is_tried(doctor: Doctor, gpu_machine: dict[str, str]) -> None:
    """Attributes of the driver do not tell what the system refuses."""
    assert "provider: CUDA virtual memory (DEEPEP_RT_SYMMETRIC_MEMORY=heap); sharing virtual memory works" in " ".join(
        doctor.text(**gpu_machine, DEEPEP_RT_SYMMETRIC_MEMORY="heap").split()
    )
    refused = dict(gpu_machine, FAKE_NOT_SHARED="1")
    answer = doctor.json(**refused, DEEPEP_RT_SYMMETRIC_MEMORY="auto")
    assert answer["ranks"][0]["facts"]["driver"]["not_shared"] == "CUDA_ERROR_SYSTEM_NOT_READY"
    assert levels(answer)["no-virtual-memory"] == "warning"
    assert "no-virtual-memory" not in levels(doctor.json(**refused, DEEPEP_RT_SYMMETRIC_MEMORY="nvshmem"))
