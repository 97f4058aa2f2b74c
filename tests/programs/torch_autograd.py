"""Compare gradients of deepep_rt.torch with gradients computed without the library.

Every rank computes the expected values of all ranks in float64. `tests/gpu/test_torch_on_gpus.py` runs these checks on GPUs.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from spmd import groups_of_every_size, main, raises
from torch.utils.checkpoint import checkpoint
from torch_layers import (
    BOUND,
    EACH,
    HIDDEN,
    TOPK,
    backward,
    buffer_for,
    close,
    compare,
    dense,
    device,
    experts,
    layer,
    local,
    matrices,
    tokens_of_all,
)

from deepep_rt import EPDestroyedError, EPInputError
from deepep_rt.arrays.compressed_rows import COMPRESSIONS
from deepep_rt.torch import Handle, combine, dispatch


def _check_layers(comm: MPI.Intracomm, run: Callable[..., torch.Tensor], num_worst_tokens: int) -> None:
    """Ranks have different numbers of tokens or none, and some experts get no token. The result has a fixed shape or not."""
    some = {
        "all ranks": dict(),
        "a rank without tokens": dict(counts=lambda rank: 0 if rank == 0 else 6),
        "the experts of rank 0 get no token": dict(first=EACH if comm.Get_size() > 1 else 0),
        "all are skipped": dict(skip=1.0),
        "no tokens": dict(counts=lambda rank: 0),
    }
    shapes = (dict(), dict(num_worst_tokens=num_worst_tokens), dict(expert_alignment=16))
    with buffer_for(comm) as buffer:
        for seed, ((what, how), shape) in enumerate(itertools.product(some.items(), shapes)):
            tokens, mats = tokens_of_all(comm, seed, **how), matrices(comm, seed)
            mine, weights_of = tokens[comm.Get_rank()], local(comm, mats)
            x, idx, weights = mine.leaves()
            out = run(buffer, x, idx, weights, weights_of, **shape)
            backward(out, mine)
            try:
                compare(comm, tokens, mats, (out, x, weights, weights_of), BOUND)
            except AssertionError as error:
                raise AssertionError(f"{what}, {shape}: {error}") from None


def check_a_layer(comm: MPI.Intracomm) -> None:
    _check_layers(comm, layer, 64 * comm.Get_size())


def _run_by_expert(buffer: Any, x: Any, idx: Any, weights: Any, mats: torch.Tensor, bias: Any = None, **how: Any) -> Any:
    """A layer whose experts take their rows as they lie."""
    sent = dispatch(buffer, x, idx, weights, layout="expert", **how)
    assert sent.recv_topk_idx is None
    first = sent.expert_offsets.tolist()
    parts = [torch.tanh(sent.recv_x[a:b] @ mat) for a, b, mat in zip(first[:-1], first[1:], mats, strict=True)]
    y = torch.cat([*parts, torch.full_like(sent.recv_x[first[-1] :], torch.nan)])  # grouped products leave the end undefined
    return combine(buffer, y, sent.handle, topk_weights=sent.recv_topk_weights, bias=bias)


def check_a_layer_by_expert(comm: MPI.Intracomm) -> None:
    """The same gradients with rows that lie expert by expert, and weights that combine multiplies by."""
    _check_layers(comm, _run_by_expert, 64 * TOPK * comm.Get_size())


def check_checkpoints_by_expert(comm: MPI.Intracomm) -> None:
    tokens, mats = tokens_of_all(comm, 21), matrices(comm, 21)
    mine = tokens[comm.Get_rank()]
    with buffer_for(comm) as buffer:
        for reentrant in (False, True):
            x, idx, weights = mine.leaves()
            weights_of = local(comm, mats)
            out = checkpoint(lambda *t: _run_by_expert(buffer, *t), x, idx, weights, weights_of, use_reentrant=reentrant)
            backward(out, mine)
            compare(comm, tokens, mats, (out, x, weights, weights_of), BOUND)


def check_same_bits_at_any_size(comm: MPI.Intracomm) -> None:
    """With `reduce="topk"`, results and gradients have the same bits on 1, 2, 4 and 8 ranks."""
    hidden, num_experts, count, found = 96, 16, 48, []
    rng = np.random.default_rng(24)
    x, seed_grad = (torch.from_numpy(rng.standard_normal((count, hidden), np.float32)).bfloat16() for _ in range(2))
    idx = torch.from_numpy(np.ascontiguousarray(rng.random((count, num_experts)).argsort(axis=1)[:, :TOPK]))
    weights = torch.from_numpy(rng.random((count, TOPK), np.float32))
    gains = torch.from_numpy(rng.standard_normal((num_experts, hidden), np.float32)).to(device())
    for group in groups_of_every_size(comm):
        size, rank = group.Get_size(), group.Get_rank()
        part = slice(rank * count // size, (rank + 1) * count // size)
        with buffer_for(group, hidden=hidden, num_experts=num_experts, dtype="bfloat16") as buffer:
            mine = x[part].to(device()).requires_grad_()
            of_mine = weights[part].to(device()).requires_grad_()
            sent = dispatch(buffer, mine, idx[part].to(device()), of_mine, layout="expert", reduce="topk")
            row = torch.arange(len(sent.recv_x), device=device())
            expert = torch.searchsorted(sent.expert_offsets[1:].long(), row, right=True) + rank * num_experts // size
            y = (torch.tanh(sent.recv_x.float()) * gains[expert]).bfloat16()
            out = combine(buffer, y, sent.handle, topk_weights=sent.recv_topk_weights, reduce="topk")
            out.backward(seed_grad[part].to(device()))
            whole = (torch.cat(group.allgather(t.detach().float().cpu())) for t in (out, mine.grad, of_mine.grad))
            found.append(tuple(whole))
    for other in found[1:]:
        for got, expected, name in zip(other, found[0], ("out", "x.grad", "weights.grad"), strict=True):
            assert torch.equal(got, expected), name
    with buffer_for(comm) as buffer, raises(EPInputError, "reduce='topk' without layout='expert'"):
        dispatch(buffer, torch.ones(2, HIDDEN, device=device()), idx[:2].to(device()), reduce="topk")


def check_finite_differences_by_expert(comm: MPI.Intracomm) -> None:
    """The gradients of dispatch, weighted combine and its weights, against differences of the loss in float32."""
    tokens, mats = tokens_of_all(comm, 22, counts=lambda rank: 3 + rank), matrices(comm, 22)
    mine, weights_of = tokens[comm.Get_rank()], local(comm, mats).detach()
    with buffer_for(comm) as buffer:

        def loss(x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            out = _run_by_expert(buffer, x, idx, weights, weights_of, bias=bias)
            return (out * mine.seed_grad.to(device())).sum()

        x, idx, weights = mine.leaves()
        bias = torch.zeros_like(x).requires_grad_()
        leaves = x, weights, bias
        loss(*leaves).backward()
        rng = np.random.default_rng([23, comm.Get_rank()])
        for moved in range(3):  # all ranks move the same argument, each in a direction of its own
            direction = torch.from_numpy(rng.standard_normal(leaves[moved].shape).astype(np.float32)).to(device())
            ends = []
            for step in (1e-2, -1e-2):
                given = [leaf.detach() + (step * direction if i == moved else 0) for i, leaf in enumerate(leaves)]
                ends.append(comm.allreduce(loss(*given).double().item()))
            slope, size = (ends[0] - ends[1]) / 2e-2, comm.allreduce(float(direction.norm() * leaves[moved].grad.norm()))
            exact = comm.allreduce((leaves[moved].grad * direction).double().sum().item())
            assert abs(slope - exact) < 2e-3 * size, (moved, slope, exact, size)


def check_bfloat16(comm: MPI.Intracomm) -> None:
    tokens, mats = tokens_of_all(comm, 1), matrices(comm, 1)
    mine, weights_of = tokens[comm.Get_rank()], local(comm, mats)
    for of in tokens:
        of.x = of.x.bfloat16().float()
    with buffer_for(comm, dtype="bfloat16") as buffer:
        x, idx, weights = mine.leaves(torch.bfloat16)
        out = layer(buffer, x, idx, weights, weights_of, run=lambda x, *rest: experts(x.float(), *rest).bfloat16())
        assert out.dtype == x.dtype
        backward(out, mine)
        assert x.grad.dtype == torch.bfloat16
        compare(comm, tokens, mats, (out, x, weights, weights_of), 2**-6)


def check_each_backward_is_the_adjoint(comm: MPI.Intracomm) -> None:
    """Check <A u, v> = <u, A* v> over all ranks, exactly, for dispatch and combine. Parts of v that must not count are NaN."""
    tokens = tokens_of_all(comm, 2, whole=True)
    mine = tokens[comm.Get_rank()]
    for worst in (None, 64 * comm.Get_size()):
        with buffer_for(comm) as buffer:
            x, idx, weights = mine.leaves()
            sent = dispatch(buffer, x, idx, weights, num_worst_tokens=worst)
            count = int(sent.num_recv_tokens)
            rng = np.random.default_rng([3, comm.Get_rank()])
            whole = lambda *shape: torch.from_numpy(rng.integers(-4, 5, shape).astype(np.float32)).to(device())  # noqa: B023, E731
            v, w = whole(*sent.recv_x.shape), whole(*sent.recv_topk_weights.shape)
            v[count:] = torch.nan  # padding
            w[sent.recv_topk_idx < 0] = torch.nan  # weights of other ranks' experts
            torch.autograd.backward([sent.recv_x, sent.recv_topk_weights], [v, w], retain_graph=True)
            there = (sent.recv_x[:count] * v[:count]).sum() + (sent.recv_topk_weights * w)[sent.recv_topk_idx >= 0].sum()
            here = (x * x.grad).sum() + (weights * weights.grad).sum()
            assert comm.allreduce(there.item()) == comm.allreduce(here.item())
            assert (weights.grad[idx < 0] == 0).all()

            y, bias = whole(*sent.recv_x.shape).requires_grad_(), whole(*x.shape).requires_grad_()
            out = combine(buffer, y, sent.handle, bias=bias)
            u = mine.seed_grad.to(device())
            (out.t() * u.t()).sum().backward()  # a gradient that is not contiguous
            there, here = ((out - bias) * u).sum(), (y * y.grad).sum()
            assert comm.allreduce(there.item()) == comm.allreduce(here.item())
            assert (y.grad[count:] == 0).all()
            assert torch.equal(bias.grad, u)


def check_padding_is_zero(comm: MPI.Intracomm) -> None:
    with buffer_for(comm) as buffer:
        mine = tokens_of_all(comm, 4)[comm.Get_rank()]
        for dtype in (torch.float32, torch.float16, torch.float8_e4m3fn, torch.uint8):
            for fp8 in (False, True) if dtype in (torch.float32, torch.float16) else (False,):
                x = mine.x.abs().to(dtype).to(device()) if not fp8 else mine.x.to(dtype).to(device())
                sent = dispatch(buffer, x, mine.idx.to(device()), num_worst_tokens=64 * comm.Get_size(), fp8=fp8)
                assert sent.recv_x.dtype == dtype
                assert sent.recv_topk_weights is None
                assert (sent.recv_x.float()[int(sent.num_recv_tokens) :] == 0).all()
                assert sent.handle.num_recv_tokens_per_expert_list is None


def check_biases(comm: MPI.Intracomm) -> None:
    mine = tokens_of_all(comm, 5, whole=True)[comm.Get_rank()]
    with buffer_for(comm) as buffer:
        x, idx, _ = mine.leaves()
        sent = dispatch(buffer, x, idx)
        plain = combine(buffer, sent.recv_x, sent.handle)
        shared = (x * 2).detach().requires_grad_()
        both = combine(buffer, sent.recv_x, sent.handle, bias=(shared, x.detach()))
        assert torch.equal(both, plain + 3 * x)
        backward(both, mine)
        assert torch.equal(shared.grad, mine.seed_grad.to(device()))


def check_unused_outputs(comm: MPI.Intracomm) -> None:
    """Ranks may use different outputs. Gradients of all outputs travel in any case."""
    tokens = tokens_of_all(comm, 6, whole=True)
    mine, rank = tokens[comm.Get_rank()], comm.Get_rank()
    of_rank = [(of.idx // EACH).masked_fill(of.idx < 0, -1) for of in tokens]
    with buffer_for(comm) as buffer:
        for uses_x, uses_weights in (
            (lambda r: True, lambda r: False),
            (lambda r: False, lambda r: True),
            (lambda r: r % 2 == 0, lambda r: r % 2 == 1),
        ):
            x, idx, weights = mine.leaves()
            sent = dispatch(buffer, x, idx, weights)
            loss = 0 * sent.recv_x.sum() if not (uses_x(rank) or uses_weights(rank)) else 0
            loss = loss + (sent.recv_x.sum() if uses_x(rank) else 0) + (sent.recv_topk_weights.sum() if uses_weights(rank) else 0)
            loss.backward()
            there = of_rank[rank]
            copies = sum((there == r).any(1).float() for r in range(comm.Get_size()) if uses_x(r)) + torch.zeros(len(there))
            chosen = sum((there == r).float() for r in range(comm.Get_size()) if uses_weights(r)) + torch.zeros(there.shape)
            assert torch.equal(x.grad.cpu(), copies[:, None].expand(-1, HIDDEN))
            assert torch.equal(weights.grad.cpu(), chosen)


def check_inputs_without_gradients(comm: MPI.Intracomm) -> None:
    tokens, mats = tokens_of_all(comm, 7), matrices(comm, 7)
    mine = tokens[comm.Get_rank()]
    expected, mats_grad = dense(tokens, mats)
    with buffer_for(comm) as buffer:
        x, idx, weights = mine.leaves()
        with torch.no_grad():
            sent = dispatch(buffer, x.detach(), idx, weights.detach())
            assert not any(t.requires_grad for t in sent[:5])
            assert combine(buffer, sent.recv_x, sent.handle).grad_fn is None
            assert layer(buffer, x, idx, weights, local(comm, mats)).grad_fn is None

        weights_of = local(comm, mats)  # only the experts learn
        out = layer(buffer, x.detach(), idx, weights.detach(), weights_of)
        backward(out, mine)
        close(weights_of.grad, mats_grad[EACH * comm.Get_rank() :][:EACH], BOUND, "the gradient of the matrices")

        out = layer(buffer, x.detach(), idx, weights, local(comm, mats))  # only the router learns
        backward(out, mine)
        close(weights.grad, expected[comm.Get_rank()][2], BOUND, "the gradient of the weights")
        out = layer(buffer, x, idx, weights.detach(), local(comm, mats))
        backward(out, mine)
        close(x.grad, expected[comm.Get_rank()][1], BOUND, "the gradient of x")


def check_ranks_that_ignore_their_rows(comm: MPI.Intracomm) -> None:
    """Odd ranks return zeros without a gradient. All ranks still make the same calls in the backward pass."""
    tokens, mats = tokens_of_all(comm, 8), matrices(comm, 8)
    mine, rank = tokens[comm.Get_rank()], comm.Get_rank()

    def lazy(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, mats: torch.Tensor) -> torch.Tensor:
        return torch.zeros(x.shape, device=x.device) if rank % 2 else experts(x, idx, weights, mats)

    for of in tokens:  # the experts of odd ranks contribute nothing
        of.idx = of.idx.masked_fill(of.idx // EACH % 2 == 1, -1)
    expected, _ = dense(tokens, mats)
    full = tokens_of_all(comm, 8)[rank].idx.to(device())
    with buffer_for(comm) as buffer:
        x, _, weights = mine.leaves()
        two = [layer(buffer, x, full, weights, local(comm, mats), run=lazy) for _ in range(2)]  # two layers on the same inputs
        backward(sum(two) / 2, mine)
        close(x.grad, expected[rank][1], BOUND, "the gradient of x")
        close(weights.grad, expected[rank][2], BOUND, "the gradient of the weights")


def check_known_routing(comm: MPI.Intracomm) -> None:
    """Use one handle in several steps, even after autograd has freed the graph of its dispatch."""
    tokens, mats = tokens_of_all(comm, 9), matrices(comm, 9)
    mine = tokens[comm.Get_rank()]
    with buffer_for(comm) as buffer:
        x, idx, weights = mine.leaves()
        first = dispatch(buffer, x * 1, idx, weights)
        backward(combine(buffer, first.recv_x, first.handle), mine)
        assert isinstance(first.handle, Handle)
        assert first.handle.num_tokens == len(x)
        assert first.handle.num_recv_tokens_per_expert_list == first.num_recv_tokens_per_expert.tolist()
        plain = buffer.dispatch(x.detach(), handle=first.handle)
        y = plain.recv_x.clone().requires_grad_()
        combine(buffer, y, plain.handle).sum().backward()
        assert torch.equal(y.grad, torch.ones_like(y))
        for step in range(3):
            x, weights_of = mine.leaves()[0], local(comm, mats)
            again = dispatch(buffer, x, handle=first.handle)
            assert again.recv_topk_idx is None
            assert again.recv_topk_weights is None
            y = experts(again.recv_x, first.recv_topk_idx, first.recv_topk_weights.detach(), weights_of)
            out = combine(buffer, y, first.handle if step % 2 else again.handle)
            backward(out, mine)
            compare(comm, tokens, mats, (out, x, None, weights_of), BOUND)


def check_layers_that_share_a_buffer(comm: MPI.Intracomm) -> None:
    """Autograd keeps more views than fit the Buffer's memory. They stay valid for a second backward pass."""
    tokens, mats = tokens_of_all(comm, 10), matrices(comm, 10)
    mine, weights_of = tokens[comm.Get_rank()], local(comm, mats)
    with buffer_for(comm, num_slots=1) as buffer:
        x, idx, weights = mine.leaves()
        out = x
        for _ in range(5):
            out = layer(buffer, out, idx, weights, weights_of)
        loss = (out * mine.seed_grad.to(device())).sum()
        loss.backward(retain_graph=True)
        compare(comm, tokens, mats, (out, x, weights, weights_of), 2 * BOUND, 5)
        before = [t.grad.clone() for t in (x, weights, weights_of)]
        layer(buffer, x.detach() + 1, idx, weights.detach(), weights_of.detach())  # results that nothing keeps
        for t in (x, weights, weights_of):
            t.grad = None
        loss.backward()
        assert all(torch.equal(a, t.grad) for a, t in zip(before, (x, weights, weights_of), strict=True))


