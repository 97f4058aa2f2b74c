"""Wrong calls: every rank raises in the same call, and the Buffer stays usable."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import oracle
import spmd
from expect import logged_warnings
from mpi4py import MPI
from spmd import inputs_of_all, main, make_buffer, raises
from table import run_checked_round

from deepep_rt import Buffer, EPConfigError, EPInputError, EPOutOfMemoryError, EPTimeoutError
from deepep_rt.arrays.compressed_rows import COMPRESSIONS


def _check_usable(comm: MPI.Intracomm, buffer: Buffer) -> None:
    """Make a good round."""
    run_checked_round(comm, buffer, 4)


def check_bad_expert_number(comm: MPI.Intracomm) -> None:
    ranks, rank = comm.Get_size(), comm.Get_rank()
    experts, culprit = 4 * ranks, ranks - 1
    x = np.zeros((5, 32), np.float32)
    with make_buffer(comm, num_experts=experts) as buffer:
        good = buffer.dispatch(x, np.zeros((5, 4), np.int64))
        for value in (experts, -2, 1 << 40, np.iinfo(np.int64).min):
            idx = np.zeros((5, 4), np.int64)
            if rank == culprit:
                idx[3, 1] = value
            ranks_named = [] if rank == culprit else [f"rank {culprit}"]
            with raises(EPInputError, "token 3", f"expert {value}", f"{experts - 1}", *ranks_named):
                buffer.dispatch(x, idx)
            with raises(EPInputError, "token 3", f"expert {value}", *ranks_named):
                buffer.dispatch(x, idx, handle=good.handle)
            _check_usable(comm, buffer)
        bad_everywhere = np.full((5, 4), experts + rank, np.int32)
        with raises(EPInputError, "token 0", f"expert {experts + rank}"):
            buffer.dispatch(x, bad_everywhere)
        _check_usable(comm, buffer)


def check_expert_numbers_that_differ_from_a_handle(comm: MPI.Intracomm) -> None:
    """Expert numbers that choose one rank more or less than the handle. GPUs do not compare them."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    if spmd.backend != "host":
        return
    culprit, x, idx = ranks - 1, np.zeros((5, 32), np.float32), np.tile(np.arange(4), (5, 1))
    with make_buffer(comm, num_experts=4 * ranks) as buffer:
        sent = buffer.dispatch(x, idx)
        for other in ([[4 * ranks - 1, 1, 2, 3]] if ranks > 1 else []) + [[-1, -1, -1, -1]]:
            given = idx.copy()
            if rank == culprit:
                given[2:] = other
            with raises(EPInputError, "topk_idx chooses other ranks than the routing of the handle"):
                buffer.dispatch(x, given, handle=sent.handle)
            _check_usable(comm, buffer)
        assert (buffer.dispatch(x, idx, handle=sent.handle).recv_topk_idx == sent.recv_topk_idx).all()


def check_ranks_that_disagree(comm: MPI.Intracomm) -> None:
    if comm.Get_size() == 1:
        return
    is_odd = comm.Get_rank() % 2  # on GPUs, a rank names itself and one rank that differs
    x = np.zeros((5, 32), np.float32)
    idx, weights, scales = np.zeros((5, 4), np.int64), np.ones((5, 4), np.float32), np.ones((5, 1), np.float32)
    with make_buffer(comm, num_experts=4 * comm.Get_size()) as buffer:
        sent, other = buffer.dispatch(x, idx), buffer.dispatch(x, idx)
        with raises(EPInputError, "x of this call", ": float32", ": float16"):
            buffer.dispatch(x.astype(np.float16) if is_odd else x, idx)
        with raises(EPInputError, "topk_idx", "int64", "int32"):
            buffer.dispatch(x, idx.astype(np.int32) if is_odd else idx)
        with raises(EPInputError, "topk_weights", "None"):
            buffer.dispatch(x, idx, weights if is_odd else None)
        with raises(EPInputError, "x_scales", "float32", "None"):
            buffer.dispatch(x, idx, x_scales=scales if is_odd else None)
        with raises(EPInputError, "handle", ": 1", ": 2"):
            buffer.combine(sent.recv_x, (other if is_odd else sent).handle)
        with raises(EPInputError, "topk_weights", "None"):
            buffer.combine(sent.recv_x, sent.handle, topk_weights=np.ones((len(sent.recv_x), 4), np.float32) if is_odd else None)
        with raises(EPInputError, "handle", ": 1", ": 2"):
            buffer.dispatch(x, handle=(other if is_odd else sent).handle)
        assert np.array_equal(buffer.dispatch(x, handle=other.handle).recv_x, other.recv_x)
        _check_usable(comm, buffer)


