"""Start programs of the tests, under mpirun and without it."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import limits
import pytest
from paths import PROGRAMS, ROOT, pythonpath

from deepep_rt._install import pip_install

# JAX programs take two thirds of the time if LLVM does not optimise. LLVM does not change the calls and their order.
QUICK_XLA = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"}
LIMIT_S = 400  # a program with 8 ranks, or one that compiles, takes 90 s on 2 cores, and longer while other tests run


@functools.cache
def mpirun() -> tuple[str, ...]:
    """Return the mpirun of this Python, or the first on PATH, with the options of MPICH or Open MPI."""
    found = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    if found is None:
        pytest.fail(f"mpirun=None; expected one next to this Python or on PATH. Run {pip_install('mpich')}, or install an MPI.")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    return found, *(("--oversubscribe", "--allow-run-as-root") if "Open MPI" in version or "OpenRTE" in version else ())


def python_on(num_ranks: int, *words: object) -> list[str]:
    """Return the command that runs this Python with `words` on `num_ranks` ranks."""
    return [*mpirun(), "-n", str(num_ranks), sys.executable, *map(str, words)]


def run_checks(num_ranks: int, program: str, *arguments: str, slowness: float | None = None) -> str:
    """Run a program of tests/programs, all of whose checks must pass, and return its output. `slowness`: as of `launch`."""
    output = launch(num_ranks, program, *arguments, slowness=slowness)
    assert ": passed" in output, f"no check ran: {output}"
    assert ": failed" not in output
    return output


def launch(num_ranks: int, program: str, *arguments: str, slowness: float | None = None) -> str:
    """Run a program of tests/programs to its end, and return its output.

    Args:
        num_ranks: Its ranks.
        program: Its name.
        arguments: Its arguments.
        slowness: The result of `limits.slowness`. None: measure it. Only the main thread can, because threads take turns.
    """
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    times = limits.slowness() if slowness is None else slowness
    try:
        done = subprocess.run(
            python_on(num_ranks, PROGRAMS / f"{program}.py", *arguments),
            env={**os.environ, **threads, **QUICK_XLA, "PYTHONPATH": pythonpath(), limits.VARIABLE: str(times)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limits.seconds(LIMIT_S, times),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout
        pytest.fail(
            f"{program} on {num_ranks} ranks did not end within {limits.seconds(LIMIT_S, times):g} s\n{output}", pytrace=False
        )
    if done.returncode:
        pytest.fail(f"{program} on {num_ranks} ranks: exit status {done.returncode}\n{done.stdout}", pytrace=False)
    return done.stdout


def run_command(
    *words: object, status: int | None = 0, limit_s: float = 180, folder: Path = ROOT, **environment: str
) -> tuple[str, str]:
    """Run a command in a folder, and return its standard output and standard error. `status`: None allows any."""
    command, variables = [*map(str, words)], {**os.environ, **environment}
    done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, timeout=limit_s, check=False)
    assert status is None or done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout, done.stderr


def run_example(num_ranks: int, example: str, *options: str, **environment: str) -> list[str]:
    """Return the lines that an example prints on the host backend."""
    printed, _ = run_command(*python_on(num_ranks, f"examples/{example}", "--backend", "host", *options), **environment)
    return printed.splitlines()


def run_bench(num_ranks: int, program: str, *options: object, status: int = 0) -> subprocess.CompletedProcess[str]:
    """Run a program of the checkout, or `bench` with its command, on ranks of the host backend. It must end with this status."""
    words = ("-m", "deepep_rt", "bench") if program == "bench" else (program,)
    command = python_on(num_ranks, *words, "--backend", "host", *options)
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
    assert done.returncode == status, done.stdout[-2000:] + done.stderr[-3000:]
    return done


def environment(**more: str) -> dict[str, str]:
    """Return the environment of programs, without the variables of MPI launchers."""
    launchers = ("OMPI_", "PMI_", "PMIX_", "MPI_", "MPIR_", "HYDRA_", "HYDI_", "SLURM_", "PRTE_", "OPAL_")
    rest = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    return {**rest, "PYTHONPATH": pythonpath(), "OMP_NUM_THREADS": "1", limits.VARIABLE: str(limits.slowness()), **more}


def run_without_mpirun(*arguments: str, launcher: tuple[str, ...] = (), **more: str) -> str:
    """Run tests/programs/spawned.py in processes without variables of MPI launchers, and return its output."""
    process = subprocess.Popen(
        [sys.executable, *launcher, str(PROGRAMS / "spawned.py"), *arguments],
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate()
    except BaseException:  # pytest-timeout, for example
        os.killpg(process.pid, signal.SIGKILL)  # also the processes that it started
        raise
    assert process.returncode == 0, output
    return output
