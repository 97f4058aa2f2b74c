"""Compilation at run time: compilers, the cache of kernels, and their launch."""
