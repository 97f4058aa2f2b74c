"""`dispatch` and `combine` as operators of `torch.library`, which `torch.compile` keeps in its graphs.

A graph holds tensors and numbers. A Buffer is therefore its number, and a handle is a tensor of one element that leads to it. This tensor
also ties the backward pass of a combine to that of its dispatch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._checks import choice, whole_number
from ..backends.inputs import check_worst, compression
from ..buffer import Buffer, buffer_of, info_of
from ..config import MAX_ALIGNMENT
from ..errors import EPInputError
from .arguments import check_dims
from .calls import backward_of, backward_of_combine, backward_of_dispatch, numbered, send, send_again, send_back
from .handles import TIE, TracedHandle, check_traced, handle_of, tensor_of
from .tensor_ops import FLOATS, aligned, dtype_of_gradient


def operator(name: str, in_cuda_graphs: bool = False) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as an operator. `torch.compile` keeps operators out of CUDA graphs if they wait for the host."""
    tag = getattr(torch.Tag, "cudagraph_unsafe", None)  # older versions leave out all operators with tensors on the CPU
    more: dict[str, Any] = {} if in_cuda_graphs or tag is None else {"tags": (tag,)}
    return torch.library.custom_op(f"deepep_rt::{name}", mutates_args=(), **more)


