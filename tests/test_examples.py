"""The example runs on the host backend and checks itself."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_dispatch_combine(num_ranks):
    mpirun = Path(sys.executable).with_name("mpirun")
    words = [str(mpirun) if mpirun.exists() else "mpirun", "-n", str(num_ranks), sys.executable, "examples/dispatch_combine.py"]
    sizes = ["--backend", "host", "--tokens", "40", "--hidden", "256"]
    done = subprocess.run([*words, *sizes], capture_output=True, text=True, timeout=180, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert lines[-1] == "OK"
    assert [line.split()[0] for line in lines[1:-1]] == ["dispatch", "combine"]
    assert all("GB/s" in line for line in lines[:-1])
    assert ("% of the copy ceiling" in lines[1]) == (num_ranks > 1)
