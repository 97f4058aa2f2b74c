"""The experts of a rank as grouped products, after dispatches by expert with and without signals.

mpirun -n 2 python tests/programs/torch_grouped.py
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from spmd import main, raises
from torch.utils.checkpoint import checkpoint
from torch_layers import BOUND, EACH, HIDDEN, buffer_for, close, device, tokens_of_all

from deepep_rt import Buffer, EPInputError
from deepep_rt.torch import expert_mlp, grouped_mlp, grouped_product
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


def _dense(
    tokens: list[Any], w1: torch.Tensor, w2: torch.Tensor, activation: Callable[..., Any]
) -> tuple[list[list[torch.Tensor]], torch.Tensor, torch.Tensor]:
    """Return output, gradient of x and of the weights for each rank, and the gradients of all matrices, in float64."""
    leaves = [[t.double().requires_grad_() for t in (of.x, of.weights)] for of in tokens]
    w1, w2 = (w.double().cpu().requires_grad_() for w in (w1, w2))
    outs = []
    for of, (x, weights) in zip(tokens, leaves, strict=True):
        each = torch.stack([activation(x @ a) @ b for a, b in zip(w1, w2, strict=True)], 1)  # [tokens, experts, hidden]
        gain = torch.zeros(len(x), len(w1), dtype=torch.float64)
        gain = gain.scatter_add(1, of.idx.clamp_min(0), weights * (of.idx >= 0))
        outs.append((each * gain[:, :, None]).sum(1))
    sum((out * of.seed_grad).sum() for out, of in zip(outs, tokens, strict=True)).backward()
    return [[out.detach(), x.grad, w.grad] for out, (x, w) in zip(outs, leaves, strict=True)], w1.grad, w2.grad


def _check_expert_mlp(comm: MPI.Intracomm, dtype: torch.dtype, bound: float, wrap: Callable[..., Any], **how: Any) -> None:
    """Compare a layer and all of its gradients with the same layer on one rank."""
    rank, some = comm.Get_rank(), dict(how.pop("tokens", {}))
    tokens = tokens_of_all(comm, 6, **some)
    for of in tokens:
        of.x, of.seed_grad = of.x.to(dtype).float(), of.seed_grad.to(dtype).float()
    w1, w2 = (
        torch.from_numpy(np.random.default_rng(seed).standard_normal((EACH * comm.Get_size(), *shape), np.float32) / shape[0] ** 0.5)
        .to(dtype)
        .to(device())
        for seed, shape in enumerate(((HIDDEN, 2 * INNER), (INNER, HIDDEN)))
    )  # fmt: skip
    of_ranks, grad_w1, grad_w2 = _dense(tokens, w1, w2, how.get("activation", swiglu))
    own = slice(EACH * rank, EACH * (rank + 1))
    mine1, mine2 = (w[own].clone().requires_grad_() for w in (w1, w2))
    with buffer_for(comm, dtype=str(dtype).removeprefix("torch.")) as buffer:
        x, idx, weights = tokens[rank].leaves(dtype)
        out = wrap(lambda *leaves: expert_mlp(buffer, leaves[0], idx, *leaves[1:], **how), x, weights, mine1, mine2)
        (out * tokens[rank].seed_grad.to(out.device)).sum().backward()
        wanted = [*of_ranks[rank], grad_w1[own], grad_w2[own]]
        for name, got, want in zip(
            ("output", "x", "weights", "w1", "w2"), (out, x.grad, weights.grad, mine1.grad, mine2.grad), wanted, strict=True
        ):
            assert got.dtype == (torch.float32 if name == "weights" else dtype), name
            close(got, want, bound, f"{how} {some}: {name}")


def _as_it_is(layer: Callable[..., Any], *leaves: Any) -> Any:
    return layer(*leaves)


@contextmanager
def _undefined_rows() -> Iterator[None]:
    """Let products leave NaN where they promise nothing, as those on GPUs may: behind the last expert."""
    module = sys.modules[expert_mlp.__module__]
    plain = module.grouped_mm

    def grouped_mm(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        out = plain(x, weight, ends)
        out[int(ends[-1]) :] = torch.nan
        return out

    def product_of_rows(sent: Any, weight: torch.Tensor, scales: Any) -> torch.Tensor:
        sent.event.wait()
        return grouped_mm(sent.recv_x, weight, sent.expert_offsets[1:])

    replaced = dict(grouped_mm=grouped_mm, product_of_rows=product_of_rows)
    before = {name: getattr(module, name) for name in replaced}
    vars(module).update(replaced)
    try:
        yield
    finally:
        vars(module).update(before)


def _steep_gate(x: torch.Tensor) -> torch.Tensor:
    """An activation that is NaN for rows of zeros, with infinite derivatives there, and whose result is not contiguous."""
    gate, up = x.abs().sqrt().chunk(2, dim=1)
    return (gate * up.sign() / up.sign()).t().contiguous().t()


def check_gradients_of_expert_mlp(comm: MPI.Intracomm) -> None:
    """With signals and without, in each dtype, for ranks and experts without tokens, with room for the most rows, and in a checkpoint."""
    first = EACH if comm.Get_size() > 1 else 0
    for dtype, bound in ((torch.float32, BOUND), (torch.float16, 1e-2), (torch.bfloat16, 3e-2)):
        for signals in (False, True):
            _check_expert_mlp(comm, dtype, bound, _as_it_is, signals=signals)
    worst = 128 * EACH + 128 * comm.Get_size()
    for tokens in (dict(counts=lambda rank: 0 if rank == 0 else 6), dict(first=first), dict(skip=1.0)):
        with _undefined_rows():
            _check_expert_mlp(comm, torch.float32, BOUND, _as_it_is, tokens=tokens, num_worst_tokens=worst, signals=True)
        for dtype, bound in ((torch.float32, BOUND), (torch.bfloat16, 3e-2)):
            _check_expert_mlp(comm, dtype, bound, _as_it_is, tokens=tokens)
    for reentrant in (False, True):
        again = functools.partial(checkpoint, use_reentrant=reentrant)
        _check_expert_mlp(comm, torch.float32, BOUND, again)
    _check_expert_mlp(comm, torch.float32, 1e-2, _as_it_is, activation=_steep_gate)


def check_a_compiled_function_with_expert_mlp(comm: MPI.Intracomm) -> None:
    """The call breaks the graph."""
    w1, w2 = _weights(comm, HIDDEN, 2 * INNER), _weights(comm, INNER, HIDDEN, seed=1)
    with buffer_for(comm, dtype="bfloat16") as buffer:
        x, idx, weights = tokens_of_all(comm, 9)[comm.Get_rank()].leaves(torch.bfloat16)

        def layer(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return expert_mlp(buffer, x * 2, idx, weights, w1, w2) + 1

        found = []
        for run in (layer, torch.compile(layer, backend="eager")):
            out = run(x, weights)
            found.append([out, *torch.autograd.grad(out.float().sum(), (x, weights))])
        assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def check_activations_of_expert_mlp(comm: MPI.Intracomm) -> None:
    """Compiled functions, modules that begin to train, and autocast, which the layer leaves out."""
    w1, w2 = _weights(comm, HIDDEN, 2 * INNER), _weights(comm, 2 * INNER, HIDDEN, seed=1)

    def squared(rows: torch.Tensor) -> torch.Tensor:
        return torch.relu(rows) ** 2

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones((), device=device(), dtype=torch.bfloat16), requires_grad=False)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return squared(rows) * self.scale

    with buffer_for(comm, dtype="bfloat16") as buffer:
        x, idx, weights = tokens_of_all(comm, 10)[comm.Get_rank()].leaves(torch.bfloat16)
        run = functools.partial(expert_mlp, buffer, x, idx, weights, w1, w2)
        wanted = torch.autograd.grad(run(activation=squared).float().sum(), (x, weights))
        module, num_compiled = Scaled(), 0

        def count(graph: Any, _: Any) -> Any:
            nonlocal num_compiled
            num_compiled += 1
            return graph.forward

        for activation in (torch.compile(squared, backend=count, dynamic=True), module):
            with torch.autocast(device(), dtype=torch.bfloat16):
                out = run(activation=activation)
            found = torch.autograd.grad(out.float().sum(), (x, weights))
            assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
        assert num_compiled <= 2, "one version for each mode of gradients"
        module.scale.requires_grad_()
        with raises(EPInputError, "parameters that require a gradient"):
            run(activation=module)
        with torch.no_grad():
            assert run(activation=module).shape == x.shape


def check_an_expert_mlp_whose_ranks_need_other_gradients(comm: MPI.Intracomm) -> None:
    """In each step, a rank needs another gradient than the others, or none."""
    with buffer_for(comm, dtype="bfloat16") as buffer:
        x, idx, weights = tokens_of_all(comm, 7)[comm.Get_rank()].leaves(torch.bfloat16)
        leaves = [x.detach(), weights.detach(), _weights(comm, HIDDEN, 2 * INNER), _weights(comm, INNER, HIDDEN, seed=1)]
        for step in range(5):
            wants = (comm.Get_rank() + step) % 5
            given = [leaf.clone().requires_grad_(wants == number + 1) for number, leaf in enumerate(leaves)]
            expert_mlp(buffer, given[0], idx, *given[1:]).float().sum().backward()
            assert [leaf.grad is not None for leaf in given] == [wants == number + 1 for number in range(4)]
        with torch.no_grad():
            assert not expert_mlp(buffer, given[0], idx, *given[1:]).requires_grad


def check_errors_of_expert_mlp(comm: MPI.Intracomm) -> None:
    w1, w2 = _weights(comm, HIDDEN, 2 * INNER), _weights(comm, INNER, HIDDEN, seed=1)
    with buffer_for(comm, dtype="bfloat16") as buffer:
        x, idx, weights = (t.detach() for t in tokens_of_all(comm, 8)[comm.Get_rank()].leaves(torch.bfloat16))
        good: dict[str, Any] = dict(x=x, topk_idx=idx, topk_weights=weights, w1=w1, w2=w2)
        wrong = {
            "w1.shape": dict(w1=w1[:, :64]),
            "w2.shape": dict(w2=w2.float()),
            "activation makes [1": dict(activation=torch.nn.functional.silu),
            "a multiple of 8": dict(w1=_weights(comm, HIDDEN, 2 * INNER + 2)),
            "changes nothing in place": dict(activation=lambda rows: swiglu(rows.relu_())),
            "makes no gradient": dict(activation=lambda rows: swiglu(rows).detach()),
            "parameters": dict(activation=lambda rows: swiglu(rows) * torch.ones((), requires_grad=True)),
            "also of no rows": dict(activation=lambda rows: swiglu(rows) * rows.amax()),
            "of 0 rows": dict(activation=lambda rows: swiglu(rows) if len(rows) else rows),
            "x.dtype": dict(x=idx),
            "topk_weights": dict(topk_weights=None),
            "signals=": dict(signals="yes"),
            "activation=": dict(activation="silu"),
        }
        for text, change in wrong.items():
            with raises(EPInputError, text):
                expert_mlp(buffer, **{**good, **change})
        for has_gradients in (True, False):
            with torch.set_grad_enabled(has_gradients):
                assert expert_mlp(buffer, **good).shape == x.shape
        with torch.no_grad():
            changed = expert_mlp(buffer, **good, activation=lambda rows: swiglu(rows.relu_()))
            assert torch.equal(changed, expert_mlp(buffer, **good, activation=lambda rows: swiglu(rows.relu())))


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
        arrays = x.float().cpu().numpy().astype("float16"), idx.cpu().numpy()
        others = Buffer.dispatch(buffer, *arrays, layout="expert", expert_alignment=64)  # that of this Buffer takes tensors only
        with raises(EPInputError, "arrays of numpy", "PyTorch's tensors"):
            grouped_product(others, _weights(comm, HIDDEN, INNER))
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