def check_checkpoints(comm: MPI.Intracomm) -> None:
    """Activation checkpointing repeats the calls on all ranks in the same order, even if the experts of a rank save nothing."""
    tokens, mats = tokens_of_all(comm, 11), matrices(comm, 11)
    mine = tokens[comm.Get_rank()]

    def run(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return experts(x, *rest) if len(x) else torch.zeros(x.shape, device=x.device)

    for of in tokens:
        of.idx = of.idx.masked_fill(of.idx < EACH, -1)  # rank 0 gets no rows
    with buffer_for(comm) as buffer:
        for reentrant in (False, True):
            x, idx, weights = mine.leaves()
            weights_of = local(comm, mats)
            out = x
            for _ in range(2):
                out = checkpoint(
                    lambda *t: layer(buffer, *t, run=run),
                    out,
                    idx,
                    weights,
                    weights_of,
                    use_reentrant=reentrant,
                )
            backward(out, mine)
            weights_of.grad = torch.zeros_like(weights_of) if weights_of.grad is None else weights_of.grad
            compare(comm, tokens, mats, (out, x, weights, weights_of), BOUND, 2)


def check_a_backward_pass_in_pieces(comm: MPI.Intracomm) -> None:
    """Each pass makes each call once: with a dispatch outside of a checkpoint, and with a gradient that the program passes on."""
    tokens, mats = tokens_of_all(comm, 14), matrices(comm, 14)
    mine = tokens[comm.Get_rank()]
    with buffer_for(comm) as buffer:
        for how in ("reentrant", "not reentrant", "by hand"):
            x, idx, weights = mine.leaves()
            weights_of = local(comm, mats)
            sent = dispatch(buffer, x, idx, weights)
            assert sent.num_recv_tokens_per_expert_list == sent.num_recv_tokens_per_expert.tolist()
            given = sent.recv_x, sent.recv_topk_weights

            def tail(rows: torch.Tensor, gains: torch.Tensor, sent: Any = sent, mats: torch.Tensor = weights_of) -> torch.Tensor:
                return combine(buffer, experts(rows, sent.recv_topk_idx, gains, mats), sent.handle)

            if how == "by hand":
                leaves = [t.detach().requires_grad_() for t in given]
                out = tail(*leaves, sent._replace(handle=sent.handle.detach()))
                backward(out, mine)
                torch.autograd.backward(given, [leaf.grad for leaf in leaves])
            else:
                out = checkpoint(tail, *given, use_reentrant=how == "reentrant")
                backward(out, mine)
            compare(comm, tokens, mats, (out, x, weights, weights_of), BOUND)


def check_fp8(comm: MPI.Intracomm) -> None:
    """The error of a number is at most 1/16 of it, or 2**-18 of the largest of its 128. The gradient ignores the rounding."""
    tokens, mats = tokens_of_all(comm, 12), matrices(comm, 12)
    mine = tokens[comm.Get_rank()]
    scale = torch.from_numpy(np.random.default_rng(13).uniform(-12, 12, (64, 1)).astype(np.float32)).exp()

    def check_bounds(got: torch.Tensor, want: torch.Tensor) -> None:
        last_rounding = {torch.float32: 0, torch.bfloat16: 2**-8}[want.dtype]  # to the dtype of x
        groups, error = (t.double().unflatten(1, (-1, 128)) for t in (want, got - want))
        least = groups.abs().amax(2, keepdim=True).clamp_min(1e-4) * 2.0**-18
        assert (error.abs() <= (groups.abs() * (1 / 16 + last_rounding + 1e-6)).maximum(least)).all()
        assert not torch.equal(got, want) or not len(want)

    with buffer_for(comm, hidden=256) as buffer:
        for dtype in (torch.float32, torch.bfloat16):
            values = (mine.x * scale[: len(mine.x)]).repeat(1, 2).to(dtype)
            values[:1] = 0
            x, idx = values.to(device()).requires_grad_(), mine.idx.to(device())
            exact, rounded = (dispatch(buffer, x, idx, fp8=fp8) for fp8 in (False, True))
            assert rounded.recv_x.dtype == dtype
            check_bounds(rounded.recv_x, exact.recv_x)
            grads = []
            for sent in (exact, rounded):
                x.grad = None
                sent.recv_x.backward(torch.ones_like(sent.recv_x) / 3)
                grads.append(x.grad)
            assert torch.equal(*grads)

            y = torch.zeros_like(exact.recv_x).requires_grad_()
            grads = []
            for fp8_grad in (False, True):
                y.grad = None
                combine(buffer, y, exact.handle, fp8_grad=fp8_grad).backward(x.detach().t().contiguous().t())
                grads.append(y.grad)
            check_bounds(grads[1], grads[0])
    with buffer_for(comm) as buffer:  # a whole layer
        x, idx, weights = mine.leaves()
        weights_of = local(comm, mats)
        out = layer(buffer, x, idx, weights, weights_of, fp8=True, fp8_grad=True, num_worst_tokens=64 * comm.Get_size())
        backward(out, mine)
        compare(comm, tokens, mats, (out, x, weights, weights_of), 0.1)


def check_compressed_rows(comm: MPI.Intracomm) -> None:
    """A combine has the bits of the Buffer's own. Its gradients are those of rows that travel as they are."""
    mine = tokens_of_all(comm, 26)[comm.Get_rank()]

    def run(compress: str | None, layout: str) -> tuple[torch.Tensor, ...]:
        x, idx, weights = mine.leaves()
        bias = mine.seed_grad.to(device()).clone().requires_grad_()
        sent = dispatch(buffer, x, idx, weights, layout=layout)
        y, gains = torch.tanh(sent.recv_x), sent.recv_topk_weights if layout == "expert" else None
        out = combine(buffer, y, sent.handle, topk_weights=gains, bias=bias, compress=compress)
        how = dict(topk_weights=gains.detach(), weighted=True) if layout == "expert" else {}
        assert torch.equal(out, buffer.combine(y.detach(), sent.handle, bias=bias.detach(), compress=compress, **how).x)
        backward(out, mine)
        return out, x.grad, weights.grad, bias.grad

    with buffer_for(comm) as buffer:
        for layout in ("token", "expert"):
            plain, *expected = run(None, layout)
            for compress in COMPRESSIONS:
                out, *gradients = run(compress, layout)
                if not buffer.config.has_network:  # a rank may have no token at another node
                    assert not torch.equal(out, plain), f"{compress}: the rows were not compressed"
                assert all(torch.equal(*pair) for pair in zip(gradients, expected, strict=True))
        sent = dispatch(buffer, mine.x.to(device()), mine.idx.to(device()), layout="expert")
        for wrong in ("fp4", 8):
            with raises(EPInputError, f"compress={wrong!r}", "'fp8' or 'log10'"):
                combine(buffer, sent.recv_x, sent.handle, compress=wrong)
        with raises(EPInputError, "compress='fp8' with reduce='topk'"):
            combine(buffer, sent.recv_x, sent.handle, compress="fp8", reduce="topk")
    with buffer_for(comm, hidden=64) as buffer:
        sent = dispatch(buffer, mine.x[:, :64].contiguous().to(device()), mine.idx.to(device()))
        with raises(EPInputError, "hidden=64; expected a multiple of 128 with compress='log10'"):
            combine(buffer, sent.recv_x, sent.handle, compress="log10")


def check_no_second_derivative(comm: MPI.Intracomm) -> None:
    mine = tokens_of_all(comm, 14)[comm.Get_rank()]
    with buffer_for(comm) as buffer:
        x, idx, _ = mine.leaves()
        sent = dispatch(buffer, x * x, idx)
        (grad,) = torch.autograd.grad((combine(buffer, sent.recv_x, sent.handle) ** 2).sum(), x, create_graph=True)
        with raises(RuntimeError, "once_differentiable"):
            grad.sum().backward()


def check_errors(comm: MPI.Intracomm) -> None:
    mine = tokens_of_all(comm, 16)[comm.Get_rank()]
    x, idx, weights = mine.leaves()
    with buffer_for(comm) as buffer:
        with raises(EPInputError, "float64", "gradient"):
            dispatch(buffer, x.double(), idx)
        with raises(EPInputError, "topk_idx=<ndarray>", "torch.Tensor"):
            dispatch(buffer, x, idx.cpu().numpy())
        with raises(EPInputError, "x=[", "torch.Tensor"):
            combine(buffer, [1.0], None)
        with raises(EPInputError, "uint8", "fp8=True"):
            dispatch(buffer, torch.zeros(len(x), HIDDEN, dtype=torch.uint8, device=device()), idx, fp8=True)
        sent = dispatch(buffer, x, idx, weights)
        loss = combine(buffer, sent.recv_x, sent.handle).sum()
    with raises(EPDestroyedError, "destroyed"):
        loss.backward()
    with buffer_for(comm, hidden=64) as buffer:
        x = x[:, :64].contiguous()
        with raises(EPInputError, "128"):
            dispatch(buffer, x, idx, fp8=True)
        sent = dispatch(buffer, x, idx)
        with raises(EPInputError, "128"):
            combine(buffer, sent.recv_x, sent.handle, fp8_grad=True)


if __name__ == "__main__":
    main(__name__, *sys.argv[1:])  # more programs, such as torch_groups
