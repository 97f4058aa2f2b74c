"""Run the table of scenarios: each rank makes the calls of a row, and compares what they give with the oracle, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
import spmd
from mpi4py import MPI
from scenario_table import TABLE
from scenarios import Round, Scenario, Sum, by_buffer
from spmd import groups_of_every_size, main, make_buffer

from deepep_rt import Buffer

MOST_HELD = 8


def run_row(buffer: Buffer, row: Scenario, rank: int) -> Round:
    """Make the calls of a row, and check them. Errors name what the row protects."""
    try:
        made = row.start(buffer.config)
        if row.worst is not None:
            for _ in range(8):
                np.full(1 << 11, 7, np.float32)  # freed at once, so that NumPy reuses memory that is not zero
        made.call(buffer, rank)
        made.check(rank)
    except Exception as error:
        raise AssertionError(f"{row.protects}: {error!r}") from error
    return made


def run_rows(comm: MPI.Intracomm, rows: Sequence[Scenario]) -> None:
    """Run rows. Those that follow each other and have the same settings share a Buffer, and later calls do not change results."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    for settings, group in by_buffer([row for row in rows if spmd.has_fp8 or not row.needs_fp8], ranks):
        held: list[Round] = []
        with make_buffer(comm, **settings) as buffer:
            for row in group:
                held.append(run_row(buffer, row, rank))
                if len(held) == MOST_HELD:
                    for made in held:
                        made.check_dispatches(rank)
                    held.clear()
            del held


def run_checked_round(comm: MPI.Intracomm, buffer: Buffer, seed: int) -> None:
    """Run a dispatch and a combine with different numbers of tokens on all ranks."""
    row = Scenario("a round of other tests", tokens=lambda rank: 4 + rank, sums=(Sum(),), seed=seed)
    run_row(buffer, row, comm.Get_rank())


def _check_of(group: str) -> Callable[[MPI.Intracomm], None]:
    def check(comm: MPI.Intracomm) -> None:
        run_rows(comm, TABLE[group])

    check.__name__ = f"check_{group}"
    return check


globals().update({f"check_{group}": _check_of(group) for group in TABLE})  # `spmd.main` and the GPU tests look for functions


def check_same_bits_at_any_size(comm: MPI.Intracomm) -> None:
    """The tokens and experts of one rank, spread over 1, 2, 4 and 8 ranks, give the same bits with `reduce="topk"`."""
    hidden, experts, num_topk, tokens = 64, 16, 4, 48
    rng = np.random.default_rng(11)
    x = rng.standard_normal((tokens, hidden), np.float32).astype(ml_dtypes.bfloat16)
    idx = np.ascontiguousarray(rng.random((tokens, experts)).argsort(axis=1)[:, :num_topk])
    weights = rng.random((tokens, num_topk), np.float32)
    gains = rng.standard_normal((experts, hidden), np.float32)
    found = []
    for group in groups_of_every_size(comm):
        size, rank = group.Get_size(), group.Get_rank()
        part = slice(rank * tokens // size, (rank + 1) * tokens // size)
        with make_buffer(group, hidden=hidden, num_topk=num_topk, num_experts=experts, dtype="bfloat16") as buffer:
            sent = buffer.dispatch(x[part], idx[part], weights[part], layout="expert")
            expert = sent.recv_expert_idx + rank * experts // size
            y = (gains[expert] * sent.recv_x.astype(np.float32)).astype(ml_dtypes.bfloat16)
            back = buffer.combine(y, sent.handle, topk_weights=sent.recv_topk_weights, weighted=True, reduce="topk")
            found.append(np.concatenate(group.allgather(np.asarray(back.x).view(np.uint16).copy())))
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])


if __name__ == "__main__":
    main(__name__)
