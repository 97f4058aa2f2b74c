"""Check libraries and outputs before the ranks measure, and end all ranks when one fails."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .._install import pip_install
from ..errors import EPConfigError, EPError, EPUnavailableError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


def need(*libraries: str) -> None:
    """Check that libraries can be imported. Raise EPUnavailableError with the command that installs a missing one."""
    for name in libraries:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise EPUnavailableError(
                f"the benchmarks need {name}, which cannot be imported ({error}). Run {pip_install('bench')}."
            ) from None


def world() -> Intracomm:
    """Return the ranks of this mpirun. Raise EPUnavailableError if MPI does not load."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise EPUnavailableError(
            f"MPI does not load ({error}). Run {pip_install('mpich')}, or put the library of your MPI where the loader finds it. "
            f"python -m deepep_rt doctor says more."
        ) from None
    return MPI.COMM_WORLD


def check_writable(comm: Intracomm | None, path: Path, option: str, *, is_file: bool = False) -> None:
    """Check that rank 0 can write a file, or into a folder. Create folders. Call it before the ranks measure.

    `comm` is None for this process alone. `option` of the command line chose the path. A file need not exist. Raise EPConfigError on all
    ranks, if rank 0 cannot write to it.
    """
    error, folder = None, path.parent if is_file else path
    if comm is None or comm.rank == 0:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if is_file and path.is_dir():
                error = "it is a folder"
            elif not (os.access(path, os.W_OK) if is_file and path.exists() else os.access(folder, os.W_OK | os.X_OK)):
                error = "this user may not write to it"
        except OSError as reason:
            error = str(reason)
    if error := error if comm is None else comm.bcast(error):
        raise EPConfigError(
            f"{option}={path} cannot be written: {error}. Choose another {'file' if is_file else 'folder'} with {option}."
        )


@contextmanager
def fail_together(world: Intracomm) -> Iterator[Intracomm]:
    """Provide a communicator for the block, and handle its errors.

    If all ranks fail, rank 0 raises. If some fail, they print their errors and abort the others, which would wait for them.
    """
    comm, ends = world.Dup(), world.Dup()
    try:
        yield comm
    except Exception as error:
        failed = ends.Ibarrier()
        deadline = time.monotonic() + 3
        while not failed.Test():
            if time.monotonic() > deadline:
                if not isinstance(error, EPError):
                    sys.excepthook(type(error), error, error.__traceback__)
                print(f"rank {world.rank}: error: {error}; the other ranks are ended", file=sys.stderr, flush=True)
                time.sleep(0.5)  # launchers drop unread output when a rank aborts
                world.Abort(1)
            time.sleep(0.01)
        if world.rank:
            sys.exit(1)
        raise
    comm.Free()
    ends.Free()
