"""Prepared low-latency calls: the bits of ordinary calls, also between them. It runs with `low_latency`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import spmd
from low_latency_rounds import (
    HIDDEN,
    MAX_TOKENS,
    Batch,
    counts_of,
    make_low_latency_buffer,
    make_low_latency_inputs,
    run_checked_round,
    to_backend,
    to_host,
)
from mpi4py import MPI
from scenario_table import FORMATS, OPAQUE
from spmd import main, raises

from deepep_rt import EPDestroyedError, EPInputError, PreparedLowLatency


class Step:
    """A prepared call, and its arrays, which each round writes in place. On GPUs they lie there, if `on_device`.

    Args:
        batch: The inputs of the first round.
        on_device: Whether the arrays lie where the backend works. Otherwise they are NumPy's.
        options: Those of `prepare_low_latency`.
    """

    def __init__(self, batch: Batch, *, on_device: bool = True, **options: Any) -> None:
        self.options, self.on_device = options, on_device
        self.arrays = [(to_backend if on_device else np.copy)(array) for array in self._values(batch)]
        self.y = self.arrays[3]
        scales = dict(x_scales=self.arrays[4]) if self.arrays[4:] else {}
        self.call: PreparedLowLatency = batch.buffer.prepare_low_latency(*self.arrays[:3], **scales, **options)

    def _values(self, batch: Batch) -> list[np.ndarray]:
        mine = batch.mine
        return [mine.x, mine.topk_idx, mine.topk_weights, batch.y, *([] if mine.scales is None else [mine.scales])]

    def write(self, batch: Batch) -> None:
        """Give the next calls these inputs."""
        for array, values in zip(self.arrays, self._values(batch), strict=True):
            array.view(np.uint8)[...] = to_backend(values.view(np.uint8)) if self.on_device else values.view(np.uint8)

    def check(self, batch: Batch) -> None:
        """Write inputs, make both calls, and compare the results with the oracle."""
        self.write(batch)
        sent = self.call.dispatch()
        if sent.hook is not None:
            sent.hook()
        back = self.call.combine(self.y)
        if back.hook is not None:
            back.hook()
        batch.buffer.synchronize()
        batch.check(sent, **{name: self.options.get(name, name == "use_fp8") for name in ("use_fp8", "round_scale", "use_ue8m0")})
        batch.check_sum(back, self.options.get("allow_multiple_reduction", True))


def check_prepared_calls_in_every_format(comm: MPI.Intracomm) -> None:
    """Each with inputs that change in place, also on the rank without tokens."""
    with make_low_latency_buffer(comm) as buffer:
        for number, options in enumerate(FORMATS):
            step = Step(Batch(comm, buffer, number), **options, allow_multiple_reduction=number % 2 == 0)
            for seed in range(3):
                step.check(Batch(comm, buffer, 10 * number + seed))


def check_prepared_calls_of_quantised_rows(comm: MPI.Intracomm) -> None:
    """And of fewer rows than the most, in GPU memory and on the host."""
    few = dict(use_fp8=False, num_max_tokens=8)
    with make_low_latency_buffer(comm) as buffer:
        for number, kind in enumerate(OPAQUE.values()):
            kind = {**kind, "options": few, "number": lambda rank: (5, 0, 8, 3)[rank % 4]}
            step = Step(Batch(comm, buffer, number, **kind), on_device=number % 2 == 0, **few)
            for seed in range(2):
                step.check(Batch(comm, buffer, 10 * number + seed, **kind))


def check_prepared_calls_of_host_arrays(comm: MPI.Intracomm) -> None:
    """On GPUs, each call copies the arrays."""
    with make_low_latency_buffer(comm) as buffer:
        step = Step(Batch(comm, buffer, 40), on_device=False, use_fp8=False)
        for seed in range(3):
            step.check(Batch(comm, buffer, 40 + seed))


def check_prepared_calls_with_hooks(comm: MPI.Intracomm) -> None:
    """Two micro-batches have a prepared call each, and their halves take turns."""
    with make_low_latency_buffer(comm) as buffer:
        steps = [Step(Batch(comm, buffer, seed), use_fp8=False, return_recv_hook=True) for seed in (50, 51)]
        for seed in range(3):
            batches = [Batch(comm, buffer, 2 * seed + half) for half in range(2)]
            for step, batch in zip(steps, batches, strict=True):
                step.write(batch)
            sent = [step.call.dispatch() for step in steps]
            with raises(EPInputError, "low_latency_dispatch is open", "prepare another call"):
                steps[0].call.dispatch()
            with raises(EPInputError, "handle", "not called yet"):
                steps[1].call.combine(steps[1].y)
            for result, batch in zip(sent, batches, strict=True):
                result.hook()
                buffer.synchronize()
                batch.check(result)
            back = [step.call.combine(step.y) for step in steps]
            with raises(EPInputError, "low_latency_combine is open"):
                steps[0].call.dispatch()
            for result, batch in zip(back, batches, strict=True):
                result.hook()
                buffer.synchronize()
                batch.check_sum(result)
        del sent, back, result
        if comm.Get_rank() == 0:  # a dropped hook runs in the next call
            steps[0].call.dispatch()
        else:
            steps[0].call.dispatch().hook()
        steps[0].check(batches[1])


def check_prepared_and_ordinary_calls(comm: MPI.Intracomm) -> None:
    """Some ranks prepare their calls and others do not, and all make ordinary calls in between."""
    with make_low_latency_buffer(comm) as buffer:
        step = Step(Batch(comm, buffer, 60), use_fp8=False)
        for seed in range(60, 64):
            batch = Batch(comm, buffer, seed)
            if (comm.Get_rank() + seed) % 2:
                step.check(batch)
            else:
                sent = batch.dispatch()
                back = batch.combine(sent)
                buffer.synchronize()
                batch.check_sum(back)
            run_checked_round(comm, buffer, make_low_latency_inputs(comm, seed + 100), seed)


def check_handle_of_a_prepared_dispatch(comm: MPI.Intracomm) -> None:
    """Ordinary combines take it, and the memory for experts' outputs as well."""
    with make_low_latency_buffer(comm) as buffer:
        batch = Batch(comm, buffer, 70)
        out = to_backend(np.zeros_like(batch.mine.x))
        step = Step(batch, use_fp8=False, zero_copy=True, out=out)
        sent = step.call.dispatch()
        assert sent.handle.num_tokens == len(batch.mine.x)
        y = buffer.get_low_latency_combine_buffer(sent.handle)
        y.view(np.uint8)[...] = to_backend(batch.y.view(np.uint8))
        with raises(EPInputError, "zero_copy=True", "get_low_latency_combine_buffer"):
            step.call.combine(step.y)
        for _ in range(2):
            back = step.call.combine(y)
            buffer.synchronize()
            batch.check_sum(back)
            batch.check_sum(SimpleNamespace(x=out))
            ordinary = buffer.low_latency_combine(y, *step.arrays[1:3], sent.handle)
            buffer.synchronize()
            batch.check_sum(ordinary)


