"""Starts programs under mpirun."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from paths import PROGRAMS, ROOT, pythonpath

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
    """Run a program of tests/programs, whose checks all have to pass; returns what it printed."""
    output = launch(num_ranks, program, *arguments)
    assert ": passed" in output, f"no check ran: {output}"
    assert ": failed" not in output
    return output


def launch(num_ranks: int, program: str, *arguments: str) -> str:
    """Run a program of tests/programs to its end; returns what it printed."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    try:
        done = subprocess.run(
            python_on(num_ranks, PROGRAMS / f"{program}.py", *arguments),
            env={**os.environ, **threads, **QUICK_XLA, "PYTHONPATH": pythonpath()},
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


def run_example(num_ranks: int, example: str, *options: str, **environment: str) -> list[str]:
    """What the example prints on the host backend, by lines."""
    words = python_on(num_ranks, f"examples/{example}", "--backend", "host", *options)
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=180, cwd=ROOT, env={**os.environ, **environment}, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def environment(**more: str) -> dict[str, str]:
    """That of a process that knows of no mpirun."""
    launchers = ("OMPI_", "PMI_", "PMIX_", "MPI_", "MPIR_", "HYDRA_", "HYDI_", "SLURM_", "PRTE_", "OPAL_")
    rest = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    return {**rest, "PYTHONPATH": pythonpath(), "OMP_NUM_THREADS": "1", **more}


def run_without_mpirun(*arguments: str, launcher: tuple[str, ...] = (), **more: str) -> str:
    """What tests/programs/spawned.py prints, in processes that know of no mpirun."""
    process = subprocess.Popen(
        [sys.executable, *launcher, str(PROGRAMS / "spawned.py"), *arguments],
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=200)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the processes that it has started, too
        pytest.fail(f"it did not end\n{process.communicate()[0]}", pytrace=False)
    assert process.returncode == 0, output
    return output
