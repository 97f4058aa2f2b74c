"""DeepEP's module, given by deepep_rt.compat: for programs that import it by themselves."""

from deepep_rt.compat import (
    Buffer,
    Config,
    EventHandle,
    EventOverlap,
    __getattr__,
    __version__,
    topk_idx_t,
)

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "__getattr__", "__version__", "topk_idx_t"]