def check_ranks_that_disagree_on_sizes_and_options(comm: MPI.Intracomm) -> None:
    """Rows of other sizes would be written past the results of other ranks. The other options would make the results differ."""
    if comm.Get_size() == 1:
        return
    is_odd = comm.Get_rank() % 2
    idx = np.zeros((5, 4), np.int64)
    with make_buffer(comm, num_experts=4 * comm.Get_size(), hidden=512) as buffer:
        x = np.zeros((5, 512), np.float32)
        sent = buffer.dispatch(x, idx)
        wide, narrow = np.zeros((5, 512), np.uint8), np.zeros((5, 256), np.uint8)
        with raises(EPInputError, "bytes of a row of x of this call", ": 256", ": 512"):
            buffer.dispatch(narrow if is_odd else wide, idx)
        with raises(EPInputError, "bytes of a row of x of this call", ": 256", ": 512"):
            buffer.prepare_throughput(narrow if is_odd else wide, sent.handle).dispatch()
        with raises(EPInputError, "bytes of a row of x_scales", ": 8", ": 16"):
            buffer.dispatch(x, idx, x_scales=np.zeros((5, 2 if is_odd else 4), np.float32))
        with raises(EPInputError, "expert_alignment", ": 128", ": 1048576"):
            buffer.dispatch(x, idx, num_worst_tokens=64, expert_alignment=128 if is_odd else 1 << 20)
        with raises(EPInputError, "zero_padding", ": True", ": False"):
            buffer.dispatch(x, idx, layout="expert", zero_padding=bool(is_odd))
        with raises(EPInputError, "scales_layout", ": row", ": column"):
            scales = np.zeros((5, 4), np.float32)
            buffer.dispatch(x, idx, x_scales=scales, layout="expert", scales_layout="row" if is_odd else "column")
        same = buffer.dispatch(x, idx, num_worst_tokens=20 + 4 * is_odd)
        buffer.combine(same.recv_x, same.handle, bias=x if is_odd else None)  # these two may differ
        _check_usable(comm, buffer)


def check_ranks_that_disagree_on_fp8(comm: MPI.Intracomm) -> None:
    if comm.Get_size() == 1:
        return
    is_odd = bool(comm.Get_rank() % 2)
    x, idx = np.zeros((5, 512), np.float32), np.zeros((5, 4), np.int64)
    with make_buffer(comm, num_experts=4 * comm.Get_size(), hidden=512) as buffer:
        for layout in ("token", "expert"):
            with raises(EPInputError, "the ranks disagree on the round_scale of this call", ": True", ": False"):
                buffer.dispatch(x, idx, layout=layout, use_fp8=True, round_scale=is_odd)
            with raises(EPInputError, "x of this call, after use_fp8", ": float8_e4m3fn", ": float32"):
                buffer.dispatch(x, idx, layout=layout, use_fp8=is_odd)
            with raises(EPInputError, "x_scales of this call, after use_fp8", ": uint8", ": float32"):
                buffer.dispatch(x, idx, layout=layout, use_fp8=True, round_scale=True, use_ue8m0=is_odd)
        _check_usable(comm, buffer)


def check_ranks_that_make_different_calls(comm: MPI.Intracomm) -> None:
    if comm.Get_size() == 1:
        return
    is_odd = comm.Get_rank() % 2
    x, idx = np.zeros((5, 32), np.float32), np.zeros((5, 4), np.int64)
    with make_buffer(comm, num_experts=4 * comm.Get_size()) as buffer:
        sent = buffer.dispatch(x, idx)
        with raises(EPInputError, "kind", "rank 0: combine", "rank 1: dispatch"):
            buffer.dispatch(x, idx) if is_odd else buffer.combine(sent.recv_x, sent.handle)
        with raises(EPInputError, "kind", "with a handle"):
            buffer.dispatch(x, idx, handle=sent.handle if is_odd else None)
        _check_usable(comm, buffer)


