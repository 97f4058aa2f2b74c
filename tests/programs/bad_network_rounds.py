"""Rounds of puts through a bad network. All bytes arrive right, and each word arrives after the bytes of its put.

In a round, each rank puts random bytes to each rank of other nodes, which checks them and puts a credit back. The environment variable
`BAD_NETWORK_ROUNDS` sets the number of rounds, and `BAD_NETWORK_SEED` the seed. Four ranks are two nodes of two.
"""

from __future__ import annotations

import os
import time
from collections import Counter

from bad_network import BadNetwork, bad_network
from mpi4py import MPI
from relay_rank import Exchange
from spmd import main

ROUNDS = int(os.environ.get("BAD_NETWORK_ROUNDS", "100"))
SEED = int(os.environ.get("BAD_NETWORK_SEED", "5"))
MAX_BYTES = 32 << 10


def check_rounds(comm: MPI.Intracomm) -> None:
    """No relay fails, and all puts leave the relays. Rank 0 prints what the network did on all ranks."""
    with bad_network(BadNetwork(seed=SEED, stalls=1e-3)):
        exchange = Exchange(comm, ROUNDS, MAX_BYTES, node_size=2 if comm.Get_size() == 4 else 1)
    start = time.monotonic()
    exchange.run(60.0 + 0.1 * ROUNDS)
    seconds = time.monotonic() - start
    traffic = exchange.rank.relay._traffic
    assert exchange.rank.relay.close()
    expected = 2 * ROUNDS * len(exchange.peers)
    assert (traffic.puts_sent, traffic.puts_received, traffic.done["puts"]) == (expected, expected, expected)
    found = sum(comm.allgather(traffic.done + Counter(bytes=traffic.bytes_sent)), Counter())
    if comm.Get_rank() == 0:
        print(f"{ROUNDS} rounds of {comm.Get_size()} ranks in {seconds:.1f} s, on all ranks: {dict(found)}", flush=True)
    assert min(found[what] for what in ("late at the sender", "late at the receiver", "split", "overtaken")) > 0
    assert not found["lost"]


if __name__ == "__main__":
    main(__name__)
