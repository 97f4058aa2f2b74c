"""The experts of a rank as grouped products, after dispatches by expert with and without signals.

mpirun -n 2 python tests/programs/torch_grouped.py
"""

from __future__ import annotations

from typing import Any

import torch
from mpi4py import MPI
from spmd import main, raises
from torch_layers import EACH, HIDDEN, buffer_for, device, tokens_of_all

from deepep_rt import EPInputError
from deepep_rt.torch import grouped_mlp, grouped_product
from deepep_rt.torch.grouped import swiglu

INNER = 128


def _weights(comm: MPI.Intracomm, *shape: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(100 * seed + comm.Get_rank())
    return (torch.randn(EACH, *shape, generator=random) / shape[0] ** 0.5).bfloat16().to(device())


def _close(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    error = (got.float() - wanted.float()).abs().max() / wanted.float().abs().max().clamp_min(1e-3)
    assert error < 2e-2, f"{what}: {error}"  # bfloat16


def _expected(sent: Any, w1: torch.Tensor, w2: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Compute the rows of each expert in float32, without padding."""
    out = torch.zeros(len(rows), w2.shape[2], device=rows.device)
    for row, expert in enumerate(sent.recv_expert_idx.tolist()):
        if expert >= 0:
            inner = (rows[row].float() @ w1[expert].float())[None].bfloat16()
            out[row] = (swiglu(inner).float() @ w2[expert].float())[0]
    return out


def check_experts_of_bfloat16_rows(comm: MPI.Intracomm) -> None:
    """With signals and without, for a new routing and a known one, in both alignments, and with room for the most rows."""
    mine = tokens_of_all(comm, 3)[comm.Get_rank()]
    w1, w2 = _weights(comm, HIDDEN, 2 * INNER), _weights(comm, INNER, HIDDEN, seed=1)
    with buffer_for(comm, dtype="bfloat16") as buffer:
        x, idx, weights = (t.detach() for t in mine.leaves(torch.bfloat16))
        for alignment, worst in ((64, None), (128, None), (128, 384 * comm.Get_size())):
            options = dict(layout="expert", expert_alignment=alignment, num_worst_tokens=worst, zero_padding=True)
            plain = buffer.dispatch(x, idx, weights, **options)
            sent = buffer.dispatch(x, idx, weights, **options, signals=True)
            y, wanted = grouped_mlp(sent, w1, w2), grouped_mlp(plain, w1, w2)
            again = buffer.dispatch(-x, handle=sent.handle, zero_padding=True, signals=True)
            y_again = grouped_mlp(again, w1, w2)
            sent.event.wait()
            assert sent.handle.tile_rows == alignment
            assert (sent.tile_ready == sent.signal).all()
            assert sent.tile_ready.shape == (-(-len(sent.recv_x) // alignment),)
            assert plain.tile_ready is None
            assert torch.equal(sent.recv_x, plain.recv_x)
            is_row = sent.recv_expert_idx >= 0
            assert torch.equal(y[is_row], wanted[is_row])
            _close(y[is_row], _expected(sent, w1, w2, sent.recv_x)[is_row], "experts")
            again.event.wait()
            _close(y_again[is_row], _expected(again, w1, w2, -plain.recv_x)[is_row], "experts along a known routing")
            back = buffer.combine(y, sent.handle, topk_weights=sent.recv_topk_weights, weighted=True).x
            same = buffer.combine(wanted, plain.handle, topk_weights=plain.recv_topk_weights, weighted=True).x
            assert torch.equal(back, same)


def check_experts_of_fp8_rows(comm: MPI.Intracomm) -> None:
    mine = tokens_of_all(comm, 4)[comm.Get_rank()]
    w1, w2 = _weights(comm, HIDDEN, 2 * INNER).to(torch.float8_e4m3fn), _weights(comm, INNER, HIDDEN, seed=1)
    scales = torch.rand(EACH, 2 * INNER // 128, HIDDEN // 128, device=device()) + 0.5
    with buffer_for(comm, dtype="bfloat16") as buffer:
        x, idx, _ = (t.detach() for t in mine.leaves(torch.bfloat16))
        options = dict(layout="expert", expert_alignment=128, zero_padding=True, use_fp8=True)
        plain, sent = buffer.dispatch(x, idx, **options), buffer.dispatch(x, idx, **options, signals=True)
        y, wanted = (grouped_mlp(one, w1, w2, w1_scales=scales) for one in (sent, plain))
        sent.event.wait()
        assert torch.equal(sent.recv_x.view(torch.uint8), plain.recv_x.view(torch.uint8))
        is_row = sent.recv_expert_idx >= 0
        assert torch.equal(y[is_row], wanted[is_row])
        rows = sent.recv_x.float() * sent.recv_x_scales.repeat_interleave(128, 1)
        blocks = scales.transpose(1, 2).repeat_interleave(128, 1).repeat_interleave(128, 2)
        _close(y[is_row], _expected(sent, w1.float() * blocks, w2, rows)[is_row], "experts of FP8 rows")


def check_ranks_without_tokens(comm: MPI.Intracomm) -> None:
    w1, w2 = _weights(comm, HIDDEN, 2 * INNER), _weights(comm, INNER, HIDDEN, seed=1)
    with buffer_for(comm, dtype="bfloat16") as buffer:
        num_tokens = 9 if comm.Get_rank() == 0 else 0
        x = torch.ones(num_tokens, HIDDEN, dtype=torch.bfloat16, device=device())
        idx = torch.zeros(num_tokens, 4, dtype=torch.int64, device=device())
        idx[:, 1:] = -1  # all to expert 0
        sent = buffer.dispatch(x, idx, layout="expert", expert_alignment=64, signals=True)
        y = grouped_mlp(sent, w1, w2)
        sent.event.wait()
        assert len(y) == (64 if comm.Get_rank() == 0 else 0)
        assert buffer.combine(y, sent.handle).x.shape == (num_tokens, HIDDEN)


def check_errors(comm: MPI.Intracomm) -> None:
    mine = tokens_of_all(comm, 5)[comm.Get_rank()]
    with buffer_for(comm, dtype="bfloat16") as buffer:
        x, idx, _ = (t.detach() for t in mine.leaves(torch.bfloat16))
        with raises(EPInputError, "signals=True", "layout='expert'"):
            buffer.dispatch(x, idx, signals=True)
        with raises(EPInputError, "expert_alignment=32", "multiple of 64"):
            buffer.dispatch(x, idx, layout="expert", expert_alignment=32, signals=True)
        with raises(EPInputError, "signals="):
            buffer.dispatch(x, idx, layout="expert", expert_alignment=64, signals="yes")
        unaligned = buffer.dispatch(x, idx, layout="expert").handle
        with raises(EPInputError, "multiple of 64"):
            buffer.dispatch(x, handle=unaligned, signals=True)
        with raises(EPInputError, "layout='expert'"):
            grouped_product(buffer.dispatch(x, idx), _weights(comm, HIDDEN, INNER))
        sent = buffer.dispatch(x, idx, layout="expert", expert_alignment=64)
        with raises(EPInputError, "weight.shape", "each local expert"):
            grouped_product(sent, _weights(comm, HIDDEN + 16, INNER))
        with raises(EPInputError, "weight.shape", f"expected [{EACH}, "):
            grouped_product(sent, _weights(comm, HIDDEN, INNER)[:2])
        with raises(EPInputError, "weight requires a gradient"):
            grouped_product(sent, _weights(comm, HIDDEN, INNER).requires_grad_())
        with raises(EPInputError, "w2.shape"):
            grouped_mlp(sent, _weights(comm, HIDDEN, 2 * INNER), _weights(comm, 2 * INNER, HIDDEN))


if __name__ == "__main__":
    main(__name__)
