"""Relays over NIXL between processes that have no MPI: puts, a rank that is killed or stopped, and survivors that go on.

Usage: relays_without_mpi.py [--ranks N] [--how SIGKILL|SIGSTOP|none|no-agent|no-network]. The last rank gets the signal
in the middle of puts, cannot make an agent, or has no network in common with the others.
"""

from __future__ import annotations

import argparse
import ipaddress
import multiprocessing as mp
import os
import signal
import sys
import time
from multiprocessing.connection import Connection

from expect import raises
from limits import seconds
from relay_rank import Exchange, RelayRank

from deepep_rt import EPTimeoutError, EPUnavailableError
from deepep_rt.comm.store import StoreCommunicator
from deepep_rt.comm.store_client import StoreClient
from deepep_rt.comm.store_server import StoreServer
from deepep_rt.doctor.addresses import interfaces

TIMEOUT_S = seconds(4.0)


def another_network() -> str:
    """Return the name of an interface of this host that other hosts could reach."""
    return next(one["name"] for one in interfaces() if not ipaddress.ip_interface(one["address"]).is_loopback)


def rank_of(rank: int, ranks: int, how: str, port: int, pipe: Connection) -> None:
    """Exchange puts until the last rank is lost, and then without it."""
    client = StoreClient("127.0.0.1", port)
    comm = StoreCommunicator(client, "all", rank, ranks)
    settings = {"transport": "nixl", "timeout_s": TIMEOUT_S}
    if how in ("no-agent", "no-network"):
        is_last, last = rank == ranks - 1, f"rank {ranks - 1} on node {ranks - 1}"
        if how == "no-network":
            os.environ |= {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo" if is_last else another_network()}
        elif is_last:
            os.environ["UCX_TLS"] = "self"
        if how == "no-agent":
            expected = f"{last} cannot make an agent of NIXL: "
        else:
            expected = f"rank 0 on node 0 does not reach the agent of {last} over {another_network()}: "
        with raises(EPUnavailableError, f"transport='nixl', but {expected}"):
            RelayRank(comm, 64, **settings)
        pipe.send(("done", 0.0, ""))
        return
    if how == "none":
        exchange = Exchange(comm, 100, 64 << 10, **settings)
        exchange.run()
        assert exchange.rank.relay.close()
        pipe.send(("done", 0.0, ""))
        return
    exchange = Exchange(comm, 10**6, 32 << 10, awaits=False, **settings)
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        exchange.step()
    pipe.send(("ready", 0.0, ""))
    if rank == ranks - 1:
        time.sleep(60)
    start = time.monotonic()
    while (error := exchange.rank.relay.error) is None:
        exchange.step()
    assert isinstance(error, EPTimeoutError)
    assert error.peer == ranks - 1, error
    pipe.send(("raised", time.monotonic() - start, str(error)))
    start = time.monotonic()
    exchange.rank.relay.close()
    limit_s = seconds(2.0) if how == "SIGKILL" else TIMEOUT_S + seconds(2.0)  # a silent rank may come back
    assert time.monotonic() - start < limit_s, "a lost rank holds the end of the relay"
    survivors = StoreCommunicator(client, "survivors", rank, ranks - 1)
    again = Exchange(survivors, 50, 16 << 10, **settings)
    again.run()
    assert again.rank.relay.close()
    assert "mpi4py" not in sys.modules
    pipe.send(("done", 0.0, ""))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--how", default="none")
    given = parser.parse_args()
    server = StoreServer()
    server.serve_in_thread()
    context = mp.get_context("spawn")
    pipes = [context.Pipe() for _ in range(given.ranks)]
    processes = [
        context.Process(target=rank_of, args=(rank, given.ranks, given.how, server.port, pipes[rank][1]))
        for rank in range(given.ranks)
    ]
    for one in processes:
        one.start()
    victims = [processes[-1]] if given.how.startswith("SIG") else []
    mine = [pipes[rank][0] for rank in range(given.ranks - len(victims))]
    try:
        if victims:
            for pipe, _ in pipes:
                assert receive(pipe)[0] == "ready"
            os.kill(victims[0].pid or 0, signal.Signals[given.how])
            for rank, pipe in enumerate(mine):
                what, after_s, text = receive(pipe)
                assert what == "raised", what
                print(f"rank {rank} raised after {after_s:.3f} s: {text}", flush=True)
        for pipe in mine:
            assert receive(pipe)[0] == "done"
        print(f"{len(mine)} ranks: passed", flush=True)
    finally:
        for one in processes:
            one.kill()
            one.join()
        server.close()


def receive(pipe: Connection) -> tuple[str, float, str]:
    assert pipe.poll(seconds(60)), "a rank says nothing"
    answer: tuple[str, float, str] = pipe.recv()
    return answer


if __name__ == "__main__":
    main()
