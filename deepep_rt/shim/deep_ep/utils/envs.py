"""The checks of the machine, at the import path of later versions of DeepEP."""

from deepep_rt.compat import __getattr__, check_nvlink_connections

__all__ = ["__getattr__", "check_nvlink_connections"]
