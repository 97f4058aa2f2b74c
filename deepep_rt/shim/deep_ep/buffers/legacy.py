"""`Buffer`, where later versions of DeepEP have V1's."""

from deepep_rt.compat import Buffer, Config, EventHandle, EventOverlap, __getattr__

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "__getattr__"]
