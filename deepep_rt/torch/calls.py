"""The calls of a Buffer in forward and backward passes, and the derivatives of both, for plain and compiled code alike.

Plain code makes the calls itself, and compiled code makes them through operators. So a derivative gets the call that it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from ..buffer import Buffer, backend_of
from ..results import CombineResult, DispatchHandle, DispatchResult
from .handles import backward_pass
from .tensor_ops import aligned, dot_rows, received_rows, to_fp8


@contextmanager
def numbered(buffer: Buffer, kind: str) -> Iterator[int]:
    """Enter to make a call, and yield its number. By it, errors name the backward pass in which a rank waits."""
    purposes = backend_of(buffer).purposes
    number = purposes.next_number(kind)
    recomputed = f"{kind} call {number}, which a checkpoint computes again"
    with purposes.during(recomputed if backward_pass() >= 0 else ""):
        yield number


@contextmanager
def backward_of(buffer: Buffer, kind: str, *numbers: int) -> Iterator[None]:
    """Enter to make the call that is the backward pass of a call with one of these numbers."""
    with backend_of(buffer).purposes.during(f"the backward of {kind} call {' or '.join(map(str, numbers))}"):
        yield


def send(
    purpose: AbstractContextManager[Any], buffer: Buffer, x: Any, fp8: bool, *routing: Any, **options: Any
) -> tuple[DispatchResult, Any, Any]:
    """Dispatch rows, as FP8 if wanted. Return the result, the rows in the dtype of `x`, and what `purpose` yields."""
    rows, scales = to_fp8(x) if fp8 else (x, None)  # before the call has a number, because it may refuse the rows
    with purpose as number:
        sent = buffer.dispatch(rows, *routing, x_scales=scales, **options)
    return sent, received_rows(sent, x.dtype), number


def send_again(
    purpose: AbstractContextManager[Any], buffer: Buffer, x: Any, handle: DispatchHandle, fp8: bool
) -> tuple[DispatchResult, Any, Any]:
    """Dispatch along a known routing, as `send` does: the gradient of a combine."""
    return send(purpose, buffer, aligned(x), fp8, handle=handle, zero_padding=handle.layout == "expert")


def send_back(
    purpose: AbstractContextManager[Any], buffer: Buffer, x: Any, topk_weights: Any, handle: DispatchHandle, reduce: str
) -> CombineResult:
    """Add up rows, and return weights to their choices: the gradient of a dispatch."""
    weights = None if topk_weights is None else aligned(topk_weights)
    with purpose:
        return buffer.combine(aligned(x), handle, topk_weights=weights, reduce=reduce)


def backward_of_dispatch(
    call: Callable[[Any, Any], tuple[Any, ...]],
    grad_x: Any,
    grad_weights: Any,
    rows: dict[str, Any],
    has_weights: bool,
    elsewhere: Any,
) -> tuple[Any, ...]:
    """Return what `call` returns for the gradients of `x` and `topk_weights`, where None stands for zeros.

    `rows` is the size, dtype and device of the rows. `elsewhere` tells which weights are of other ranks' experts. It is None if rows lie by
    expert.
    """
    # The arguments depend on the forward pass and not on the gradients of this rank, so all ranks make the same call.
    if grad_x is None:
        grad_x = torch.zeros(**rows)
    if not has_weights:
        grad_weights = None
    elif grad_weights is None:
        shape = rows["size"][:1] if elsewhere is None else elsewhere.shape
        grad_weights = torch.zeros(shape, dtype=torch.float32, device=rows["device"])
    elif elsewhere is not None:
        # Only the rank of an expert has a gradient of its weight: the zeros of other ranks are no copies.
        grad_weights = grad_weights.masked_fill(elsewhere, 0)
    return call(grad_x, grad_weights)


def backward_of_combine(call: Callable[[Any], tuple[Any, ...]], grad: Any, weights: Any, x: Any, reduce: str) -> tuple[Any, ...]:
    """Return the gradients of the rows and of their weights, and what else `call` returns.

    `call` sends the gradient of the sums to the rows, and returns it with the padding. Only the gradient of weights needs the padding
    and `x`.
    """
    grad_x, is_padding, *more = call(grad)
    if weights is None:
        return grad_x, None, *more
    exact, grad_weights = grad_x.float(), None
    if x is not None:
        grad_weights = dot_rows(exact, x.float(), reduce).masked_fill(is_padding, 0)  # the experts' rows of padding may be NaN
    return (exact * weights[:, None]).to(grad.dtype), grad_weights, *more
