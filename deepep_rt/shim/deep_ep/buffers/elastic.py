"""`ElasticBuffer` of DeepEP V2, at its import path."""

from deepep_rt.compat import ElasticBuffer, EPHandle, EventHandle, EventOverlap, __getattr__

__all__ = ["EPHandle", "ElasticBuffer", "EventHandle", "EventOverlap", "__getattr__"]
