"""Events, where DeepEP V1 has them."""

from deepep_rt.compat import EventHandle, EventOverlap, __getattr__, check_nvlink_connections

__all__ = ["EventHandle", "EventOverlap", "__getattr__", "check_nvlink_connections"]
