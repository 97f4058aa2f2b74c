"""The host backend on 1 to 8 ranks: launches the programs of tests/mpi_host under mpirun."""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
PROGRAMS = ["dispatch", "combine", "rounds", "bad_calls", "buffers", "frameworks", "low_latency"]
LATE = [
    "late_dispatch",
    "late_cached_dispatch",
    "late_combine",
    "late_low_latency_dispatch",
    "late_low_latency_combine",
    "never",
    "lost_between_counts_and_rows",
    "never_made",
]
LIMIT_S = 200  # of a program that takes 90 where 8 ranks share 2 cores


@functools.cache
def _mpirun() -> list[str]:
    """The launcher that belongs to this Python, else the first on the PATH; MPICH and Open MPI want different options."""
    beside = str(Path(sys.executable).parent)
    found = shutil.which("mpirun", path=beside) or shutil.which("mpirun")
    if found is None:
        return []
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    return [found, *(["--oversubscribe", "--allow-run-as-root"] if "Open MPI" in version or "OpenRTE" in version else [])]


def _launch(num_ranks: int, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    if not _mpirun():
        pytest.fail("no mpirun beside this Python or on PATH; pip install 'deepep_rt[mpich]', or install an MPI")
    paths = [str(TESTS.parent), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    command = [*_mpirun(), "-n", str(num_ranks), sys.executable, str(TESTS / "mpi_host" / f"{program}.py"), *arguments]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **threads, "PYTHONPATH": os.pathsep.join(paths)},
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
    return done


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("program", PROGRAMS)
def test_program(program: str, num_ranks: int) -> None:
    output = _launch(num_ranks, program).stdout
    assert ": passed" in output, f"no check ran: {output}"
    assert ": failed" not in output


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="needs JAX")
@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("program", ["in_jit", "decode_in_jit"])
def test_inside_of_compiled_jax_functions(program: str, num_ranks: int) -> None:
    test_program(program, num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_masked_ranks(num_ranks: int) -> None:
    """A rank alone has nobody to mask. Eight, which take turns on two cores for 90 s, do the same checks on GPUs (test_same_checks)."""
    test_program("masks", num_ranks)


@pytest.mark.parametrize("num_ranks", [2, 8])
@pytest.mark.parametrize("scenario", LATE)
def test_late_rank(scenario: str, num_ranks: int) -> None:
    output = _launch(num_ranks, "late", scenario).stdout
    assert output.count("passed") == num_ranks, output
