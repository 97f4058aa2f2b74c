"""What later versions of DeepEP say of the machine."""

from deepep_rt.compat import __getattr__, check_nvlink_connections

__all__ = ["__getattr__", "check_nvlink_connections"]
