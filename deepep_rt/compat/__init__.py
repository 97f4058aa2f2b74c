"""DeepEP's Python interface on top of `deepep_rt.Buffer`: `import deepep_rt.compat as deep_ep`.

Names, arguments, defaults and results of `Buffer` are those of DeepEP 1.2, and of `ElasticBuffer` those of DeepEP 2.1.
docs/coming-from-deepep.md lists the differences. All tensors are PyTorch's. Calls with tensors on the CPU run on the host backend.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from .. import _env
from .._shim import shim_path
from ..errors import EPUnavailableError
from .base import NoAttributeError
from .buffer import Buffer
from .config import Config
from .elastic import ElasticBuffer
from .elastic_handle import EPHandle
from .events import EventHandle, EventOverlap

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "check_nvlink_connections",
    "install",
    "shim_path",
    "topk_idx_t",
]

topk_idx_t = torch.int64
"""The dtype of expert numbers in DeepEP. This library accepts int32 too."""


__version__ = _env.deepep_version()  # of DeepEP, whose interface this is


def install() -> None:
    """Make `import deep_ep` import this library, in this process and in processes that multiprocessing starts from it.

    Programs that import DeepEP by themselves need it. Call it before their import: many programs read an ImportError as "DeepEP is not
    installed". Other processes (`vllm serve`, Ray's workers) find `deep_ep` if PYTHONPATH begins with the output of
    `python -m deepep_rt shim-path`.

    Raises:
        EPUnavailableError: If DeepEP itself was imported before.

    Example:
        >>> import deepep_rt.compat
        >>> deepep_rt.compat.install()
        >>> from deep_ep.utils import EventOverlap
    """
    imported = [name for name in ("deep_ep", "deep_ep_cpp") if name in sys.modules]
    if others := [name for name in imported if getattr(sys.modules[name], "Buffer", None) is not Buffer]:
        raise EPUnavailableError(
            f"{others[0]} was imported already and is not this library. Call install() before the first import of {others[0]}."
        )
    if shim_path() not in sys.path:
        sys.path.insert(0, shim_path())


def check_nvlink_connections(group: Any) -> None:
    """Do nothing. The constructor of Buffer raises an error if GPUs cannot reach each other.

    Args:
        group: Not read.
    """


if not TYPE_CHECKING:  # type checkers still report names that are missing

    def __getattr__(name: str) -> NoReturn:
        """Raise NoAttributeError for any other name."""
        raise NoAttributeError(f"{name} is not a part of this library. See docs/coming-from-deepep.md for the names that are.")


# In deep_ep_cpp these two are functions.
get_low_latency_rdma_size_hint = Buffer.get_low_latency_rdma_size_hint
is_sm90_compiled = Buffer.is_sm90_compiled