def check_local_mistakes_can_be_retried(comm: MPI.Intracomm) -> None:
    """A wrong argument of one rank raises there before anything is sent. When that rank calls again, all ranks go on."""
    rank = comm.Get_rank()
    with make_buffer(comm, num_experts=4 * comm.Get_size()) as buffer:
        if rank == 0:
            with raises(EPInputError, "hidden"):
                buffer.dispatch(np.zeros((5, 48), np.float32), np.zeros((5, 4), np.int64))
        _check_usable(comm, buffer)


def check_intercommunicators(comm: MPI.Intracomm) -> None:
    """Refused; the communicator that Merge() makes of one works."""
    size, rank = comm.Get_size(), comm.Get_rank()
    if size == 1 or not isinstance(comm, MPI.Comm):
        return
    half = comm.Split(rank % 2, rank)
    between = half.Create_intercomm(0, comm, 1 - rank % 2)
    with raises(EPConfigError, "comm=<intercommunicator>", "Merge()"):
        make_buffer(between, num_experts=4 * size)
    merged = between.Merge()
    with make_buffer(merged, num_experts=4 * size) as buffer:
        _check_usable(merged, buffer)
    for used in (merged, between, half):
        used.Free()


def check_wrong_rows_of_4_bit_numbers(comm: MPI.Intracomm) -> None:
    ranks, experts = comm.Get_size(), 4 * comm.Get_size()
    for width, dtype in (("bfloat16", ml_dtypes.bfloat16), ("float8_e4m3fn", np.uint8)):
        with make_buffer(comm, hidden=512, num_experts=experts, dtype=width) as buffer:
            idx, scales = np.tile(np.arange(4), (64, 1)), np.ones((64, 8), np.float32)
            with raises(EPInputError, "x_scales has 32 bytes a row", "up to 16"):
                buffer.dispatch(np.zeros((64, 512), dtype), idx, x_scales=scales)
            with raises(EPInputError, "x.shape=", "[num_tokens, 512]", "[num_tokens, 256] of uint8"):
                buffer.dispatch(np.zeros((64, 256), np.float32), idx)
            rows = buffer.dispatch(np.ones((64, 256), np.uint8), idx, x_scales=scales).recv_x
            assert rows.shape == (64 * ranks * (comm.Get_rank() == 0), 256)


def check_wrong_conversions_to_fp8(comm: MPI.Intracomm) -> None:
    experts, idx = 4 * comm.Get_size(), np.zeros((2, 4), np.int64)
    x = np.zeros((2, 512), np.float32)
    with make_buffer(comm, num_experts=experts, hidden=512) as buffer:
        column = dict(use_fp8=True, use_ue8m0=True, layout="expert", scales_layout="column")
        for words, wrong in (
            ("expected use_fp8=True with it", dict(round_scale=True)),
            ("x_scales with use_fp8=True; expected none", dict(use_fp8=True, x_scales=np.ones((2, 4), np.float32))),
            ("use_ue8m0=True; expected a type of 4 bytes", column),
        ):
            with raises(EPInputError, words):
                buffer.dispatch(x, idx, **wrong)
        with raises(EPInputError, "x.dtype=uint8; expected"):
            buffer.dispatch(x.astype(np.uint8), idx, use_fp8=True)
        _check_usable(comm, buffer)
    with (
        make_buffer(comm, num_experts=experts, hidden=64) as buffer,
        raises(EPInputError, "hidden=64; expected a multiple of 128"),
    ):
        buffer.dispatch(np.zeros((2, 64), np.float32), idx, use_fp8=True)


def _dispatch_by_expert(buffer: Buffer, mine: oracle.RankInputs, **options: Any) -> Any:
    return buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights, x_scales=mine.scales, layout="expert", **options)