@operator("dispatch")
def dispatch_op(
    x: Tensor,
    tie: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    buffer: int,
    num_worst_tokens: int | None,
    expert_alignment: int,
    layout: str,
    fp8: bool,
    reduce: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Dispatch along a new routing. `tie` and `reduce` are for the gradient.

    Returns:
        The rows; the experts of the rows, or with `layout="expert"` the offsets of experts; the weights, or an empty tensor; the number of
        rows that arrived; the counts of experts; and the tensor of the handle.
    """
    by_expert = layout == "expert"
    options: dict[str, Any] = dict(num_worst_tokens=num_worst_tokens, expert_alignment=expert_alignment, layout=layout)
    purpose = numbered(of := buffer_of(buffer), "dispatch")
    given = (aligned(x), fp8, topk_idx, topk_weights)
    sent, recv_x, number = send(purpose, of, *given, zero_padding=by_expert, **options)
    weights = sent.recv_topk_weights
    if weights is None:
        weights = x.new_empty(0, dtype=torch.float32)
    experts = sent.expert_offsets if by_expert else sent.recv_topk_idx
    counts = sent.num_recv_tokens, sent.num_recv_tokens_per_expert
    return recv_x, experts, weights, *counts, tensor_of(sent.handle, number)


@dispatch_op.register_fake
def _(
    x: Tensor,
    tie: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    buffer: int,
    num_worst_tokens: int | None,
    expert_alignment: int,
    layout: str,
    fp8: bool,
    reduce: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    config = buffer_of(buffer).config
    num_rows = torch.library.get_ctx().new_dynamic_size() if num_worst_tokens is None else num_worst_tokens
    by_expert = layout == "expert"
    whole, number = dict(dtype=torch.int32), dict(dtype=torch.float32)
    of_row = (num_rows,) if by_expert else (num_rows, *topk_idx.shape[1:])  # the call refuses a wrong shape
    return (
        x.new_empty(num_rows, *x.shape[1:]),
        x.new_empty(config.num_local_experts + 1, **whole) if by_expert else topk_idx.new_empty(of_row),
        x.new_empty(of_row if topk_weights is not None else 0, **number),
        x.new_empty(1, **whole),
        x.new_empty(config.num_local_experts, **whole),
        torch.empty(1, dtype=torch.float64, device="cpu"),
    )


def _keep_for_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    x, _, _, weights, ctx.buffer, _, _, layout, _, ctx.reduce = inputs
    ctx.num_tokens, ctx.has_weights, ctx.by_expert = x.shape[0], weights is not None, layout == "expert"
    ctx.is_float, ctx.dtype = x.dtype in FLOATS, dtype_of_gradient(buffer_of(ctx.buffer), x, ctx.has_weights)
    if not ctx.is_float:
        recv_x, _, recv_weights, *_, handle = output
        ctx.mark_non_differentiable(*([recv_x] if ctx.dtype else [recv_x, recv_weights, handle]))
    ctx.save_for_backward(output[5], output[1])


def _dispatch_backward(
    ctx: Any, grad_x: Tensor | None, _: Any, grad_weights: Tensor, __: Any, ___: Any, after: Tensor
) -> tuple[Any, ...]:
    handle, experts = ctx.saved_tensors
    rows: dict[str, Any] = {}
    if not ctx.is_float:
        hidden = buffer_of(ctx.buffer).config.hidden
        rows = dict(size=(grad_weights.shape[0], hidden), dtype=ctx.dtype, device=grad_weights.device)
        grad_x = None

    def call(rows: Tensor, weights: Tensor | None) -> tuple[Any, ...]:
        return torch.ops.deepep_rt.send_back(rows, handle, after, weights, ctx.buffer, ctx.num_tokens, ctx.reduce)

    elsewhere = experts < 0 if ctx.has_weights and not ctx.by_expert else None
    x, weights, tie = backward_of_dispatch(call, grad_x, grad_weights, rows, ctx.has_weights, elsewhere)
    needs_x, _, _, needs_weights, *_ = ctx.needs_input_grad
    return x if needs_x else None, tie, None, weights if needs_weights else None, *[None] * 6


dispatch_op.register_autograd(_dispatch_backward, setup_context=_keep_for_dispatch)


@operator("combine")
def combine_op(
    x: Tensor,
    tie: Tensor,
    handle: Tensor,
    topk_weights: Tensor | None,
    bias_0: Tensor | None,
    bias_1: Tensor | None,
    buffer: int,
    num_tokens: int,
    fp8_grad: bool,
    reduce: str,
    compress: str | None,
) -> Tensor:
    """Add up rows, weighted or not, and biases. `tie` and `fp8_grad` are for the gradient."""
    biases = tuple(bias for bias in (bias_0, bias_1) if bias is not None)
    how: dict[str, Any] = dict(weighted=topk_weights is not None, reduce=reduce, compress=compress, bias=biases or None)
    known, numbers = handle_of(handle)
    with numbered(of := buffer_of(buffer), "combine") as number:
        numbers["combine"].append(number)
        return of.combine(aligned(x), known, topk_weights=topk_weights, **how).x


@combine_op.register_fake
def _(
    x: Tensor,
    tie: Tensor,
    handle: Tensor,
    topk_weights: Tensor | None,
    bias_0: Tensor | None,
    bias_1: Tensor | None,
    buffer: int,
    num_tokens: int,
    *_: Any,
) -> Tensor:
    return x.new_empty(num_tokens, *x.shape[1:])


def _keep_for_combine(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, _, handle, weights, *biases, ctx.buffer, _, ctx.fp8_grad, ctx.reduce, _ = inputs
    ctx.num_recv_rows, ctx.biases = x.shape[0], [bias is not None for bias in biases]
    ctx.save_for_backward(handle, *(() if weights is None else (weights, x)))


def _combine_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    handle, *saved = ctx.saved_tensors
    weights, x = saved or (None, None)

    def call(grad: Tensor) -> tuple[Any, ...]:
        sizes = ctx.buffer, ctx.num_recv_rows, x is not None, ctx.fp8_grad
        return torch.ops.deepep_rt.send_again(grad, None, handle, *sizes, "rank")

    grad_x, grad_weights, tie = backward_of_combine(call, grad, weights, x, ctx.reduce)
    biases = [grad if exists else None for exists in ctx.biases]
    return grad_x, tie, tie, grad_weights, *biases, *[None] * 5


combine_op.register_autograd(_combine_backward, setup_context=_keep_for_combine)


@operator("send_back")
def send_back_op(
    x: Tensor, handle: Tensor, after: Tensor, topk_weights: Tensor | None, buffer: int, num_tokens: int, reduce: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Add up rows, and return weights to their choices: the gradient of a dispatch.

    `after` is the gradient of its handle: graphs make this call after the gradients of all combines, even if the experts used no row.

    Returns:
        The rows, the weights, and the gradient of the tie. It depends on this call, so that no graph leaves the call out.
    """
    known, numbers = handle_of(handle)
    purpose = backward_of(of := buffer_of(buffer), "dispatch", *numbers["dispatch"])
    back = send_back(purpose, of, x, topk_weights, known, reduce)
    returned = x.new_empty(0, dtype=torch.float32) if topk_weights is None else back.topk_weights
    return back.x, returned, torch.zeros_like(handle)


@send_back_op.register_fake
def _(
    x: Tensor, handle: Tensor, after: Tensor, topk_weights: Tensor | None, buffer: int, num_tokens: int, reduce: str
) -> tuple[Tensor, Tensor, Tensor]:
    of_token = 0 if topk_weights is None else (num_tokens, buffer_of(buffer).config.num_topk)
    return x.new_empty(num_tokens, x.shape[1]), x.new_empty(of_token, dtype=torch.float32), torch.empty_like(handle)


@operator("send_again")
def send_again_op(
    x: Tensor, tie: Tensor | None, handle: Tensor, buffer: int, num_recv_rows: int, by_expert: bool, fp8: bool, reduce: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Dispatch along a known routing. Without `tie` it is the gradient of a combine. `reduce` is for the gradient of this call.

    Returns:
        The rows; with `by_expert` whether each is padding; and a tensor of the same handle, which ties combines to this call. Without
        `tie` it is the gradient of such a tensor instead.
    """
    known, numbers = handle_of(handle)
    of = buffer_of(buffer)
    purpose = numbered(of, "dispatch") if tie is not None else backward_of(of, "combine", *numbers["combine"])
    sent, rows, number = send_again(purpose, of, x, known, fp8)
    is_padding = sent.recv_expert_idx < 0 if by_expert else x.new_empty(0, dtype=torch.bool)
    return rows, is_padding, torch.zeros_like(handle) if number is None else tensor_of(known, number)


@send_again_op.register_fake
def _(
    x: Tensor, tie: Tensor | None, handle: Tensor, buffer: int, num_recv_rows: int, by_expert: bool, fp8: bool, reduce: str
) -> tuple[Tensor, Tensor, Tensor]:
    is_padding = x.new_empty(num_recv_rows if by_expert else 0, dtype=torch.bool)
    return x.new_empty(num_recv_rows, x.shape[1]), is_padding, torch.empty_like(handle)


def _keep_for_known_dispatch(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    x, _, handle, ctx.buffer, *_, ctx.reduce = inputs
    ctx.num_tokens = x.shape[0]
    ctx.save_for_backward(handle)


def _known_dispatch_backward(ctx: Any, grad: Tensor, _: Any, after: Tensor) -> tuple[Any, ...]:
    (handle,) = ctx.saved_tensors
    x, _, tie = torch.ops.deepep_rt.send_back(grad, handle, after, None, ctx.buffer, ctx.num_tokens, ctx.reduce)
    return x, tie, tie, None, None, None, None, None


send_again_op.register_autograd(_known_dispatch_backward, setup_context=_keep_for_known_dispatch)


def traced_dispatch(
    buffer: Buffer,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    handle: Any,
    num_worst_tokens: int | None,
    expert_alignment: int,
    layout: str | None,
    fp8: bool,
    reduce: str,
) -> tuple[Any, ...]:
    """Add a dispatch to the graph. Return the fields of `Dispatched`."""
    info = info_of(buffer)
    serial = info.serial
    check_dims(x, "x", ("num_tokens", "hidden"))
    expert_alignment = whole_number(expert_alignment, "expert_alignment", 1, MAX_ALIGNMENT)
    if handle is not None:
        check_traced(handle)
        sizes_given = num_worst_tokens is not None or expert_alignment != 1
        if topk_idx is not None or topk_weights is not None or sizes_given or layout not in (None, handle.layout):
            raise EPInputError("handle= with a routing or sizes in a compiled function; expected only x. Leave the others out")
        recv_x, _, tensor = torch.ops.deepep_rt.send_again(
            x, TIE, handle.tensor, serial, handle.num_recv_rows, False, fp8, reduce
        )
        num_recv, per_expert, offsets = handle.counts
        return recv_x, None, None, num_recv, per_expert, dataclasses.replace(handle, tensor=tensor), offsets
    if topk_idx is None:
        raise EPInputError("topk_idx=None without handle; expected one of them. Pass the routing")
    layout = layout or "token"
    if num_worst_tokens is not None:
        num_worst_tokens = check_worst(info.config, num_worst_tokens, layout, expert_alignment)
    recv_x, experts, weights, num_recv, per_expert, tensor = torch.ops.deepep_rt.dispatch(
        x, TIE, topk_idx, topk_weights, serial, num_worst_tokens, expert_alignment, layout, fp8, reduce
    )
    recv_idx, offsets = (None, experts) if layout == "expert" else (experts, None)
    traced = TracedHandle(tensor, x.shape[0], recv_x.shape[0], layout, (num_recv, per_expert, offsets))
    return recv_x, recv_idx, None if topk_weights is None else weights, num_recv, per_expert, traced, offsets


def traced_combine(
    buffer: Buffer,
    x: Any,
    handle: Any,
    topk_weights: Any,
    biases: Sequence[Any],
    fp8_grad: bool,
    reduce: str,
    compress: str | None,
) -> Any:
    """Add a combine to the graph."""
    check_traced(handle)
    reduce = choice(reduce, "reduce", ("rank", "topk"))
    if len(biases) > 2:
        raise EPInputError(f"len(bias)={len(biases)}; expected at most 2 tensors. Add them up first")
    bias_0, bias_1 = (*biases, None, None)[:2]
    how = (info_of(buffer).serial, handle.num_tokens, fp8_grad, reduce, compression(buffer.config, compress, reduce))
    return torch.ops.deepep_rt.combine(x, TIE, handle.tensor, topk_weights, bias_0, bias_1, *how)
