"""Random kills: python kills.py cuda|host KILLS RANKS SEED starts RANKS processes without mpirun, again and again, until KILLS are done.

Each rank makes the same random calls. At a random moment one of them kills itself. The others raise long before the time limit of the
Buffer, and make a new one over the ranks that live, whose results are checked. That goes on until two ranks are left. The ranks of the next
starts load their libraries meanwhile. This process holds the store, so any rank may die.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gpu_faults import CALLS, Rank, sizes_of
from limits import seconds
from ports import free_port

from deepep_rt import Buffer, EPTimeoutError
from deepep_rt.comm.store import StoreCommunicator

LATEST_S, LIMIT_S = 0.05, seconds(60)
FIRST_S = 60.0  # the first Buffers may compile
TIMEOUT_S, AHEAD = seconds(30), {"cuda": 2, "host": 0}  # and starts that wait for their turn


def plan(seed: int, world: int, size: int, most: int) -> list[tuple[int, float, list[str]]]:
    """Draw the kills of one start: the rank, the seconds after which it dies, and the calls in which it does."""
    rng, alive, kills = np.random.default_rng([seed, world]), list(range(size)), []
    while len(alive) > 2 and len(kills) < most:
        victim = alive.pop(int(rng.integers(len(alive))))
        kills.append((victim, float(rng.uniform(0, LATEST_S)), [str(call) for call in rng.choice(CALLS, 20)]))
    return kills


def make_buffer(store: dist.Store, name: str, backend: str, rank: int, alive: list[int]) -> tuple[Buffer, Rank]:
    """Make a Buffer over the ranks that live, and check its calls. Note how long the making took."""
    group = StoreCommunicator(store, name, alive.index(rank), len(alive))
    begin = time.monotonic()
    buffer = Buffer(group, **sizes_of(len(alive)), timeout_s=TIMEOUT_S, backend=backend)
    store.set(f"{name}/made in/{rank}", f"{time.monotonic() - begin:.4f}")
    mine = Rank(buffer, alive.index(rank), len(alive), "cuda" if backend == "cuda" else "cpu")
    for _ in range(3):
        mine.prepare()
    return buffer, mine


def run_rank(backend: str, seed: int, size: int, most: int, world: int, rank: int, port: int) -> None:
    if backend == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.cuda.synchronize()  # the start of CUDA
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    store.set(f"{world}/ready/{rank}", "")
    store.wait([f"{world}/turn"], timedelta(hours=1))
    faulthandler.dump_traceback_later(LIMIT_S * size + FIRST_S, exit=True)
    alive = list(range(size))
    for number, (victim, delay_s, calls) in enumerate(plan(seed, world, size, most)):
        buffer, mine = make_buffer(store, f"{world}/{number}", backend, rank, alive)
        if rank == victim:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the process dies at once, also in a call of a library
            signal.setitimer(signal.ITIMER_REAL, max(delay_s, 1e-6))
        begin = time.monotonic()
        try:
            while time.monotonic() - begin < LIMIT_S:
                for call in calls:
                    getattr(mine, call)()
                    buffer.synchronize()
        except EPTimeoutError:
            assert time.monotonic() - begin < LATEST_S + seconds(4)
        else:
            raise AssertionError("the loss of a rank was not reported")
        buffer.destroy(in_touch=False)
        alive.remove(victim)
    buffer, _ = make_buffer(store, f"{world}/end", backend, rank, alive)
    buffer.destroy()
    os._exit(0)


def start(backend: str, seed: int, size: int, most: int, world: int, port: int) -> list[subprocess.Popen[bytes]]:
    """Start the ranks of a world. They wait for its turn."""
    words = [sys.executable, __file__, backend, str(most), str(size), str(seed), str(world)]
    return [subprocess.Popen([*words, str(rank), str(port)]) for rank in range(size)]


def run_world(
    ranks: list[subprocess.Popen[bytes]], seed: int, size: int, most: int, world: int, store: dist.TCPStore
) -> list[float]:
    """Let the ranks run. Return the seconds of the slowest rank for each new Buffer after a kill."""
    store.wait([f"{world}/ready/{rank}" for rank in range(size)], timedelta(seconds=FIRST_S))
    store.set(f"{world}/turn", "")
    codes = [process.wait(LIMIT_S * size + FIRST_S) for process in ranks]
    kills = plan(seed, world, size, most)
    alive, victims = set(range(size)), [victim for victim, *_ in kills]
    assert codes == [-signal.SIGALRM if rank in victims else 0 for rank in range(size)], f"seed {seed}, start {world}: {codes}"
    found = []
    for number, (victim, delay_s, _) in enumerate(kills):
        alive.remove(victim)
        name = f"{world}/{number + 1 if number + 1 < len(kills) else 'end'}"
        found.append(max(float(store.get(f"{name}/made in/{rank}")) for rank in alive))
        after = f"rank {victim} killed after {1e3 * delay_s:.1f} ms"
        print(f"start {world}: {after}; {len(alive)} ranks have a new Buffer after {found[-1]:.3f} s", flush=True)
    return found


def main() -> None:
    backend, kills, size, seed, *rest = sys.argv[1:]
    if rest:
        world, rank, port = map(int, rest)
        return run_rank(backend, int(seed), int(size), int(kills), world, rank, port)
    store: Any = dist.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    each = int(size) - 2
    most = [min(each, int(kills) - first) for first in range(0, int(kills), each)]
    worlds: list[list[subprocess.Popen[bytes]]] = []
    found: list[float] = []
    try:
        for world in range(len(most)):
            while len(worlds) < min(world + 1 + AHEAD[backend], len(most)):
                worlds.append(start(backend, int(seed), int(size), most[len(worlds)], len(worlds), store.port))
            found += run_world(worlds[world], int(seed), int(size), most[world], world, store)
    finally:
        for ranks in worlds:
            for process in ranks:
                process.kill()
    print(
        f"passed: {len(found)} kills in {len(most)} starts of {size} ranks; new Buffer p50 {np.median(found):.3f} s, max {max(found):.3f} s"
    )
    return None


if __name__ == "__main__":
    main()
