"""Backends: they execute the calls of a Buffer, on GPUs or on the host."""
