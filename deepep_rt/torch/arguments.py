"""Checks of the arguments that the functions of this package share."""

from __future__ import annotations

from typing import Any

import torch

from .._checks import argument_error, flag
from ..arrays.dtypes import FP8_GROUP
from ..arrays.frameworks import check_dense
from ..buffer import Buffer
from ..config import COMBINE_DTYPES
from ..errors import EPInputError
from .tensor_ops import FLOATS


def check_tensor(value: Any, name: str, required: bool) -> None:
    if not isinstance(value, torch.Tensor) and (required or value is not None):
        raise argument_error(value, name, "a torch.Tensor", "Pass other arrays to Buffer.dispatch and Buffer.combine.")
    if value is not None:
        check_dense(value, name)


def check_dims(tensor: torch.Tensor, name: str, dims: tuple[str, ...]) -> None:
    if tensor.dim() != len(dims):
        raise EPInputError(f"{name}.shape={list(tensor.shape)}; expected [{', '.join(dims)}]. Pass a tensor of that shape.")


def check_fp8(buffer: Buffer, fp8: bool, name: str) -> bool:
    fp8 = flag(fp8, name)
    if fp8 and buffer.config.hidden % FP8_GROUP:
        raise EPInputError(
            f"hidden={buffer.config.hidden}; expected a multiple of {FP8_GROUP}, the channels of an FP8 scale, with {name}=True. "
            f"Pass {name}=False."
        )
    return fp8


def check_differentiable(x: Any, fp8: bool) -> None:
    """Check that rows can be converted to FP8, if they shall be, and that they can have a gradient, if they need one."""
    if (fp8 or x.requires_grad) and x.dtype not in FLOATS:
        reason = "fp8=True" if fp8 else "a gradient"
        raise EPInputError(f"x.dtype={x.dtype}; expected {' or '.join(COMBINE_DTYPES)} for {reason}. Convert x, or detach() it.")
