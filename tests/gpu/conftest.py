"""GPU tests run under mpirun, every rank the same tests: `mpirun -n N python -m pytest -m gpu tests/gpu` (without -x)."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def comm():
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture(autouse=True)
def _together(request):
    """Ranks start and end each test together, so that a failure on one does not shift the others."""
    if "comm" in request.fixturenames:
        comm = request.getfixturevalue("comm")
        comm.Barrier()
        yield
        comm.Barrier()
    else:
        yield


def pytest_runtest_logreport(report):
    """Failures are shown at once: the end of a run that hangs is never reached."""
    if report.failed:
        print(f"\n--- {report.nodeid} ({report.when})\n{report.longreprtext}", flush=True)
