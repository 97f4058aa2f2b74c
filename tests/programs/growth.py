"""A Buffer grows from 2 to 4 and 8 ranks, each a process. `admit` takes all that wait, and every result is compared with the oracle.

Usage: growth.py [--seed N] [--rounds N] [--backend host|cuda]. It needs no MPI. Its processes are copies of the first one, which has loaded
the libraries. On GPUs, several of the eight ranks may share one: set DEEPEP_RT_SHARE_GPUS=1.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing as mp
import traceback
from collections.abc import Collection
from multiprocessing.connection import Connection
from typing import Any

import ml_dtypes  # noqa: F401  (teaches NumPy bfloat16)
import numpy as np
from limits import seconds
from oracle import RankInputs
from scenario_table import drawn
from scenarios import Round, Scenario

from deepep_rt import Buffer
from deepep_rt.comm.membership import Membership
from deepep_rt.comm.store import StoreCommunicator
from deepep_rt.comm.store_client import StoreClient
from deepep_rt.comm.store_server import StoreServer

SLOTS, LOCAL, TOKENS, SIZES = 8, 2, 12, (2, 4, 8)
LAYOUTS = ("token", "expert", "low_latency")
SETTINGS: dict[str, Any] = dict(num_max_tokens_per_rank=TOKENS, hidden=256, num_topk=3, num_experts=SLOTS * LOCAL)
SETTINGS |= dict(dtype="bfloat16", low_latency=True, max_ranks=SLOTS, timeout_s=seconds(30))


class Choices:
    """The choices of a rank. The oracle sees -1 where calls name experts of absent slots, which have no tokens."""

    def __init__(self, row: Scenario, members: Collection[int]) -> None:
        self._members, self._named = members, list[tuple[np.ndarray, np.ndarray]]()
        self._change = row.changed
        self.row = dataclasses.replace(row, changed=self._hide)

    def _hide(self, one: RankInputs, rank: int, ranks: int, each: int) -> None:
        if self._change is not None:
            self._change(one, rank, ranks, each)
        if rank not in self._members:
            one.x, one.topk_idx, one.topk_weights = one.x[:0], one.topk_idx[:0], one.topk_weights[:0]
            one.scales = None if one.scales is None else one.scales[:0]
            return
        named = one.topk_idx
        one.topk_idx = np.where(np.isin(named // each, list(self._members)), named, -1).astype(named.dtype)
        self._named.append((one.topk_idx, named))

    def put(self, array: np.ndarray) -> np.ndarray:
        return next((named for known, named in self._named if known is array), array)


def compare(buffer: Buffer, seed: int) -> None:
    """Make a round of random calls of each kind, and compare all that they give."""
    for layout in LAYOUTS:
        fixed: dict[str, Any] = {} if layout == "low_latency" else dict(dtypes=["bfloat16"], scales=[0])
        choices = Choices(drawn(layout, seed, TOKENS, **fixed), buffer.members)
        made: Round = choices.row.start(buffer.config)
        made.call(buffer, buffer.rank, choices.put)
        made.check(buffer.rank)


def tell_of_applications(pipe: Connection) -> None:
    """Tell the parent when this process waits to be taken in."""
    ask = Membership._ask

    def told(membership: Membership, method: str, *arguments: Any) -> Any:
        answer = ask(membership, method, *arguments)
        if method == "add" and arguments[0].endswith("/applications") and arguments[1]:
            pipe.send("it waits")
        return answer

    Membership._ask = told


def rank_main(rank: int | None, address: str, backend: str, pipe: Connection) -> None:
    try:
        settings = {**SETTINGS, "backend": backend, "rendezvous": f"{address}/growth"}
        if rank is None:
            pipe.recv()
            tell_of_applications(pipe)
            buffer = Buffer.join(**settings)
        else:
            host, port = address.split(":")
            buffer = Buffer(StoreCommunicator(StoreClient(host, int(port)), "start", rank, SIZES[0]), **settings)
        pipe.send((buffer.members, ()))
        while (command := pipe.recv()) != "end":
            new = ()
            if command == "admit":
                new = buffer.admit()
            else:
                compare(buffer, command)
            pipe.send((buffer.members, new))
        buffer.destroy()
        pipe.send("ended")
    except BaseException:
        pipe.send(traceback.format_exc())
        raise


def main(seed: int, rounds: int, backend: str) -> None:
    server, processes = StoreServer(), []
    pipes: list[Connection] = []
    for number in range(SLOTS):
        mine, theirs = mp.get_context("fork").Pipe()
        rank = number if number < SIZES[0] else None
        processes.append(mp.get_context("fork").Process(target=rank_main, args=(rank, server.address, backend, theirs)))
        processes[-1].start()
        pipes.append(mine)
    server.serve_in_thread()  # after the copies were made, which must have no threads

    def answers(some: Collection[Connection]) -> list[Any]:
        found = []
        for pipe in some:
            assert pipe.poll(seconds(60)), "a rank is silent"
            found.append(pipe.recv())
            assert not isinstance(found[-1], str) or "Traceback" not in found[-1], found[-1]
        return found

    def all_make(command: Any, some: Collection[Connection]) -> list[Any]:
        for pipe in some:
            pipe.send(command)
        return answers(some)

    try:
        answers(pipes[: SIZES[0]])
        before = 0
        for size in SIZES:
            members = tuple(range(size))
            if before:
                assert all_make("join", pipes[before:size]) == ["it waits"] * (size - before)
                assert all_make("admit", pipes[:before]) == [(members, members[before:])] * before, (
                    "it does not take all that wait"
                )
                assert answers(pipes[before:size]) == [(members, ())] * (size - before)
            for number in range(rounds):
                assert all_make(1000 * seed + 10 * size + number, pipes[:size]) == [(members, ())] * size
            assert all_make("admit", pipes[:size]) == [(members, ())] * size, "nobody waits"
            before = size
        assert all_make("end", pipes) == ["ended"] * SLOTS
        print("OK")
    finally:
        for process in processes:
            process.kill()
        server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--backend", choices=("host", "cuda"), default="host")
    given = parser.parse_args()
    main(given.seed, given.rounds, given.backend)
