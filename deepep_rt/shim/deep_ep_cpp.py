"""DeepEP V1's compiled module. Its names come from deepep_rt.compat."""

from deepep_rt.compat import (
    Buffer,
    Config,
    EventHandle,
    __getattr__,
    get_low_latency_rdma_size_hint,
    is_sm90_compiled,
    topk_idx_t,
)

__all__ = [
    "Buffer",
    "Config",
    "EventHandle",
    "__getattr__",
    "get_low_latency_rdma_size_hint",
    "is_sm90_compiled",
    "topk_idx_t",
]
