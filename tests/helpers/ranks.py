"""What all GPU tests share: every rank of an mpirun runs the same tests, and they stay together."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def comm():
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture(autouse=True)
def together(request):
    """Ranks start and end each test together, so that a failure on one does not shift the others."""
    if "comm" in request.fixturenames:
        comm = request.getfixturevalue("comm")
        comm.Barrier()
        yield
        comm.Barrier()
    else:
        yield


def pytest_runtest_logreport(report):
    """A failure is shown at once and ends the job: the other ranks would wait for this one in MPI, without a limit."""
    if report.failed:
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        print(
            f"\n--- rank {comm.Get_rank()}: {report.nodeid} ({report.when})\n{report.longreprtext}\n{report.capstdout}",
            flush=True,
        )
        if comm.Get_size() > 1:
            comm.Abort(1)
