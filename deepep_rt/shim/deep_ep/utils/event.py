"""Events, where later versions of DeepEP have them."""

from deepep_rt.compat import EventHandle, EventOverlap, __getattr__

__all__ = ["EventHandle", "EventOverlap", "__getattr__"]
