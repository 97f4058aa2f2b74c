"""DeepEP V1's Python interface on top of `deepep_rt.Buffer`: `import deepep_rt.compat as deep_ep`.

Names, arguments, defaults and results are those of DeepEP 1.2; docs/coming-from-deepep.md says what differs. Tensors are PyTorch's: on
GPUs, or on the CPU, where calls run on the host backend.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from .._shim import shim_path
from ..errors import EPUnavailableError
from .base import NoAttributeError
from .buffer import Buffer
from .config import Config
from .events import EventHandle, EventOverlap

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "check_nvlink_connections", "install", "shim_path", "topk_idx_t"]

topk_idx_t = torch.int64
"""What expert numbers are in DeepEP; int32 is welcome too."""


__version__ = "1.2.1"  # of DeepEP, whose interface this is


def install() -> None:
    """Let `import deep_ep` give this library: in this process, and in those that multiprocessing starts from it.

    For programs that import DeepEP by themselves. Call it before they do: many take an ImportError for "DeepEP is not installed".
    Other processes (`vllm serve`, Ray's workers) find `deep_ep` where `python -m deepep_rt shim-path` is in front of PYTHONPATH.

    Raises:
        EPUnavailableError: if DeepEP itself was imported before.

    Example:
        >>> import deepep_rt.compat
        >>> deepep_rt.compat.install()
        >>> from deep_ep.utils import EventOverlap
    """
    before = [name for name in ("deep_ep", "deep_ep_cpp") if name in sys.modules]
    if theirs := [name for name in before if getattr(sys.modules[name], "Buffer", None) is not Buffer]:
        raise EPUnavailableError(f"{theirs[0]} was imported before, and is not this library; call install() first of all")
    if shim_path() not in sys.path:
        sys.path.insert(0, shim_path())


def check_nvlink_connections(group: Any) -> None:
    """Nothing to check here: making a Buffer raises an error where GPUs do not reach each other.

    Args:
        group: Not looked at.
    """


if not TYPE_CHECKING:  # type checkers shall go on to find names that are not there

    def __getattr__(name: str) -> NoReturn:
        """Say of any other name that it is not here."""
        raise NoAttributeError(f"{name} is not a part of this library; docs/coming-from-deepep.md lists what it has of DeepEP")


# deep_ep_cpp has these two as functions.
get_low_latency_rdma_size_hint = Buffer.get_low_latency_rdma_size_hint
is_sm90_compiled = Buffer.is_sm90_compiled
