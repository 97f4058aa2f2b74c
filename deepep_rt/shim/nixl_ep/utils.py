"""Events, at the import path of nixl_ep."""

from deepep_rt.compat.nixl_ep import EventHandle, EventOverlap, __getattr__

__all__ = ["EventHandle", "EventOverlap", "__getattr__"]
