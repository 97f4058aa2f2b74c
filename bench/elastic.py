"""Measure Buffers with slots: what absent slots cost, how fast the others are without a rank, how long changes of the members take, and
what a killed rank costs the others.

    python bench/elastic.py --ranks 4                  # a rank on each of four GPUs
    python bench/elastic.py --ranks 4 --slots 4,8      # with as many slots as ranks, and with twice as many

It starts its ranks itself, without mpirun. Calls of Buffers with fixed ranks and with slots are replays of a CUDA graph, in turns. Choices
are among the experts of the ranks that exist, so all Buffers move the same rows. Times are those of the slowest rank.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deepep_rt._install import CHECKOUT, or_exit

with or_exit("this benchmark", "bench"):
    import numpy as np
    import torch

    from deepep_rt import Buffer, EPTimeoutError
    from deepep_rt.bench import program
    from deepep_rt.bench.report import markdown_table
    from deepep_rt.bench.results import provenance, write
    from deepep_rt.comm.store import StoreCommunicator
    from deepep_rt.comm.store_client import StoreClient
    from deepep_rt.comm.store_server import StoreServer

_CHAIN, _TURNS, _REPEATS, _LIMIT_S = 10, 3, 10, 60.0


@dataclass(kw_only=True)
class Settings(program.Settings):
    """The settings of this benchmark.

    Args:
        ranks: Ranks to start.
        slots: Numbers of slots to compare.
        tokens: Tokens of a rank in throughput calls.
        decode_tokens: Tokens of a rank in low-latency calls.
        changes: How often each change is measured.
        kills: How often a rank is killed.
    """

    ranks: int = 2
    slots: tuple[int, ...] = (2, 4)
    tokens: int = 4096
    decode_tokens: int = 128
    changes: int = 10
    kills: int = 3


class Rank:
    """One rank: it measures, and gathers the results with the others over `store`."""

    def __init__(self, settings: Settings, rank: int, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self.settings, self.rank, self.address = settings, rank, address
        self.store = StoreClient(host, int(port))
        self.comm = StoreCommunicator(self.store, "bench", rank, settings.ranks)
        torch.cuda.set_device(rank % torch.cuda.device_count())
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.rng = np.random.default_rng([settings.seed, rank])

    def buffer(self, num_tokens: int, slots: int | None, comm: Any = None, name: str = "", **more: Any) -> Buffer:
        """Make a Buffer with slots, or with fixed ranks. A process that is started again needs a name for it."""
        settings = self.settings
        if slots is not None:
            more |= {"max_ranks": slots, "rendezvous": f"{self.address}/{name}".rstrip("/")}
        sizes = dict(
            num_max_tokens_per_rank=num_tokens, hidden=settings.hidden, num_topk=settings.topk, num_experts=settings.experts
        )
        return Buffer(comm or self.comm, **sizes, timeout_s=_LIMIT_S, **more)

    def inputs(self, num_tokens: int, slots: int) -> tuple[Any, Any, Any]:
        """Draw rows, choices among the experts of the ranks that exist, and weights."""
        settings, local = self.settings, self.settings.experts // slots
        scores = self.rng.random((num_tokens, local * settings.ranks))
        idx = np.argpartition(scores, settings.topk, axis=1)[:, : settings.topk].astype(np.int64)
        x = torch.randn(num_tokens, settings.hidden, device=self.device, dtype=torch.bfloat16)
        weights = torch.rand(num_tokens, settings.topk, device=self.device)
        return x, torch.from_numpy(idx).to(self.device), weights

    def graphs(self, slots: int | None) -> tuple[dict[str, Any], list[Buffer]]:
        """Capture a chain of each kind of call."""
        settings, low = self.settings, self.settings.decode_tokens
        count = settings.ranks if slots is None else slots
        wide, narrow = self.buffer(settings.tokens, slots), self.buffer(low, slots, low_latency=True)
        x, idx, weights = self.inputs(settings.tokens, count)
        lx, lidx, lweights = self.inputs(low, count)
        sent = wide.dispatch(x, idx, weights)
        rows = sent.recv_x

        def combine() -> None:
            wide.combine(rows, sent.handle)

        def both() -> None:
            got = narrow.low_latency_dispatch(lx, lidx, use_fp8=False)
            narrow.low_latency_combine(got.recv_x, lidx, lweights, got.handle)

        calls = {
            "dispatch, new routing": lambda: wide.dispatch(x, idx, weights, num_worst_tokens=settings.ranks * settings.tokens),
            "dispatch, known routing": lambda: wide.dispatch(x, handle=sent.handle),
            "combine": combine,
            "low-latency dispatch and combine": both,
        }
        return {name: self.capture(call) for name, call in calls.items()}, [wide, narrow]

    def capture(self, call: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture a chain of calls, after a first one."""
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(_CHAIN):
                call()
        return graph

    def time(self, graph: torch.cuda.CUDAGraph) -> float:
        """Return the microseconds of a call in a chain. Collective over the ranks that make calls, after a barrier."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # the ranks meet
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) * 1e3 / _CHAIN

    def measure_slots(self) -> dict[str, dict[str, float]]:
        """Return microseconds of each call, by kind of Buffer.

        The kinds take turns, and each Buffer with low-latency calls is alone: such kernels overlap only then.
        """
        kinds = {"fixed": None} | {f"{self.settings.ranks} of {slots}": slots for slots in self.settings.slots}
        found: dict[str, dict[str, list[float]]] = {kind: {} for kind in kinds}
        for kind, slots in list(kinds.items()) * _TURNS:
            graphs, buffers = self.graphs(slots)
            for repeat in range(_REPEATS + 2):
                for name, graph in graphs.items():
                    self.comm.Barrier()
                    us = self.time(graph)
                    if repeat >= 2:
                        found[kind].setdefault(name, []).append(us)
            for graph in graphs.values():
                graph.reset()
            for buffer in buffers:
                buffer.destroy()
        all_ranks = self.comm.allgather(found)
        return {
            kind: {
                name: statistics.median(max(times) for times in zip(*(ranks[kind][name] for ranks in all_ranks), strict=True))
                for name in found[kind]
            }
            for kind in kinds
        }

    def measure_without_one(self) -> dict[str, float]:
        """Return the tokens a second that all ranks dispatch and combine, with all of them, and after the last one has left.

        Both are replays of one graph. Choices are among the experts of all slots. Those of the absent one are skipped.
        """
        settings, last = self.settings, self.settings.ranks - 1
        buffer = self.buffer(settings.tokens, settings.ranks)
        x, idx, weights = self.inputs(settings.tokens, settings.ranks)

        def calls() -> None:
            sent = buffer.dispatch(x, idx, weights, num_worst_tokens=settings.ranks * settings.tokens)
            buffer.combine(sent.recv_x, sent.handle)

        graph, rates = self.capture(calls), {}
        for ranks in (settings.ranks, settings.ranks - 1):
            if ranks == last:
                self.comm.Barrier()
                buffer.shrink([last])
            times = []
            for _ in range(_TURNS * _REPEATS):
                self.comm.Barrier()
                times.append(self.time(graph) if self.rank < ranks else 0.0)
            us = statistics.median(map(max, zip(*self.comm.allgather(times), strict=True)))
            rates[f"{ranks} of {settings.ranks}"] = ranks * settings.tokens / us * 1e6
        graph.reset()
        buffer.destroy(in_touch=False)
        return rates

    def measure_changes(self) -> dict[str, list[float]]:
        """Let the last rank leave and come back. Return milliseconds of both changes on the others."""
        ranks, last = self.settings.ranks, self.settings.ranks - 1
        buffer = self.buffer(self.settings.tokens, max(self.settings.slots), low_latency=False)
        times: dict[str, list[float]] = {"shrink": [], "admit": []}
        for number in range(self.settings.changes):
            self.comm.Barrier()
            begin = time.monotonic()
            buffer.shrink([last])
            times["shrink"].append((time.monotonic() - begin) * 1e3)
            self.comm.Barrier()
            if self.rank == last:
                self.store.set(f"back/{number}", "")
                buffer.wake()
                continue
            while not self.store.check([f"back/{number}"]):
                time.sleep(1e-4)
            time.sleep(0.05)
            begin = time.monotonic()
            while not buffer.admit():
                pass
            times["admit"].append((time.monotonic() - begin) * 1e3)
        gathered = self.comm.allgather(times)[: ranks - 1]
        buffer.destroy()
        return {name: [max(found) for found in zip(*(one[name] for one in gathered), strict=True)] for name in times}

    def measure_kill(self, number: int) -> dict[str, float]:
        """Make steps until another rank is killed, go on without it, and return what that took. The last rank never returns."""
        settings = self.settings
        comm = StoreCommunicator(self.store, f"kill{number}", self.rank, settings.ranks)
        buffer = self.buffer(settings.tokens, max(settings.slots), comm, f"kill{number}")
        x, idx, weights = self.inputs(settings.tokens, max(settings.slots))

        def step() -> None:
            sent = buffer.dispatch(x, idx, weights)
            buffer.combine(sent.recv_x, sent.handle)
            torch.cuda.synchronize()

        for _ in range(5):
            step()
        self.store.set(f"ready{number}/{self.rank}", "")
        try:
            while True:
                step()
        except EPTimeoutError:
            noticed = time.monotonic()
        buffer.shrink()
        changed = time.monotonic()
        step()
        end = time.monotonic()
        killed = float(self.store.get(f"killed{number}"))
        buffer.destroy(in_touch=False)
        return {"noticed": (noticed - killed) * 1e3, "shrink": (changed - noticed) * 1e3, "next step ended": (end - killed) * 1e3}


def run_rank(arguments: Mapping[str, Any]) -> None:
    """Measure as one rank. Rank 0 writes the results to the store."""
    settings = Settings(**arguments["settings"])
    rank = Rank(settings, arguments["rank"], arguments["address"])
    if "kill" in arguments:
        rank.store.set(f"result{arguments['kill']}/{rank.rank}", json.dumps(rank.measure_kill(arguments["kill"])))
        return
    found: dict[str, Any] = {"slots": rank.measure_slots(), "changes": rank.measure_changes()}
    found["tokens_per_s"] = rank.measure_without_one() if settings.ranks > 1 else {}
    if rank.rank == 0:
        rank.store.set("result", json.dumps({**found, "machine": torch.cuda.get_device_name()}))
    rank.comm.Barrier()


def run(settings: Settings) -> dict[str, Any]:
    """Start the ranks, and return the result for JSON."""
    server = StoreServer()
    server.serve_in_thread()
    host, port = server.address.rsplit(":", 1)
    store = StoreClient(host, int(port))
    plain = {name: value for name, value in vars(settings).items() if name != "commit"}

    def start(rank: int, **more: Any) -> subprocess.Popen[bytes]:
        words = json.dumps({"settings": plain, "rank": rank, "address": server.address, **more})
        path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
        return subprocess.Popen([sys.executable, __file__, "--as-rank", words], env={**os.environ, "PYTHONPATH": path})

    for process in [start(rank) for rank in range(settings.ranks)]:
        if process.wait():
            sys.exit("error: a rank has failed")
    found = json.loads(store.get("result"))
    kills = [kill_one(settings, store, number, start) for number in range(settings.kills)] if settings.ranks > 1 else []
    server.close()
    boundary = "CUDA events and the clock of the host; the slowest rank; medians"
    return {**provenance(settings.commit), **settings.described(boundary), "num_ranks": settings.ranks, **found, "kills": kills}


def kill_one(settings: Settings, store: StoreClient, number: int, start: Any) -> dict[str, float]:
    """Start all ranks, kill the last one in the middle of its steps, and return the longest times of the others."""
    processes = [start(rank, kill=number) for rank in range(settings.ranks)]
    while not store.check([f"ready{number}/{rank}" for rank in range(settings.ranks)]):
        if any(process.poll() for process in processes):
            sys.exit("error: a rank has failed")
        time.sleep(0.01)
    time.sleep(0.2)
    store.set(f"killed{number}", str(time.monotonic()))
    processes[-1].send_signal(signal.SIGKILL)
    for process in processes[:-1]:
        if process.wait():
            sys.exit("error: a survivor has failed")
    times = [json.loads(store.get(f"result{number}/{rank}")) for rank in range(settings.ranks - 1)]
    return {name: max(one[name] for one in times) for name in times[0]}


def markdown(result: Mapping[str, Any]) -> str:
    """Write the tables."""
    kinds = list(result["slots"])
    calls = [[name, *(f"{result['slots'][kind][name]:.2f}" for kind in kinds)] for name in result["slots"][kinds[0]]]
    rates = [[name, f"{rate / 1e6:.2f}"] for name, rate in result["tokens_per_s"].items()]
    kills = {name: [kill[name] for kill in result["kills"]] for name in (result["kills"] or [{}])[0]}
    tables = [markdown_table(["us of a call", *kinds], calls), markdown_table(["ranks", "million tokens a second"], rates)]
    for title, rows in (("ms of a change", result["changes"]), ("ms after a kill", kills)):
        lines = [[name, f"{statistics.median(ms):.1f}", f"{max(ms):.1f}"] for name, ms in rows.items()]
        tables.append(markdown_table([title, "median", "longest"], lines))
    return "\n\n".join(tables)


def main() -> None:
    """Run the program."""
    if sys.argv[1:2] == ["--as-rank"]:
        run_rank(json.loads(sys.argv[2]))
        return
    parser = program.parser(__doc__, compares=False)
    parser.add_argument("--ranks", type=int, default=Settings.ranks)
    parser.add_argument(
        "--slots", type=program.numbers, default=None, help="numbers of slots; default: the ranks, and twice as many"
    )
    parser.add_argument("--tokens", type=int, default=Settings.tokens)
    parser.add_argument("--decode-tokens", type=int, default=Settings.decode_tokens)
    parser.add_argument("--changes", type=int, default=Settings.changes)
    parser.add_argument("--kills", type=int, default=Settings.kills)
    args = vars(parser.parse_args())
    path = args.pop("json")
    del args["compare"]
    args["slots"] = args["slots"] or (args["ranks"], 2 * args["ranks"])
    result = run(Settings(**args))
    print(f"{result['machine']}, {result['num_ranks']} ranks; {result['boundary']}. {result['date']}.\n")
    print(markdown(result))
    if path:
        write(path, result)


if __name__ == "__main__":
    main()
