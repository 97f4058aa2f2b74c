"""Wrong calls that only kernels see, on the CPU. Their rows appear in no other call, and each is reported."""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes  # noqa: F401  (dtypes for NumPy)
import numpy as np
import pytest
from scenario_table import BOTH, few_tokens
from scenarios import SUM, Sum

from deepep_rt import Buffer, EPInputError, EPTimeoutError
from tests.kernels_on_cpu import compiler
from tests.kernels_on_cpu.device_arrays import DeviceArrays
from tests.kernels_on_cpu.machine import Machine

pytestmark = pytest.mark.skipif(compiler.compiler() is None, reason="no C++ compiler (g++ or clang++) is installed")

SMALL: dict[str, Any] = dict(
    num_max_tokens_per_rank=4, hidden=256, num_topk=4, num_experts=8, low_latency=True, low_latency_sms=2, num_slots=2
)
TOKENS = (4, 2)


class Round:
    """A round of both low-latency calls on all ranks. Its methods queue work and do not run it."""

    def __init__(self, machine: Machine, buffers: list[Buffer], seed: int, **more: Any) -> None:
        self.machine, self.buffers, self.sent = machine, buffers, {}
        self.round: Any = few_tokens("a round", lambda rank: TOKENS[rank % 2], 0.1, seed=seed, **more).start(buffers[0].config)
        self.inputs = self.round.inputs

    def dispatch(self, rank: int) -> None:
        self.sent[rank] = self.round.send(self.buffers[rank], rank, partial(self.machine.put, rank))

    def combine(self, rank: int, handle: Any = None, topk_idx: np.ndarray | None = None, *, reduce_early: bool = True) -> Any:
        mine, put = self.inputs[rank], self.machine.put
        return self.buffers[rank].low_latency_combine(
            put(rank, self.round.outputs(SUM)[rank]),
            put(rank, mine.topk_idx if topk_idx is None else topk_idx),
            put(rank, mine.topk_weights),
            handle or self.sent[rank].handle,
            allow_multiple_reduction=reduce_early,
        )

    def check(self, backs: list[Any], *, reduce_early: bool = True) -> None:
        for rank, back in enumerate(backs):
            self.round.check_dispatch(rank, self.sent[rank])
            self.round.check_sum(rank, back, BOTH[not reduce_early])


def run_round(machine: Machine, buffers: list[Buffer], seed: int, **more: Any) -> None:
    made = Round(machine, buffers, seed, **more).round
    for rank, buffer in enumerate(buffers):
        made.call(buffer, rank, partial(machine.put, rank))
    machine.run()
    for rank in range(len(buffers)):
        made.check(rank)


@pytest.mark.parametrize("reduce", ["rank", "topk"])
@pytest.mark.parametrize("early", [True, False])
def test_excluded_choices(reduce: str, early: bool) -> None:
    """Their rows still arrive. A row that stays in its slot would be taken for a row of a later call."""
    with Machine(2, seed=1) as machine:
        buffers = machine.buffers(**SMALL)
        for seed in range(3):
            run_round(machine, buffers, seed, early=(early,), sums=(Sum(reduce=reduce, named="some ranks"),))
            for later in range(3):  # these rounds use each slot again
                run_round(machine, buffers, 100 + 10 * seed + later, early=(early,), sums=(Sum(reduce=reduce),))


def test_other_choices_are_reported() -> None:
    """The sum follows the dispatch, and the error names the choice."""
    with Machine(2, seed=2) as machine:
        buffers = machine.buffers(**SMALL)
        made = Round(machine, buffers, 3)
        for rank in range(2):
            made.inputs[rank].topk_idx[0] = 1, 5, 2, -1
            made.inputs[rank].topk_idx[1] = -1  # a token without a row
            made.dispatch(rank)
        for value, token, choice, expected in ((3, 0, 0, 1), (8, 0, 1, 5), (7, 0, 3, -1), (-1, 0, 2, 2), (4, 1, 3, -1)):
            given = made.inputs[0].topk_idx.copy()
            given[token, choice] = value
            backs = [made.combine(0, topk_idx=given), made.combine(1)]
            machine.run()
            made.check(backs)
            shown = "an expert that does not exist" if value == 8 else value
            with pytest.raises(EPInputError, match=rf"topk_idx\[{token}, {choice}\]={shown}; expected {expected}"):
                buffers[0].check()
            for buffer in buffers:
                buffer.check()


