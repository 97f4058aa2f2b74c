"""Measure the messages between the ranks of the host backend, near and far."""

from __future__ import annotations

import time

import numpy as np

from ...comm.communicator import Communicator
from ...comm.timed_collectives import wait_all
from ...config import Config
from ...description import LinkRates

_TAG = 5
_SMALL, _LARGE = 8, 1 << 20  # bytes of a message
_ROUNDS = {_SMALL: 9, _LARGE: 3}
_PHASE = "the measurement of links"


def measure_links(comm: Communicator, config: Config) -> LinkRates:
    """Measure the links while all ranks send at the same time; see `path_choice.Measure`. Nodes have several ranks.

    Each rank sends to the next rank of its node, and then to the rank of its number on the next node.

    Raises:
        EPTimeoutError: if a rank does not come.
    """
    rank, node, size = comm.Get_rank(), config.node_size, comm.Get_size()
    first = rank - rank % node
    near = first + (rank - first + 1) % node, first + (rank - first - 1) % node
    far = (rank + node) % size, (rank - node) % size
    times = [_seconds(comm, *peers, num_bytes) for peers in (near, far) for num_bytes in (_SMALL, _LARGE)]
    near_small, near_large, far_small, far_large = np.max(comm.allgather(times), axis=0).tolist()
    return LinkRates(_LARGE / near_large, near_small, _LARGE / far_large, far_small)


def _seconds(comm: Communicator, dest: int, source: int, num_bytes: int) -> float:
    """Return the shortest time in which this rank sends a message and receives one. Other work of the machine only makes it longer."""
    outgoing, incoming = np.zeros((2, num_bytes), np.uint8)
    times = []
    for _ in range(1 + _ROUNDS[num_bytes]):  # the first one also makes connections
        start = time.perf_counter()
        requests = [comm.Irecv(incoming, source, _TAG), comm.Isend(outgoing, dest, _TAG)]
        if not wait_all(requests, comm.timeout_s):
            comm.retain(requests, outgoing, incoming)
            raise comm.timeout_error([source], _PHASE, "all ranks to make the Buffer", comm.timeout_s)
        times.append(time.perf_counter() - start)
    return min(times[1:])
