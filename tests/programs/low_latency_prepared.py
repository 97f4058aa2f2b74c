"""Prepared low-latency calls: the bits of ordinary calls, also between them. It runs with `low_latency`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import low_latency_oracle
import numpy as np
import spmd
from low_latency_rounds import (
    HIDDEN,
    MAX_TOKENS,
    assert_same,
    expected_arrivals,
    expert_outputs,
    make_low_latency_buffer,
    make_low_latency_inputs,
    run_checked_round,
    to_backend,
    to_host,
)
from mpi4py import MPI
from scenario_table import FORMATS
from spmd import main, raises

from deepep_rt import Buffer, EPDestroyedError, EPInputError, PreparedLowLatency


class Step:
    """A prepared call, and its arrays, which each round writes in place. On GPUs they lie there, if `on_device`.

    Args:
        buffer: The Buffer.
        inputs: Those of all ranks in the first round.
        on_device: Whether the arrays lie where the backend works. Otherwise they are NumPy's.
        options: Those of `prepare_low_latency`.
    """

    def __init__(self, buffer: Buffer, inputs: list[Any], rank: int, *, on_device: bool = True, **options: Any) -> None:
        self.buffer, self.rank, self.options, self.on_device = buffer, rank, options, on_device
        move = to_backend if on_device else np.copy
        mine = inputs[rank]
        self.arrays = [move(array) for array in (mine.x, mine.topk_idx, mine.topk_weights)]
        self.y = move(expert_outputs(buffer, 0)[rank])
        self.call: PreparedLowLatency = buffer.prepare_low_latency(*self.arrays, **options)

    def write(self, inputs: list[Any], y: list[np.ndarray]) -> None:
        """Give the next calls these inputs."""
        mine = inputs[self.rank]
        for array, values in zip((*self.arrays, self.y), (mine.x, mine.topk_idx, mine.topk_weights, y[self.rank]), strict=True):
            array.view(np.uint8)[...] = to_backend(values.view(np.uint8)) if self.on_device else values.view(np.uint8)

    def run(self) -> tuple[Any, Any]:
        """Make both calls."""
        sent = self.call.dispatch()
        if sent.hook is not None:
            sent.hook()
        back = self.call.combine(self.y)
        if back.hook is not None:
            back.hook()
        return sent, back

    def check(self, inputs: list[Any], seed: int) -> None:
        """Write inputs, make both calls, and compare the results with the oracle."""
        y = expert_outputs(self.buffer, seed, special=bool(seed % 2))
        self.write(inputs, y)
        sent, back = self.run()
        self.buffer.synchronize()
        formats = {name: self.options.get(name, name == "use_fp8") for name in ("use_fp8", "round_scale", "use_ue8m0")}
        compare_arrived(sent, expected_arrivals(self.buffer, self.rank, inputs, formats))
        reduce_early, compress = self.options.get("allow_multiple_reduction", True), self.options.get("compress")
        experts = self.buffer.config.num_experts
        wanted = low_latency_oracle.expected_combine(self.rank, inputs, y, experts, reduce_early=reduce_early, compress=compress)
        assert_same(f"combine of round {seed}", to_host(back.x), wanted)


def compare_arrived(sent: Any, expected: Any) -> None:
    """Compare the results of a dispatch with the oracle."""
    names = "recv_x", "recv_x_scales", "num_recv_tokens_per_expert"
    low_latency_oracle.check_dispatch(SimpleNamespace(**{name: to_host(getattr(sent, name)) for name in names}), expected)


def check_prepared_calls_in_every_format(comm: MPI.Intracomm) -> None:
    """Each with inputs that change in place, also on the rank without tokens."""
    rank = comm.Get_rank()
    with make_low_latency_buffer(comm) as buffer:
        for number, options in enumerate(FORMATS):
            first = make_low_latency_inputs(comm, number)
            step = Step(buffer, first, rank, **options, allow_multiple_reduction=number % 2 == 0)
            for seed in range(3):
                step.check(make_low_latency_inputs(comm, 10 * number + seed), seed)


def check_prepared_calls_of_host_arrays(comm: MPI.Intracomm) -> None:
    """On GPUs, each call copies the arrays."""
    with make_low_latency_buffer(comm) as buffer:
        step = Step(buffer, make_low_latency_inputs(comm, 40), comm.Get_rank(), on_device=False, use_fp8=False)
        for seed in range(3):
            step.check(make_low_latency_inputs(comm, 40 + seed), seed)


def check_prepared_calls_with_hooks(comm: MPI.Intracomm) -> None:
    """Two micro-batches have a prepared call each, and their halves take turns."""
    rank = comm.Get_rank()
    with make_low_latency_buffer(comm) as buffer:
        batches = [make_low_latency_inputs(comm, seed) for seed in (50, 51)]
        steps = [Step(buffer, batch, rank, use_fp8=False, return_recv_hook=True) for batch in batches]
        for seed in range(3):
            y = [expert_outputs(buffer, 2 * seed + half) for half in range(2)]
            for step, inputs, given in zip(steps, batches, y, strict=True):
                step.write(inputs, given)
            sent = [step.call.dispatch() for step in steps]
            with raises(EPInputError, "low_latency_dispatch is open", "prepare another call"):
                steps[0].call.dispatch()
            with raises(EPInputError, "handle", "not called yet"):
                steps[1].call.combine(steps[1].y)
            for result, inputs in zip(sent, batches, strict=True):
                result.hook()
                buffer.synchronize()
                compare_arrived(result, expected_arrivals(buffer, rank, inputs, {}))
            back = [step.call.combine(step.y) for step in steps]
            with raises(EPInputError, "low_latency_combine is open"):
                steps[0].call.dispatch()
            for result, inputs, given in zip(back, batches, y, strict=True):
                result.hook()
                buffer.synchronize()
                wanted = low_latency_oracle.expected_combine(rank, inputs, given, buffer.config.num_experts, reduce_early=True)
                assert_same(f"combine of round {seed}", to_host(result.x), wanted)
        del sent, back, result
        if rank == 0:  # a dropped hook runs in the next call
            steps[0].call.dispatch()
        else:
            steps[0].call.dispatch().hook()
        steps[0].check(batches[1], 9)


def check_prepared_and_ordinary_calls(comm: MPI.Intracomm) -> None:
    """Some ranks prepare their calls and others do not, and all make ordinary calls in between."""
    rank = comm.Get_rank()
    with make_low_latency_buffer(comm) as buffer:
        step = Step(buffer, make_low_latency_inputs(comm, 60), rank, use_fp8=False)
        for seed in range(60, 64):
            inputs, y = make_low_latency_inputs(comm, seed), expert_outputs(buffer, seed)
            mine = inputs[rank]
            if (rank + seed) % 2:
                step.write(inputs, y)
                _, back = step.run()
            else:
                sent = buffer.low_latency_dispatch(mine.x, mine.topk_idx, topk_weights=mine.topk_weights, use_fp8=False)
                back = buffer.low_latency_combine(y[rank], mine.topk_idx, mine.topk_weights, sent.handle)
            buffer.synchronize()
            wanted = low_latency_oracle.expected_combine(rank, inputs, y, buffer.config.num_experts, reduce_early=True)
            assert_same(f"round {seed}", to_host(back.x), wanted)
            run_checked_round(comm, buffer, make_low_latency_inputs(comm, seed + 100), seed)


def check_handle_of_a_prepared_dispatch(comm: MPI.Intracomm) -> None:
    """Ordinary combines take it, and the memory for experts' outputs as well."""
    rank = comm.Get_rank()
    with make_low_latency_buffer(comm) as buffer:
        inputs, given = make_low_latency_inputs(comm, 70), expert_outputs(buffer, 70)
        out = to_backend(np.zeros_like(inputs[rank].x))
        step = Step(buffer, inputs, rank, use_fp8=False, zero_copy=True, out=out)
        sent = step.call.dispatch()
        assert sent.handle.num_tokens == len(inputs[rank].x)
        y = buffer.get_low_latency_combine_buffer(sent.handle)
        y.view(np.uint8)[...] = to_backend(given[rank].view(np.uint8))
        with raises(EPInputError, "zero_copy=True", "get_low_latency_combine_buffer"):
            step.call.combine(step.y)
        wanted = low_latency_oracle.expected_combine(rank, inputs, given, buffer.config.num_experts, reduce_early=True)
        for _ in range(2):
            back = step.call.combine(y)
            buffer.synchronize()
            assert_same("prepared", to_host(back.x), wanted)
            assert_same("out", to_host(out), wanted)
            ordinary = buffer.low_latency_combine(y, *step.arrays[1:], sent.handle)
            buffer.synchronize()
            assert_same("ordinary", to_host(ordinary.x), wanted)


