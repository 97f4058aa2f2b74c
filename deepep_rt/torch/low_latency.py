"""The low-latency calls as operators of `torch.library`, for decoding. Rows and routing lie in PyTorch's memory.

`torch.compile` keeps the calls in its graphs, and CUDA graphs capture them (`mode="reduce-overhead"`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..arrays.dtypes import FP8_GROUP
from ..backends.base import LowLatencyMemory
from ..backends.inputs import as_view, form_of_combine, form_of_dispatch, low_latency_dispatch_inputs, max_tokens_of
from ..buffer import Buffer, backend_of, buffer_of, check_buffer, info_of, low_latency_dispatch_into
from ..errors import EPInputError
from .arguments import check_dims, check_tensor
from .operators import operator


@dataclass
class LowLatencyHandle:
    """The routing of a `low_latency_dispatch`, for its `low_latency_combine`."""

    tables: Any
    """The tables of the Buffer, `[n]` int32."""
    num_tokens: int
    """Tokens that this rank dispatched."""
    has_weights: bool
    """Whether `topk_weights` travelled with the rows."""
    capacity: int
    """Rows for which each expert has room."""
    buffer_serial: int
    """Number of the Buffer in this process."""


class LowLatencyDispatched(NamedTuple):
    """The rows that arrived at this rank, expert by expert, as in `LowLatencyDispatchResult`."""

    recv_x: Any
    """Rows, `[num_local_experts, num_ranks * num_max_tokens, hidden]` bfloat16 or float8_e4m3fn; or as wide as `x`, and of its dtype."""
    recv_x_scales: Any
    """Scales, `[num_local_experts, num_ranks * num_max_tokens, hidden // 128]` float32, or uint8 exponents; or those that came. Or None."""
    num_recv_tokens_per_expert: Any
    """Rows of each local expert, `[num_local_experts]` int32, on the device."""
    handle: LowLatencyHandle
    """The handle for `low_latency_combine`."""


def low_latency_dispatch(
    buffer: Buffer,
    x: Any,
    topk_idx: Any,
    topk_weights: Any = None,
    *,
    use_fp8: bool = True,
    round_scale: bool = False,
    use_ue8m0: bool = False,
    x_scales: Any = None,
    num_max_tokens: int | None = None,
) -> LowLatencyDispatched:
    """Call `Buffer.low_latency_dispatch` with tensors, on the current stream. For decoding: it has no gradient.

    Compiled functions keep the call in their graph. A CUDA graph captures it too, because the results lie in PyTorch's memory.

    Args:
        buffer: A Buffer with `low_latency=True`.
        x: As in `Buffer.low_latency_dispatch`, and so are the others.
        topk_idx: See there.
        topk_weights: See there.
        use_fp8: See there. If a rank's GPU has no FP8 (before sm_89), the call raises EPUnavailableError.
        round_scale: See there.
        use_ue8m0: See there.
        x_scales: See there.
        num_max_tokens: See there.

    Returns:
        Rows, scales, counts and the handle.

    Raises:
        EPInputError: As in `Buffer.low_latency_dispatch`.
        EPTimeoutError: As there.
        EPDestroyedError: After `destroy()`.

    Example:
        >>> sent = low_latency_dispatch(buffer, x, topk_idx, topk_weights)
        >>> y = experts(sent.recv_x, sent.recv_x_scales, sent.num_recv_tokens_per_expert)
        >>> out = low_latency_combine(buffer, y, topk_idx, topk_weights, sent.handle)
    """
    check_buffer(buffer)
    for name, tensor in (("x", x), ("topk_idx", topk_idx), ("topk_weights", topk_weights), ("x_scales", x_scales)):
        check_tensor(tensor, name, required=name in ("x", "topk_idx"))
    backend, info, num_experts = backend_of(buffer, low_latency=True), info_of(buffer), buffer.config.num_local_experts
    # An operator converts flags and numbers, or raises an error of PyTorch.
    form, most = form_of_dispatch(info, use_fp8, round_scale, use_ue8m0), max_tokens_of(info, num_max_tokens)
    check_dims(x, "x", ("num_tokens", "hidden"))
    if x_scales is not None:
        check_dims(x_scales, "x_scales", ("num_tokens", "scales"))
    recv_x, scales, tables = torch.ops.deepep_rt.low_latency_dispatch(
        x, topk_idx, topk_weights, x_scales, info.serial, *form, most
    )
    first = backend.tables.low_latency_counts.start
    handle = LowLatencyHandle(tables, x.shape[0], topk_weights is not None, info.config.num_ranks * most, info.serial)
    has_scales = form[0] or x_scales is not None
    return LowLatencyDispatched(recv_x, scales if has_scales else None, tables[first : first + num_experts], handle)


def low_latency_combine(
    buffer: Buffer,
    x: Any,
    topk_idx: Any,
    topk_weights: Any,
    handle: LowLatencyHandle,
    *,
    allow_multiple_reduction: bool = True,
    compress: str | None = None,
) -> Any:
    """Call `Buffer.low_latency_combine` with tensors, on the current stream. It has no gradient.

    Args:
        buffer: The Buffer of the dispatch.
        x: The `y` of `Buffer.low_latency_combine`. The call does not read rows past `num_recv_tokens_per_expert`.
        topk_idx: As in `Buffer.low_latency_combine`, and so are the weights.
        topk_weights: See there.
        handle: The handle of the `low_latency_dispatch` of this module that brought the tokens.
        allow_multiple_reduction: As in `Buffer.low_latency_combine`.
        compress: See there.

    Returns:
        `[num_tokens, hidden]` bfloat16, in PyTorch's memory.

    Raises:
        EPInputError: As in `Buffer.low_latency_combine`.
        EPTimeoutError: As there.
        EPDestroyedError: After `destroy()`.

    Example:
        >>> out = low_latency_combine(buffer, y, topk_idx, topk_weights, sent.handle)
    """
    check_buffer(buffer)
    reduce_early, compress = form_of_combine(info_of(buffer), allow_multiple_reduction, None, compress)
    for name, tensor in (("x", x), ("topk_idx", topk_idx), ("topk_weights", topk_weights)):
        check_tensor(tensor, name, required=True)
    if not isinstance(handle, LowLatencyHandle):
        raise EPInputError("handle is not that of deepep_rt.torch.low_latency_dispatch; expected its .handle. Pass it as it is")
    if handle.buffer_serial != info_of(buffer).serial:
        raise EPInputError("handle is of another Buffer; expected one of this Buffer's low_latency_dispatch. Call that Buffer")
    sizes = (handle.buffer_serial, handle.num_tokens, handle.has_weights, handle.capacity, reduce_early, compress)
    return torch.ops.deepep_rt.low_latency_combine(x, topk_idx, topk_weights, handle.tables, *sizes)


@operator("low_latency_dispatch", in_cuda_graphs=True)
def low_latency_dispatch_op(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    x_scales: Tensor | None,
    buffer: int,
    use_fp8: bool,
    round_scale: bool,
    use_ue8m0: bool,
    num_max_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Dispatch. Return rows, scales (or an empty tensor) and the tables of the handle."""
    of = buffer_of(buffer)
    backend, info = backend_of(of, low_latency=True), info_of(of)
    with backend.call_lock:
        backend.call_lock.progress.name = "low_latency_dispatch"
        call = backend.begin(x, False, None, None)
        inputs = low_latency_dispatch_inputs(
            info, call.stream, x, topk_idx, topk_weights, use_fp8, round_scale, use_ue8m0, None, None, x_scales, num_max_tokens
        )
        results = _results(x, x_scales, of, use_fp8, use_ue8m0, num_max_tokens)
        recv_x, scales, tables = (None if not t.numel() else as_view(info, t, "x", call.stream) for t in results)
        assert recv_x is not None
        assert tables is not None
        if recv_x.device != info.device:
            raise EPInputError(
                f"x is on {x.device}; expected GPU {info.device}, where this Buffer works. Move it, topk_idx and topk_weights"
            )
        inputs.into = LowLatencyMemory(recv_x, scales, tables)
        low_latency_dispatch_into(of, backend, inputs, call)
    return results


