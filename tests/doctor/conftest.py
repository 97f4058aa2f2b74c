"""Provide doctor, its facts on this machine, and variables that imitate a machine with GPUs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from doctor_command import Doctor, compile_library

from deepep_rt.doctor import runner

HERE = Path(__file__).resolve().parent


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    return Doctor(tmp_path / "cache")


@pytest.fixture(scope="module")
def probed() -> dict[str, Any]:
    """Run the probes once, for tests that do not depend on their facts."""
    return runner.run_probes()


@pytest.fixture(scope="session")
def gpu_machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Compile libraries that imitate 8 H200s. Return the variables that make doctor use them."""
    folder = tmp_path_factory.mktemp("driver")
    compile_library(HERE / "fake_driver/cuda.c", folder / "libcuda.so.1")
    compile_library(HERE / "fake_driver/nvml.c", folder / "libnvidia-ml.so.1")
    return {"LD_LIBRARY_PATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])}
