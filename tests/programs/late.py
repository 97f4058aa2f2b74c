"""A rank that does not call. The other ranks raise EPTimeoutError in time, and every process still ends normally.

Usage: late.py SCENARIO, one of the functions below without an underscore. The last rank does not call, or calls late.
"""

from __future__ import annotations

import sys
import time

import ml_dtypes
import numpy as np
from limits import seconds
from mpi4py import MPI
from spmd import make_buffer, raises

from deepep_rt import Buffer, EPTimeoutError

TIMEOUT_S = seconds(0.6)
HIDDEN = 4096  # 20 rows of it are beyond what MPI sends eagerly


def _expect_timeout(buffer: Buffer, comm: MPI.Intracomm, call, phase: str, call_idx: int, peer: int) -> None:
    rank, start, node = comm.Get_rank(), time.monotonic(), buffer.config.node_of(peer)
    where = f"rank {peer}" if node is None else f"rank {peer} on node {node}"
    with raises(
        EPTimeoutError, f"rank {rank} waited", where, phase, f"{TIMEOUT_S:g} s", "timeout_s", "DEEPEP_RT_TIMEOUT_S"
    ) as caught:
        call()
    waited_s = time.monotonic() - start
    assert TIMEOUT_S * 0.9 <= waited_s < TIMEOUT_S + seconds(5), waited_s
    error = caught.error
    found = (error.rank, error.peer, error.node, error.phase, error.call_idx)
    assert found == (rank, peer, node, phase, call_idx), vars(error)
    for later in (call, buffer.synchronize):  # the Buffer stays broken, and raises at once
        start = time.monotonic()
        with raises(EPTimeoutError, "broken", phase) as caught:
            later()
        assert time.monotonic() - start < TIMEOUT_S / 2
        error = caught.error
        assert (error.rank, error.peer, error.node, error.phase) == (rank, peer, node, phase)


def _make_scene(comm: MPI.Intracomm):
    """Make a Buffer, and one good dispatch in which every token goes to every rank."""
    ranks = comm.Get_size()
    buffer = make_buffer(comm, num_experts=ranks, num_topk=ranks, hidden=HIDDEN, timeout_s=TIMEOUT_S)
    x = np.ones((20, HIDDEN), np.float32)
    idx = np.arange(ranks, dtype=np.int64)[None].repeat(20, 0)
    return buffer, x, idx, buffer.dispatch(x, idx)


def _late(comm: MPI.Intracomm, make_call, phase: str, phase_of_late_rank: str) -> None:
    buffer, x, idx, sent = _make_scene(comm)
    culprit = comm.Get_size() - 1
    call = make_call(buffer, x, idx, sent)
    if comm.Get_rank() == culprit:
        time.sleep(3 * TIMEOUT_S)
        _expect_timeout(buffer, comm, call, phase_of_late_rank, 2, 0)  # the other ranks sent headers, but no rows
    else:
        _expect_timeout(buffer, comm, call, phase, 2, culprit)
    buffer.destroy()


def late_dispatch(comm: MPI.Intracomm) -> None:
    _late(comm, lambda b, x, i, s: lambda: b.dispatch(x, i), "the token counts of dispatch", "the rows of dispatch")


def late_cached_dispatch(comm: MPI.Intracomm) -> None:
    phases = "the address where dispatch may write", "the rows of dispatch"
    _late(comm, lambda b, x, i, s: lambda: b.dispatch(x, handle=s.handle), *phases)


def late_combine(comm: MPI.Intracomm) -> None:
    phases = "the address where combine may write", "the rows of combine"
    _late(comm, lambda b, x, i, s: lambda: b.combine(s.recv_x, s.handle), *phases)


def late_low_latency_dispatch(comm: MPI.Intracomm) -> None:
    """It consists of a dispatch, but the error names the phase of the low-latency call."""
    _late_low_latency(comm, "dispatch", "the token counts of a low-latency dispatch", 2)


def late_low_latency_combine(comm: MPI.Intracomm) -> None:
    _late_low_latency(comm, "combine", "room for the rows of a low-latency combine", 2)


