"""nixl_ep, NIXL's expert-parallel module, for programs that import it by themselves. Its names come from deepep_rt.compat.nixl_ep."""

from deepep_rt.compat.nixl_ep import Buffer, Config, EventOverlap, __getattr__, topk_idx_t

__all__ = ["Buffer", "Config", "EventOverlap", "__getattr__", "topk_idx_t"]