def check_statistics_of_prepared_calls(comm: MPI.Intracomm) -> None:
    rank, ranks = comm.Get_rank(), comm.Get_size()
    with make_low_latency_buffer(comm) as buffer:
        stats, waits = to_backend(np.zeros(4, np.int32)), to_backend(np.zeros(ranks, np.int64))
        counters = dict(cumulative_local_expert_recv_stats=stats, wait_recv_cost_stats=waits)
        inputs = make_low_latency_inputs(comm, 80)
        step = Step(buffer, inputs, rank, use_fp8=False, **counters)
        counts = np.array([len(x) for x in expected_arrivals(buffer, rank, inputs, {}).x])
        for number in range(1, 4):
            step.call.dispatch()
            buffer.synchronize()
            assert (to_host(stats) == number * counts).all()


def check_wrong_prepared_calls(comm: MPI.Intracomm) -> None:
    """A mistake of one rank raises there before anything is sent, and all ranks go on."""
    rank = comm.Get_rank()
    with make_low_latency_buffer(comm) as buffer:
        inputs = make_low_latency_inputs(comm, 90, lambda rank: 5)
        x, idx, weights = inputs[rank].x, inputs[rank].topk_idx, inputs[rank].topk_weights
        step = Step(buffer, inputs, rank, use_fp8=False)
        prepare: Any = buffer.prepare_low_latency
        many = np.zeros((MAX_TOKENS + 1, HIDDEN), x.dtype)
        for words, call in (
            (("float32", "bfloat16"), lambda: prepare(x.astype(np.float32), idx, weights)),
            (("16 tokens",), lambda: prepare(many, idx, weights)),
            (("topk_weights=None",), lambda: prepare(x, idx, None)),
            (("topk_weights", "shape"), lambda: prepare(x, idx, weights[:2])),
            (("reduce=",), lambda: prepare(x, idx, weights, reduce="expert")),
            (("compress=",), lambda: prepare(x, idx, weights, compress="fp4")),
            (("out", "shape"), lambda: prepare(x, idx, weights, out=to_backend(x[:3].copy()))),
            (("y.shape",), lambda: prepare(x, idx, weights, y=x)),
            (("y=None",), lambda: step.call.combine()),
            (("expected its dispatch before",), lambda: step.call.combine(step.y)),
            (("y.shape",), lambda: step.call.combine(x)),
        ):
            if rank == 0:
                with raises(EPInputError, *words):
                    call()
        step.check(inputs, 90)
        run_checked_round(comm, buffer, inputs, 91)
    for late in (step.call.dispatch, lambda: step.call.combine(step.y)):
        with raises(EPDestroyedError, "this Buffer was destroyed"):
            late()
    if spmd.backend == "host":
        with make_low_latency_buffer(comm, low_latency=False) as plain, raises(EPInputError, "low_latency=True"):
            plain.prepare_low_latency(x, idx, weights)


if __name__ == "__main__":
    main(__name__)
