"""`Buffer`, at the import path of DeepEP V1."""

from deepep_rt.compat import Buffer, Config, EventHandle, EventOverlap, __getattr__

__all__ = ["Buffer", "Config", "EventHandle", "EventOverlap", "__getattr__"]
