"""Differentiable `dispatch` and `combine`."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from .._checks import choice
from ..buffer import Buffer, check_buffer
from ..errors import EPInputError
from ..results import DispatchHandle
from .arguments import check_differentiable, check_fp8, check_tensor
from .calls import backward_of, backward_of_combine, backward_of_dispatch, numbered, send, send_again, send_back
from .handles import TIE, Handle, Link, TracedHandle, unlinked
from .operators import traced_combine, traced_dispatch
from .tensor_ops import FLOATS, dtype_of_gradient


class Dispatched(NamedTuple):
    """The rows that arrived at this rank, in the order (source rank, source token).

    With `num_worst_tokens`, rows past `num_recv_tokens` are padding: `recv_x` is 0, `recv_topk_idx` is -1, `recv_topk_weights` is 0.

    With `layout="expert"` there is a row for each (token, choice), expert by expert. `recv_topk_idx` is None, `recv_topk_weights` is
    `[num_recv]`, and both rows and weights of padding are 0.
    """

    recv_x: Any
    """Rows, `[num_recv, hidden]`, dtype of `x`. Differentiable."""
    recv_topk_idx: Any
    """Local expert numbers, `[num_recv, num_topk]`, dtype of `topk_idx`; -1 for experts of other ranks. None without `topk_idx`."""
    recv_topk_weights: Any
    """Weights, `[num_recv, num_topk]` float32; 0 for experts of other ranks. Differentiable. None without `topk_weights`."""
    num_recv_tokens: Any
    """Rows that arrived, `[1]` int32, on the device."""
    num_recv_tokens_per_expert: Any
    """Received tokens of each local expert, `[num_local_experts]` int32, on the device."""
    handle: Handle
    """The handle for `combine`."""
    expert_offsets: Any = None
    """With `layout="expert"`, the first row of each local expert and the end, `[num_local_experts + 1]` int32, on the device."""

    @property
    def num_recv_tokens_per_expert_list(self) -> list[int] | None:
        """The counts on the host, which grouped matrix products need. None with `num_worst_tokens`."""
        return self.handle.num_recv_tokens_per_expert_list


def dispatch(
    buffer: Buffer,
    x: Any,
    topk_idx: Any = None,
    topk_weights: Any = None,
    *,
    handle: DispatchHandle | None = None,
    num_worst_tokens: int | None = None,
    expert_alignment: int = 1,
    layout: str | None = None,
    fp8: bool = False,
    reduce: str = "rank",
) -> Dispatched:
    """Call `Buffer.dispatch` with tensors, on the current stream. Differentiable in `x` and `topk_weights`.

    The backward pass adds up the gradients of a token's rows over the ranks, in float32. There are no second derivatives. With gradients
    enabled, floating-point results require a gradient on every rank, because other ranks may need one.
    `torch.compile(fullgraph=True)` keeps the call in its graph; see `TracedHandle`.

    Args:
        buffer: The Buffer. The backward pass needs it, and has to run before `destroy`.
        x: `[num_tokens, hidden]` bfloat16, float16 or float32; any dtype of `Buffer.dispatch` if it needs no gradient.
        topk_idx: `[num_tokens, num_topk]` int32 or int64, expert numbers; -1 skips. Not needed with `handle`.
        topk_weights: `[num_tokens, num_topk]` float32, or None. Ranks may differ in which of `x` and this require a gradient.
        handle: As in `Buffer.dispatch`.
        num_worst_tokens: As in `Buffer.dispatch`. Padding is zero here, so matrix products may include it.
        expert_alignment: As in `Buffer.dispatch`.
        layout: As in `Buffer.dispatch`.
        fp8: Send rows as float8_e4m3fn with a float32 scale for each 128 channels. They arrive in the dtype of `x`. The error is up to
            1/16 of a number, or 1/450000 of the largest one of its 128. Gradients ignore the rounding, and travel in the dtype of `x`.
        reduce: The order in which the backward pass adds up gradients, as in `Buffer.combine`. "topk" needs `layout="expert"`.

    Returns:
        Rows, experts, weights, counts and the handle.

    Raises:
        EPInputError: If an argument is wrong. No kernel was launched.
        EPOutOfMemoryError: As in `Buffer.dispatch`.
        EPTimeoutError: As in `Buffer.dispatch`.
        EPDestroyedError: After `destroy()`, also in the backward pass.

    Example:
        >>> sent = dispatch(buffer, x, topk_idx, topk_weights)
        >>> y = experts(sent.recv_x, sent.recv_topk_idx, sent.recv_topk_weights)
        >>> combine(buffer, y, sent.handle).sum().backward()
        >>> sent = dispatch(buffer, x, topk_idx, topk_weights, layout="expert", expert_alignment=16)
        >>> y = torch.nn.functional.grouped_mm(sent.recv_x, experts, offs=sent.expert_offsets[1:])
        >>> out = combine(buffer, y, sent.handle, topk_weights=sent.recv_topk_weights)
    """
    check_buffer(buffer)
    for name, tensor in (("x", x), ("topk_idx", topk_idx), ("topk_weights", topk_weights)):
        check_tensor(tensor, name, required=name == "x")
    fp8 = check_fp8(buffer, fp8, "fp8")
    check_differentiable(x, fp8)
    layout = None if layout is None else choice(layout, "layout", ("token", "expert"))
    by_expert = layout == "expert" or (
        layout is None and isinstance(handle, DispatchHandle | TracedHandle) and handle.layout == "expert"
    )
    if choice(reduce, "reduce", ("rank", "topk")) == "topk" and not by_expert:
        raise EPInputError(
            "reduce='topk' without layout='expert'; expected both, because it adds up a row for each choice. Pass layout too"
        )
    if torch.compiler.is_compiling() or isinstance(handle, TracedHandle):
        given = (x, topk_idx, topk_weights, handle, num_worst_tokens, expert_alignment, layout, fp8, reduce)
        return Dispatched(*traced_dispatch(buffer, *given))
    options = (unlinked(handle), num_worst_tokens, expert_alignment, layout, fp8, reduce)
    recv_x, recv_idx, recv_weights, num_recv, per_expert, offsets, without_link, tensor = _Dispatch.apply(
        x, topk_weights, TIE, topk_idx, buffer, *options
    )
    fields = {f.name: getattr(without_link, f.name) for f in dataclasses.fields(DispatchHandle)}
    linked = Handle(**fields, without_link=without_link, link=Link(tensor))
    return Dispatched(recv_x, recv_idx, recv_weights, num_recv, per_expert, linked, offsets)


def combine(
    buffer: Buffer,
    x: Any,
    handle: DispatchHandle,
    *,
    topk_weights: Any = None,
    bias: Any = None,
    fp8_grad: bool = False,
    reduce: str = "rank",
    compress: str | None = None,
) -> Any:
    """Call `Buffer.combine` with tensors, on the current stream. Differentiable in `x`, `topk_weights` and `bias`.

    The backward pass sends the gradient of a token to each rank with rows of that token. There are no second derivatives.
    `torch.compile(fullgraph=True)` keeps the call in its graph.

    Args:
        buffer: The Buffer of the dispatch.
        x: `[rows of recv_x, hidden]` bfloat16, float16 or float32, in the order of `recv_x`.
        handle: The handle of the dispatch that brought the tokens. If it comes from the `dispatch` of this module, this backward pass
            also runs that of the dispatch, on all ranks, even if their experts did not use the rows.
        topk_weights: None, or with a handle of `layout="expert"` the weight of each row, `[rows of recv_x]` float32: rows are multiplied
            by them in float32.
        bias: None, one tensor or two tensors, `[num_tokens, hidden]`, dtype of `x`. They are added to the sum.
        fp8_grad: Send the rows of the gradient as float8_e4m3fn with scales, as `fp8` in `dispatch` does.
        reduce: The order of the sum, as in `Buffer.combine`.
        compress: The form of the rows on the way, as in `Buffer.combine`. Gradients ignore the rounding. Their rows are not
            compressed, except by `fp8_grad`.

    Returns:
        `[num_tokens, hidden]`, dtype of `x`: for each token the sum of its rows.

    Raises:
        EPInputError: If an argument is wrong. No kernel was launched.
        EPUnavailableError: As in `Buffer.combine`.
        EPTimeoutError: As in `Buffer.combine`.
        EPDestroyedError: After `destroy()`, also in the backward pass.

    Example:
        >>> out = combine(buffer, y, sent.handle, bias=shared_expert_output)
    """
    check_buffer(buffer)
    check_tensor(x, "x", required=True)
    fp8_grad = check_fp8(buffer, fp8_grad, "fp8_grad")
    check_tensor(topk_weights, "topk_weights", required=False)
    biases = () if bias is None else bias if isinstance(bias, (tuple, list)) else (bias,)
    for number, tensor in enumerate(biases):
        check_tensor(tensor, f"bias[{number}]", required=True)
    if torch.compiler.is_compiling() or isinstance(handle, TracedHandle):
        return traced_combine(buffer, x, handle, topk_weights, biases, fp8_grad, reduce, compress)
    tie = handle.link.of_this_graph() if isinstance(handle, Handle) else TIE
    how = dict(weighted=topk_weights is not None, reduce=reduce, compress=compress)
    return _Combine.apply(x, tie, topk_weights, buffer, unlinked(handle), fp8_grad, how, *biases)


class _Dispatch(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to mypy
    """Dispatches `(x, topk_weights)` to `(recv_x, recv_topk_weights)`. Backward, a combine."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Any,
        topk_weights: Any,
        tie: Any,
        topk_idx: Any,
        buffer: Buffer,
        handle: DispatchHandle | None,
        num_worst_tokens: int | None,
        expert_alignment: int,
        layout: str | None,
        fp8: bool,
        reduce: str,
    ) -> tuple:
        by_expert = layout == "expert" or (isinstance(handle, DispatchHandle) and handle.layout == "expert")
        options: dict[str, Any] = dict(num_worst_tokens=num_worst_tokens, expert_alignment=expert_alignment, layout=layout)
        given = (buffer, x, fp8, topk_idx, topk_weights)
        sent, recv_x, ctx.number = send(numbered(buffer, "dispatch"), *given, handle=handle, zero_padding=by_expert, **options)
        recv_idx, recv_weights = sent.recv_topk_idx, sent.recv_topk_weights
        if fp8:  # `recv_x` is a copy; with copies of these too, the Buffer's memory is free again
            recv_idx, recv_weights = (None if t is None else t.clone() for t in (recv_idx, recv_weights))
        offsets = sent.expert_offsets
        ctx.buffer, ctx.handle, ctx.reduce, ctx.has_weights = buffer, sent.handle, reduce, recv_weights is not None
        ctx.set_materialize_grads(False)
        # All ranks save a tensor, even an empty one, so that torch.utils.checkpoint repeats the forward pass on all ranks.
        # Weights of padding rows do not return, so only rows by token need to know which weights are not theirs.
        ctx.save_for_backward(recv_idx < 0 if ctx.has_weights and offsets is None else x.new_empty(0))
        dtype, tensor = dtype_of_gradient(buffer, x, ctx.has_weights), x.new_empty(0, dtype=torch.float32)
        ctx.rows = dict(size=(sent.handle.num_recv_rows, buffer.config.hidden), dtype=dtype, device=x.device)
        counts = (sent.num_recv_tokens, sent.num_recv_tokens_per_expert)
        fixed = [recv_idx, *counts, offsets]
        if x.dtype not in FLOATS:
            fixed += [recv_x] if dtype else [recv_x, recv_weights, tensor]
        ctx.mark_non_differentiable(*(t for t in fixed if t is not None))
        return recv_x, recv_idx, recv_weights, *counts, offsets, sent.handle, tensor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Any, _: Any, grad_weights: Any, *__: Any) -> tuple:
        (elsewhere,) = ctx.saved_tensors

        def call(rows: Any, weights: Any) -> tuple[Any, Any]:
            purpose = backward_of(ctx.buffer, "dispatch", ctx.number)
            back = send_back(purpose, ctx.buffer, rows, weights, ctx.handle, ctx.reduce)
            return back.x, back.topk_weights

        elsewhere = elsewhere if ctx.handle.layout == "token" else None
        x, weights = backward_of_dispatch(call, grad_x, grad_weights, ctx.rows, ctx.has_weights, elsewhere)
        needs_x, needs_weights, *_ = ctx.needs_input_grad
        return x if needs_x else None, weights if needs_weights else None, *[None] * 9


