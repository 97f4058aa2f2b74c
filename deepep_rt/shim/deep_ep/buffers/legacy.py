"""`Buffer` of DeepEP V1, at the import path of later versions."""

from deepep_rt.compat import Buffer, Config, EventHandle, EventOverlap, __getattr__

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "__getattr__"]
