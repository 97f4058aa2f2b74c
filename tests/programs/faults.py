"""Faults of one rank in the middle of a call, on the host backend: python faults.py [SEED [KIND...]].

A scenario is three processes over a store that this program serves. At one store operation of a call, the victim is killed, sleeps, raises,
or runs out of memory. The other ranks either finish the call with the right bytes, or raise in time and name the victim. Several scenarios
run at once, so that their time-outs overlap.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import struct
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import ml_dtypes
import numpy as np
from limits import seconds

from deepep_rt import Buffer, EPError, EPPeerLostError, EPTimeoutError
from deepep_rt.backends.host import backend as host
from deepep_rt.comm.store import StoreCommunicator

RANKS, VICTIM, TOKENS, TOPK, EXPERTS, HIDDEN = 3, 1, 6, 2, 6, 64
KINDS = ("raises", "no_memory", "killed_masked", "asleep", "killed")
LOW_LATENCY = ("low_latency_dispatch", "low_latency_combine", "low_latency_combine_of_single_rows")
CALLS = ("dispatch", "cached_dispatch", "combine", *LOW_LATENCY)
TIMEOUT_S, AT_ONCE = seconds(1.5), 4
NOTICE_TIMEOUT_S, QUICK_S = seconds(60.0), seconds(10.0)  # a failure notice or a death ends waits long before this time-out
LOST_S = seconds(2.0)  # from a death to the errors of the others: a second, and as much for other tests on the same cores
LIMIT_S = int(seconds(120))


@dataclass
class Scenario:
    """A fault: its kind, the call of the victim, and the point in the call, as a share of its store operations."""

    kind: str
    call: str
    point: float
    store: dict[str, bytes] = field(default_factory=dict)
    ranks: list[tuple[int, Connection]] = field(default_factory=list)  # process numbers, and pipes to the processes
    problems: dict[int, str] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    died_at: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, 8))  # that all processes share

    @property
    def name(self) -> str:
        return f"{self.kind} in {self.call} at {self.point:.2f}"

    @property
    def timeout_s(self) -> float:
        return TIMEOUT_S if self.kind == "asleep" else NOTICE_TIMEOUT_S


class PipeStore:
    """A store that the parent process serves. The fault happens in one of its operations."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.count = 0  # of operations but `check`, whose number depends on timing
        self.fault_at, self.fault = -1, lambda: None

    def _ask(self, method: str, *given: Any) -> Any:
        if method != "check":
            self.count += 1
            if self.count == self.fault_at:
                self.fault()
        self._pipe.send((method, given))
        return self._pipe.recv()

    def set(self, key: str, value: bytes) -> None:
        self._ask("set", key, value)

    def get(self, key: str) -> bytes:
        return self._ask("get", key)

    def check(self, keys: list[str]) -> bool:
        return self._ask("check", keys)

    def delete_key(self, key: str) -> bool:
        return self._ask("delete_key", key)


# --- a rank --------------------------------------------------------------------------------------------------------------------------


def routing(rank: int) -> np.ndarray:
    rng = np.random.default_rng([7, rank])
    return np.stack([rng.permutation(EXPERTS)[:TOPK] for _ in range(TOKENS)]).astype(np.int64)


def rows(rank: int) -> np.ndarray:
    """Rows of one number each that BF16 represents exactly. All rows differ."""
    return np.tile((16 * rank + np.arange(TOKENS) + 1)[:, None], HIDDEN).astype(ml_dtypes.bfloat16)


def send_mask(rank: int) -> np.ndarray:
    """`[tokens, ranks]` bool: the ranks that each token of a rank goes to."""
    owner = routing(rank) // (EXPERTS // RANKS)
    return (owner[:, :, None] == np.arange(RANKS)).any(1)


