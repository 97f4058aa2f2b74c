"""Layers of experts for the checks of gradients: tokens, experts, and the same layer computed without the library."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import spmd
import torch
from mpi4py import MPI
from spmd import make_buffer

from deepep_rt import Buffer, DispatchResult
from deepep_rt.torch import combine, dispatch

BOUND = 5e-6  # of errors in float32, relative to the largest value
HIDDEN, TOPK, EACH = 128, 4, 4  # EACH: experts of each rank


@dataclasses.dataclass
class Tokens:
    """The inputs of one rank."""

    x: torch.Tensor
    idx: torch.Tensor
    weights: torch.Tensor
    seed_grad: torch.Tensor  # the loss is the sum of the layer's output times this

    def leaves(self, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, weights = (
            t.to(device(), kind, copy=True).requires_grad_() for t, kind in ((self.x, dtype), (self.weights, torch.float32))
        )
        return x, self.idx.to(device()), weights


def device() -> str:
    return "cuda" if spmd.backend == "cuda" else "cpu"


def tokens_of_all(comm: MPI.Intracomm, seed: int, counts: Callable[[int], int] = lambda rank: 5 + 9 * rank % 17, **how: Any):
    return [_tokens(seed, rank, counts(rank), EACH * comm.Get_size(), **how) for rank in range(comm.Get_size())]


def _tokens(
    seed: int, rank: int, count: int, num_experts: int, *, skip: float = 0.2, whole: bool = False, first: int = 0
) -> Tokens:
    """Draw tokens of one rank. Experts begin at `first`, and some are -1. With `whole` numbers, sums are exact."""
    rng = np.random.default_rng([seed, rank])
    idx = first + rng.random((count, num_experts - first)).argsort(axis=1)[:, :TOPK]
    idx = np.pad(idx, ((0, 0), (0, TOPK - idx.shape[1])), constant_values=-1)
    idx[rng.random(idx.shape) < skip] = -1
    if whole:
        x, weights, grad = (rng.integers(-4, 5, (count, n)).astype(np.float32) for n in (HIDDEN, TOPK, HIDDEN))
    else:
        x, grad = rng.standard_normal((2, count, HIDDEN), np.float32)
        weights = rng.random((count, TOPK), np.float32)
    return Tokens(*map(torch.from_numpy, (x, idx, weights, grad)))


def matrices(comm: MPI.Intracomm, seed: int) -> torch.Tensor:
    """Return the matrices of all experts, `[num_experts, hidden, hidden]` float32."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.standard_normal((EACH * comm.Get_size(), HIDDEN, HIDDEN), np.float32) / HIDDEN**0.5)


def experts(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, mats: torch.Tensor) -> torch.Tensor:
    """Return, for each row, the sum over its experts of weight * tanh(x @ matrix)."""
    gains = [(weights * (idx == e)).sum(1, keepdim=True).to(x.dtype) for e in range(len(mats))]
    return sum(gain * torch.tanh(x @ mat) for gain, mat in zip(gains, mats, strict=True))


def local(comm: MPI.Intracomm, mats: torch.Tensor) -> torch.Tensor:
    return mats[EACH * comm.Get_rank() :][:EACH].clone().to(device()).requires_grad_()


def layer(buffer, x, idx, weights, mats, *, run=experts, fp8: bool = False, fp8_grad: bool = False, bias: Any = None, **how: Any):
    sent = dispatch(buffer, x, idx, weights, fp8=fp8, **how)
    y = run(sent.recv_x, sent.recv_topk_idx, sent.recv_topk_weights, mats)
    return combine(buffer, y, sent.handle, bias=bias, fp8_grad=fp8_grad)


def dense(tokens: list[Tokens], mats: torch.Tensor, num_layers: int = 1):
    """Return output, gradient of x and gradient of the weights for each rank, and the gradient of the matrices, in float64."""
    leaves = [[t.double().requires_grad_() for t in (of.x, of.weights)] for of in tokens]
    mats = mats.double().requires_grad_()
    outs = []
    for of, (x, weights) in zip(tokens, leaves, strict=True):
        outs.append(x)
        for _ in range(num_layers):
            outs[-1] = experts(outs[-1], of.idx, weights, mats)
    sum((out * of.seed_grad).sum() for out, of in zip(outs, tokens, strict=True)).backward()
    return [(out.detach(), x.grad, w.grad) for out, (x, w) in zip(outs, leaves, strict=True)], mats.grad


def close(got: torch.Tensor, expected: torch.Tensor, bound: float, name: str) -> None:
    """Check that the largest error, relative to the largest expected number, is at most `bound`."""
    assert got is not None, f"{name} is None"
    assert got.shape == expected.shape, f"{name} has shape {got.shape}; expected {expected.shape}"
    got, expected = got.detach().double().cpu(), expected.double()
    error = ((got - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item() if expected.numel() else 0.0
    assert error <= bound, f"{name} has an error of {error:.2e} of the largest value; expected at most {bound:.0e}"


def compare(comm: MPI.Intracomm, tokens: list[Tokens], mats: torch.Tensor, got: tuple, bound: float, num_layers: int = 1) -> None:
    """Check `got` after the backward pass: the output, and the leaves x, weights (None: unchecked) and matrices of this rank."""
    of_ranks, mats_grad = dense(tokens, mats, num_layers)
    out, x, weights, mine = got
    expected_out, expected_x, expected_weights = of_ranks[comm.Get_rank()]
    close(out, expected_out, bound, "the output")
    close(x.grad, expected_x, bound, "the gradient of x")
    if weights is not None:
        close(weights.grad, expected_weights, bound, "the gradient of the weights")
    close(mine.grad, mats_grad[EACH * comm.Get_rank() :][:EACH], bound, "the gradient of the matrices")


@contextmanager
def buffer_for(comm: MPI.Intracomm, **settings: Any) -> Iterator[Buffer]:
    """Make a Buffer whose padding is NaN."""
    sizes = dict(hidden=HIDDEN, num_topk=TOPK, num_experts=EACH * comm.Get_size(), num_max_tokens_per_rank=64)
    with make_buffer(comm, **{**sizes, **settings}) as buffer:
        plain = buffer.dispatch

        def poisoned(*args: Any, **options: Any) -> DispatchResult:
            sent = plain(*args, **options)
            if not options.get("zero_padding"):
                sent.event.wait()
                is_padding = torch.arange(len(sent.recv_x), device=device()) >= sent.num_recv_tokens
                if sent.recv_expert_idx is not None:
                    is_padding |= sent.recv_expert_idx < 0
                sent.recv_x.view(torch.uint8)[is_padding] = 0xFF  # NaN, also in FP8
            return sent

        buffer.dispatch = poisoned
        yield buffer


def backward(out: torch.Tensor, mine: Tokens) -> None:
    (out * mine.seed_grad.to(device(), out.dtype)).sum().backward()
