"""Handles whose entries a program keeps one by one, as autograd functions do."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from expect import raises
from torch.utils.checkpoint import checkpoint

from deepep_rt import EPUnavailableError

from .world import World, deep_ep, layout_of, routing


class _DispatchAndCombine(torch.autograd.Function):
    """Saves the entries of a handle in autograd's context, and passes them back as a tuple."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, buffer: deep_ep.Buffer, layout: dict[str, Any], topk_idx: torch.Tensor
    ) -> torch.Tensor:
        recv_x, _, _, _, handle, _ = buffer.dispatch(x, topk_idx=topk_idx, **layout)
        ctx.buffer = buffer
        ctx.save_for_backward(*handle)
        return buffer.combine(recv_x, tuple(handle))[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        entries = ctx.saved_tensors  # checkpoints allow only one read
        rows, *_ = ctx.buffer.dispatch(grads[0].contiguous(), handle=entries)
        return ctx.buffer.combine(rows, list(entries))[0], None, None, None


class _AlongHandle(torch.autograd.Function):
    """Takes the entries of a handle as arguments."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, buffer: deep_ep.Buffer, *handle: Any) -> torch.Tensor:
        ctx.buffer = buffer
        ctx.save_for_backward(*handle)
        return buffer.combine(buffer.dispatch(x, handle=handle)[0], handle)[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        entries = ctx.saved_tensors
        rows, *_ = ctx.buffer.dispatch(grads[0].contiguous(), handle=entries)
        return ctx.buffer.combine(rows, entries)[0], *[None] * (1 + len(entries))


def _copy_to_cpu(saved: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(saved, device="cpu").copy_(saved)


def _copy_to(moved: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty(moved.shape, dtype=moved.dtype, device=device).copy_(moved)


def run_handles_taken_apart(world: World) -> None:
    """Save entries, move them with hooks of saved tensors, and repeat the forward pass for the backward pass."""
    with world.buffer(int(1e7)) as buffer:
        num_experts = 4 * world.num_ranks
        rows = world.random_rows(6, 5)
        topk_idx = routing(world, 5, 6, 2, num_experts)
        layout = layout_of(buffer, topk_idx, num_experts)
        copies = layout["is_token_in_rank"].sum(1, keepdim=True)

        def round_trip(x: torch.Tensor) -> torch.Tensor:
            return _DispatchAndCombine.apply(x, buffer, layout, topk_idx)

        def repeated(x: torch.Tensor) -> torch.Tensor:
            return checkpoint(round_trip, x, use_reentrant=False)

        def along_handle(x: torch.Tensor, *handle: Any) -> torch.Tensor:
            return _AlongHandle.apply(x, buffer, *handle)

        def repeated_with_entries(x: torch.Tensor) -> torch.Tensor:
            handle = buffer.dispatch(rows, topk_idx=topk_idx, **layout)[4]
            return checkpoint(along_handle, x, *handle, use_reentrant=True)

        hooks = torch.autograd.graph.saved_tensors_hooks
        for run, saving in (
            (round_trip, nullcontext()),
            (repeated, nullcontext()),
            (repeated_with_entries, nullcontext()),
            (round_trip, torch.autograd.graph.save_on_cpu()),
            (round_trip, torch.autograd.graph.save_on_cpu(pin_memory=True)),
            (round_trip, hooks(_copy_to_cpu, partial(_copy_to, device=world.device))),
            (round_trip, hooks(torch.Tensor.detach, torch.clone)),
            (repeated, torch.autograd.graph.save_on_cpu()),
        ):
            x = rows.clone().requires_grad_()
            with saving:
                out = run(x)
            assert torch.equal(out, rows * copies)
            gc.collect()
            out.sum().backward()
            assert torch.equal(x.grad, copies.expand_as(x).to(x.dtype))
        handle = buffer.dispatch(rows, topk_idx=topk_idx, **layout)[4]
        _check_unsupported_entries(
            handle,
            {1: "rdma_channel_prefix_matrix", 4: "recv_rdma_rank_prefix_sum", 8: "send_rdma_head", 9: "send_nvl_head"}
            if len(handle) == 10
            else {1: "channel_prefix_matrix", 2: "recv_channel_prefix_matrix", 5: "send_head"},
        )


def _check_unsupported_entries(handle: Any, names: dict[int, str]) -> None:
    """Read the attributes of unsupported entries, and copy them. A use of their elements raises an error with their name."""
    for entry, name in ((handle[index], name) for index, name in names.items()):
        assert (entry.shape, entry.size(), entry.dim(), entry.numel(), entry.nbytes) == ((0,), (0,), 1, 0, 0)
        assert (entry.dtype, entry.device.type, entry.layout, entry.is_contiguous()) == (torch.int32, "cpu", torch.strided, True)
        flags = (entry.requires_grad, entry.is_leaf, entry.grad_fn, entry._base, entry.is_sparse)
        assert flags == (False, True, None, None, False)
        for copied in (entry.detach(), entry.clone(), entry.cpu(), entry.to("cpu", copy=True), entry.contiguous(), entry.data):
            for again in (copied, copy.copy(copied), copy.deepcopy(copied), copied.requires_grad_(False)):
                assert (again.handle, again.entry) == (handle, name)
        for use in (
            lambda a: a[0],
            len,
            torch.sum,
            lambda a: a + 1,
            lambda a: torch.cat([a, a]),
            lambda a: a.T,
            lambda a: a.tolist(),
        ):
            with raises(EPUnavailableError, name):
                use(entry)