class Rank:
    """The calls of one rank. Each call checks its result."""

    def __init__(self, buffer: Buffer, rank: int) -> None:
        self.buffer, self.rank, self.x, self.idx = buffer, rank, rows(rank), routing(rank)
        self.weights = np.full(self.idx.shape, 0.5, np.float32)
        self.lost: set[int] = set()  # after the fault: ranks whose rows may be missing in results

    def prepare(self) -> None:
        self.sent = self.dispatch()
        self.quick = self.low_latency_dispatch()

    def dispatch(self, **known: Any) -> Any:
        sent = self.buffer.dispatch(self.x, **known) if known else self.buffer.dispatch(self.x, self.idx, self.weights)
        wanted = [(source, token) for source in range(RANKS) for token in np.flatnonzero(send_mask(source)[:, self.rank])]
        assert [tuple(pair) for pair in np.asarray(sent.recv_src_idx)] == wanted
        assert (np.asarray(sent.recv_x) == np.array([rows(source)[token] for source, token in wanted])).all()
        return sent

    def cached_dispatch(self) -> None:
        self.dispatch(handle=self.sent.handle)

    def combine(self) -> None:
        back = self.buffer.combine(self.sent.recv_x, self.sent.handle).x
        assert (back.astype(np.float32) == self.x.astype(np.float32) * send_mask(self.rank).sum(1, keepdims=True)).all()

    def low_latency_dispatch(self) -> Any:
        sent = self.buffer.low_latency_dispatch(self.x, self.idx, topk_weights=self.weights, use_fp8=False)
        counts, local = np.asarray(sent.num_recv_tokens_per_expert), EXPERTS // RANKS
        for expert in range(local):
            arrived = np.asarray(sent.recv_x)[expert, : counts[expert], 0].astype(int)
            wanted = {r: (16 * r + 1 + np.flatnonzero((routing(r) == self.rank * local + expert).any(1))) for r in range(RANKS)}
            certain = [value for r in range(RANKS) if r not in self.lost for value in wanted[r]]
            assert set(arrived) >= set(certain), (arrived, wanted)
            assert set(arrived) <= set(np.concatenate(list(wanted.values()))), (arrived, wanted)
        return sent

    def low_latency_combine(self, **options: Any) -> None:
        quick = self.quick
        back = self.buffer.low_latency_combine(quick.recv_x, self.idx, self.weights, quick.handle, **options).x.astype(np.float32)
        owner = self.idx // (EXPERTS // RANKS)
        least = (self.weights * ~np.isin(owner, list(self.lost))).sum(1, keepdims=True) * self.x.astype(np.float32)
        most = self.weights.sum(1, keepdims=True) * self.x.astype(np.float32)
        assert ((back >= least) & (back <= most)).all()
        if not self.lost:
            assert (back == most).all()

    def low_latency_combine_of_single_rows(self) -> None:
        self.low_latency_combine(allow_multiple_reduction=False)


def fault_of(scenario: Scenario) -> Callable[[], None]:
    """Return the function that makes the fault happen."""

    def sleep() -> None:
        time.sleep(2.5 * TIMEOUT_S)

    def fail() -> None:
        raise KeyError("mine")

    def no_memory() -> None:
        raise MemoryError("no memory")

    def die() -> None:
        scenario.died_at[:] = struct.pack("d", time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)

    return {"asleep": sleep, "raises": fail, "no_memory": no_memory}.get(scenario.kind, die)


def make_buffer(store: PipeStore, scenario: Scenario, rank: int) -> Buffer:
    return Buffer(
        StoreCommunicator(store, "faults", rank, RANKS),
        num_max_tokens_per_rank=8,
        hidden=HIDDEN,
        num_topk=TOPK,
        num_experts=EXPERTS,
        timeout_s=scenario.timeout_s,
        low_latency=True,
        on_timeout="mask" if scenario.kind == "killed_masked" else "raise",
        backend="host",
    )


def run_victim(scenario: Scenario, store: PipeStore) -> None:
    """Make a good call, and a call with the fault."""
    with make_buffer(store, scenario, VICTIM) as buffer:
        mine = Rank(buffer, VICTIM)
        mine.prepare()
        before = store.count
        getattr(mine, scenario.call)()  # counts the operations of the call
        store.fault_at = store.count + 1 + round(scenario.point * (store.count - before - 1))
        store.fault = fault_of(scenario)
        getattr(mine, scenario.call)()
        assert scenario.kind == "asleep", "the fault did not happen"
        getattr(mine, scenario.call)()