def check_wrong_arguments_of_layouts(comm: MPI.Intracomm) -> None:
    experts, rank = 4 * comm.Get_size(), comm.Get_rank()
    inputs = inputs_of_all(comm, 2, lambda rank: 6, hidden=32, num_topk=4, num_experts=experts, num_scales=1)
    mine = inputs[rank]
    with make_buffer(comm, num_experts=experts) as buffer:
        by_expert, by_token = _dispatch_by_expert(buffer, mine), buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
        most = buffer.config.num_max_recv_tokens * 4
        y, weights = by_expert.recv_x, by_expert.recv_topk_weights
        with raises(EPInputError, "layout='rows'; expected 'token' or 'expert'"):
            buffer.dispatch(mine.x, mine.topk_idx, layout="rows")
        with raises(EPInputError, "layout='token'; expected 'expert', the layout of the handle"):
            buffer.dispatch(mine.x, handle=by_expert.handle, layout="token")
        with raises(EPInputError, "zero_padding=True; expected layout='expert' with it"):
            buffer.dispatch(mine.x, mine.topk_idx, zero_padding=True)
        with raises(EPInputError, "scales_layout='column'; expected layout='expert' with it"):
            buffer.dispatch(mine.x, mine.topk_idx, scales_layout="column")
        with raises(EPInputError, "expected a type of 4 bytes with scales_layout='column'"):
            scales = mine.scales.view(np.uint8)
            buffer.dispatch(mine.x, mine.topk_idx, x_scales=scales, layout="expert", scales_layout="column")
        with raises(EPInputError, f"num_worst_tokens={most + 1}; expected a whole number from 0 to {most}"):
            _dispatch_by_expert(buffer, mine, num_worst_tokens=most + 1)
        with raises(EPInputError, "weighted=True with a handle of layout='token'"):
            buffer.combine(by_token.recv_x, by_token.handle, topk_weights=by_token.recv_topk_weights, weighted=True)
        with raises(EPInputError, "topk_weights=None; expected a weight for each row with weighted=True"):
            buffer.combine(y, by_expert.handle, weighted=True)
        with raises(EPInputError, f"topk_weights.shape=[{len(y)}, 4]; expected [{len(y)}]"):
            buffer.combine(y, by_expert.handle, topk_weights=np.zeros((len(y), 4), np.float32))
        oracle.check_expert_rows(_dispatch_by_expert(buffer, mine), oracle.expected_expert_rows(rank, inputs, experts))
        assert buffer.combine(y, by_expert.handle, topk_weights=weights).topk_weights.shape == (6, 4)


def check_ranks_with_different_layouts(comm: MPI.Intracomm) -> None:
    ranks, rank = comm.Get_size(), comm.Get_rank()
    if ranks == 1:
        return
    inputs = inputs_of_all(comm, 2, lambda rank: 6, hidden=32, num_topk=4, num_experts=4 * ranks)
    mine = inputs[rank]
    with make_buffer(comm, num_experts=4 * ranks) as buffer:
        with raises(EPInputError, "the ranks disagree on the kind of this call"):
            buffer.dispatch(mine.x, mine.topk_idx, layout="expert" if rank == 0 else "token")
            buffer.synchronize()  # on GPUs, a later call raises it
        sent = _dispatch_by_expert(buffer, mine)
        oracle.check_expert_rows(sent, oracle.expected_expert_rows(rank, inputs, 4 * ranks))
        with raises(EPInputError, "the ranks disagree on the kind of this call"):
            buffer.combine(sent.recv_x, sent.handle, topk_weights=sent.recv_topk_weights, weighted=rank == 0)
            buffer.synchronize()


def check_wrong_compression(comm: MPI.Intracomm) -> None:
    sizes = dict(hidden=384, num_topk=3, num_experts=3 * comm.Get_size())
    with make_buffer(comm, **sizes) as buffer:
        sent = buffer.dispatch(np.ones((5, 384), ml_dtypes.bfloat16), np.tile(np.arange(3), (5, 1)))
        y, handle, combine = sent.recv_x, sent.handle, buffer.combine
        for wrong in ("fp4", "", 8, True):
            with raises(EPInputError, "compress=", "fp8"):
                combine(y, handle, compress=wrong)
        by_expert = buffer.dispatch(np.ones((5, 384), ml_dtypes.bfloat16), np.tile(np.arange(3), (5, 1)), layout="expert")
        with raises(EPInputError, "reduce='topk'"):
            combine(by_expert.recv_x, by_expert.handle, compress="fp8", reduce="topk")
        if comm.Get_size() > 1:  # the ranks do not agree
            formats = (*COMPRESSIONS, None)
            mixed = formats[comm.Get_rank() % len(formats)]
            with raises(EPInputError, "the ranks disagree on the kind of this call", "compress="):
                combine(y, handle, compress=mixed)
                buffer.synchronize()
        assert (combine(y, handle).x.astype(np.float32) == 1).all()
    with make_buffer(comm, **{**sizes, "hidden": 192}) as buffer:
        sent = buffer.dispatch(np.ones((2, 192), ml_dtypes.bfloat16), np.zeros((2, 3), np.int64))
        with raises(EPInputError, "hidden=192", "multiple of 128"):
            buffer.combine(sent.recv_x, sent.handle, compress="log10")


