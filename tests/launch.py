"""Starts programs under mpirun."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
# JAX programs take two thirds of the time if LLVM does not optimise; which calls they make, in which order, is settled before LLVM.
QUICK_XLA = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"}
LIMIT_S = 200  # of a program that takes 90 where 8 ranks share 2 cores


@functools.cache
def mpirun() -> tuple[str, ...]:
    """The launcher that belongs to this Python, else the first on the PATH; MPICH and Open MPI want different options."""
    found = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    if found is None:
        pytest.fail("no mpirun beside this Python or on PATH; pip install 'deepep_rt[mpich]', or install an MPI")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    return found, *(("--oversubscribe", "--allow-run-as-root") if "Open MPI" in version or "OpenRTE" in version else ())


def python_on(num_ranks: int, *words: object) -> list[str]:
    """The command that runs this Python with `words` on so many ranks."""
    return [*mpirun(), "-n", str(num_ranks), sys.executable, *map(str, words)]


def run_checks(num_ranks: int, program: str, *arguments: str) -> str:
    """Run a program of tests/mpi_host, whose checks all have to pass; returns what it printed."""
    output = launch(num_ranks, program, *arguments)
    assert ": passed" in output, f"no check ran: {output}"
    assert ": failed" not in output
    return output


def launch(num_ranks: int, program: str, *arguments: str) -> str:
    """Run a program of tests/mpi_host to its end; returns what it printed."""
    paths = [str(TESTS.parent), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    try:
        done = subprocess.run(
            python_on(num_ranks, TESTS / "mpi_host" / f"{program}.py", *arguments),
            env={**os.environ, **threads, **QUICK_XLA, "PYTHONPATH": os.pathsep.join(paths)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout
        pytest.fail(f"{program} on {num_ranks} ranks did not end within {LIMIT_S} s\n{output}", pytrace=False)
    if done.returncode:
        pytest.fail(f"{program} on {num_ranks} ranks: exit status {done.returncode}\n{done.stdout}", pytrace=False)
    return done.stdout
