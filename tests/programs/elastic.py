"""Ranks that come and go. A parent starts ranks, kills some in the middle of their calls, and starts others, which join.

Usage: elastic.py [--backend host|cuda] [--ranks N] [--slots N] [--rounds N] [--seed N]. It needs no MPI.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np

from deepep_rt import Buffer, EPEvictedError, EPInputError, EPTimeoutError
from deepep_rt.comm.store import StoreCommunicator
from deepep_rt.comm.store_client import StoreClient
from deepep_rt.comm.store_server import StoreServer

TOKENS, HIDDEN, TOPK, LOCAL = 16, 64, 3, 2


def check(buffer: Buffer, rng: np.random.Generator, num_slots: int) -> None:
    """Make one call of each kind, and compare every number."""
    members = set(buffer.members)
    n = int(rng.integers(0, TOKENS + 1))
    x = rng.integers(-4, 5, (n, HIDDEN)).astype(np.float32)
    idx = rng.integers(-1, num_slots * LOCAL, (n, TOPK))
    weights = 2.0 ** rng.integers(-1, 2, (n, TOPK)).astype(np.float32)
    present = (idx >= 0) & np.isin(idx // LOCAL, list(members))
    for layout in ("token", "expert"):
        sent = buffer.dispatch(x, idx, weights, layout=layout)
        got = buffer.combine(sent.recv_x, sent.handle)
        copies = np.zeros(n)
        for token in range(n):
            owners = idx[token][present[token]]
            copies[token] = len(set(owners // LOCAL)) if layout == "token" else len(owners)
        assert np.array_equal(got.x, x * copies[:, None]), f"{layout}: wrong sums with members {sorted(members)}"
        again = buffer.dispatch(x + 1, handle=sent.handle)
        assert (
            np.array_equal(again.recv_x, np.where(np.asarray(sent.recv_x) == sent.recv_x, sent.recv_x + 1, 0))
            or layout == "expert"
        )


class Graphs:
    """Captured calls of a rank on a GPU: calls with their routing, which replay in every generation, and one with a routing of before."""

    def __init__(self, buffer: Buffer, num_slots: int) -> None:
        import torch

        self.torch, self.buffer, self.num_slots = torch, buffer, num_slots
        make = {"device": "cuda"}
        self.x = torch.zeros((TOKENS, HIDDEN), dtype=torch.float32, **make)
        self.idx = torch.full((TOKENS, TOPK), -1, dtype=torch.int64, **make)
        self.weights = torch.zeros((TOKENS, TOPK), dtype=torch.float32, **make)
        self.stream, self.graph, self.known = torch.cuda.Stream(), torch.cuda.CUDAGraph(), None
        self.stream.wait_stream(torch.cuda.current_stream())
        self.call()
        with torch.cuda.graph(self.graph, stream=self.stream):
            self.sums, self.low = self.call()
        self.capture_known()

    def call(self):
        """Make one call of each kind, with a new routing."""
        buffer = self.buffer
        with self.torch.cuda.stream(self.stream):
            sent = buffer.dispatch(self.x, self.idx, self.weights, num_worst_tokens=self.num_slots * TOKENS)
            sums = buffer.combine(sent.recv_x, sent.handle).x
            rows = buffer.low_latency_dispatch(self.x.bfloat16(), self.idx, use_fp8=False)
            return sums, buffer.low_latency_combine(rows.recv_x, self.idx, self.weights, rows.handle).x

    def renew(self) -> None:
        """After a change, make the calls that a new member makes, and see that the routing of before gives NaN and a report."""
        if self.known is not None:
            self.check_outdated()
            self.known = None
        self.call()
        self.capture_known()

    def capture_known(self) -> None:
        """Capture a combine along a routing of this generation."""
        torch, buffer = self.torch, self.buffer
        known = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream):
            sent = buffer.dispatch(self.x, self.idx, self.weights)
            y = torch.ones((sent.handle.num_recv_rows, HIDDEN), dtype=torch.float32, device="cuda")
            torch.cuda.synchronize()
            with torch.cuda.graph(known, stream=self.stream):
                self.known_sums = buffer.combine(y, sent.handle).x
        torch.cuda.synchronize()
        self.known = known

    def check(self, rng: np.random.Generator) -> None:
        torch = self.torch
        x = rng.integers(-4, 5, (TOKENS, HIDDEN)).astype(np.float32)
        idx = rng.integers(-1, self.num_slots * LOCAL, (TOKENS, TOPK))
        weights = (2.0 ** rng.integers(-1, 2, (TOKENS, TOPK))).astype(np.float32)
        for tensor, values in ((self.x, x), (self.idx, idx), (self.weights, weights)):
            tensor.copy_(torch.from_numpy(values))
        self.sums.fill_(7), self.low.fill_(7)
        torch.cuda.synchronize()
        self.graph.replay()
        torch.cuda.synchronize()
        self.buffer.check()
        present = (idx >= 0) & np.isin(idx // LOCAL, list(self.buffer.members))
        copies = np.array([len(set(idx[t][present[t]] // LOCAL)) for t in range(TOKENS)])
        assert np.array_equal(self.sums.cpu().numpy(), x * copies[:, None]), "a replay: wrong sums"
        low = x * (weights * present).sum(1, keepdims=True)
        assert np.array_equal(self.low.float().cpu().numpy(), low), "a replay of low-latency calls: wrong sums"

    def check_outdated(self) -> None:
        """Replay a call along the routing of an older generation."""
        self.known_sums.fill_(7)
        self.torch.cuda.synchronize()
        self.known.replay()
        self.torch.cuda.synchronize()
        assert self.known_sums.isnan().all(), "an outdated routing: no NaN"
        report = ""
        try:
            self.buffer.check()
        except EPInputError as error:
            report = str(error)
        assert "generation" in report, f"an outdated routing: no report {report}"


def num_held() -> int:
    """Count the descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")) + threading.active_count()