@low_latency_dispatch_op.register_fake
def _(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None,
    x_scales: Tensor | None,
    buffer: int,
    use_fp8: bool,
    round_scale: bool,
    use_ue8m0: bool,
    num_max_tokens: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return _results(x, x_scales, buffer_of(buffer), use_fp8, use_ue8m0, num_max_tokens)


def _results(
    x: Tensor, x_scales: Tensor | None, buffer: Buffer, use_fp8: bool, use_ue8m0: bool, num_max_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate rows, scales and tables."""
    config, tables = buffer.config, backend_of(buffer, low_latency=True).tables
    rows = (config.num_local_experts, config.num_ranks * num_max_tokens)
    if x_scales is not None:
        scales = x_scales.new_empty(*rows, x_scales.shape[1])
    else:
        of_fp8 = (*rows, config.hidden // FP8_GROUP) if use_fp8 else (0,)
        scales = x.new_empty(of_fp8, dtype=torch.uint8 if use_ue8m0 else torch.float32)
    return (
        x.new_empty(*rows, x.shape[1], dtype=torch.float8_e4m3fn if use_fp8 else x.dtype),
        scales,
        x.new_empty(tables.num_low_latency_words, dtype=torch.int32),
    )


@operator("low_latency_combine", in_cuda_graphs=True)
def low_latency_combine_op(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    tables: Tensor,
    buffer: int,
    num_tokens: int,
    has_weights: bool,
    capacity: int,
    reduce_early: bool,
    compress: str | None,
) -> Tensor:
    """Combine along the routing in `tables`."""
    of = buffer_of(buffer)
    handle = backend_of(of, low_latency=True).tables.load_low_latency(
        as_view(info_of(of), tables, "tables", None), num_tokens, has_weights, capacity
    )
    out = x.new_empty(num_tokens, of.config.hidden)
    of.low_latency_combine(x, topk_idx, topk_weights, handle, allow_multiple_reduction=reduce_early, compress=compress, out=out)
    return out


@low_latency_combine_op.register_fake
def _(
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor,
    tables: Tensor,
    buffer: int,
    num_tokens: int,
    has_weights: bool,
    capacity: int,
    reduce_early: bool,
    compress: str | None,
) -> Tensor:
    return x.new_empty(num_tokens, buffer_of(buffer).config.hidden)


def _refuse(ctx: Any, *grads: Any) -> NoReturn:
    raise EPInputError("low-latency calls have no gradient; expected dispatch and combine for training. Call those, or detach()")


low_latency_dispatch_op.register_autograd(_refuse)
low_latency_combine_op.register_autograd(_refuse)
