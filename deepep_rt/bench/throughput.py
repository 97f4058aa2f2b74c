"""Measure bandwidth and host time of dispatch and combine, and the copy ceiling of the same run.

    mpirun -n 8 python bench/throughput.py --json bench/results/NAME.json --compare bench/reference/h200x8_peers.json

Routing: with `unknown` the GPU counts and the host reads the counts. `known` repeats a handle. `worst` fixes the shapes
(num_worst_tokens). The time of the host in a dispatch with `known` and in `combine_bf16` is also measured through prepared calls.

`expert` is BF16 with `layout="expert"`, and combine with weights. `combine_topk` adds `reduce="topk"`. `copy_expert` is a plain copy of the
bytes of a rank's rows by expert. `permute_expert` makes these rows of the rows by token, with an array library. Dispatch by expert compares
with plain dispatch and one of them.

`combine_fp8` and `combine_log10` are `combine_bf16` with `compress=`. Their bytes are those of the compressed rows. Before the benchmark
measures them, it compares some of their sums with those of the host. It leaves out works that a machine or a size does not allow, and
records the reason.

`nccl_all_to_all` is NCCL's all-to-all of as many BF16 rows as a rank receives, in equal shares (`--nccl`, with PyTorch).
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from mpi4py import MPI

from ..buffer import Buffer
from ..config import PATHS, Config
from ..errors import EPInputError, EPUnavailableError
from ..results import DispatchHandle
from . import compressed, nccl, program, timing
from .machine import Machine
from .results import Row, document, row_bytes

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

WORKS = (
    *(f"dispatch_{kind}_{routing}" for kind in ("bf16", "fp8") for routing in ("unknown", "known", "worst")),
    "combine_bf16",
    "dispatch_expert_unknown",
    "dispatch_expert_known",
    "copy_expert",
    "permute_expert",
    "combine_expert",
    "combine_topk",
    *compressed.WORKS,
)
MAY_BE_LEFT_OUT = ("combine_topk", *compressed.WORKS)
"""Works that some GPUs, sizes or numbers of nodes do not have."""
NUM_SETS = 2  # calls alternate between the inputs, so that the L2 cache does not hold their rows


@dataclass(kw_only=True)
class Settings(program.NodeSettings):
    """The settings of this benchmark."""

    tokens: tuple[int, ...] = (4096, 8192)  # numbers of tokens of each rank
    sms: tuple[int, ...] = (8, 16, 24, 32, 64)
    calls: int = 20  # in a loop
    repeats: int = 11  # loops. The result is their median
    warmup: int = 5  # calls before the first loop
    nccl: bool = False  # measure NCCL's all-to-all too
    path: str = "auto"  # as for `Buffer`
    works: tuple[str, ...] = WORKS

    def __post_init__(self) -> None:
        if self.quick:
            self.calls, self.repeats, self.warmup = 2, 2, 1
        if self.backend == "host" and self.sms == Settings.sms:  # the host has none
            self.sms = (24,)


def works(text: str) -> tuple[str, ...]:
    """Parse the works of an option. Raise argparse.ArgumentTypeError if one of them does not exist."""
    names = tuple(text.split(","))
    for name in names:
        if name not in WORKS:
            raise argparse.ArgumentTypeError(f"{name!r} is no work; expected some of {', '.join(WORKS)}")
    return names


def num_steps(settings: Settings) -> int:
    """Count the calls of `step` in `run`. Works that are left out count too."""
    return len(settings.sms) * len(settings.tokens) * (len(settings.works) + settings.nccl)


@dataclass
class ExpertInputs:
    """A routing with rows by expert."""

    handle: DispatchHandle
    experts_out: Any  # rows for combine
    weights: Any  # of these rows
    rows: Any  # rows by token
    row_of: Any  # the row by token of each row by expert


@dataclass
class Inputs:
    """One set of arguments on the device, and the numbers of its rows."""

    bf16: Any
    fp8: Any
    scales: Any
    topk_idx: Any
    topk_weights: Any
    handle: DispatchHandle
    experts_out: Any  # rows for combine
    by_expert: ExpertInputs
    num_rows: float  # received rows, mean over the ranks
    num_remote_rows: float  # that cross, as `num_crossings` counts, mean over the ranks


def num_crossings(ranks: np.ndarray, own: int, config: Config) -> int:
    """Count the rows that leave the rank `own`: on one node those for other ranks, with several nodes those for other nodes.

    `ranks` is the rank of each choice. On the hierarchical path a token crosses once for each node, otherwise once for each rank.
    """
    is_far = ranks // config.node_size != own // config.node_size if config.has_network else ranks != own
    places = ranks // config.node_size if config.has_network and config.path == "hierarchical" else ranks
    ordered = np.sort(np.where(is_far, places, -1), axis=1)
    return int((ordered[:, 0] >= 0).sum() + (ordered[:, 1:] != ordered[:, :-1]).sum())


class Bench:
    """The arrays, the clock and the works of one backend."""

    def __init__(self, comm: Intracomm, settings: Settings, step: Callable[[str], None]) -> None:
        self.comm, self.settings, self.step = comm, settings, step
        self.machine = Machine(comm, settings.backend)
        self.rng = np.random.default_rng([settings.seed, comm.rank])
        self.clock = timing.clock(self.machine.on_gpu)
        self.left_out: dict[str, str] = {}

    def make_inputs(self, buffer: Buffer, num_tokens: int) -> Inputs:
        """Make random tokens and routing. Dispatch the routing once for its handle and counts."""
        settings, rng, upload = self.settings, self.rng, self.machine.upload
        chosen = rng.random((num_tokens, settings.experts), dtype=np.float32).argpartition(settings.topk, axis=1)[
            :, : settings.topk
        ]
        bf16 = self.machine.bf16(rng, num_tokens, settings.hidden)
        fp8 = upload(rng.integers(0, 256, (num_tokens, settings.hidden), dtype=np.uint8))
        scales = upload(rng.random((num_tokens, settings.hidden // 128), dtype=np.float32))
        topk_idx = upload(np.ascontiguousarray(chosen, np.int64))
        topk_weights = upload(rng.random((num_tokens, settings.topk), dtype=np.float32))
        sent = buffer.dispatch(bf16, topk_idx, topk_weights)
        experts_out = self.machine.bf16(rng, sent.handle.num_recv_rows, settings.hidden)
        remote = num_crossings(chosen // (settings.experts // self.comm.size), self.comm.rank, buffer.config)
        by_expert = self._by_expert(buffer, sent, bf16, topk_idx, topk_weights)
        means = (self.comm.allreduce(n) / self.comm.size for n in (sent.handle.num_recv_rows, remote))
        return Inputs(bf16, fp8, scales, topk_idx, topk_weights, sent.handle, experts_out, by_expert, *means)

    def _by_expert(self, buffer: Buffer, by_token: Any, x: Any, topk_idx: Any, topk_weights: Any) -> ExpertInputs:
        sent = buffer.dispatch(x, topk_idx, topk_weights, layout="expert")
        rank, token, _ = self.machine.download(sent.recv_src_idx).T
        source = self.machine.download(by_token.recv_src_idx)
        most = self.comm.allreduce(len(x), MPI.MAX)
        row_of = np.searchsorted(source[:, 0] * most + source[:, 1], rank * most + token)
        experts_out = self.machine.bf16(self.rng, sent.handle.num_recv_rows, self.settings.hidden)
        weights = self.machine.copied(sent.recv_topk_weights)
        return ExpertInputs(sent.handle, experts_out, weights, self.machine.copied(by_token.recv_x), self.machine.upload(row_of))

    def cases(self, buffer: Buffer, sets: list[Inputs], num_tokens: int) -> Iterator[tuple[str, Callable[[int], Any]]]:
        """Yield each work and the function that makes its call."""
        worst = min(self.comm.size * num_tokens, buffer.config.num_max_recv_tokens)
        for name in ("bf16", "fp8"):
            rows = [getattr(s, name) for s in sets]
            scales = [s.scales if name == "fp8" else None for s in sets]

            def fresh(i: int, rows: list = rows, scales: list = scales, most: int | None = None) -> None:
                s = sets[i % NUM_SETS]
                buffer.dispatch(
                    rows[i % NUM_SETS], s.topk_idx, s.topk_weights, x_scales=scales[i % NUM_SETS], num_worst_tokens=most
                )

            def known(i: int, rows: list = rows, scales: list = scales) -> None:
                buffer.dispatch(rows[i % NUM_SETS], x_scales=scales[i % NUM_SETS], handle=sets[i % NUM_SETS].handle)

            def fixed(i: int, fresh: Callable[..., None] = fresh) -> None:
                fresh(i, most=worst)

            yield f"dispatch_{name}_unknown", fresh
            yield f"dispatch_{name}_known", known
            yield f"dispatch_{name}_worst", fixed
        yield "combine_bf16", lambda i: buffer.combine(sets[i % NUM_SETS].experts_out, sets[i % NUM_SETS].handle)
        yield from self.expert_cases(buffer, sets)
        for work, compression in compressed.WORKS.items():

            def smaller(i: int, compression: str = compression) -> None:
                buffer.combine(sets[i % NUM_SETS].experts_out, sets[i % NUM_SETS].handle, compress=compression)

            yield work, smaller

    def expert_cases(self, buffer: Buffer, sets: list[Inputs]) -> Iterator[tuple[str, Callable[[int], Any]]]:
        """Yield the works with rows by expert."""
        of = [s.by_expert for s in sets]
        targets = [self.machine.copied(one.experts_out) for one in of]

        def fresh(i: int) -> None:
            s = sets[i % NUM_SETS]
            buffer.dispatch(s.bf16, s.topk_idx, s.topk_weights, layout="expert")

        def known(i: int) -> None:
            buffer.dispatch(sets[i % NUM_SETS].bf16, handle=of[i % NUM_SETS].handle)

        def combine(i: int, reduce: str = "rank") -> None:
            one = of[i % NUM_SETS]
            buffer.combine(one.experts_out, one.handle, topk_weights=one.weights, weighted=True, reduce=reduce)

        yield "dispatch_expert_unknown", fresh
        yield "dispatch_expert_known", known
        yield "copy_expert", lambda i: self.machine.copy(of[i % NUM_SETS].experts_out, targets[i % NUM_SETS])
        yield "permute_expert", lambda i: self.machine.take(of[i % NUM_SETS].rows, of[i % NUM_SETS].row_of, targets[i % NUM_SETS])
        yield "combine_expert", combine
        yield "combine_topk", lambda i: combine(i, "topk")

    def run(self, sms: int) -> tuple[dict[str, float], list[Row]]:
        """Measure all works with one number of SMs. Return the copy ceilings, and the rows."""
        settings, comm, rows = self.settings, self.comm, []
        sizes: dict[str, Any] = dict(hidden=settings.hidden, num_topk=settings.topk, num_experts=settings.experts)
        sizes |= dict(num_max_tokens_per_rank=max(settings.tokens), num_sms=sms, backend=settings.backend)
        with Buffer(comm, **sizes, path=settings.path, **settings.nodes) as buffer:
            ceilings = buffer.copy_ceilings()
            for num_tokens in settings.tokens:
                sets = [self.make_inputs(buffer, num_tokens) for _ in range(NUM_SETS)]
                num_rows, num_remote = (sum(getattr(s, n) for s in sets) / NUM_SETS for n in ("num_rows", "num_remote_rows"))
                spent: dict[str, float] = {}
                for work, call in self.cases(buffer, sets, num_tokens):
                    if work not in settings.works:
                        continue
                    self.step(f"{work}, {num_tokens} tokens" + (f", {sms} SMs" if self.machine.on_gpu else ""))
                    if not self.is_possible(work, call):
                        continue
                    if work in compressed.WORKS:
                        self.check_sums(buffer, sets[0], work)
                    waits = work.endswith("unknown")
                    seconds = timing.measure(buffer, comm, self.clock, call, settings, in_advance=not waits)
                    spent[work] = seconds
                    host = None if waits else 1e6 * timing.measure_host(buffer, comm, call, settings)
                    each = row_bytes(work, settings.hidden)
                    gb_s, remote_gb_s = (n * each / seconds / 1e9 for n in (num_rows, num_remote))
                    prepared = self.host_prepared_us(buffer, sets[0], work)
                    plain = spent.get("combine_bf16") if work in compressed.WORKS else None
                    percent = 100 * seconds / plain if plain else None
                    rows.append(Row(work, num_tokens, sms, 1e6 * seconds, gb_s, remote_gb_s, host, each, percent, prepared))
                if settings.nccl:
                    rows.append(self.all_to_all(buffer, num_rows, num_tokens, sms))
        return ceilings, rows

    def all_to_all(self, buffer: Buffer, num_rows: float, num_tokens: int, sms: int) -> Row:
        """Measure NCCL's all-to-all of about as many BF16 rows as a rank receives."""
        comm, settings, each = self.comm, self.settings, row_bytes(nccl.WORK, self.settings.hidden)
        self.step(f"{nccl.WORK}, {num_tokens} tokens, {sms} SMs")
        num_bytes = nccl.rows_for_each_peer(num_rows, comm.size) * each
        call = nccl.all_to_all(comm.size, num_bytes)
        seconds = timing.measure(buffer, comm, self.clock, call, settings, in_advance=False)
        host = timing.measure_host(buffer, comm, call, settings)
        gb_s, remote_gb_s = (n * num_bytes / seconds / 1e9 for n in (comm.size, comm.size - 1))
        return Row(nccl.WORK, num_tokens, sms, 1e6 * seconds, gb_s, remote_gb_s, 1e6 * host, each)

    def host_prepared_us(self, buffer: Buffer, inputs: Inputs, work: str) -> float | None:
        """Measure the time of the host in a prepared call. None for works that have no prepared calls."""
        is_fp8 = work == "dispatch_fp8_known"
        if not is_fp8 and work not in ("dispatch_bf16_known", "combine_bf16"):
            return None
        x, scales = (inputs.fp8, inputs.scales) if is_fp8 else (inputs.bf16, None)
        step = buffer.prepare_throughput(x, inputs.handle, x_scales=scales, y=inputs.experts_out)
        make = step.combine if work == "combine_bf16" else step.dispatch
        make()  # the first call prepares its results
        return 1e6 * timing.measure_host(buffer, self.comm, lambda i: make(), self.settings)

    def is_possible(self, work: str, call: Callable[[int], Any]) -> bool:
        """Make a call if it may be refused. The refusal is the same on all ranks, and becomes the reason in the result."""
        if work in MAY_BE_LEFT_OUT:
            try:
                call(0)
            except (EPInputError, EPUnavailableError) as error:
                self.left_out[work] = str(error).partition(". ")[0]
        return work not in self.left_out

    def check_sums(self, buffer: Buffer, inputs: Inputs, work: str) -> None:
        """Check a combine with compressed rows. The rows by token are those that this rank received."""
        arrays: dict[str, Any] = dict(x=inputs.bf16, topk_idx=inputs.topk_idx, recv_x=inputs.by_expert.rows)
        compressed.check_sums(self.comm, self.machine, buffer, work, **arrays, handle=inputs.handle)