def rank_main(arguments: argparse.Namespace) -> None:
    try:
        make_rounds(arguments)
    except EPEvictedError:  # the parent has stopped this process for long
        print(json.dumps({"event": "evicted"}), flush=True)


def make_rounds(arguments: argparse.Namespace) -> None:
    host, port = arguments.address.rsplit(":", 1)
    sizes = dict(
        num_max_tokens_per_rank=TOKENS, hidden=HIDDEN, num_topk=TOPK, num_experts=arguments.slots * LOCAL, dtype="float32"
    )
    sizes |= dict(low_latency=arguments.graphs, num_sms=8, low_latency_sms=8)
    sizes |= dict(
        backend=arguments.backend, timeout_s=arguments.timeout, max_ranks=arguments.slots, rendezvous=arguments.address + "/test"
    )
    if arguments.rank >= 0:
        comm = StoreCommunicator(StoreClient(host, int(port)), "start", arguments.rank, arguments.ranks)
        buffer = Buffer(comm, **sizes)
    else:
        if arguments.backend == "cuda":
            import torch

            torch.cuda.set_device(os.getpid() % torch.cuda.device_count())
            torch.cuda.synchronize()
        sys.stdin.readline()  # the parent keeps processes ready
        buffer = Buffer.join(**sizes)
    tell = lambda **facts: print(json.dumps({"members": buffer.members, **facts}), flush=True)  # noqa: E731
    rng = np.random.default_rng(os.getpid())
    tell(event="ready")
    held = {}  # descriptors and threads, by members, when they were the members for the first time
    graphs = None
    rounds, changes, is_new = 0, 0, True
    while True:
        try:
            if arguments.graphs and is_new:
                if graphs is None:
                    graphs = Graphs(buffer, arguments.slots)
                else:
                    graphs.renew()
                is_new = False
            check(buffer, rng, arguments.slots)
            if graphs is not None:
                graphs.check(rng)
            rounds += 1
            if rounds > 1:
                held.setdefault(buffer.members, num_held())
            # All members see the same: the file of the parent says when to end, and a call tells all of them.
            ends = np.array([[os.path.exists(arguments.stop)] * HIDDEN], np.float32)
            rank0 = min(buffer.members) * LOCAL
            sent = buffer.dispatch(np.repeat(ends, 1, 0), np.array([[rank0, -1, -1]]))
            over = np.asarray(sent.recv_x).max(initial=0) if buffer.members[0] * LOCAL == rank0 and len(sent.recv_x) else 0
            verdict = buffer.combine(np.full_like(sent.recv_x, over), sent.handle).x
            if verdict.max() > 0:
                break
            if new := buffer.admit():  # last: a process that joins begins with the next round
                changes += 1
                is_new = True
                tell(event="admitted", new=new)
        except EPTimeoutError as error:
            began, lost = time.monotonic(), getattr(error, "ranks", (error.peer,))
            buffer.shrink()
            changes += 1
            is_new = True
            tell(event="shrunk", lost=lost, seconds=round(time.monotonic() - began, 4))
    more = num_held() - held.get(buffer.members, num_held())
    tell(event="done", rounds=rounds, changes=changes, more=more)
    buffer.destroy()