def check_statistics_of_prepared_calls(comm: MPI.Intracomm) -> None:
    ranks = comm.Get_size()
    with make_low_latency_buffer(comm) as buffer:
        stats, waits = to_backend(np.zeros(4, np.int32)), to_backend(np.zeros(ranks, np.int64))
        counters = dict(cumulative_local_expert_recv_stats=stats, wait_recv_cost_stats=waits)
        batch = Batch(comm, buffer, 80)
        step = Step(batch, use_fp8=False, **counters)
        counts = counts_of(batch)
        for number in range(1, 4):
            step.call.dispatch()
            buffer.synchronize()
            assert (to_host(stats) == number * counts).all()


def check_wrong_prepared_calls(comm: MPI.Intracomm) -> None:
    """A mistake of one rank raises there before anything is sent, and all ranks go on."""
    rank = comm.Get_rank()
    with make_low_latency_buffer(comm) as buffer:
        batch = Batch(comm, buffer, 90, lambda rank: 5)
        x, idx, weights = batch.mine.x, batch.mine.topk_idx, batch.mine.topk_weights
        step = Step(batch, use_fp8=False)
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
        step.check(batch)
        run_checked_round(comm, buffer, batch.inputs, 91)
    for late in (step.call.dispatch, lambda: step.call.combine(step.y)):
        with raises(EPDestroyedError, "this Buffer was destroyed"):
            late()
    if spmd.backend == "host":
        with make_low_latency_buffer(comm, low_latency=False) as plain, raises(EPInputError, "low_latency=True"):
            plain.prepare_low_latency(x, idx, weights)


if __name__ == "__main__":
    main(__name__)
