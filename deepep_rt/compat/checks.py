"""Check the tensors and handles of DeepEP V1's calls."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from .._checks import argument_error, instance
from ..arrays.dtypes import DTYPES
from ..arrays.frameworks import check_dense
from ..config import MAX_TOPK
from ..errors import EPInputError

Tensors: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""Rows; FP8 rows come with their scales."""


_MOST_ITEMSIZE = DTYPES["float32"].itemsize  # of the widest Buffers


def backend_for(x: torch.Tensor) -> str:
    """Return the backend of `deepep_rt.Buffer` for such a tensor."""
    return "cuda" if x.is_cuda else "host"


def without_gradient(x: Any) -> Any:
    """Detach a tensor that requires a gradient. DeepEP's calls give no gradient, and its programs compute their own."""
    return x.detach() if isinstance(x, torch.Tensor) and x.requires_grad else x


def check_tensor(x: Any, name: str) -> None:
    """Raise EPInputError unless `x` is a dense tensor of PyTorch with values."""
    instance(x, name, torch.Tensor, "Make one of a NumPy array with torch.from_numpy.")
    check_dense(x, name)


def check_rows(x: Any) -> None:
    """Raise EPInputError unless `x` is a dense tensor with two dimensions whose rows a Buffer can send.

    For another dtype this rank would make a Buffer alone.
    """
    check_tensor(x, "x")
    if x.dim() != 2:
        raise EPInputError(f"x.shape={list(x.shape)}; expected [num_tokens, hidden]. Reshape it.")
    if (kind := DTYPES.get(str(x.dtype).removeprefix("torch."))) is None or kind.itemsize > _MOST_ITEMSIZE:
        allowed = [name for name, kind in DTYPES.items() if kind.itemsize <= _MOST_ITEMSIZE]
        raise EPInputError(f"x.dtype={x.dtype}; expected one of {', '.join(allowed)}. Convert it.")


def check_choices(topk_idx: torch.Tensor) -> None:
    """Raise EPInputError unless `topk_idx` has a column for each choice. The other ranks make a Buffer of their top-k."""
    if topk_idx.dim() != 2 or not 1 <= topk_idx.shape[1] <= MAX_TOPK:
        raise EPInputError(
            f"topk_idx.shape={list(topk_idx.shape)}; expected [num_tokens, num_topk] with 1 to {MAX_TOPK} choices, also without tokens. "
            f"Reshape it."
        )


def rows_and_scales(x: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return rows and their FP8 scales, both checked. The scales are None if `x` is one tensor."""
    if not isinstance(x, tuple):
        check_rows(x)
        return x, None
    if len(x) != 2:
        raise argument_error(x, "x", "a tensor, or a pair of rows and scales", "Pass one of them.")
    rows, scales = x
    check_rows(rows)
    check_tensor(scales, "x[1]")
    return rows, scales


def check_layout(is_token_in_rank: Any, num_tokens_per_expert: Any, topk_idx: Any, num_tokens: int, num_ranks: int) -> None:
    """Raise EPInputError unless these are results of `get_dispatch_layout`.

    The shape of `is_token_in_rank` matters only without `topk_idx`, because it then decides where tokens go.
    """
    remedy = "Pass the results of get_dispatch_layout."
    for tensor, name in ((is_token_in_rank, "is_token_in_rank"), (num_tokens_per_expert, "num_tokens_per_expert")):
        instance(tensor, name, torch.Tensor, remedy)
        check_dense(tensor, name)
    shape, expected, dtype = list(is_token_in_rank.shape), [num_tokens, num_ranks], is_token_in_rank.dtype
    if topk_idx is None and (shape != expected or dtype is not torch.bool):
        raise EPInputError(f"is_token_in_rank.shape={shape}, dtype={dtype}; expected {expected} bool. {remedy}")
    shape, dtype = list(num_tokens_per_expert.shape), num_tokens_per_expert.dtype
    if len(shape) != 1 or dtype not in (torch.int32, torch.int64):
        raise EPInputError(f"num_tokens_per_expert.shape={shape}, dtype={dtype}; expected [num_experts] int32. {remedy}")


def check_handle(handle: Any, kind: type, method: str) -> None:
    """Raise EPInputError unless the handle is of the class that `method` returns."""
    if not isinstance(handle, kind):
        raise argument_error(handle, "handle", f"the whole handle that {method} returned", "Pass it as it is.")
