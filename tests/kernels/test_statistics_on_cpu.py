"""What kernels count for `Buffer.statistics`, on the CPU: rows as the host backend counts them, and waits for a rank that is late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scenarios import Again, Sum

from deepep_rt import Buffer
from deepep_rt.kernels import nodes_layout
from deepep_rt.statistics import CALL_KINDS
from tests.kernels_on_cpu import compiler
from tests.kernels_on_cpu.machine import Machine
from tests.kernels_on_cpu.rounds import LOW_LATENCY, THROUGHPUT, LowLatencyRound, ThroughputRound, broken, inputs_of

pytestmark = pytest.mark.skipif(compiler.compiler() is None, reason="no C++ compiler (g++ or clang++) is installed")

BOTH = {**THROUGHPUT, "low_latency": True, "low_latency_sms": 2, "hidden": 256, "num_max_tokens_per_rank": 8}
LATE = 1  # the rank that is late


def rows_between(inputs: list[Any], config: Any) -> np.ndarray:
    """Count the tokens of each rank for each rank, `[source, destination]`."""
    owner = [np.where(mine.topk_idx >= 0, mine.topk_idx // config.num_local_experts, -1) for mine in inputs]
    return np.array([[(mine == rank).any(1).sum() for rank in range(config.num_ranks)] for mine in owner])


def choices_of(inputs: list[Any], config: Any, rank: int) -> list[int]:
    """Count the choices of each expert of a rank."""
    chosen = np.concatenate([mine.topk_idx.reshape(-1) for mine in inputs])
    first = rank * config.num_local_experts
    return [int((chosen == expert).sum()) for expert in range(first, first + config.num_local_experts)]


def moved(counted: Any) -> tuple[int, int, int]:
    return counted.calls, counted.rows_sent, counted.rows_received


def test_rows_of_throughput_calls() -> None:
    with Machine(3, 5) as machine:
        buffers = machine.buffers(**BOTH, statistics=True)
        config = buffers[0].config
        made = ThroughputRound(machine, buffers, 5, worst=None, again=(Again(),), sums=(Sum(),))
        machine.each_rank(made.run)
        rows = rows_between(made.inputs, config)
        for rank, buffer in enumerate(buffers):
            counted, sent, received = buffer.statistics(), rows[rank].sum(), rows[:, rank].sum()
            assert moved(counted.dispatch) == (2, 2 * sent, 2 * received)
            assert moved(counted.combine) == (1, received, sent)
            assert counted.dispatch.bytes_sent == counted.dispatch.rows_sent * config.row_bytes
            assert counted.combine.bytes_received == counted.combine.rows_received * config.row_bytes
            assert list(counted.rows_by_expert) == choices_of(made.inputs, config, rank)
            assert counted.rank == rank
            assert 0 < counted.pool.most_bytes_in_use <= counted.pool.capacity_bytes


def test_dropped_rows_are_not_received() -> None:
    """Rows past num_worst_tokens do not count, neither where they would arrive nor in the combine."""
    with Machine(3, 2, "sm_80") as machine:
        buffers = machine.buffers(**BOTH, statistics=True)
        inputs = inputs_of(buffers[0].config, 3)
        back, sent = {}, {}
        for rank, buffer in enumerate(buffers):
            put = [machine.put(rank, array) for array in (inputs[rank].x, inputs[rank].topk_idx)]
            sent[rank] = buffer.dispatch(*put, num_worst_tokens=3)
            y = machine.put(rank, np.zeros((3, buffer.config.hidden), inputs[rank].x.dtype))
            back[rank] = buffer.combine(y, sent[rank].handle)
        machine.run()
        counted = [buffer.statistics() for buffer in buffers]
        assert [c.dispatch.rows_received for c in counted] == [3, 3, 3]
        assert sum(c.dispatch.rows_sent for c in counted) == 9
        assert [c.combine.rows_sent for c in counted] == [3, 3, 3]
        assert sum(c.combine.rows_received for c in counted) == 9


def test_a_call_without_the_counts_of_a_rank_counts_no_choices(tmp_path: Path) -> None:
    """Rank 1 begins its third call and says no more. What it said in its first call lies in the same memory."""
    folder = broken(
        tmp_path, "throughput/route.cu", r" send\(p, epoch, shared\);", " if (epoch < 3 || p.rank == 0) send(p, epoch, shared);"
    )
    with Machine(2, 5, cuda_src=folder) as machine:
        buffers = machine.buffers(**{**BOTH, "num_experts": 4}, statistics=True)
        inputs = inputs_of(buffers[0].config, 3)
        for _ in range(3):
            for rank, buffer in enumerate(buffers):
                put = [machine.put(rank, array) for array in (inputs[rank].x, inputs[rank].topk_idx)]
                buffer.dispatch(*put, num_worst_tokens=buffer.config.num_max_recv_tokens)
            machine.run()
        for rank, buffer in enumerate(buffers):
            assert list(buffer.statistics().rows_by_expert) == [2 * n for n in choices_of(inputs, buffer.config, rank)]


@pytest.mark.parametrize("nodes", [{}, dict(ranks_per_node=1), dict(ranks_per_node=1, path="direct")])
def test_rows_of_choices(nodes: dict[str, Any]) -> None:
    """With reduce="topk" each choice has a row, and one call may take several launches."""
    with Machine(3, 4) as machine:
        buffers = machine.buffers(**BOTH, **nodes, statistics=True)
        made = ThroughputRound(machine, buffers, 9, "expert", worst=None, sums=(Sum(), Sum(reduce="topk")))
        machine.each_rank(made.run)
        rows, config = rows_between(made.inputs, buffers[0].config), buffers[0].config
        for rank, buffer in enumerate(buffers):
            combine = buffer.statistics().combine
            received = rows[rank].sum() + (made.inputs[rank].topk_idx >= 0).sum()
            assert moved(combine) == (2, rows[:, rank].sum() + sum(choices_of(made.inputs, config, rank)), received)


@pytest.mark.parametrize("reduce", [True, False])
@pytest.mark.parametrize("hooks", [True, False])
def test_rows_of_low_latency_calls(reduce: bool, hooks: bool) -> None:
    with Machine(3, 6) as machine:
        buffers = machine.buffers(**BOTH, statistics=True)
        config, count = buffers[0].config, 3
        made = [
            LowLatencyRound(machine, buffers, 1 + i, reduce=reduce, hooks=hooks, format=dict(use_fp8=i > 0)).all()
            for i in range(count)
        ]
        machine.run()
        rows = [rows_between(one.inputs, config) for one in made]
        for rank, buffer in enumerate(buffers):
            counted = buffer.statistics()
            sent, received = [int(r[rank].sum()) for r in rows], [int(r[:, rank].sum()) for r in rows]
            by_expert = np.sum([choices_of(one.inputs, config, rank) for one in made], axis=0)
            assert moved(counted.low_latency_dispatch) == (count, sum(sent), sum(received))
            fp8_bytes = config.hidden + config.hidden // 128 * 4
            assert counted.low_latency_dispatch.bytes_sent == sent[0] * 2 * config.hidden + sum(sent[1:]) * fp8_bytes
            assert list(counted.rows_by_expert) == by_expert.tolist()
            if not reduce:  # a row for each choice
                sent = [int((one.inputs[rank].topk_idx >= 0).sum()) for one in made]
                received = [by_expert.sum()]
            assert moved(counted.low_latency_combine) == (count, sum(received), sum(sent))


def test_rows_of_many_tokens() -> None:
    """Another kernel combines many tokens."""
    with Machine(2, 8) as machine:
        sizes = dict(num_max_tokens_per_rank=12, num_topk=4, low_latency_sms=1)
        buffers = machine.buffers(**{**LOW_LATENCY, **sizes}, statistics=True)
        made = [LowLatencyRound(machine, buffers, seed, reduce=True).all() for seed in range(3)]
        machine.run()
        assert "ll_combine_large" in machine.launched
        rows = sum(rows_between(one.inputs, buffers[0].config) for one in made)
        for rank, buffer in enumerate(buffers):
            assert moved(buffer.statistics().low_latency_combine) == (3, rows[:, rank].sum(), rows[rank].sum())


class LateRank:
    """Four calls in which one rank is late: it queues its work after the others have waited for it.

    Args:
        machine: The ranks.
        buffers: Of all ranks.
    """

    def __init__(self, machine: Machine, buffers: list[Buffer]) -> None:
        self._machine, self._buffers, self._config = machine, buffers, buffers[0].config
        self._step_ns = machine._gpus.clock_step_ns
        rng = np.random.default_rng(1)
        sizes = self._config.num_max_tokens_per_rank, self._config.num_topk
        self._idx = [rng.permuted(np.arange(sizes[0] * sizes[1]) % self._config.num_experts).reshape(sizes) for _ in buffers]
        self._sent: dict[int, Any] = {}

    def call(self, kind: str) -> float:
        """Make a call, with the last rank late. Return the seconds by which it is late."""
        for rank in [rank for rank in range(len(self._buffers)) if rank != LATE]:
            self._queue(kind, rank)
        passed = 0
        while passed < 2:  # steps of the clock, which passes only while all threads wait
            before = self._machine._gpus._num_waits
            self._machine._gpus.advance(1 << 14)
            passed += self._machine._gpus._num_waits > before
        self._queue(kind, LATE)
        self._machine.run()
        return 2 * self._step_ns / 1e9

    def _queue(self, kind: str, rank: int) -> None:
        buffer, put, config = self._buffers[rank], self._machine.put, self._config
        x = put(rank, np.ones((config.num_max_tokens_per_rank, config.hidden), "bfloat16"))
        idx, weights = put(rank, self._idx[rank]), put(rank, np.ones(self._idx[rank].shape, np.float32))
        most = config.num_max_recv_tokens
        if kind == "dispatch":
            self._sent[rank] = buffer.dispatch(x, idx, num_worst_tokens=most)
        elif kind == "combine":
            buffer.combine(put(rank, np.ones((most, config.hidden), "bfloat16")), self._sent[rank].handle)
        elif kind == "low_latency_dispatch":
            self._sent[rank] = buffer.low_latency_dispatch(x, idx, topk_weights=weights, use_fp8=False)
        else:
            shape = config.num_local_experts, config.worst_recv_tokens, config.hidden
            buffer.low_latency_combine(put(rank, np.ones(shape, "bfloat16")), idx, weights, self._sent[rank].handle)


@pytest.mark.parametrize("sizes", [{}, dict(on_timeout="mask")])
@pytest.mark.parametrize("weak_memory", [False, True])
def test_waits_name_the_late_rank(sizes: dict[str, Any], weak_memory: bool) -> None:
    with Machine(3, 3, weak_memory=weak_memory) as machine:
        check_waits(machine, machine.buffers(**BOTH, **sizes, timeout_s=8.0, statistics=True))


def test_waits_between_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes_layout, "_CHUNK_BYTES", {"nvshmem": 512, "mpi": 512})
    with Machine(2, 3, transport="mpi") as machine:
        sizes = {**BOTH, "num_experts": 4, "ranks_per_node": 1}
        check_waits(machine, machine.buffers(**sizes, timeout_s=8.0, statistics=True))


def check_waits(machine: Machine, buffers: list[Buffer]) -> None:
    late = LateRank(machine, buffers)
    for kind in CALL_KINDS:
        before = [getattr(buffer.statistics(), kind).wait_s for buffer in buffers]
        seconds = late.call(kind)
        for rank, buffer in enumerate(buffers):
            counted = buffer.statistics()
            waited = np.subtract(getattr(counted, kind).wait_s, before[rank])
            assert waited[rank] == 0
            assert getattr(counted, kind).calls == 1
            if rank != LATE:
                assert 0.4 * seconds < waited[LATE] < 1.2 * seconds, (kind, rank, waited)
                assert (np.delete(waited, LATE) < 0.1 * seconds).all(), (kind, rank, waited)
            else:
                assert (waited < 0.1 * seconds).all(), (kind, rank, waited)


def test_waits_of_several_calls_add_up() -> None:
    """Each call counts its own longest wait, also after a call with a longer one."""
    with Machine(3, 1) as machine:
        buffers = machine.buffers(**BOTH, timeout_s=8.0, statistics=True)
        late = LateRank(machine, buffers)
        for kind in ("dispatch", "low_latency_dispatch"):
            total = []
            for _ in range(4):
                late.call(kind)
                total.append(getattr(buffers[0].statistics(), kind).wait_s[LATE])
            each = np.diff([0.0, *total])
            assert (each > 0.5 * each.max()).all(), (kind, each)