def parent(arguments: argparse.Namespace) -> None:
    rng = random.Random(arguments.seed)
    server = StoreServer()
    server.serve_in_thread()
    address, stop = server.address, f"/tmp/elastic-{os.getpid()}"
    command = [sys.executable, __file__, "--address", address, "--stop", stop, "--backend", arguments.backend]
    command += ["--graphs"] * arguments.graphs
    command += ["--slots", str(arguments.slots), "--ranks", str(arguments.ranks), "--timeout", str(arguments.timeout)]

    def start(rank: int) -> subprocess.Popen:
        return subprocess.Popen([*command, "--rank", str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def read(process: subprocess.Popen, event: str) -> dict:
        while line := process.stdout.readline():
            found = json.loads(line)
            if found["event"] == event:
                return found
        raise SystemExit(f"a rank ended before it said {event}")

    living, spare = [start(rank) for rank in range(arguments.ranks)], [start(-2) for _ in range(2)]
    everyone = [*living, *spare]
    stopped, kills, times, joins, began = 0, 0, [], [], time.monotonic()
    try:
        for process in living:
            read(process, "ready")
        began = time.monotonic()
        for number in itertools.count():
            if (time.monotonic() - began > arguments.seconds) if arguments.seconds else number == arguments.rounds:
                break
            time.sleep(rng.random() * 0.2)
            if len(living) > 1 and (len(living) == arguments.slots or rng.random() < 0.5):
                victim = living.pop(rng.randrange(len(living)))
                stops = rng.random() < arguments.stops
                victim.send_signal(signal.SIGSTOP if stops else signal.SIGKILL)
                found = [read(process, "shrunk")["seconds"] for process in living]
                if stops:  # it goes on, with memory of before
                    victim.send_signal(signal.SIGCONT)
                    read(victim, "evicted")
                    stopped += 1
                else:
                    times += found
                    kills += 1
                victim.wait()
            else:
                new, spare = spare[0], [*spare[1:], start(-2)]
                everyone.append(spare[-1])
                asked = time.monotonic()
                new.stdin.write("join\n")
                new.stdin.flush()
                read(new, "ready")
                joins.append(time.monotonic() - asked)
                for process in living:
                    read(process, "admitted")
                living.append(new)
        open(stop, "w").close()
        done = [read(process, "done") for process in living]
        assert len({tuple(found["members"]) for found in done}) == 1, done
        assert all(found["more"] <= 4 for found in done), f"descriptors or threads stay: {done}"
        assert all(process.wait() == 0 for process in living)
        longest = f"shrinks at most {max(times, default=0):.3f} s, joins {max(joins, default=0):.2f} s"
        print(f"{kills} kills, {stopped} stops, {len(joins)} joins in {time.monotonic() - began:.0f} s; {longest}")
        print("OK")
    finally:
        for process in everyone:
            process.kill()
        if os.path.exists(stop):
            os.remove(stop)
        server.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="host")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", type=float, default=30)
    parser.add_argument("--seconds", type=float, default=0, help="instead of rounds")
    parser.add_argument("--stops", type=float, default=0, help="the share of processes that are stopped, and go on later")
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--address")
    parser.add_argument("--stop")
    given = parser.parse_args()
    parent(given) if given.rank is None else rank_main(given)
