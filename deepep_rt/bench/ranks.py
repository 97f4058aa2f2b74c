"""What the ranks of a benchmark do together: see that rank 0 can write before they measure, and fail."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import EPConfigError, EPError

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm


def make_room(comm: Intracomm | None, path: Path, option: str, *, is_file: bool = False) -> None:
    """See, before anything is measured, that rank 0 can write a file, or into a folder; folders are made. All ranks learn if it cannot.

    Args:
        comm: The ranks; None: only this process.
        path: What will be written.
        option: Of the command line, which chose it.
        is_file: Whether it is a file, which need not be there; otherwise a folder.

    Raises:
        EPConfigError: if it cannot be written.
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
        raise EPConfigError(f"{path} cannot be written: {error}; choose another {'file' if is_file else 'folder'} with {option}")


@contextmanager
def together(world: Intracomm) -> Iterator[Intracomm]:
    """A communicator to work on. If all ranks fail, rank 0 says why; if some do, they say why and end the others, which wait for them."""
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
                time.sleep(0.5)  # launchers drop what they have not read when a rank aborts
                world.Abort(1)
            time.sleep(0.01)
        if world.rank:
            sys.exit(1)
        raise
    comm.Free()
    ends.Free()