def run(comm: Intracomm, settings: Settings, step: Callable[[str], None] = lambda doing: None) -> dict[str, Any] | None:
    """Measure. Collective. Return the contents of the result file (`results.document`) on rank 0, and None on the others.

    `step` is called with a description before each of `num_steps(settings)` measurements.
    """
    bench = Bench(comm, settings, step)
    ceilings, rows = {}, []
    with nccl.started(comm, bench.machine.on_gpu) if settings.nccl else contextlib.nullcontext():
        for sms in settings.sms:
            ceilings[sms], found = bench.run(sms)
            rows += found
    rows.sort(key=lambda row: (row.tokens, row.work, row.sms))
    described = {**bench.machine.described(), **settings.described(timing.BOUNDARY[settings.backend]), "left_out": bench.left_out}
    return document(rows, ceilings, described, settings.commit) if comm.rank == 0 else None


def main() -> None:
    """Run the program `bench/throughput.py`."""
    parser = program.parser(__doc__)
    parser.add_argument("--tokens", type=program.numbers, default=Settings.tokens, help="tokens of each rank, such as 4096,8192")
    parser.add_argument("--sms", type=program.numbers, default=Settings.sms, help="numbers of SMs to try, such as 24,64")
    parser.add_argument("--calls", type=int, default=Settings.calls, help="calls in a loop")
    parser.add_argument("--repeats", type=int, default=Settings.repeats, help="loops; their median counts")
    parser.add_argument("--warmup", type=int, default=Settings.warmup, help="calls before the first loop")
    program.add_node_options(parser)
    parser.add_argument("--path", choices=PATHS, default=Settings.path, help="the way of rows between nodes")
    parser.add_argument("--works", type=works, default=WORKS, help="works to measure, such as combine_bf16,combine_fp8")
    parser.add_argument("--nccl", action="store_true", help="measure NCCL's all-to-all of as many bytes too (needs PyTorch)")
    program.run_program(MPI.COMM_WORLD, parser.parse_args(), Settings, run)