def _late_low_latency(comm: MPI.Intracomm, name: str, phase: str, call_idx: int) -> None:
    ranks, culprit = comm.Get_size(), comm.Get_size() - 1
    sizes = dict(num_topk=ranks, hidden=HIDDEN, dtype="bfloat16", low_latency=True)
    buffer = make_buffer(comm, num_experts=ranks, timeout_s=TIMEOUT_S, **sizes)
    x, weights = np.ones((20, HIDDEN), ml_dtypes.bfloat16), np.ones((20, ranks), np.float32)
    idx = np.arange(ranks, dtype=np.int64)[None].repeat(20, 0)
    sent = buffer.low_latency_dispatch(x, idx, topk_weights=weights, use_fp8=False)
    if comm.Get_rank() != culprit:
        calls = {
            "dispatch": lambda: buffer.low_latency_dispatch(x, idx, use_fp8=False),
            "combine": lambda: buffer.low_latency_combine(sent.recv_x, idx, weights, sent.handle),
        }
        _expect_timeout(buffer, comm, calls[name], phase, call_idx, culprit)
    buffer.destroy()


def never(comm: MPI.Intracomm) -> None:
    """The culprit makes no further call."""
    buffer, x, idx, _ = _make_scene(comm)
    culprit = comm.Get_size() - 1
    if comm.Get_rank() != culprit:
        _expect_timeout(buffer, comm, lambda: buffer.dispatch(x, idx), "the token counts of dispatch", 2, culprit)
    buffer.destroy()


def lost_between_counts_and_rows(comm: MPI.Intracomm) -> None:
    """The culprit sends its counts and no rows, and does not receive large messages."""
    buffer, x, idx, _ = _make_scene(comm)
    culprit = comm.Get_size() - 1
    if comm.Get_rank() != culprit:
        _expect_timeout(buffer, comm, lambda: buffer.dispatch(x, idx), "the rows of dispatch", 2, culprit)
        buffer.destroy()
        return

    def fail(*_) -> None:
        raise InterruptedError("between counts and rows")

    channel = buffer._backend._channel
    channel.exchange_rows, channel.failure_notice.notify = fail, lambda error: None  # as a rank that stands still
    with raises(InterruptedError):
        buffer.dispatch(x, idx)
    buffer.destroy(in_touch=False)  # the end of a with block would notify the other ranks


def never_made(comm: MPI.Intracomm) -> None:
    """The culprit makes no Buffer."""
    if comm.Get_rank() == comm.Get_size() - 1:
        return
    start = time.monotonic()
    culprit = comm.Get_size() - 1
    with raises(
        EPTimeoutError, "the making of a Buffer", f"timeout_s={TIMEOUT_S:g}", f"for rank {culprit}, which did not arrive"
    ) as caught:
        make_buffer(comm, num_experts=4 * comm.Get_size(), timeout_s=TIMEOUT_S)
    assert caught.error.peer == culprit
    assert time.monotonic() - start < TIMEOUT_S + seconds(5)


def never_measures(comm: MPI.Intracomm) -> None:
    """The culprit does not take part in copy_ceiling. The Buffer stays usable."""
    buffer, *_ = _make_scene(comm)
    if comm.Get_rank() != comm.Get_size() - 1:
        start = time.monotonic()
        culprit = comm.Get_size() - 1
        with raises(
            EPTimeoutError, "copy_ceiling", "all ranks to call it", f"timeout_s={TIMEOUT_S:g}", f"rank {culprit}, "
        ) as caught:
            buffer.copy_ceiling(num_rows=1)
        assert caught.error.peer == culprit
        assert time.monotonic() - start < TIMEOUT_S + seconds(5)
    comm.Barrier()
    assert buffer.copy_ceiling(num_rows=1) > 0
    buffer.destroy()


if __name__ == "__main__":
    globals()[sys.argv[1]](MPI.COMM_WORLD)
    print(f"rank {MPI.COMM_WORLD.Get_rank()} passed", flush=True)
