"""Prepared throughput calls: the bits of ordinary calls, also between them. It runs with `rounds`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from low_latency_rounds import as_numpy, to_backend, tokens_of
from mpi4py import MPI
from scenarios import SUM, Again, Scenario, Sum, ThroughputRound
from spmd import main, make_buffer, raises
from table import run_checked_round

from deepep_rt import Buffer, EPDestroyedError, EPInputError, PreparedThroughput

NUM_ROUNDS = 4


class Step:
    """A prepared call along a routing, and its arrays, which each round writes in place. On GPUs they lie there, if `on_device`.

    Args:
        on_device: Whether the arrays lie where the backend works. Otherwise they are NumPy's.
        with_idx: Whether the dispatches send `topk_idx` and the weights, and the combines the weights of rows.
        how: The combines.
        row: More of the scenario.
    """

    def __init__(
        self, comm: MPI.Intracomm, buffer: Buffer, *, on_device: bool = True, with_idx: bool = False, how: Sum = SUM, **row: Any
    ) -> None:
        self.buffer, self.rank, self.on_device = buffer, comm.Get_rank(), on_device
        self.move = to_backend if on_device else np.copy
        row = {"dtype": "bfloat16", "drawn": dict(skip_probability=0.2), **row}
        again, sums = [Again(with_idx, with_idx)] * NUM_ROUNDS, [replace(how, weights=with_idx)] * NUM_ROUNDS
        self.round = ThroughputRound(Scenario("prepared", tokens=tokens_of, again=again, sums=sums, **row), buffer.config)
        mine = self.round.inputs[self.rank]
        self.handle = buffer.dispatch(to_backend(mine.x), to_backend(mine.topk_idx)).handle
        values = self._values(0)
        if with_idx:
            values["topk_idx"] = mine.topk_idx
        self.arrays = {name: self.move(array) for name, array in values.items()}
        self.x, self.y, biases = self.arrays.pop("x"), self.arrays.pop("y"), self.round.values(0)[2][self.rank]
        self.options: dict[str, Any] = dict(bias=[self.move(bias) for bias in biases] or None)
        self.options |= {} if how.compress is None else dict(compress=how.compress)
        self.call: PreparedThroughput = buffer.prepare_throughput(self.x, self.handle, **self.arrays, **self.options)

    def _values(self, number: int) -> dict[str, np.ndarray]:
        """Return what the arrays hold in a round."""
        one, (y, weights, _) = self.round.inputs_of(1 + number)[self.rank], self.round.values(number)
        found = {"x": one.x, "y": y[self.rank], "x_scales": one.scales}
        found |= {} if weights is None else {"topk_weights": one.topk_weights, "y_weights": weights[self.rank]}
        return {name: array for name, array in found.items() if array is not None}

    def ordinary(self) -> tuple[Any, Any]:
        """Make both calls as ordinary ones."""
        for_dispatch = {name: array for name, array in self.arrays.items() if name != "y_weights"}
        sent = self.buffer.dispatch(self.x, handle=self.handle, **for_dispatch)
        return sent, self.buffer.combine(self.y, self.handle, topk_weights=self.arrays.get("y_weights"), **self.options)

    def check(self, number: int, is_prepared: bool = True) -> None:
        """Write inputs, make both calls, and compare the results with the oracle. The routing stays."""
        values = self._values(number)
        for name, array in {"x": self.x, "y": self.y, **self.arrays}.items():
            if name in values:
                raw = values[name].view(np.uint8)
                array.view(np.uint8)[...] = to_backend(raw) if self.on_device else raw
        sent, back = (self.call.dispatch(), self.call.combine(self.y)) if is_prepared else self.ordinary()
        self.buffer.synchronize()
        self.round.check_rows(self.rank, 1 + number, as_numpy(sent, "handle", "num_recv_tokens_per_expert_list"))
        self.round.check_sum(self.rank, number, as_numpy(back))


def check_prepared_calls_in_every_form(comm: MPI.Intracomm) -> None:
    """Each with inputs that change in place, also on the rank without tokens."""
    cases: list[dict[str, Any]] = [
        {},
        dict(with_idx=True, how=Sum("float32", biases=2)),
        dict(dtype="uint8", scales=1, how=Sum("float16", biases=1)),
        dict(drawn=dict(skip_probability=0.2, idx_dtype="int32"), with_idx=True, how=Sum(compress="log10")),
    ]
    with make_buffer(comm, num_experts=4 * comm.Get_size(), hidden=128) as buffer:
        for case in cases:
            step = Step(comm, buffer, **case)
            for number in range(3):
                step.check(number)


def check_prepared_throughput_of_host_arrays(comm: MPI.Intracomm) -> None:
    """On GPUs, each call copies the arrays."""
    with make_buffer(comm, num_experts=4 * comm.Get_size(), hidden=128) as buffer:
        step = Step(comm, buffer, on_device=False, with_idx=True)
        for number in range(3):
            step.check(number)


def check_prepared_and_ordinary_throughput_calls(comm: MPI.Intracomm) -> None:
    """Some ranks prepare their calls and others do not, and all make ordinary calls in between."""
    with make_buffer(comm, num_experts=4 * comm.Get_size(), hidden=128) as buffer:
        step = Step(comm, buffer, how=Sum("float32", biases=1))
        for number in range(4):
            step.check(number, is_prepared=bool((comm.Get_rank() + number) % 2))
            if number == 1:
                buffer.num_sms = 5
    with make_buffer(comm, num_experts=4 * comm.Get_size()) as buffer:
        step = Step(comm, buffer)
        for number in range(2):
            run_checked_round(comm, buffer, 50 + number)
            step.check(number)


def check_wrong_prepared_throughput_calls(comm: MPI.Intracomm) -> None:
    """A mistake of one rank raises there before anything is sent, and all ranks go on."""
    rank = comm.Get_rank()
    with make_buffer(comm, num_experts=4 * comm.Get_size(), hidden=128) as buffer:
        step = Step(comm, buffer, how=Sum(biases=1))
        mine = step.round.inputs[rank]
        by_expert = buffer.dispatch(to_backend(mine.x), to_backend(mine.topk_idx), layout="expert").handle
        prepare: Any = buffer.prepare_throughput
        x, handle = step.x, step.handle
        wide = to_backend(np.zeros((handle.num_recv_rows, 128), np.float32))
        for words, call in (
            (("handle=None",), lambda: prepare(x, None)),
            (("layout='expert'", "dispatch(handle=)"), lambda: prepare(x, by_expert)),
            (("tokens",), lambda: prepare(to_backend(np.zeros((33, 128), np.float32)), handle)),
            (("topk_idx=None",), lambda: prepare(x, handle, topk_weights=wide)),
            (("y.shape",), lambda: prepare(x, handle, y=to_backend(np.zeros((999, 128), np.float32)))),
            (("y_weights", "shape"), lambda: prepare(x, handle, y_weights=to_backend(np.zeros((999, 4), np.float32)))),
            (("compress=",), lambda: prepare(x, handle, compress="fp4")),
            (("y=None",), lambda: step.call.combine()),
            (("y.dtype=float32", "expected bfloat16"), lambda: step.call.combine(wide)),
        ):
            if rank == 0:
                with raises(EPInputError, *words):
                    call()
        step.check(1)
    for late in (step.call.dispatch, lambda: step.call.combine(step.y)):
        with raises(EPDestroyedError, "this Buffer was destroyed"):
            late()


if __name__ == "__main__":
    main(__name__)