@pytest.mark.parametrize("what", ["kind", "handle"])
def test_different_combines(what: str) -> None:
    with Machine(2, seed=3) as machine:
        buffers = machine.buffers(**SMALL)
        made = Round(machine, buffers, 4)
        first = {}
        for rank in range(2):
            made.dispatch(rank)
            first[rank] = made.sent[rank]
        for rank in range(2):
            made.dispatch(rank)
        made.combine(0)
        made.combine(1, first[1].handle if what == "handle" else None, reduce_early=what == "handle")
        machine.run()
        for buffer in buffers:
            with pytest.raises(
                EPInputError, match=f"the ranks disagree on the {what}.*rank 0: .*rank 1: .*cannot be used any more"
            ):
                buffer.check()


THROUGHPUT: dict[str, Any] = dict(num_max_tokens_per_rank=16, hidden=256, num_topk=2, num_experts=4, timeout_s=5)


class Step:
    """Steps of a program that goes on after an error. In a wrong step the ranks pass rows of different dtypes."""

    def __init__(self, machine: Machine, buffers: list[Buffer], **options: Any) -> None:
        self._machine, self._buffers, self._options = machine, buffers, options

    def run(self, rank: int, wrong: bool) -> np.ndarray:
        """Run a step. A host is late for its combine."""
        buffer, put = self._buffers[rank], self._machine.put
        x = np.full((16, 256), 1 + rank, "float16" if wrong and rank == 1 else "bfloat16")
        sent = buffer.dispatch(put(rank, x), put(rank, np.tile(np.array([0, 2]), (16, 1))), **self._options)
        for _ in range(50 if rank == 1 and wrong else 0):
            self._machine._pause()
        y = np.ones((sent.handle.num_recv_rows, 256), "bfloat16")
        reduce = dict(reduce="topk") if self._options.get("layout") == "expert" else {}
        back = buffer.combine(put(rank, y), sent.handle, **reduce)
        buffer.synchronize()
        return np.asarray(back.x, np.float32)


@pytest.mark.parametrize(
    "options", [{}, dict(num_worst_tokens=32), dict(layout="expert"), dict(layout="expert", num_worst_tokens=64)], ids=str
)
@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_differ_stay_in_step(options: dict[str, Any], seed: int) -> None:
    """All ranks raise in the step with the difference, whether or not they made the combine. The next steps are right."""
    with Machine(2, seed) as machine:
        step = Step(machine, machine.buffers(**THROUGHPUT), **options)

        def program(rank: int) -> list[Any]:
            said: list[Any] = []
            for number in range(3):
                try:
                    said.append(step.run(rank, wrong=number == 0))
                except EPInputError as error:
                    said.append(str(error))
            return said

        for first, *others in machine.each_rank(program):
            assert isinstance(first, str)
            assert "the ranks disagree on the x of this call" in first
            for sums in others:
                assert (sums == 2).all()


def test_a_difference_is_raised_by_the_dispatch() -> None:
    """Its host waits for counts, so no rank goes on to its combine."""
    with Machine(2, 1) as machine:
        step = Step(machine, machine.buffers(**THROUGHPUT))
        machine.launched.clear()

        def program(rank: int) -> None:
            with pytest.raises(EPInputError, match="the ranks disagree on the x of this call"):
                step.run(rank, wrong=True)

        machine.each_rank(program)
        assert "combine" not in machine.launched


@pytest.mark.parametrize("late", [0, 1])
def test_a_new_routing_meets_a_known_one(late: int) -> None:
    """One rank computes a routing, and the other repeats one. Each hears of it at once, and they stay in step."""
    with Machine(2, 1) as machine:
        buffers = machine.buffers(**THROUGHPUT)
        step = Step(machine, buffers)
        put, idx, x = machine.put, np.tile(np.array([0, 2]), (16, 1)), np.ones((16, 256), "bfloat16")
        handles = machine.each_rank(lambda rank: buffers[rank].dispatch(put(rank, x), put(rank, idx)).handle)

        def program(rank: int) -> np.ndarray:
            for _ in range(2 if rank == late else 0):
                machine._pause()
            with pytest.raises(EPInputError, match="rank 0: dispatch with a handle, rank 1: dispatch"):  # noqa: PT012
                if rank == 0:
                    buffers[rank].dispatch(put(rank, x), handle=handles[rank])
                else:
                    buffers[rank].dispatch(put(rank, x), put(rank, idx), num_worst_tokens=32)
                buffers[rank].synchronize()
            return step.run(rank, wrong=False)

        for sums in machine.each_rank(program):
            assert (sums == 2).all()


