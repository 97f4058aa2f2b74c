"""`Buffer`, where DeepEP V1 has it."""

from deepep_rt.compat import Buffer, Config, EventHandle, EventOverlap, __getattr__

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "__getattr__"]
