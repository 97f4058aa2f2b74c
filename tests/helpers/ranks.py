"""Fixtures of all GPU tests. All ranks of an mpirun run the same tests at the same time."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def comm():
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture(autouse=True)
def together(request):
    """Start and end each test on all ranks at the same time, so that a failure on one rank does not shift the others."""
    if "comm" in request.fixturenames:
        comm = request.getfixturevalue("comm")
        comm.Barrier()
        yield
        comm.Barrier()
    else:
        yield


def pytest_runtest_logreport(report):
    """Print a failure and end the job. Otherwise the other ranks would wait in MPI for this rank without a limit."""
    if report.failed:
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        print(
            f"\n--- rank {comm.Get_rank()}: {report.nodeid} ({report.when})\n{report.longreprtext}\n{report.capstdout}",
            flush=True,
        )
        if comm.Get_size() > 1:
            comm.Abort(1)
