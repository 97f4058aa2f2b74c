"""Run `python -m deepep_rt doctor` as users do, in a clean environment."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import unittest.mock
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

PAGE = (ROOT / "docs/when-it-does-not-work.md").read_text()


def program(*options: str, python: str = sys.executable) -> list[str]:
    """Return the words of a doctor command."""
    return [python, "-m", "deepep_rt", "doctor", *options]


_OF_A_PROCESS = {"PYTHONPATH", "PYTHONIOENCODING", "PYTHONUNBUFFERED", "COLUMNS", "FORCE_COLOR"}
"""Variables that Python, or a terminal, reads when the process starts."""


def _start(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def _run_here(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run the command in this process. Doctor itself starts processes for its probes."""
    from deepep_rt.cli import app

    out, err, status = io.StringIO(), io.StringIO(), 0
    with unittest.mock.patch.dict(os.environ, environment, clear=True), redirect_stdout(out), redirect_stderr(err):
        try:
            app.run(command[3:])
        except SystemExit as end:
            status = int(end.code or 0)
    return subprocess.CompletedProcess(command, status, out.getvalue(), err.getvalue())


class Doctor:
    """Run doctor with an empty cache and without the settings of the test run."""

    def __init__(self, cache: Path) -> None:
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("DEEPEP_RT_", "NVSHMEM_", "CUDA_", "FAKE_"))
        }
        self.environment["DEEPEP_RT_CACHE_DIR"] = str(cache)

    def run(self, command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
        run = _run_here if command[:4] == program() and not _OF_A_PROCESS & set(environment) else _start
        done = run(command, {**self.environment, **environment})
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
