"""DeepEP's module, for programs that import it by themselves. Its names come from deepep_rt.compat."""

from deepep_rt.compat import (
    Buffer,
    Config,
    ElasticBuffer,
    EPHandle,
    EventHandle,
    EventOverlap,
    __getattr__,
    __version__,
    topk_idx_t,
)

__all__ = [
    "Buffer",
    "Config",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "__getattr__",
    "__version__",
    "topk_idx_t",
]