class _Combine(torch.autograd.Function):  # type: ignore[misc]
    """Adds up rows, weighted or not, and biases. Backward, a dispatch."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Any,
        tie: Any,
        topk_weights: Any,
        buffer: Buffer,
        handle: DispatchHandle,
        fp8_grad: bool,
        how: dict[str, Any],
        *biases: Any,
    ) -> Any:
        ctx.buffer, ctx.handle, ctx.fp8_grad, ctx.reduce = buffer, handle, fp8_grad, how["reduce"]
        if how["weighted"]:
            ctx.save_for_backward(topk_weights, x if ctx.needs_input_grad[2] else None)
        with numbered(buffer, "combine") as ctx.number:
            return buffer.combine(x, handle, topk_weights=topk_weights, bias=biases or None, **how).x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> tuple:
        weights, x = ctx.saved_tensors or (None, None)  # once: each read of a checkpointed tensor would make its calls again

        def call(grad: Any) -> tuple[Any, Any]:
            purpose = backward_of(ctx.buffer, "combine", ctx.number)
            sent, rows, _ = send_again(purpose, ctx.buffer, grad, ctx.handle, ctx.fp8_grad)
            return rows, None if x is None else sent.recv_expert_idx < 0

        grad_x, grad_weights = backward_of_combine(call, grad, weights, x, ctx.reduce)
        num_biases = len(ctx.needs_input_grad) - 7
        return grad_x, None, grad_weights, None, None, None, None, *[grad] * num_biases
