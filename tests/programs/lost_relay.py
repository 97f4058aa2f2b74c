"""A rank of four whose process is lost in the middle of puts: python lost_relay.py SIGSTOP|SIGKILL. The program ends on all ranks.

After SIGSTOP, the other ranks raise. After SIGKILL, mpirun may end them before. Start it with `python -m mpi4py`, so that an exception on
one rank ends MPI on all ranks.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from limits import seconds
from mpi4py import MPI
from relay_rank import Exchange
from spmd import idle_barrier

from deepep_rt import EPError

VICTIM, TIMEOUT_S = 3, seconds(4.0)


def main() -> None:
    comm = MPI.COMM_WORLD
    rank = comm.Get_rank()
    exchange = Exchange(comm, 10**6, 1024, awaits=False, node_size=2, timeout_s=TIMEOUT_S)
    for _ in range(200):
        exchange.step()
    print(f"rank {rank} is process {os.getpid()}", flush=True)
    idle_barrier(comm)
    start = time.monotonic()
    if rank == VICTIM:
        os.kill(os.getpid(), signal.Signals[sys.argv[1]])
    try:
        while time.monotonic() < start + 5 * TIMEOUT_S:
            exchange.step()
            exchange.rank.relay.check()
    except EPError as error:
        print(f"rank {rank} raised after {time.monotonic() - start:.2f} s: {error}", flush=True)
        time.sleep(TIMEOUT_S / 2)  # until the other ranks have raised too
        raise


if __name__ == "__main__":
    main()
