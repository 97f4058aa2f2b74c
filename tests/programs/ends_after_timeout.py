"""Programs that go on after a time-out and end: all processes end, and mpirun returns 0. `ends_after_timeout.py alone|other`

alone: rank 0 makes no Buffer, and ends last. other: rank 0 makes it over another communicator. In both, the ranks wait for rank 0.
"""

from __future__ import annotations

import sys
import time

from mpi4py import MPI

from deepep_rt import Buffer, EPTimeoutError

WORLD = MPI.COMM_WORLD
TIMEOUT_S = 1.5

pair = WORLD.Split(WORLD.rank % 2, -WORLD.rank)
comm = pair if WORLD.rank == 0 and sys.argv[1] == "other" else WORLD
if WORLD.rank or sys.argv[1] == "other":
    try:
        Buffer(comm, num_max_tokens_per_rank=16, hidden=128, num_topk=2, num_experts=8, backend="host", timeout_s=TIMEOUT_S)
    except EPTimeoutError as error:
        print(error)
else:
    end = time.monotonic() + 2 * TIMEOUT_S
    while time.monotonic() < end:
        assert not WORLD.iprobe(), "the library sends no message over the program's communicator"
        time.sleep(0.01)
print(f"rank {WORLD.rank} ends", flush=True)
