"""`Buffer`, at the import path of nixl_ep."""

from deepep_rt.compat.nixl_ep import DEFAULT_TIMEOUT_MS, Buffer, Config, EventHandle, EventOverlap, __getattr__

__all__ = ["DEFAULT_TIMEOUT_MS", "Buffer", "Config", "EventHandle", "EventOverlap", "__getattr__"]
