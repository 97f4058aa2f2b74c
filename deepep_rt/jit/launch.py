"""Packs a kernel's Params and launches it; the only launcher."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from cuda.bindings import driver

from ..cuda.driver import ok
from ..kernels.structs import offset
from ..kernels.table import Kernel
from .build import LoadedKernel

_FORMATS = {"u1": "B", "u4": "I", "i4": "i", "u8": "Q", "i8": "q", "f4": "f"}


class Launcher:
    """One kernel with the members of its Params that never change; a call packs the others and launches.

    Args:
        kernel: Its table entry.
        function: The loaded kernel.
        constants: The constants it was compiled with.
        fixed: Values of the first members of Params, in order.
    """

    def __init__(self, kernel: Kernel, function: LoadedKernel, constants: Mapping[str, int], fixed: Mapping[str, Any]) -> None:
        dtype = kernel.struct.dtype(constants)
        names = kernel.struct.names
        self.names, self._name = names[len(fixed) :], kernel.name
        if tuple(fixed) != names[: len(fixed)]:
            raise AssertionError(f"{kernel.name}: the fixed members {tuple(fixed)} are not the first of {names}")
        self._buffer = ctypes.create_string_buffer(dtype.itemsize)
        memory: Any = self._buffer
        head = np.frombuffer(memory, dtype)[0:1]
        for name, value in fixed.items():
            head[name] = value
        self._start = offset(dtype, self.names[0])
        self._packer = struct.Struct(_format(dtype, self.names, self._start))
        self._is_checked = False
        self._where = 0, -1  # blocks and stream of the last launch
        self._argument = (ctypes.c_void_p * 1)(ctypes.addressof(self._buffer))
        self._arguments_at = ctypes.addressof(self._argument)
        self._function = driver.CUfunction(function.handle)  # from an integer it would be made in each call, which takes 1 us
        self._config = config = driver.CUlaunchConfig()
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        config.blockDimX, config.sharedMemBytes, config.numAttrs = function.threads, function.shared_bytes, 0
        self._overlaps = kernel.overlaps and bool(constants["kHasOverlap"])
        if self._overlaps:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1

    def allow_overlap(self, allowed: bool) -> None:
        """Whether later launches may begin while the kernel before them ends, as far as this kernel can do that."""
        self._config.numAttrs = int(self._overlaps and allowed)

    def __call__(self, stream: int, num_blocks: int, values: Mapping[str, int]) -> None:
        """Launch `num_blocks` blocks on `stream`; `values` has every member that is not fixed, in their order."""
        if not self._is_checked:  # once: a kernel is launched from one place, and looking values up by name takes its time
            if tuple(values) != self.names:
                raise AssertionError(f"{self._name}: the values {tuple(values)} are not the members {self.names}, in this order")
            self._is_checked = True
        self._packer.pack_into(self._buffer, self._start, *values.values())
        config, where = self._config, (num_blocks, stream)
        if where != self._where:  # mostly it is the same
            config.gridDimX, config.hStream = self._where = where
        ok(driver.cuLaunchKernelEx(config, self._function, self._arguments_at, 0))


def _format(dtype: np.dtype, names: tuple[str, ...], start: int) -> str:
    """The struct format of these scalar members, with the padding that the C compiler puts between them."""
    parts, end = ["<"], start
    for name in names:
        kind, begin = dtype[name], offset(dtype, name)
        parts.append(f"{begin - end}x" if begin > end else "")
        parts.append(_FORMATS[kind.str[1:]])
        end = begin + kind.itemsize
    return "".join(parts)
