"""Inputs, expected results and checked rounds of the low-latency calls, for the programs that test them."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import low_latency_oracle
import numpy as np
import oracle
import spmd
from mpi4py import MPI
from scenario_table import BOTH, FORMATS, few_tokens
from scenarios import LowLatencyRound, Scenario
from spmd import inputs_of_all, make_buffer

from deepep_rt import Buffer

HIDDEN, NUM_TOPK, MAX_TOKENS = 256, 4, 16


def make_low_latency_buffer(comm: MPI.Intracomm, **settings: Any) -> Buffer:
    """Make a small Buffer for low-latency calls."""
    defaults = dict(hidden=HIDDEN, num_topk=NUM_TOPK, num_max_tokens_per_rank=MAX_TOKENS, num_experts=4 * comm.Get_size())
    return make_buffer(comm, dtype="bfloat16", **{"low_latency": True, **defaults, **settings})


def tokens_of(rank: int) -> int:
    """Numbers of tokens that differ between ranks."""
    return (5, 0, 16, 3)[rank % 4]


def make_low_latency_inputs(comm: MPI.Intracomm, seed: int, num_tokens=tokens_of, **settings: Any) -> list[oracle.RankInputs]:
    """Make the inputs of all ranks for such a Buffer."""
    defaults = dict(hidden=HIDDEN, num_topk=NUM_TOPK, num_experts=4 * comm.Get_size(), dtype="bfloat16", skip_probability=0.2)
    return inputs_of_all(comm, seed, num_tokens, **{**defaults, **settings})


def expert_outputs(buffer: Buffer, seed: int, **settings: Any) -> list[np.ndarray]:
    """Make random outputs of each rank's experts."""
    config = buffer.config
    shape = (config.num_local_experts, config.worst_recv_tokens, config.hidden)
    return [low_latency_oracle.outputs(seed, rank, shape, **settings) for rank in range(config.num_ranks)]


def expected_arrivals(
    buffer: Buffer, rank: int, inputs: list[oracle.RankInputs], options: dict[str, bool]
) -> low_latency_oracle.Arrived:
    """Work out what a dispatch with these options of `Buffer.low_latency_dispatch` brings to a rank."""
    renamed = {{"use_fp8": "fp8", "use_ue8m0": "ue8m0"}.get(name, name): value for name, value in options.items()}
    return low_latency_oracle.expected_dispatch(rank, inputs, buffer.config.num_experts, **renamed)


class Batch:
    """Low-latency inputs of all ranks, with calls of this rank, and a comparison of their results with the oracle."""

    def __init__(self, comm: MPI.Intracomm, buffer: Buffer, seed: int, number=tokens_of, **more: Any) -> None:
        self.buffer, self.rank = buffer, comm.Get_rank()
        self.round = LowLatencyRound(few_tokens("a batch", number, seed=seed, **more), buffer.config)
        self.inputs, self.sums = self.round.inputs, self.round.row.sums
        self.mine, self.y = self.inputs[self.rank], self.round.outputs(self.sums[0])[self.rank]

    def dispatch(self, early: bool = True, **options: Any) -> Any:
        """Make a dispatch; `early`: with the weights."""
        return self.round.send(self.buffer, self.rank, early=early, **options)

    def combine(self, sent: Any, reduce_early: bool = True, **options: Any) -> Any:
        """Make the combine that follows `dispatch`."""
        return self.round.send_back(self.buffer, self.rank, sent, self.sums[not reduce_early], **options)

    def check(self, sent: Any, live: Collection[int] | None = None, **options: Any) -> None:
        """Compare the result of a dispatch with these options; `live`: as in the oracle."""
        self.round.check_dispatch(self.rank, as_numpy(sent), live, **options)

    def check_sum(self, back: Any, reduce_early: bool = True, live: Any = None, answering: Any = None) -> None:
        """Compare the result of a combine; `live` and `answering`: as in the oracle."""
        self.round.check_sum(self.rank, as_numpy(back), self.sums[not reduce_early], live, answering)


def counts_of(batch: Batch) -> np.ndarray:
    """Count the choices of each expert of this rank."""
    experts = np.arange(4 * batch.rank, 4 * batch.rank + 4)
    return sum((one.topk_idx[:, :, None] == experts).sum((0, 1)) for one in batch.inputs)


def assert_same(name: str, got: np.ndarray, wanted: np.ndarray) -> None:
    """Compare two arrays bit for bit."""
    assert got.dtype == wanted.dtype, (name, got.dtype)
    assert got.shape == wanted.shape, (name, got.shape, wanted.shape)
    bad = np.argwhere(np.ascontiguousarray(got).view(np.uint16) != wanted.view(np.uint16))
    assert not len(bad), f"{name}: {len(bad)} differ, first at {bad[0]}: {got[tuple(bad[0])]} != {wanted[tuple(bad[0])]}"


def run_checked_round(comm: MPI.Intracomm, buffer: Buffer, inputs: list[oracle.RankInputs], seed: int) -> None:
    """Dispatch with and without weights, combine each in both ways, and compare all results with the oracle."""
    row = Scenario("a round of other tests", "low_latency", sums=BOTH, options=FORMATS[0], seed=seed)
    made = LowLatencyRound(row, buffer.config, inputs)
    made.call(buffer, comm.Get_rank())
    made.check(comm.Get_rank())


def to_backend(array: np.ndarray) -> Any:
    """Copy an array to memory that the backend can write to. CUDA calls refuse to write to host memory."""
    if spmd.backend == "host":
        return array.copy()
    import cupy

    return cupy.asarray(array.view(np.uint8)).view(array.dtype)


def to_host(array: Any) -> np.ndarray:
    """Return an array of `to_backend` as one of NumPy."""
    return array.view(np.uint8).get().view(np.dtype(array.dtype.name)) if hasattr(array, "get") else array


ARRAYS = (
    "recv_x recv_x_scales recv_topk_idx recv_topk_weights recv_src_idx num_recv_tokens num_recv_tokens_per_expert x topk_weights"
)


def as_numpy(result: Any, *names: str) -> Any:
    """Return the arrays of a result as those of NumPy, and other attributes as they are."""
    found = {name: getattr(result, name, None) for name in ARRAYS.split()}
    converted = {name: None if array is None else to_host(array) for name, array in found.items()}
    return SimpleNamespace(**converted, **{name: getattr(result, name) for name in names})
