"""Kernels: their table, structures, memory layout, tuning and source text."""
