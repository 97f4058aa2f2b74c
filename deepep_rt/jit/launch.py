"""Pack a kernel's Params and launch it. All kernels of the library start here."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from cuda.bindings import driver

from ..cuda.driver import ok
from ..kernels.structs import offset
from ..kernels.table import Kernel
from .loader import LoadedKernel

_FORMATS = {"u1": "B", "u4": "I", "i4": "i", "u8": "Q", "i8": "q", "f4": "f"}


class Launcher:
    """One kernel, with the members of its Params that never change. A call packs the other members, and launches the kernel.

    Args:
        kernel: Its table entry.
        function: The loaded kernel.
        constants: The constants it was compiled with.
        fixed: Values of the first members of Params, in order.
        launches: Its first number counts the launches.
    """

    def __init__(
        self,
        kernel: Kernel,
        function: LoadedKernel,
        constants: Mapping[str, int],
        fixed: Mapping[str, Any],
        launches: list[int] | None = None,
    ) -> None:
        self._launches = [0] if launches is None else launches
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
        self._dtype, self._start = dtype, offset(dtype, self.names[0])
        self._packer = struct.Struct(_format(dtype, self.names, self._start))
        self._is_checked = False
        self._blocks_and_stream = 0, -1  # of the last launch
        self._argument = (ctypes.c_void_p * 1)(ctypes.addressof(self._buffer))
        self._argument_ptr = ctypes.addressof(self._argument)
        self._function = driver.CUfunction(function.handle)  # made once: the binding takes 1 us to make it from an integer
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
        """Set whether later launches may start while the kernel before them ends, if this kernel supports that."""
        self._config.numAttrs = int(self._overlaps and allowed)

    def __call__(self, stream: int, num_blocks: int, values: Mapping[str, int]) -> None:
        """Launch the kernel.

        Args:
            stream: The stream of the launch.
            num_blocks: Blocks of the grid.
            values: Every member of Params that is not fixed, in order.
        """
        if not self._is_checked:  # in the first call only: one place launches a kernel, and lookups by name take time
            self._check_names(values)
            self._is_checked = True
        self._packer.pack_into(self._buffer, self._start, *values.values())
        self.launch(stream, num_blocks, self._argument_ptr)

    def prepare(self, num_blocks: int, values: Mapping[str, int]) -> PreparedLaunch:
        """Pack the parameters of a launch that repeats. Arguments as of a launch."""
        self._check_names(values)
        self._packer.pack_into(self._buffer, self._start, *values.values())
        return PreparedLaunch(self, bytes(self._buffer), self._dtype, num_blocks)

    def launch(self, stream: int, num_blocks: int, argument_ptr: int) -> None:
        """Launch the kernel with packed parameters. `argument_ptr` is the address of a pointer to them."""
        config, blocks_and_stream = self._config, (num_blocks, stream)
        if blocks_and_stream != self._blocks_and_stream:  # rarely: most calls repeat them
            config.gridDimX, config.hStream = self._blocks_and_stream = blocks_and_stream
        ok(driver.cuLaunchKernelEx(config, self._function, argument_ptr, 0))
        self._launches[0] += 1

    def _check_names(self, values: Mapping[str, int]) -> None:
        if tuple(values) != self.names:
            raise AssertionError(f"{self._name}: the values {tuple(values)} are not the members {self.names}, in this order")


class PreparedLaunch:
    """A launch that repeats. It keeps its packed parameters, so other launches of the kernel in between do not change them.

    Args:
        launcher: Of the kernel.
        params: The packed Params.
        dtype: Of Params.
        num_blocks: Blocks of the grid. It may be changed between launches.
    """

    def __init__(self, launcher: Launcher, params: bytes, dtype: np.dtype, num_blocks: int) -> None:
        self._launch, self._dtype, self.num_blocks = launcher.launch, dtype, num_blocks
        self._buffer = ctypes.create_string_buffer(params, len(params))
        self._argument = (ctypes.c_void_p * 1)(ctypes.addressof(self._buffer))
        self._argument_ptr = ctypes.addressof(self._argument)

    def __call__(self, stream: int) -> None:
        """Launch the kernel on a stream."""
        self._launch(stream, self.num_blocks, self._argument_ptr)

    def member(self, name: str) -> Callable[[int], None]:
        """Return a function that changes a member of Params for later launches. The driver copies Params in each launch."""
        pack_into = struct.Struct(f"<{_FORMATS[self._dtype[name].str[1:]]}").pack_into
        return functools.partial(pack_into, self._buffer, offset(self._dtype, name))


def _format(dtype: np.dtype, names: tuple[str, ...], start: int) -> str:
    """Return the `struct` format of scalar members, with the padding that the C compiler inserts."""
    parts, end = ["<"], start
    for name in names:
        kind, begin = dtype[name], offset(dtype, name)
        parts.append(f"{begin - end}x" if begin > end else "")
        parts.append(_FORMATS[kind.str[1:]])
        end = begin + kind.itemsize
    return "".join(parts)
