"""What kernels count for `Buffer.statistics` on GPUs: rows as the host backend counts them, waits for a late rank, and replays."""

from __future__ import annotations

import time

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

from gpu_buffers import SHARED_GPUS, TAKE_TURNS, captured, cpu, make, same, tokens  # noqa: E402
from gpu_low_latency import transport  # noqa: E402

from deepep_rt import EPInputError  # noqa: E402
from deepep_rt.statistics import CALL_KINDS  # noqa: E402

__all__ = ["transport"]

HIDDEN, TOKENS, NUM_CALLS = 512, 40, 3
LATE_S = 0.05


def make_counting(comm, backend="cuda", **settings):
    sizes = dict(num_max_tokens_per_rank=64, hidden=HIDDEN, num_experts=8 * comm.Get_size(), low_latency=True, statistics=True)
    return make(comm, backend, **{**sizes, **settings})


class Calls:
    """Calls of all kinds on the same tokens. The low-latency dispatch sends the weights, so combines wait for rows alone."""

    def __init__(self, comm, buffer, *, on_cpu=False):
        self._buffer, self._worst = buffer, buffer.config.num_max_recv_tokens
        given = tokens(comm, buffer, 1, TOKENS + comm.Get_rank())
        self._x, self._idx, self._weights = cpu(*given) if on_cpu else given

    def make(self, kind):
        buffer = self._buffer
        if kind == "dispatch":
            self._sent = buffer.dispatch(self._x, self._idx, self._weights, num_worst_tokens=self._worst, expert_alignment=4)
        elif kind == "combine":
            buffer.combine(self._sent.recv_x, self._sent.handle)
        elif kind == "low_latency_dispatch":
            self._few = buffer.low_latency_dispatch(self._x, self._idx, topk_weights=self._weights, use_fp8=False)
        else:
            buffer.low_latency_combine(self._few.recv_x, self._idx, self._weights, self._few.handle)


def moved(counted):
    """Return everything but the waits."""
    return {
        kind: [
            getattr(getattr(counted, kind), name)
            for name in ("calls", "rows_sent", "rows_received", "bytes_sent", "bytes_received")
        ]
        for kind in CALL_KINDS
    }


def test_rows_as_on_the_host(comm):
    with make_counting(comm) as gpu, make_counting(comm, "host") as host:
        for buffer in (gpu, host):
            calls = Calls(comm, buffer, on_cpu=buffer is host)
            for kind in CALL_KINDS:
                for _ in range(NUM_CALLS):
                    calls.make(kind)
        gpu.synchronize()
        counted, expected = gpu.statistics(), host.statistics()
        assert moved(counted) == moved(expected)
        assert counted.rows_by_expert == expected.rows_by_expert
        assert counted.rank == comm.Get_rank()
        assert 0 < counted.pool.most_bytes_in_use <= counted.pool.capacity_bytes


def test_waits_name_the_late_rank(comm):
    """The GPU of the last rank sleeps before each call. The others count that time for it, and little for each other."""
    if comm.Get_size() == 1 or TAKE_TURNS:
        return
    late, rank = comm.Get_size() - 1, comm.Get_rank()
    with make_counting(comm) as gpu:
        calls = Calls(comm, gpu)
        for kind in CALL_KINDS:  # the first calls allocate memory
            calls.make(kind)
        for kind in CALL_KINDS:
            waited = np.zeros(comm.Get_size())
            seconds = 0.0
            for _ in range(NUM_CALLS):
                gpu.synchronize()
                before = getattr(gpu.statistics(), kind).wait_s
                comm.Barrier()
                start = time.monotonic()
                if rank == late:
                    torch.cuda.synchronize()
                    time.sleep(LATE_S)
                calls.make(kind)
                gpu.synchronize()
                seconds += time.monotonic() - start
                waited += np.subtract(getattr(gpu.statistics(), kind).wait_s, before)
            assert waited[rank] == 0
            assert waited.max() < seconds, "no wait is longer than the calls"
            if rank != late:
                assert waited[late] > 0.7 * NUM_CALLS * LATE_S, (kind, waited)
                assert (np.delete(waited, late) < 0.5 * waited[late]).all(), (kind, waited)
            else:
                assert (waited < 0.5 * NUM_CALLS * LATE_S).all(), (kind, waited)


def test_replays_count(comm):
    with make_counting(comm) as gpu:
        calls = Calls(comm, gpu)
        kinds = CALL_KINDS if not gpu.config.has_network else CALL_KINDS[2:]
        for kind in kinds:
            calls.make(kind)

        def work():
            for kind in kinds:
                calls.make(kind)
            with pytest.raises(EPInputError, match="during the capture of a CUDA graph"):
                gpu.statistics()

        graph, _ = captured(comm, work)
        before = gpu.statistics()
        for _ in range(NUM_CALLS):
            graph.replay()
        gpu.synchronize()
        torch.cuda.synchronize()
        after = gpu.statistics()
        for kind in kinds:
            assert getattr(after, kind).calls == getattr(before, kind).calls + NUM_CALLS


def test_reading_waits_for_no_work(comm):
    """Another rank comes late, and the caller's stream is busy. Both do not keep the host from reading."""
    if SHARED_GPUS:
        return
    with make_counting(comm) as gpu:
        calls = Calls(comm, gpu)
        calls.make("dispatch")
        gpu.synchronize()
        comm.Barrier()
        begin, end = (torch.cuda.Event() for _ in range(2))
        begin.record()
        torch.cuda._sleep(int(1e9))  # about half a second
        calls.make("dispatch")
        end.record()
        counted = gpu.statistics()
        assert not end.query(), "the host has waited for the call"
        assert counted.dispatch.calls == 1
        gpu.synchronize()
        assert gpu.statistics().dispatch.calls == 2


def test_files_are_written_during_captures(comm, tmp_path, monkeypatch):
    """The thread that writes files reads while this thread captures, and the capture stays valid."""
    monkeypatch.setenv("DEEPEP_RT_STATISTICS", str(tmp_path))
    with make_counting(comm, statistics=None) as gpu:
        monkeypatch.setattr("deepep_rt._statistics_files._PERIOD_S", 0.001)
        calls = Calls(comm, gpu)
        for kind in CALL_KINDS[2:]:
            calls.make(kind)
        time.sleep(1.1)  # the thread now writes all the time

        def work():
            for kind in CALL_KINDS[2:]:
                calls.make(kind)
            time.sleep(0.1)

        graph, _ = captured(comm, work)
        graph.replay()
        gpu.synchronize()
        assert gpu.statistics().low_latency_combine.calls == 2
    assert len(list(tmp_path.glob("*.json"))) == 1


def test_results_do_not_depend_on_statistics(comm):
    """Kernels that count move the same bytes."""
    found = []
    for statistics in (False, True):
        with make_counting(comm, statistics=statistics) as gpu:
            x, idx, weights = tokens(comm, gpu, 5, TOKENS)
            sent = gpu.dispatch(x, idx, weights)
            out = gpu.combine(sent.recv_x, sent.handle).x
            few = gpu.low_latency_dispatch(x, idx, use_fp8=False)
            back = gpu.low_latency_combine(few.recv_x, idx, weights, few.handle).x
            found.append((out.clone(), back.clone()))
            torch.cuda.synchronize()
    for plain, counted in zip(*found, strict=True):
        same(plain, counted)
