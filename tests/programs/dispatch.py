"""Dispatch against the oracle, bit for bit."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import oracle
from mpi4py import MPI
from spmd import inputs_of_all, main, make_buffer, raises, same_bits

from deepep_rt import EPInputError
from deepep_rt.arrays.dtypes import to_fp8, to_ue8m0

CASES = [
    # (num_topk, experts of a rank, hidden, dtype of x, scales of a row, options of make_inputs)
    (1, 1, 16, "float32", 0, {}),
    (4, 8, 64, "bfloat16", 0, {"idx_dtype": "int32"}),
    (8, 32, 2880, "bfloat16", 0, {"skip_probability": 0.3}),
    (9, 16, 48, "float16", 0, {"idx_dtype": "int32", "skip_probability": 0.9}),
    (32, 32, 112, "float32", 0, {"pattern": "skewed"}),
    (8, 8, 512, "float8_e4m3fn", 4, {"pattern": "one_rank"}),
    (4, 4, 256, "float8_e5m2", 1, {"pattern": "skewed"}),
    (4, 6, 144, "uint8", 2, {"skip_probability": 1.0}),
    (6, 8, 32, "int8", 0, {"pattern": "one_rank", "idx_dtype": "int32", "skip_probability": 0.5}),
]


def _run_case(comm: MPI.Intracomm, num_tokens, case, *, expert_alignment: int = 1, seed: int = 1) -> None:
    num_topk, each, hidden, dtype, num_scales, options = case
    sizes = dict(hidden=hidden, num_topk=num_topk, num_experts=each * comm.Get_size())
    inputs = inputs_of_all(comm, seed, num_tokens, dtype=dtype, num_scales=num_scales, **sizes, **options)
    mine = inputs[comm.Get_rank()]
    with make_buffer(comm, **sizes, dtype="bfloat16" if np.dtype(dtype).itemsize < 2 else dtype) as buffer:
        sent = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights, x_scales=mine.scales, expert_alignment=expert_alignment)
        expected = oracle.expected_dispatch(comm.Get_rank(), inputs, sizes["num_experts"], expert_alignment=expert_alignment)
        oracle.check_dispatch(sent, expected)
        assert sent.handle.num_tokens == len(mine.x)
        assert sent.views["x"].ptr % 64 == 0, "not aligned for JAX"
        assert sent.recv_x is sent.recv_x


def check_every_kind_of_row(comm: MPI.Intracomm) -> None:
    for case in CASES:
        if case[0] <= case[1] * comm.Get_size():
            _run_case(comm, lambda rank: 5 + 3 * rank, case)


def check_rows_of_4_bit_numbers(comm: MPI.Intracomm) -> None:
    """Two numbers in a byte. NVFP4 has a scale byte for 16 numbers, and MXFP4 one for 32."""
    hidden, experts, rank = 512, 4 * comm.Get_size(), comm.Get_rank()
    for width, channels_of_scale in (("bfloat16", 16), ("float8_e4m3fn", 16), ("bfloat16", 32)):
        sizes = dict(hidden=hidden // 2, num_topk=4, num_experts=experts)
        inputs = inputs_of_all(
            comm, 4, lambda rank: 64 - 9 * rank, dtype="uint8", num_scales=hidden // channels_of_scale // 4, **sizes
        )
        mine = inputs[rank]
        with make_buffer(comm, hidden=hidden, num_topk=4, num_experts=experts, dtype=width) as buffer:
            for layout in ("token", "expert", "token"):
                sent = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights, x_scales=mine.scales, layout=layout)
                if layout == "token":
                    oracle.check_dispatch(sent, oracle.expected_dispatch(rank, inputs, experts))
                else:
                    oracle.check_expert_rows(sent, oracle.expected_expert_rows(rank, inputs, experts))
            wide = np.zeros((len(mine.x), hidden), np.uint8 if width != "bfloat16" else ml_dtypes.bfloat16)
            if channels_of_scale == 16:
                with raises(EPInputError, "x_scales has 32 bytes a row", "up to 16"):
                    buffer.dispatch(wide, mine.topk_idx, x_scales=mine.scales)
            with raises(EPInputError, "x.shape=", f"[num_tokens, {hidden}]", f"[num_tokens, {hidden // 2}] of uint8"):
                buffer.dispatch(wide[:, : hidden // 2].astype(np.float32), mine.topk_idx)
            _check_plain_rows(buffer, comm)


def _check_plain_rows(buffer: Any, comm: MPI.Intracomm) -> None:
    config = buffer.config
    sizes = dict(hidden=config.hidden, num_topk=config.num_topk, num_experts=config.num_experts)
    inputs = inputs_of_all(comm, 5, lambda rank: 7, dtype=config.dtype, **sizes)
    mine = inputs[comm.Get_rank()]
    sent = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
    oracle.check_dispatch(sent, oracle.expected_dispatch(comm.Get_rank(), inputs, config.num_experts))


def check_expert_alignment(comm: MPI.Intracomm) -> None:
    for alignment in (2, 16, 100, 128):
        _run_case(comm, lambda rank: 9, CASES[1], expert_alignment=alignment)


def check_zero_tokens(comm: MPI.Intracomm) -> None:
    for case in (CASES[1], CASES[5]):
        _run_case(comm, lambda rank: 0, case)
        _run_case(comm, lambda rank: 7 * (rank % 2), case)
        _run_case(comm, lambda rank: 7 * (rank == 0), case)


def check_full_buffer(comm: MPI.Intracomm) -> None:
    _run_case(comm, lambda rank: 64, CASES[1])


def check_without_weights(comm: MPI.Intracomm) -> None:
    experts = 4 * comm.Get_size()
    inputs = inputs_of_all(comm, 3, lambda rank: 6, hidden=32, num_topk=4, num_experts=experts)
    for one in inputs:
        one.topk_weights = None
    mine = inputs[comm.Get_rank()]
    with make_buffer(comm, num_experts=experts) as buffer:
        oracle.check_dispatch(buffer.dispatch(mine.x, mine.topk_idx), oracle.expected_dispatch(comm.Get_rank(), inputs, experts))


def check_experts_named_twice(comm: MPI.Intracomm) -> None:
    """A token that names an expert repeatedly travels once, and each name counts."""
    experts, rank = comm.Get_size(), comm.Get_rank()
    inputs = [
        oracle.RankInputs(np.full((3, 32), r, np.float32), np.full((3, 4), experts - 1, np.int64), np.ones((3, 4), np.float32))
        for r in range(experts)
    ]
    mine = inputs[rank]
    with make_buffer(comm, num_experts=max(experts, 4) if experts == 1 else 4 * experts) as buffer:
        num_experts = buffer.config.num_experts
        sent = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights)
        oracle.check_dispatch(sent, oracle.expected_dispatch(rank, inputs, num_experts))
        assert sum(sent.num_recv_tokens_per_expert_list) == 4 * len(sent.recv_x)


def check_cached_handle(comm: MPI.Intracomm) -> None:
    experts, rank = 8 * comm.Get_size(), comm.Get_rank()
    sizes = dict(hidden=128, num_topk=4, num_experts=experts, skip_probability=0.4)
    inputs = inputs_of_all(comm, 5, lambda rank: 4 + 5 * (rank % 3), **sizes)
    mine = inputs[rank]
    with make_buffer(comm, num_experts=experts, hidden=128) as buffer:
        first = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights, expert_alignment=4)
        first.recv_src_idx[:] = 77  # results belong to the caller, so writing to one must not change the handle
        first.num_recv_tokens_per_expert[:] = 77
        for seed in (6, 7):
            fresh = inputs_of_all(comm, seed, lambda rank: 4 + 5 * (rank % 3), dtype="bfloat16", num_scales=1, **sizes)
            for old, new in zip(inputs, fresh, strict=True):
                new.topk_idx = old.topk_idx
            ours = fresh[rank]
            expected = oracle.expected_dispatch(rank, fresh, experts, expert_alignment=4)
            again = buffer.dispatch(ours.x, ours.topk_idx, ours.topk_weights, x_scales=ours.scales, handle=first.handle)
            oracle.check_dispatch(again, expected)
            assert again.num_recv_tokens_per_expert_list == first.num_recv_tokens_per_expert_list
            payload_only = buffer.dispatch(ours.x, x_scales=ours.scales, handle=again.handle)
            oracle.check_dispatch(payload_only, expected, with_idx=False)
            weightless = buffer.dispatch(ours.x, ours.topk_idx, x_scales=ours.scales, handle=first.handle)
            assert weightless.recv_topk_weights is None
            assert (weightless.recv_topk_idx == expected.topk_idx).all()


def check_conversion_to_fp8(comm: MPI.Intracomm) -> None:
    """`use_fp8` gives the bits of rows that were converted before, in both layouts, for new and known routings."""
    experts, rank = 4 * comm.Get_size(), comm.Get_rank()
    for seed, dtype in enumerate(("bfloat16", "float16", "float32")):
        sizes = dict(hidden=512, num_topk=4, num_experts=experts)
        inputs = inputs_of_all(comm, seed, lambda rank: 5 * (rank % 2) + 4, dtype=dtype, **sizes)
        mine = inputs[rank]
        with make_buffer(comm, num_experts=experts, hidden=512, dtype=dtype) as buffer:
            for round_scale, use_ue8m0, layout in itertools.product((False, True), (False, True), ("token", "expert")):
                codes, scales = to_fp8(mine.x.astype(np.float32), round_scale or use_ue8m0)
                scales = to_ue8m0(scales) if use_ue8m0 else scales
                rows = codes.view(ml_dtypes.float8_e4m3fn)
                want = buffer.dispatch(rows, mine.topk_idx, mine.topk_weights, x_scales=scales, layout=layout)
                how = dict(use_fp8=True, round_scale=round_scale, use_ue8m0=use_ue8m0)
                got = buffer.dispatch(mine.x, mine.topk_idx, mine.topk_weights, layout=layout, **how)
                again = buffer.dispatch(mine.x, handle=want.handle, **how)
                for sent in (got, again):
                    assert same_bits(sent.recv_x, want.recv_x)
                    assert same_bits(sent.recv_x_scales, want.recv_x_scales)
                assert same_bits(got.recv_topk_weights, want.recv_topk_weights)
            codes, scales = to_fp8(mine.x.astype(np.float32), False)
            for words, wrong in (
                ("expected use_fp8=True with it", dict(round_scale=True)),
                ("x_scales with use_fp8=True; expected none", dict(use_fp8=True, x_scales=scales)),
                (
                    "use_ue8m0=True; expected a type of 4 bytes",
                    dict(use_fp8=True, use_ue8m0=True, layout="expert", scales_layout="column"),
                ),
            ):
                with raises(EPInputError, words):
                    buffer.dispatch(mine.x, mine.topk_idx, **wrong)
            with raises(EPInputError, "x.dtype=uint8; expected"):
                buffer.dispatch(codes, mine.topk_idx, use_fp8=True)
    with (
        make_buffer(comm, num_experts=experts, hidden=64) as buffer,
        raises(EPInputError, "hidden=64; expected a multiple of 128"),
    ):
        buffer.dispatch(np.zeros((2, 64), np.float32), np.zeros((2, 4), np.int64), use_fp8=True)


def check_num_worst_tokens(comm: MPI.Intracomm) -> None:
    """Limits that are large enough, exact, too small and zero, and that differ between ranks."""
    ranks, rank = comm.Get_size(), comm.Get_rank()
    experts = 4 * ranks
    inputs = inputs_of_all(
        comm, 8, lambda rank: 3 + rank, hidden=32, num_topk=4, num_experts=experts, idx_dtype="int32", num_scales=1
    )
    arriving = [oracle.expected_dispatch(r, inputs, experts).num_recv for r in range(ranks)]
    mine = inputs[rank]
    with make_buffer(comm, num_experts=experts, num_max_tokens_per_rank=16) as buffer:
        for _ in range(8):
            np.full(16 * ranks * 32, 7, np.float32)  # freed at once, so that NumPy reuses memory that is not zero
        for limit in (16 * ranks, arriving[rank], arriving[rank] // 2, 1 + rank % 2, 0, arriving[rank] * (rank % 2)):
            expected = oracle.expected_dispatch(rank, inputs, experts, num_worst_tokens=limit, expert_alignment=2)
            sent = buffer.dispatch(
                mine.x,
                mine.topk_idx,
                mine.topk_weights,
                x_scales=mine.scales,
                num_worst_tokens=limit,
                expert_alignment=2,
            )
            oracle.check_dispatch(sent, expected, has_counts=False)
            if buffer.backend == "host":
                assert (sent.recv_x[expected.num_kept :] == 0).all(), "the host backend leaves zeros in the padding"
            again = buffer.dispatch(
                mine.x,
                mine.topk_idx,
                mine.topk_weights,
                x_scales=mine.scales,
                handle=sent.handle,
                num_worst_tokens=limit,
            )
            oracle.check_dispatch(again, expected, has_counts=False)


if __name__ == "__main__":
    main(__name__)
