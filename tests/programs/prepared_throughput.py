"""Prepared throughput calls: the bits of ordinary calls, also between them. It runs with `rounds`."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
from low_latency_rounds import as_numpy, to_backend
from mpi4py import MPI
from spmd import inputs_of_all, main, make_buffer, outputs_of_all, raises
from table import run_checked_round

from deepep_rt import Buffer, DispatchHandle, EPDestroyedError, EPInputError, PreparedThroughput

NUM_TOPK = 4


def tokens_of(rank: int) -> int:
    return (5, 0, 16, 3)[rank % 4]


class Step:
    """A prepared call, and its arrays, which each round writes in place. On GPUs they lie there, if `on_device`.

    Args:
        buffer: The Buffer.
        handle: The handle of the routing.
        inputs: Those of all ranks. Their routing is that of the handle.
        outputs: Rows for combine, of all ranks.
        rank: This rank.
        on_device: Whether the arrays lie where the backend works. Otherwise they are NumPy's.
        with_idx: Whether the dispatches send `topk_idx` and the weights, and the combines the weights of rows.
        num_biases: Biases of the combines.
        options: Those of `prepare_throughput`.
    """

    def __init__(
        self,
        buffer: Buffer,
        handle: DispatchHandle,
        inputs: list[Any],
        outputs: list[np.ndarray],
        rank: int,
        *,
        on_device: bool = True,
        with_idx: bool = False,
        num_biases: int = 0,
        **options: Any,
    ) -> None:
        self.buffer, self.handle, self.rank, self.with_idx, self.options = buffer, handle, rank, with_idx, options
        self.on_device, move = on_device, to_backend if on_device else np.copy
        mine = inputs[rank]
        self.x, self.y = move(mine.x), move(outputs[rank])
        self.arrays: dict[str, Any] = {} if mine.scales is None else {"x_scales": move(mine.scales)}
        self.y_weights = np.zeros((handle.num_recv_rows, NUM_TOPK), np.float32)
        self.biases = [np.full(mine.x.shape, 1 + i, outputs[rank].dtype) for i in range(num_biases)]
        if with_idx:
            self.arrays |= {"topk_idx": move(mine.topk_idx), "topk_weights": move(mine.topk_weights)}
            self.arrays["y_weights"] = move(self.y_weights)
        self.call: PreparedThroughput = buffer.prepare_throughput(
            self.x, handle, **self.arrays, bias=[move(bias) for bias in self.biases] or None, **options
        )

    def write(self, inputs: list[Any], outputs: list[np.ndarray], weights: np.ndarray) -> None:
        """Give the next calls these inputs."""
        mine = inputs[self.rank]
        values = {"x": mine.x, "y": outputs[self.rank], "x_scales": mine.scales, "topk_weights": mine.topk_weights}
        values["y_weights"] = self.y_weights = weights
        for name, array in {"x": self.x, "y": self.y, **self.arrays}.items():
            if name in values:
                raw = values[name].view(np.uint8)
                array.view(np.uint8)[...] = to_backend(raw) if self.on_device else raw

    def ordinary(self) -> tuple[Any, Any]:
        """Make both calls as ordinary ones."""
        for_dispatch = {name: array for name, array in self.arrays.items() if name != "y_weights"}
        sent = self.buffer.dispatch(self.x, handle=self.handle, **for_dispatch)
        move = to_backend if self.on_device else np.copy
        biases = [move(bias) for bias in self.biases] or None
        weights = self.arrays.get("y_weights")
        return sent, self.buffer.combine(self.y, self.handle, topk_weights=weights, bias=biases, **self.options)

    def check(self, comm: MPI.Intracomm, seed: int, settings: dict[str, Any], dtype: str, is_prepared: bool = True) -> None:
        """Write inputs, make both calls, and compare the results with the oracle. The routing stays."""
        config = self.buffer.config
        routing = inputs_of_all(comm, 1, tokens_of, **settings)
        inputs = inputs_of_all(comm, seed, tokens_of, **settings)
        for fresh, first in zip(inputs, routing, strict=True):
            fresh.topk_idx = first.topk_idx
        outputs = outputs_of_all(inputs, config.num_experts, seed, config.hidden, dtype)
        weights = outputs_of_all(inputs, config.num_experts, seed + 100, NUM_TOPK, "float32")
        self.write(inputs, outputs, weights[self.rank])
        sent, back = (self.call.dispatch(), self.call.combine(self.y)) if is_prepared else self.ordinary()
        self.buffer.synchronize()
        expected = oracle.expected_dispatch(self.rank, inputs, config.num_experts)
        if not self.with_idx:
            expected.topk_weights = None
        oracle.check_dispatch(as_numpy(sent, "handle", "num_recv_tokens_per_expert_list"), expected, with_idx=self.with_idx)
        how: dict[str, Any] = dict(node_size=config.node_size, biases=self.biases, all_weights=weights if self.with_idx else None)
        how |= {"compress": self.options["compress"], "path": config.path} if "compress" in self.options else {}
        oracle.check_sums(as_numpy(back), self.rank, inputs, outputs, config.num_experts, **how)


def settings_of(comm: MPI.Intracomm, **more: Any) -> dict[str, Any]:
    experts = 4 * comm.Get_size()
    return dict(hidden=128, num_topk=NUM_TOPK, num_experts=experts, skip_probability=0.2, dtype="bfloat16", **more)


def prepared_step(comm: MPI.Intracomm, buffer: Buffer, settings: dict[str, Any], dtype: str, **options: Any) -> Step:
    """Dispatch a routing, and prepare calls along it."""
    inputs = inputs_of_all(comm, 1, tokens_of, **settings)
    rank = comm.Get_rank()
    handle = buffer.dispatch(*(to_backend(array) for array in (inputs[rank].x, inputs[rank].topk_idx))).handle
    outputs = outputs_of_all(inputs, buffer.config.num_experts, 1, buffer.config.hidden, dtype)
    return Step(buffer, handle, inputs, outputs, rank, **options)


def check_prepared_calls_in_every_form(comm: MPI.Intracomm) -> None:
    """Each with inputs that change in place, also on the rank without tokens."""
    cases: list[tuple[dict[str, Any], str, dict[str, Any]]] = [
        ({}, "bfloat16", {}),
        ({}, "float32", {"with_idx": True, "num_biases": 2}),
        ({"dtype": "uint8", "num_scales": 1}, "float16", {"num_biases": 1}),
        ({"idx_dtype": "int32"}, "bfloat16", {"with_idx": True, "compress": "log10"}),
    ]
    with make_buffer(comm, num_experts=4 * comm.Get_size(), hidden=128) as buffer:
        for more, dtype, options in cases:
            settings = {**settings_of(comm), **more}
            step = prepared_step(comm, buffer, settings, dtype, **options)
            for seed in range(3):
                step.check(comm, 10 + seed, settings, dtype)


def check_prepared_throughput_of_host_arrays(comm: MPI.Intracomm) -> None:
    """On GPUs, each call copies the arrays."""
    settings = settings_of(comm)
    with make_buffer(comm, num_experts=4 * comm.Get_size(), hidden=128) as buffer:
        step = prepared_step(comm, buffer, settings, "bfloat16", on_device=False, with_idx=True)
        for seed in range(3):
            step.check(comm, 30 + seed, settings, "bfloat16")


def check_prepared_and_ordinary_throughput_calls(comm: MPI.Intracomm) -> None:
    """Some ranks prepare their calls and others do not, and all make ordinary calls in between."""
    settings = settings_of(comm)
    with make_buffer(comm, num_experts=4 * comm.Get_size(), hidden=128) as buffer:
        step = prepared_step(comm, buffer, settings, "float32", num_biases=1)
        for seed in range(4):
            step.check(comm, 40 + seed, settings, "float32", is_prepared=bool((comm.Get_rank() + seed) % 2))
            if seed == 1:
                buffer.num_sms = 5
    with make_buffer(comm, num_experts=4 * comm.Get_size()) as buffer:
        small = {**settings, "hidden": 32}
        step = prepared_step(comm, buffer, small, "bfloat16")
        for seed in range(2):
            run_checked_round(comm, buffer, 50 + seed)
            step.check(comm, 60 + seed, small, "bfloat16")


def check_wrong_prepared_throughput_calls(comm: MPI.Intracomm) -> None:
    """A mistake of one rank raises there before anything is sent, and all ranks go on."""
    settings, rank = settings_of(comm), comm.Get_rank()
    with make_buffer(comm, num_experts=4 * comm.Get_size(), hidden=128) as buffer:
        step = prepared_step(comm, buffer, settings, "bfloat16", num_biases=1)
        mine = inputs_of_all(comm, 1, tokens_of, **settings)[rank]
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
        step.check(comm, 70, settings, "bfloat16")
    for late in (step.call.dispatch, lambda: step.call.combine(step.y)):
        with raises(EPDestroyedError, "this Buffer was destroyed"):
            late()


if __name__ == "__main__":
    main(__name__)
