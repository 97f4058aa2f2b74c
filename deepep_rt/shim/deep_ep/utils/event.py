"""Events, at the import path of later versions of DeepEP."""

from deepep_rt.compat import EventHandle, EventOverlap, __getattr__

__all__ = ["EventHandle", "EventOverlap", "__getattr__"]
