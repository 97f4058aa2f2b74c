"""The experts of a layer from tokens to tokens, with gradients: dispatch, two grouped products and combine.

The backward pass has the same parts in the same order: a dispatch of the gradient along the routing, two products, and a combine. The
gradients of the weights need nothing of other ranks after the dispatch, so they are computed while the combine moves rows.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .._checks import argument_error, flag
from ..buffer import Buffer, check_buffer
from ..errors import EPInputError
from .arguments import check_tensor
from .calls import backward_of, numbered
from .grouped import grouped_mm, grouped_outer, product_of_rows, swiglu
from .handles import TIE
from .tensor_ops import FLOATS, aligned

_ALIGNMENT = 128  # rows of an expert begin at a tile of the products
_COLUMNS = 8  # of which grouped products of PyTorch take multiples, in bfloat16

Activation = Callable[[torch.Tensor], torch.Tensor]

_without_dynamo = getattr(torch, "_disable_dynamo", None) or torch.compiler.disable  # the first does not import Dynamo

_checked: weakref.WeakKeyDictionary[Activation, set[Any]] = weakref.WeakKeyDictionary()
"""The shapes, dtypes and devices for which an activation has been checked, with gradients or without."""


@_without_dynamo
def expert_mlp(
    buffer: Buffer,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    *,
    activation: Activation = swiglu,
    num_worst_tokens: int | None = None,
    signals: bool = False,
) -> torch.Tensor:
    """Return for each token the weighted sum of its experts, `activation(x @ w1[e]) @ w2[e]`, wherever they live. Differentiable.

    The backward pass adds up gradients as that of `dispatch` does. It computes the gradients of the weights while the gradients of the
    tokens travel back. There are no second derivatives. All ranks run the backward pass, or none. Inside `torch.compile` the call breaks
    the graph.

    Args:
        buffer: The Buffer. The backward pass needs it, and has to run before `destroy`.
        x: `[num_tokens, hidden]` bfloat16, float16 or float32. Products are fastest in bfloat16.
        topk_idx: `[num_tokens, num_topk]` int32 or int64, expert numbers; -1 skips.
        topk_weights: `[num_tokens, num_topk]` float32.
        w1: `[num_local_experts, hidden, n]`, dtype of `x`. In bfloat16, `n` and `m` are multiples of 8.
        w2: `[num_local_experts, m, hidden]`, dtype of `x`. `m` is the width of what `activation` returns, with `swiglu` `n // 2`.
        activation: From `[rows, n]` to `[rows, m]`, row by row, also of no rows. It runs without autocast. With gradients it changes
            nothing in place, has no parameters to train and draws no random numbers: the backward pass calls it again.
        num_worst_tokens: As in `Buffer.dispatch`, with `layout="expert"`: rows, with their padding.
        signals: As in `Buffer.dispatch`: the first product of each pass starts while its rows arrive.

    Returns:
        `[num_tokens, hidden]`, dtype of `x`.

    Raises:
        EPInputError: If an argument is wrong. Nothing was sent.
        EPOutOfMemoryError: As in `Buffer.dispatch`.
        EPTimeoutError: As in `Buffer.dispatch`, also in the backward pass.
        EPDestroyedError: After `destroy()`, also in the backward pass.

    Example:
        >>> out = expert_mlp(buffer, x, topk_idx, topk_weights, w1, w2)
        >>> (x + out).square().mean().backward()
    """
    check_buffer(buffer)
    given = (("x", x), ("topk_idx", topk_idx), ("topk_weights", topk_weights), ("w1", w1), ("w2", w2))
    for name, tensor in given:
        check_tensor(tensor, name, required=True)
    _check_weights(buffer, x, w1, w2)
    options = dict(num_worst_tokens=num_worst_tokens, signals=flag(signals, "signals"))
    with torch.autocast(x.device.type, enabled=False):
        _check_activation(activation, x, w1, w2)
        return _ExpertMlp.apply(x, topk_weights, w1, w2, TIE, topk_idx, buffer, activation, options)


# A check that fails after a call of the Buffer would leave the other ranks waiting.


def _check_weights(buffer: Buffer, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> None:
    experts, hidden = buffer.config.num_local_experts, buffer.config.hidden
    if x.dtype not in FLOATS:
        raise EPInputError(f"x.dtype={x.dtype}; expected {' or '.join(FLOATS.values())}. Convert x")
    multiple = _COLUMNS if x.dtype == torch.bfloat16 else 1
    for weight, name, wanted, fixed, free in (
        (w1, "w1", f"[{experts}, {hidden}, n]", (0, 1), 2),
        (w2, "w2", f"[{experts}, m, {hidden}]", (0, 2), 1),
    ):
        fits = weight.dim() == 3 and tuple(weight.shape[i] for i in fixed) == (experts, hidden)
        if not fits or weight.dtype != x.dtype or weight.device != x.device or weight.shape[free] % multiple:
            raise EPInputError(
                f"{name}.shape={list(weight.shape)}, dtype={weight.dtype}, on {weight.device}; expected {wanted} of {x.dtype} on "
                f"{x.device}, a matrix for each local expert, with {'nm'[free == 1]} a multiple of {multiple}. Pass such weights"
            )


def _check_activation(activation: Activation, x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> None:
    """Try the activation on a row, and on no rows."""
    width, wanted, has_gradients = w1.shape[2], w2.shape[1], torch.is_grad_enabled()
    if not callable(activation):
        raise argument_error(activation, "activation", "a function of rows", "Pass one.")
    if has_gradients and isinstance(activation, torch.nn.Module) and any(one.requires_grad for one in activation.parameters()):
        raise _not_differentiable("has parameters that require a gradient")
    key = width, wanted, x.dtype, x.device, has_gradients
    try:
        known = _checked.setdefault(activation, set())
    except TypeError:  # it has no weak reference
        known = set()
    if key in known:
        return
    plain = activation  # compiled code has no versions for such sizes, and needs none
    for name in ("_torchdynamo_orig_callable", "_orig_mod"):
        plain = getattr(plain, name, None) or plain
    try:
        row = plain(x.new_zeros((1, width)).requires_grad_(has_gradients))
        nothing = plain(x.new_zeros((0, width)))
    except RuntimeError as error:
        raise EPInputError(
            f"activation raised {error!r}; expected a function of [rows, {width}], also of no rows, that changes nothing in place. "
            f"Pass such a function"
        ) from error
    for made, rows in ((row, 1), (nothing, 0)):
        if made.shape != (rows, wanted) or made.dtype != x.dtype:
            raise EPInputError(
                f"activation makes {list(made.shape)} {made.dtype} of {rows} rows of w1.shape={list(w1.shape)}; expected {[rows, wanted]} "
                f"{x.dtype}, by w2.shape={list(w2.shape)}. Pass weights that fit"
            )
    if has_gradients and nothing.requires_grad:
        raise _not_differentiable("has parameters that require a gradient")
    if has_gradients and not row.requires_grad:
        raise _not_differentiable("makes no gradient")
    known.add(key)


def _not_differentiable(what: str) -> EPInputError:
    return EPInputError(
        f"activation {what}; expected a differentiable function without parameters. Use dispatch and combine for such a layer"
    )


class _ExpertMlp(torch.autograd.Function):  # type: ignore[misc]  # torch is Any to mypy
    """The layer of `(x, topk_weights, w1, w2)`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Any,
        topk_weights: Any,
        w1: Any,
        w2: Any,
        tie: Any,
        topk_idx: Any,
        buffer: Buffer,
        activation: Callable[[Any], Any],
        options: dict[str, Any],
    ) -> Any:
        how: dict[str, Any] = dict(layout="expert", expert_alignment=_ALIGNMENT, zero_padding=True, **options)
        with numbered(buffer, "dispatch") as dispatched:
            sent = buffer.dispatch(aligned(x), topk_idx, topk_weights, **how)
        before = product_of_rows(sent, w1, None)
        sent.event.wait()
        ends = sent.expert_offsets[1:]
        y = grouped_mm(activation(before), w2, ends)
        with numbered(buffer, "combine") as combined:
            out = buffer.combine(y, sent.handle, topk_weights=sent.recv_topk_weights, weighted=True).x
        ctx.buffer, ctx.activation, ctx.handle, ctx.signals = buffer, activation, sent.handle, options["signals"]
        ctx.numbers = dispatched, combined
        saved_x = sent.recv_x if ctx.needs_input_grad[2] else None
        ctx.save_for_backward(saved_x, before, sent.recv_topk_weights, ends, w1, w2)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> tuple:
        x, before, weights, ends, w1, w2 = ctx.saved_tensors
        _, _, needs_w1, needs_w2, *_ = ctx.needs_input_grad
        buffer, (dispatched, combined) = ctx.buffer, ctx.numbers
        with backward_of(buffer, "combine", combined):
            sent = buffer.dispatch(aligned(grad), handle=ctx.handle, zero_padding=True, signals=ctx.signals)
        grad_inner = product_of_rows(sent, w2.transpose(1, 2), None).float()  # without weights: their gradients need it so
        sent.event.wait()
        with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
            before = before.detach().requires_grad_()
            inner = ctx.activation(before)
        grad_weights = (grad_inner * inner.detach()).sum(1)  # those of padding do not return
        (grad_before,) = torch.autograd.grad(inner, before, (grad_inner * weights[:, None]).to(inner.dtype))
        # Padding is zero or undefined before the activation, and anything behind it. Gradients of weights add up all rows of an expert.
        is_padding = (sent.recv_expert_idx < 0)[:, None]
        grad_before = grad_before.masked_fill(is_padding, 0)
        rows = grouped_mm(grad_before, w1.transpose(1, 2), ends)
        with backward_of(buffer, "dispatch", dispatched):
            # On a stream of its own, and the products below run meanwhile.
            back = buffer.combine(rows, ctx.handle, topk_weights=grad_weights, async_finish=True)
        counts = ctx.handle.num_recv_tokens_per_expert_list
        grad_w1 = grouped_outer(x, grad_before, ends, counts) if needs_w1 else None
        weighted = (inner.detach() * weights[:, None]).masked_fill_(is_padding, 0).to(inner.dtype)
        grad_w2 = grouped_outer(weighted, sent.recv_x, ends, counts) if needs_w2 else None
        back.event.wait()
        return back.x, back.topk_weights, grad_w1, grad_w2, *[None] * 5
