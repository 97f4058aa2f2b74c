"""Events, at the import path of DeepEP V1."""

from deepep_rt.compat import EventHandle, EventOverlap, __getattr__, check_nvlink_connections

__all__ = ["EventHandle", "EventOverlap", "__getattr__", "check_nvlink_connections"]
