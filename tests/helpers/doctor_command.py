"""Run `python -m deepep_rt doctor` as users do, in a clean environment."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

PAGE = (ROOT / "docs/when-it-does-not-work.md").read_text()


def program(*options: str, python: str = sys.executable) -> list[str]:
    """Return the words of a doctor command."""
    return [python, "-m", "deepep_rt", "doctor", *options]


class Doctor:
    """Run doctor with an empty cache and without the settings of the test run."""

    def __init__(self, cache: Path) -> None:
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("DEEPEP_RT_", "NVSHMEM_", "CUDA_", "FAKE_"))
        }
        self.environment["DEEPEP_RT_CACHE_DIR"] = str(cache)

    def run(self, command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command, env={**self.environment, **environment}, capture_output=True, text=True, timeout=200, check=False
        )
        assert "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
        return done

    def text(self, *options: str, status: int = 0, **environment: str) -> str:
        done = self.run(program(*options), **environment)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout

    def json(self, *options: str, command: Sequence[str] = (), status: int = 0, **environment: str) -> dict[str, Any]:
        done = self.run(command or program("--json", *options), **environment)
        assert (done.returncode != 0) == (status != 0), done.stdout + done.stderr
        answer = json.loads(done.stdout)
        assert (answer["status"] == "broken") == (status != 0)
        return answer


def levels(answer: dict[str, Any]) -> dict[str, str]:
    """Return the level of each found type."""
    return {finding["kind"]: finding["level"] for finding in answer["findings"]}


def found_text(answer: dict[str, Any], name: str) -> str:
    """Join the texts of all findings of a type."""
    return "; ".join(finding["what"] for finding in answer["findings"] if finding["kind"] == name)


def compile_library(source: Path, library: Path, *options: str) -> None:
    """Compile a C file to a shared library. Without a compiler, skip the test."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    subprocess.run([compiler, "-shared", "-fPIC", *options, "-o", str(library), str(source)], check=True, timeout=60)
