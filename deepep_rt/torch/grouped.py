"""The experts of a rank as grouped matrix products, which start while the rows of a dispatch with `signals=True` still arrive."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from ..errors import EPInputError
from .tensor_ops import aligned

if TYPE_CHECKING:
    from ..arrays.view import View
    from ..results import DispatchResult

_FP8 = (torch.float8_e4m3fn,)
_DTYPES = {"bfloat16": torch.bfloat16, "float8_e4m3fn": torch.float8_e4m3fn}
_GROUP = 128


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` of `[rows, 2 * n]`, whose first half is `gate`."""
    gate, up = x.chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def grouped_product(sent: DispatchResult, weight: torch.Tensor, *, weight_scales: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply each row that arrived by the matrix of its expert.

    After a dispatch with `signals=True`, each tile of rows is multiplied once it is here, on the SMs that the dispatch leaves free. When
    the dispatch ends, the product takes its SMs too. Without signals, or where Triton has no kernel for it, the product runs after the
    dispatch.

    Args:
        sent: The result of `Buffer.dispatch(..., layout="expert")` on PyTorch's tensors. Its `recv_x` is bfloat16, or float8_e4m3fn with
            float32 scales for each 128 channels, in rows.
        weight: `[num_local_experts, hidden, n]`, dtype of `recv_x`, with any strides. Products are fastest if `hidden` is contiguous.
        weight_scales: With FP8, `[num_local_experts, n // 128, hidden // 128]` float32: the scale of each block of 128 by 128.

    Returns:
        `[rows, n]` bfloat16, in the order of `recv_x`. Rows of padding are undefined.

    Raises:
        EPInputError: If a shape or dtype does not fit, if `sent` holds arrays of another library, or if `weight` requires a gradient: the
            product makes none.

    Example:
        >>> sent = buffer.dispatch(x, topk_idx, topk_weights, layout="expert", expert_alignment=128, signals=True)
        >>> with torch.no_grad():
        ...     y = grouped_product(sent, experts)
    """
    _check(sent, weight, weight_scales)
    return product_of_rows(sent, weight, weight_scales if weight.dtype in _FP8 else None)


def product_of_rows(sent: DispatchResult, weight: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """Return what `grouped_product` does, for checked arguments. `scales` are those of the weights, with FP8."""
    num_rows, tile_rows, rows = sent.handle.num_recv_rows, sent.handle.tile_rows, sent.views["x"]
    assert rows is not None
    if rows.device != weight.get_device() or not has_kernel(weight, num_rows, tile_rows):
        sent.event.wait()
        return _after_the_dispatch(sent, weight, scales)
    from .tile_product import launch, num_sms  # Triton takes long to import

    def pointer(name: str, dtype: torch.dtype) -> _Pointer:
        view = sent.views[name]
        assert view is not None
        return _Pointer(view, dtype)

    out = weight.new_empty((num_rows, weight.shape[2]), dtype=torch.bfloat16)
    x, experts = pointer("x", weight.dtype), pointer("expert_idx", torch.int32)
    both_scales = None if scales is None else (pointer("scales", torch.float32), scales)
    options: dict[str, Any] = dict(tile_rows=tile_rows, scales=both_scales)
    sms = num_sms(weight.device)
    if sent.views.get("tile_ready") is None:
        sent.event.wait()
        launch(sms, x, weight, out, experts, _zero(weight.device), **options)
        return out
    if sent.words_cleared is not None:  # the call may have been made under another current stream
        sent.words_cleared.wait()
    ticket = _ticket(sent)
    here = torch.cuda.current_stream()
    begins = here.record_event()  # behind earlier work with the memory of `out`, and behind `ticket`
    options |= dict(ready=pointer("tile_ready", torch.int32), signal=sent.signal)
    launch(max(1, sms - sent.num_sms), x, weight, out, experts, ticket, **options)
    theirs = torch.cuda.ExternalStream(cast(Any, sent.event).stream)
    with torch.cuda.stream(theirs):  # behind the dispatch
        theirs.wait_event(begins)
        launch(min(sent.num_sms, sms - 1), x, weight, out, experts, ticket, **options)
    here.wait_stream(theirs)
    return out


class _Pointer:
    """An array of a result, as kernels in Triton take it. To make a tensor takes the host 25 us, and rows may arrive meanwhile."""

    __slots__ = ("_ptr", "dtype")

    def __init__(self, view: View, dtype: torch.dtype) -> None:
        view.note_use()
        self._ptr, self.dtype = view.ptr, dtype

    def data_ptr(self) -> int:
        """Return the address."""
        return self._ptr


def _zero(device: torch.device) -> torch.Tensor:
    return torch.zeros(1, dtype=torch.int32, device=device)


def _ticket(sent: DispatchResult) -> Any:
    """Return a counter that is 0, for one product. The dispatch has made some."""
    tickets, number = sent.views["tickets"], sent.tickets_taken
    assert tickets is not None
    if number == tickets.shape[0]:
        return _zero(torch.device("cuda", tickets.device))
    sent.tickets_taken = number + 1
    return _Pointer(replace(tickets, ptr=tickets.ptr + number * tickets.row_bytes), torch.int32)


def grouped_mlp(
    sent: DispatchResult,
    w1: torch.Tensor,
    w2: torch.Tensor,
    *,
    w1_scales: torch.Tensor | None = None,
    activation: Callable[[torch.Tensor], torch.Tensor] = swiglu,
) -> torch.Tensor:
    """Run the experts of this rank on the rows that arrived: `activation(recv_x @ w1[e]) @ w2[e]` for each row of expert `e`.

    The first product starts as `grouped_product` says.

    Args:
        sent: As in `grouped_product`.
        w1: `[num_local_experts, hidden, n]`, dtype of `recv_x`.
        w2: `[num_local_experts, m, hidden]` bfloat16. `m` is the width of what `activation` returns, with `swiglu` `n // 2`.
        w1_scales: With FP8, the `weight_scales` of `grouped_product`.
        activation: From `[rows, n]` bfloat16 to `[rows, m]` bfloat16.

    Returns:
        `[rows, hidden]` bfloat16, for `Buffer.combine(..., sent.handle)`.

    Raises:
        EPInputError: If a shape or dtype does not fit, if `sent` holds arrays of another library, or if a weight requires a gradient: the
            products make none.

    Example:
        >>> sent = buffer.dispatch(x, topk_idx, topk_weights, layout="expert", expert_alignment=128, signals=True)
        >>> y = grouped_mlp(sent, w1, w2)  # under torch.no_grad(), if the weights are parameters
        >>> out = buffer.combine(y, sent.handle, topk_weights=sent.recv_topk_weights, weighted=True).x
    """
    _check_no_gradient(w2, "w2")
    inner = activation(grouped_product(sent, w1, weight_scales=w1_scales))
    if w2.dim() != 3 or w2.shape[:2] != (w1.shape[0], inner.shape[1]):
        raise EPInputError(
            f"w2.shape={list(w2.shape)}; expected [{w1.shape[0]}, {inner.shape[1]}, hidden], by what activation returns. Pass such weights"
        )
    return grouped_mm(inner, w2, sent.expert_offsets[1:])


def _check(sent: DispatchResult, weight: torch.Tensor, weight_scales: torch.Tensor | None) -> None:
    if sent.handle.layout != "expert":
        raise EPInputError("sent has rows by token; expected layout='expert'. Pass it to the dispatch")
    views = sent.views  # not as tensors, which take the host long to make: rows may arrive meanwhile
    x, offsets, x_scales = views["x"], views["expert_offsets"], views.get("scales")
    assert x is not None
    assert offsets is not None
    if x.framework.name != "torch":  # whose current stream this product does not know
        raise EPInputError(f"sent holds arrays of {x.framework.name}; expected PyTorch's tensors. Dispatch a tensor")
    if x.dtype not in _DTYPES:
        raise EPInputError(f"recv_x.dtype={x.dtype}; expected bfloat16, or float8_e4m3fn with scales. Dispatch such rows")
    dtype, experts = _DTYPES[x.dtype], offsets.shape[0] - 1
    if weight.dim() != 3 or weight.shape[:2] != (experts, x.shape[1]) or weight.dtype != dtype:
        raise EPInputError(
            f"weight.shape={list(weight.shape)}, dtype={weight.dtype}; expected [{experts}, {x.shape[1]}, n] of {dtype}: a matrix for "
            f"each local expert. Pass such weights"
        )
    _check_no_gradient(weight, "weight")
    if dtype not in _FP8:
        return
    groups = x.shape[1] // _GROUP
    if weight.shape[2] % _GROUP:
        raise EPInputError(
            f"weight.shape={list(weight.shape)}; expected a multiple of {_GROUP} columns with FP8 rows. Pad the weights"
        )
    wanted = weight.shape[0], weight.shape[2] // _GROUP, groups
    if x_scales is None or x_scales.shape != (x.shape[0], groups) or x_scales.dtype != "float32":
        raise EPInputError(
            "recv_x_scales do not fit; expected float32 scales of 128 channels, in rows. Pass use_fp8=True to the dispatch, or x_scales"
        )
    if (
        weight_scales is None
        or weight_scales.shape != wanted
        or weight_scales.dtype != torch.float32
        or not weight_scales.is_contiguous()
    ):
        given = None if weight_scales is None else f"{list(weight_scales.shape)} {weight_scales.dtype}"
        raise EPInputError(f"weight_scales={given}; expected {list(wanted)} float32. Pass a scale for each block of 128 by 128")


def _check_no_gradient(weight: torch.Tensor, name: str) -> None:
    if torch.is_grad_enabled() and weight.requires_grad:
        raise EPInputError(
            f"{name} requires a gradient; expected weights without one, because this product makes none. Use no_grad()"
        )


def has_kernel(weight: torch.Tensor, num_rows: int, tile_rows: int) -> bool:
    """Return whether tile_product has a kernel for so many rows of the dtype of `weight`, `[experts, depth, columns]`."""
    if not (weight.is_cuda and tile_rows and num_rows and num_rows % tile_rows == 0):
        return False
    if weight.dtype not in _DTYPES.values() or weight.shape[1] % _GROUP or weight.shape[2] % _GROUP:
        return False
    if weight.dtype in _FP8 and _capability(weight.device) < (8, 9):
        return False
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a GPU. PyTorch takes 30 us for it."""
    return torch.cuda.get_device_capability(device)


def _after_the_dispatch(sent: DispatchResult, weight: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    x = sent.recv_x
    if scales is not None:
        x = (x.float().view(len(x), -1, _GROUP) * sent.recv_x_scales.unsqueeze(2)).view(x.shape).bfloat16()
        blocks = scales.transpose(1, 2).repeat_interleave(_GROUP, 1).repeat_interleave(_GROUP, 2)
        weight = (weight.float() * blocks).bfloat16()
    return grouped_mm(x, weight, sent.expert_offsets[1:])


def grouped_mm(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply the rows of each expert by its matrix, `[experts, columns of x, n]`. Rows past the last end are undefined."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        return _of_pytorch()(aligned(x), _in_lines(weight), offs=ends)
    out = x.new_zeros((x.shape[0], weight.shape[2]))
    for expert, begin, end in _experts(ends):
        out[begin:end] = x[begin:end] @ weight[expert]
    return out


def grouped_outer(x: torch.Tensor, y: torch.Tensor, ends: torch.Tensor, counts: list[int] | None) -> torch.Tensor:
    """Return `x[rows].T @ y[rows]` for the rows of each expert, `[experts, columns of x, columns of y]`: the gradient of a matrix.

    `counts` are the rows of each expert, if the host knows them.
    """
    if x.is_cuda and x.dtype == torch.bfloat16 and len(x):
        out = _of_pytorch()(aligned(x).t(), aligned(y), offs=ends)
        return _without_rows_zero(out, ends, counts)
    out = x.new_zeros((len(ends), x.shape[1], y.shape[1]))
    for expert, begin, end in _experts(ends):
        out[expert] = x[begin:end].t() @ y[begin:end]
    return out


def _in_lines(matrices: torch.Tensor) -> torch.Tensor:
    """Return matrices that PyTorch's grouped product takes: contiguous rows or columns, a multiple of 16 bytes apart. Copy others."""
    multiple = 16 // matrices.element_size()
    for inner, outer in ((-1, -2), (-2, -1)):
        distance = matrices.stride(outer)
        has_lines = matrices.stride(inner) == 1 and distance % multiple == 0 and distance >= matrices.shape[inner]
        if has_lines and matrices.data_ptr() % 16 == 0:
            return matrices
    return matrices.clone(memory_format=torch.contiguous_format)


def _without_rows_zero(matrices: torch.Tensor, ends: torch.Tensor, counts: list[int] | None) -> torch.Tensor:
    """Set the matrices of experts without rows to zero. PyTorch's kernels for Blackwell write anything there (pytorch/pytorch#172439)."""
    if _capability(matrices.device)[0] < 10:
        return matrices
    if counts is None:  # a pass over all matrices, so that the host needs no counts
        return matrices.masked_fill_((ends.diff(prepend=ends.new_zeros(1)) == 0)[:, None, None], 0)
    for expert, count in enumerate(counts):
        if count == 0:
            matrices[expert].zero_()
    return matrices


def _of_pytorch() -> Any:
    """Return PyTorch's grouped product."""
    return getattr(torch.nn.functional, "grouped_mm", None) or torch._grouped_mm  # its name before PyTorch 2.10


def _experts(ends: torch.Tensor) -> list[tuple[int, int, int]]:
    """Return each expert, its first row and its end."""
    bounds = [0, *ends.tolist()]
    return [(expert, bounds[expert], bounds[expert + 1]) for expert in range(len(bounds) - 1)]