def run_other(scenario: Scenario, store: PipeStore, rank: int) -> None:
    """Call until the Buffer reports that the victim is lost. After the victim's last good call, one or two calls may succeed."""
    buffer = make_buffer(store, scenario, rank)
    mine = Rank(buffer, rank)
    mine.prepare()
    getattr(mine, scenario.call)()
    if scenario.kind == "killed_masked":
        mine.lost = {VICTIM}
        start = time.monotonic()
        getattr(mine, scenario.call)()
        for _ in range(5):
            mine.quick = mine.low_latency_dispatch()
            mine.low_latency_combine()
        assert buffer.query_masked_ranks() == [VICTIM]
        assert time.monotonic() - start < QUICK_S
        buffer.destroy()
        return
    caught, start = None, time.monotonic()
    try:
        with buffer:
            for _ in range(3):
                getattr(mine, scenario.call)()
    except EPTimeoutError as error:
        caught = error
    assert caught is not None, "the loss of the victim was not reported"
    assert f"rank {VICTIM}" in str(caught), caught
    if scenario.kind == "killed":
        assert isinstance(caught, EPPeerLostError), caught
        assert caught.ranks == (VICTIM,)
        took = time.monotonic() - struct.unpack("d", scenario.died_at)[0]
        assert took < LOST_S, took
    if scenario.kind in ("raises", "no_memory"):
        assert "left the Buffer" in str(caught), caught
        assert {"raises": "mine", "no_memory": "memory"}[scenario.kind] in str(caught), caught
    assert time.monotonic() - start < (TIMEOUT_S if scenario.timeout_s == TIMEOUT_S else 0) + QUICK_S
    buffer.destroy()


def run_rank(scenario: Scenario, pipe: Connection, rank: int) -> str:
    """Run the part of one rank; return a problem, or an empty text."""
    pipe.recv()
    warnings.simplefilter("ignore")
    store = PipeStore(pipe)
    try:
        if rank != VICTIM:
            run_other(scenario, store, rank)
            return ""
        try:
            run_victim(scenario, store)
        except (KeyError, MemoryError, EPError):
            if scenario.kind.startswith("killed"):
                raise
        return ""
    except BaseException:
        return f"rank {rank}:\n{traceback.format_exc()}"


# --- the parent ----------------------------------------------------------------------------------------------------------------------


def scenarios(kind: str, seed: int) -> list[Scenario]:
    """List the scenarios of one kind of fault."""
    rng = np.random.default_rng(seed)
    calls = LOW_LATENCY[:2] if kind == "killed_masked" else CALLS
    made = []
    for call in calls:
        points = [0.0, 1.0, rng.random()] if kind.startswith("killed") else [rng.random()]
        made += [Scenario(kind, call, float(point)) for point in points]
    return made


def fork(scenario: Scenario) -> None:
    """Start the processes of a scenario."""
    for rank in range(RANKS):
        ours, theirs = Pipe()
        child = os.fork()
        if not child:
            signal.alarm(LIMIT_S)  # also if this program is killed
            problem = run_rank(scenario, theirs, rank)
            theirs.send(("ended", (problem,)))
            os._exit(0)
        scenario.ranks.append((child, ours))


def answer(store: dict[str, bytes], method: str, given: tuple[Any, ...]) -> Any:
    """Carry out an operation of a store."""
    if method == "check":
        return all(key in store for key in given[0])
    if method == "set":
        store[given[0]] = given[1]
        return None
    return store[given[0]] if method == "get" else store.pop(given[0], None) is not None


def serve(waiting: list[Scenario]) -> list[str]:
    """Run the scenarios, a few at once. Return the names of those that failed."""
    running: list[Scenario] = []
    failed = []
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            running.append(waiting.pop())
            for _, pipe in running[-1].ranks:
                pipe.send("go")
        owners = {
            pipe: (scenario, rank)
            for scenario in running
            for rank, (_, pipe) in enumerate(scenario.ranks)
            if rank not in scenario.ended
        }
        for pipe in wait(list(owners), timeout=0.05):
            scenario, rank = owners[pipe]
            try:
                method, given = pipe.recv()
            except (EOFError, ConnectionError):  # processes that were forked later may hold their end open, too
                scenario.ended.add(rank)
                continue
            if method == "ended":
                scenario.problems[rank] = given[0]
            else:
                with contextlib.suppress(ConnectionError):
                    pipe.send(answer(scenario.store, method, given))
        for scenario in running[:]:
            expected = set(range(RANKS)) - ({VICTIM} if scenario.kind.startswith("killed") else set())
            if expected <= set(scenario.problems):
                running.remove(scenario)
                problems = "".join(scenario.problems.values())
                print(f"{scenario.name}: {'failed' if problems else 'passed'}\n{problems}", end="", flush=True)
                failed += [scenario.name] * bool(problems)
                for child, _ in scenario.ranks:
                    os.waitpid(child, 0)
    return failed


def main() -> None:
    assert host  # loads its modules before the ranks are forked
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    made = [scenario for kind in sys.argv[2:] or KINDS for scenario in scenarios(kind, seed)]
    for scenario in made:
        fork(scenario)
    sys.exit(1 if serve(made) else 0)


if __name__ == "__main__":
    main()