@pytest.mark.parametrize("call", ["dispatch", "combine"])
def test_results_after_a_time_out_are_nan(call: str) -> None:
    """Results of the call that timed out, and of calls that were queued after it."""
    with Machine(2, seed=4) as machine:
        buffers = machine.buffers(**SMALL)
        run_round(machine, buffers, 5)
        made = Round(machine, buffers, 5)
        for _ in range(2):
            made.dispatch(0)
            if call == "combine":
                made.dispatch(1)
            back = made.combine(0)
        machine.run()
        assert np.isnan(back.x.astype(np.float32)).all()
        assert np.isnan(made.sent[0].recv_x.astype(np.float32)).all()
        with pytest.raises(EPTimeoutError, match="rank 0 waited 1 s for rank 1"):
            buffers[0].check()


def test_experts_named_too_often(caplog: pytest.LogCaptureFixture) -> None:
    """An expert has room for 8 rows. Further rows are dropped, as on the host backend, with one warning."""
    with Machine(2, seed=5) as machine:
        buffers = machine.buffers(**SMALL)
        for seed in range(2):
            made = Round(machine, buffers, 6 + seed)
            for rank, mine in enumerate(made.inputs):
                mine.topk_idx[:] = 5
                made.dispatch(rank)
            for reduce_early in (True, False):
                backs = [made.combine(rank, reduce_early=reduce_early) for rank in range(2)]
                machine.run()
                made.check(backs, reduce_early=reduce_early)
            buffers[1].check()
    warnings = [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
    assert len(warnings) == 1
    assert warnings[0].startswith("rank 1: low_latency_dispatch received 24 rows for local expert 1, which has room")


def throughput(machine: Machine, buffers: list[Buffer], rank: int, rows: int) -> tuple[Any, Any]:
    """Queue a dispatch and a combine of one rank. Each token goes to both ranks."""
    put, tokens = machine.put, TOKENS[rank]
    x = put(rank, np.ones((tokens, 256), "bfloat16"))
    idx = put(rank, np.tile([0, 4, 1, -1], (tokens, 1)))
    sent = buffers[rank].dispatch(x, idx, put(rank, np.ones((tokens, 4), np.float32)), num_worst_tokens=rows)
    return sent, buffers[rank].combine(put(rank, np.ones((rows, 256), "bfloat16")), sent.handle)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_throughput_results_after_a_time_out_are_nan(arch: str) -> None:
    with Machine(2, seed=6, arch=arch) as machine:
        buffers = machine.buffers(**{**SMALL, "num_slots": 4}, num_sms=2)
        calls = [throughput(machine, buffers, rank, 8) for rank in range(2)]
        machine.run()
        for rank, (_, back) in enumerate(calls):
            assert (back.x.astype(np.float32) == 2).all(), rank
        for _ in range(2):
            sent, back = throughput(machine, buffers, 0, 8)
        machine.run()
        for array in (sent.recv_x, sent.recv_topk_weights, back.x):
            assert np.isnan(array.astype(np.float32)).all()
        with pytest.raises(EPTimeoutError, match="rank 0 waited 1 s for rank 1"):
            buffers[0].check()


def test_rows_past_num_worst_tokens_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with Machine(2, seed=7) as machine:
        buffers = machine.buffers(**{**SMALL, "num_slots": 4}, num_sms=2)
        for _ in range(2):
            calls = [throughput(machine, buffers, rank, (8, 5)[rank]) for rank in range(2)]
            machine.run()
            assert [sent.num_recv_tokens.tolist() for sent, _ in calls] == [[6], [6]]
            for buffer in buffers:
                buffer.check()
    warnings = [record.getMessage() for record in caplog.records if "dropped" in record.getMessage()]
    assert len(warnings) == 1
    assert warnings[0].startswith("rank 1: dispatch received 6 rows; num_worst_tokens=5. The last 1 were dropped")


def test_two_buffers_in_different_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each Buffer has a stream of its own, and a variable holds the last result of both. So each result is dropped while the stream of the
    other Buffer is current. No call may wait for a call of the same round there, because the other rank calls in the other order.
    """
    with Machine(2, seed=8) as machine:
        pairs = [machine.buffers(**SMALL) for _ in range(2)]
        streams = [[machine.new_stream(rank) for _ in range(2)] for rank in range(2)]
        current, held = {}, {}
        with monkeypatch.context() as patches:
            patches.setattr(DeviceArrays, "current_stream", lambda library, rank: current[rank])
            for number in range(6):
                made = Round(machine, pairs[0], number)
                for rank in range(2):
                    for which in (0, 1) if rank == 0 else (1, 0):
                        current[rank], made.buffers = streams[rank][which], pairs[which]
                        made.sent = {}
                        made.dispatch(rank)
                        held[rank] = made.sent.pop(rank).recv_x
            machine.run()
            held.clear()
        for buffer in (*pairs[0], *pairs[1]):
            buffer.check()
