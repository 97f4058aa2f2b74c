"""The checks of the host backend, on GPUs: the same programs, through NumPy arrays that the CUDA backend stages."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "mpi_host")]


def _checks():
    try:
        import bad_calls
        import buffers
        import combine
        import dispatch
        import rounds
    except ImportError:  # no MPI: these tests are not for this machine, and pytest only collects here
        return []
    found = []
    for module in (dispatch, combine, buffers, rounds, bad_calls):
        checks = [f for name, f in inspect.getmembers(module, inspect.isfunction) if name.startswith("check_")]
        found += [
            pytest.param(f, id=f"{module.__name__}-{f.__name__}") for f in sorted(checks, key=lambda f: f.__code__.co_firstlineno)
        ]
    return found


@pytest.mark.parametrize("check", _checks())
def test_check(check, comm, monkeypatch):
    import spmd

    monkeypatch.setattr(spmd, "backend", "cuda")
    monkeypatch.setenv("DEEPEP_RT_DEBUG", "1")
    assert spmd._run(check, comm)