def check_rows_past_worst(comm: MPI.Intracomm) -> None:
    """Rows past num_worst_tokens cause one warning."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    with logged_warnings() as log, make_buffer(comm, num_experts=4 * ranks) as buffer:
        x = np.zeros((8, 32), np.float32)
        idx = np.tile(np.arange(4), (8, 1))  # all go to rank 0
        for _ in range(3):
            sent = buffer.dispatch(x, idx, num_worst_tokens=7)
        assert np.asarray(sent.num_recv_tokens)[0] == (8 * ranks if rank == 0 else 0)
        buffer.synchronize()
        buffer.check()
    warnings = [line for line in log if "dropped" in line]
    assert len(warnings) == (rank == 0), warnings
    for line in warnings:
        assert f"rank 0: dispatch received {8 * ranks} rows; num_worst_tokens=7" in line, line


def check_huge_messages_are_refused(comm: MPI.Intracomm) -> None:
    """More bytes for one peer than an int holds. The test lowers the limit, so that it needs no large array."""
    from deepep_rt.backends.host import headers

    limit, headers.MAX_MESSAGE_BYTES = headers.MAX_MESSAGE_BYTES, 1000
    try:
        with make_buffer(comm, num_experts=4 * comm.Get_size()) as buffer:
            idx = np.full((5, 4), buffer.config.num_experts - 1, np.int64)
            small = buffer.dispatch(np.zeros((5, 32), np.float32), idx)
            is_culprit = comm.Get_rank() == 0
            num_tokens = 9 if is_culprit else 5
            with raises(EPInputError, f"{9 * 128} bytes", "at most 1000", *([] if is_culprit else ["rank 0"])):
                buffer.dispatch(np.zeros((num_tokens, 32), np.float32), np.resize(idx, (num_tokens, 4)))
            assert buffer.combine(small.recv_x, small.handle).x.shape == (5, 32)
    finally:
        headers.MAX_MESSAGE_BYTES = limit


def check_out_of_host_memory(comm: MPI.Intracomm) -> None:
    """In every kind of call, the other ranks raise at once and do not wait for their time-out."""
    from deepep_rt.backends.host import low_latency, throughput

    ranks, is_culprit, start = comm.Get_size(), comm.Get_rank() == comm.Get_size() - 1, time.monotonic()
    x, idx = np.zeros((5, 32), ml_dtypes.bfloat16), np.tile(np.arange(4), (5, 1))

    class NoMemory(throughput.Result):
        def __init__(self, *_: object, **__: object) -> None:
            raise MemoryError("Unable to allocate 7 TiB")

    def calls(buffer: Buffer) -> dict[str, Callable[[], object]]:
        sent, low = buffer.dispatch(x, idx), buffer.low_latency_dispatch(x, idx, use_fp8=False)
        weights = np.ones((5, 4), np.float32)
        return {
            "dispatch": lambda: buffer.dispatch(x, idx),
            "known dispatch": lambda: buffer.dispatch(x, handle=sent.handle),
            "combine": lambda: buffer.combine(sent.recv_x, sent.handle),
            "low_latency_dispatch": lambda: buffer.low_latency_dispatch(x, idx, use_fp8=False),
            "low_latency_combine": lambda: buffer.low_latency_combine(low.recv_x, idx, weights, low.handle),
        }

    usual = throughput.Result
    for kind in ("dispatch", "known dispatch", "combine", "low_latency_dispatch", "low_latency_combine"):
        with contextlib.suppress(EPTimeoutError), make_buffer(comm, num_experts=4 * ranks, low_latency=True) as buffer:
            call = calls(buffer)[kind]
            if is_culprit:
                throughput.Result = low_latency.Result = NoMemory
                try:
                    with raises(EPOutOfMemoryError, "host memory does not suffice", "7 TiB", "; expected"):
                        call()
                finally:
                    throughput.Result = low_latency.Result = usual
                with raises(EPTimeoutError, "broken", "host memory does not suffice"):
                    call()
            else:
                with raises(EPTimeoutError, f"rank {ranks - 1}", "EPOutOfMemoryError", "7 TiB"):
                    for _ in range(3):  # a rank may receive all rows before the notice
                        call()
    assert time.monotonic() - start < spmd.TIMEOUT_S


if __name__ == "__main__":
    main(__name__)
