"""Operations on tensors around the calls of a Buffer: FP8 conversion, zeros for padding, and counts. On PyTorch's current stream.

On GPUs a kernel does each in one pass over memory, and the host does not wait. PyTorch's operators take several passes. They work on the
CPU, and convert to FP8 on GPUs without instructions for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..arrays.dtypes import FP8_GROUP, MAX_E4M3, MIN_AMAX
from ..buffer import Buffer
from ..config import COMBINE_DTYPES, ROW_ALIGNMENT
from ..errors import EPInputError
from ..jit import compiler
from ..kernels.tuning import has_fp8
from ..results import DispatchResult

FLOATS = {getattr(torch, name): name for name in COMBINE_DTYPES}
"""The dtypes of rows before and after FP8, with their names."""

_MAX_COUNTING_BLOCKS = 128  # each block adds its counts of all experts at the end


def dtype_of_gradient(buffer: Buffer, x: Any, has_weights: bool) -> Any:
    """Return the dtype of the rows in the backward pass of a dispatch. None: it has none, because nothing in it can have a gradient.

    Rows of bytes have no gradient. Zeros travel for them, with the gradients of the weights.
    """
    if x.dtype in FLOATS:
        return x.dtype
    return getattr(torch, buffer.config.dtype) if has_weights and buffer.config.dtype in COMBINE_DTYPES else None


def aligned(rows: Any) -> Any:
    """Return the same rows contiguous and aligned for kernels. Gradients may be expanded, transposed, or parts of another tensor."""
    rows = rows.contiguous()
    return rows if rows.data_ptr() % ROW_ALIGNMENT == 0 else rows.clone()


def to_fp8(rows: Any) -> tuple[Any, Any]:
    """Convert rows `[n, hidden]` (bfloat16, float16 or float32) to float8_e4m3fn, and return scales `[n, hidden // 128]` float32.

    Kernels convert as `arrays.dtypes.to_fp8` does. PyTorch's operators divide, which may round differently. With them, a NaN spreads over
    its 128 channels.

    Raise EPInputError if the rows have no whole groups of channels. The Buffer checks the rest.
    """
    if rows.dim() != 2 or rows.shape[1] % FP8_GROUP:
        raise EPInputError(
            f"x.shape={list(rows.shape)}; expected [num_tokens, hidden], and a multiple of {FP8_GROUP} channels for FP8. Pass rows of this "
            f"Buffer's hidden"
        )
    if not _has_kernels(rows):
        groups = rows.contiguous().unflatten(-1, (rows.shape[-1] // FP8_GROUP, FP8_GROUP))
        amax = torch.linalg.vector_norm(groups, math.inf, dim=-1)  # in one pass
        scales = amax.float().clamp_(min=float(MIN_AMAX)) / float(MAX_E4M3)
        return (groups / scales[..., None]).to(torch.float8_e4m3fn).flatten(-2), scales
    rows = aligned(rows)
    out = torch.empty_like(rows, dtype=torch.float8_e4m3fn)
    scales = torch.empty(*rows.shape[:-1], rows.shape[-1] // FP8_GROUP, dtype=torch.float32, device=rows.device)
    values = {"x": rows.data_ptr(), "out": out.data_ptr(), "scales": scales.data_ptr(), "num_groups": scales.numel()}
    values |= {"round_scale": False, "use_ue8m0": False}
    _launch("fp8_encode", rows, values, -(-rows.numel() // 4096), FLOATS[rows.dtype])  # 16 elements a thread
    return out, scales


def from_fp8(rows: Any, scales: Any, dtype: Any, num_kept: Any = None) -> Any:
    """Convert the results of `to_fp8` back to `dtype`. Rows from `num_kept` (int32 `[1]`, on the device) on become zero."""
    if not _has_kernels(rows):
        groups = rows.to(dtype).unflatten(-1, (scales.shape[-1], FP8_GROUP))  # exact: every such dtype has the numbers of FP8
        out = torch.mul(groups, scales[..., None], out=torch.empty_like(groups)).flatten(-2)  # in float32, rounded once
        return out if num_kept is None else zero_padding(out, num_kept)
    out = torch.empty_like(rows, dtype=dtype)
    values = {
        "x": rows.data_ptr(),
        "scales": scales.data_ptr(),
        "out": out.data_ptr(),
        "num_kept": 0 if num_kept is None else num_kept.data_ptr(),
        "num_rows": rows.shape[0],
        "num_channels": rows.shape[1],
    }
    _launch("fp8_decode", rows, values, rows.shape[0], FLOATS[dtype])
    return out


def zero_padding(rows: Any, num_kept: Any) -> Any:
    """Set rows from `num_kept` (int32 `[1]`, on the device) on to zero, and return the rows, `[n, hidden]` of any dtype."""
    if rows.is_cuda:
        # It imports the CUDA bindings, which programs on the host backend may lack.
        from ..jit.launch import launch_zero_padding

        ptr, row_bytes = rows.data_ptr(), rows.shape[1] * rows.element_size()
        with _gpu_of(rows) as stream:
            launch_zero_padding(stream, ptr, ptr, num_kept.data_ptr(), rows.shape[0], row_bytes)
    else:
        rows.view(torch.uint8)[int(num_kept) :] = 0
    return rows


def received_rows(sent: DispatchResult, dtype: Any) -> Any:
    """Return the rows of a dispatch in this dtype. Padding is zero, and the host does not learn its size."""
    is_padded = sent.num_recv_tokens_per_expert_list is None and sent.handle.layout == "token"
    num_kept = sent.num_recv_tokens if is_padded else None
    if sent.recv_x_scales is not None:
        return from_fp8(sent.recv_x, sent.recv_x_scales, dtype, num_kept)
    return sent.recv_x if num_kept is None else zero_padding(sent.recv_x, num_kept)


def dot_rows(a: Any, b: Any, reduce: str) -> Any:
    """Return the dot product of each row of `a` with that of `b`, `[n]`. With `reduce="topk"`, its bits do not depend on `n`."""
    products = a * b
    if reduce == "rank":
        return products.sum(1)
    while (width := products.shape[1]) > 1:  # PyTorch's order of a sum depends on the number of rows
        half = width // 2
        sums = products[:, :half] + products[:, half : 2 * half]
        products = torch.cat([sums, products[:, 2 * half :]], 1) if width % 2 else sums
    return products[:, 0]


def dispatch_layout(topk_idx: Any, num_experts: int, num_ranks: int) -> tuple[Any, Any, Any]:
    """Count the tokens for each rank and each expert.

    Args:
        topk_idx: `[num_tokens, num_topk]` int32 or int64, expert numbers. Numbers out of range do not count.
        num_experts: Experts over all ranks, a multiple of `num_ranks`.
        num_ranks: Number of ranks.

    Returns:
        The number of tokens for each rank, `[num_ranks]` int32; the number of choices of each expert, `[num_experts]` int32; and whether a
        token goes to a rank, `[num_tokens, num_ranks]` bool.
    """
    num_tokens, num_topk = topk_idx.shape
    if not topk_idx.is_cuda:
        is_choice = (topk_idx >= 0) & (topk_idx < num_experts)
        expert, token = topk_idx[is_choice].long(), is_choice.nonzero()[:, 0]
        is_in_rank = torch.zeros(num_tokens, num_ranks, dtype=torch.bool)
        is_in_rank[token, expert // (num_experts // num_ranks)] = True
        return is_in_rank.sum(0, dtype=torch.int32), expert.bincount(minlength=num_experts).int(), is_in_rank
    topk_idx = topk_idx.contiguous()
    like = dict(dtype=torch.int32, device=topk_idx.device)
    per_rank, per_expert = torch.zeros(num_ranks + num_experts, **like).split([num_ranks, num_experts])
    is_in_rank = topk_idx.new_empty(num_tokens, num_ranks, dtype=torch.bool)
    values = {
        "topk_idx": topk_idx.data_ptr(),
        "per_rank": per_rank.data_ptr(),
        "per_expert": per_expert.data_ptr(),
        "is_in_rank": is_in_rank.data_ptr(),
        "idx_bytes": topk_idx.element_size(),
        "num_tokens": num_tokens,
        "num_topk": num_topk,
        "num_experts": num_experts,
        "num_ranks": num_ranks,
    }
    _launch("dispatch_layout", topk_idx, values, min(-(-num_tokens // 32), _MAX_COUNTING_BLOCKS))
    return per_rank, per_expert, is_in_rank


def _has_kernels(rows: Any) -> bool:
    if not rows.is_cuda:
        return False
    with _gpu_of(rows):
        return has_fp8(compiler.target_arch())


def _launch(kernel: str, like: Any, values: dict[str, int], most_blocks: int, dtype: str | None = None) -> None:
    from ..jit.launch import launch_local

    with _gpu_of(like) as stream:
        launch_local(kernel, stream, values, most_blocks, dtype)


@contextmanager
def _gpu_of(tensor: Any) -> Iterator[int]:
    """Make a tensor's GPU current, and return PyTorch's stream on it."""
    from ..cuda import driver

    with torch.cuda.device(tensor.device):
        # A thread (of a backward pass) may have no context yet, because PyTorch makes one with its first kernel there.
        driver.use_device(tensor.device.index)
        yield torch.cuda.current_stream().cuda_stream
