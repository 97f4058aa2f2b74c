"""Load compiled kernels into the current CUDA context, pack their Params, and launch them. All kernels of the library start here.

After the first call, `load` is a dictionary look-up. `launch_local` launches kernels on a rank's own arrays, without a Buffer. Wrappers use
them where a library would need several passes over memory.

loaded = load(KERNELS["dispatch"], kernel_constants(layout, "sm_90", KERNELS["dispatch"]), "sm_90")
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from cuda.bindings import driver

from ..cuda import driver as cuda_driver
from ..cuda import nvshmem
from ..cuda.driver import ok, relaxed_capture_mode
from ..errors import EPUnavailableError
from ..kernels.source import Constants
from ..kernels.structs import offset
from ..kernels.table import KERNELS, Kernel
from ..kernels.tuning import local_constants
from . import compiler
from .build import CompiledKernel, build, cached
from .libraries import nvrtc_version

_FORMATS = {"u1": "B", "u4": "I", "i4": "i", "u8": "Q", "i8": "q", "f4": "f"}
_BLOCKS_PER_SM = 8  # of 256 threads, for a kernel without a Buffer: at least as many as fit
_launching = threading.Lock()  # PyTorch runs a backward pass in another thread


@dataclass(frozen=True)
class LoadedKernel:
    """A loaded kernel."""

    handle: int  # CUfunction
    threads: int  # of a block
    shared_bytes: int  # dynamic shared memory of a block


LOADED: dict[tuple, LoadedKernel] = {}
"""The loaded kernels of this process, by name, target, context and constants."""

_loading = threading.Lock()
_read: dict[tuple, CompiledKernel] = {}
"""The kernels that `read` has found and `load` has not loaded, by name, target and constants."""


def read(kernel: Kernel, constants: Constants, arch: str) -> None:
    """Read a kernel from the disk cache, if it is there, for a later `load`. No GPU is needed. Raise the errors of `build`."""
    if found := cached(kernel, constants, arch):
        _read[kernel.name, arch, tuple(constants.items())] = found


def drop_read() -> None:
    """Drop the kernels that `read` has found and `load` has not loaded."""
    _read.clear()


def load(kernel: Kernel, constants: Constants, arch: str) -> LoadedKernel:
    """Load a kernel into the current CUDA context, or return the one that was loaded before. `constants` is from `kernel_constants`.

    Raises:
        EPError: the errors of `build`.
        EPUnavailableError: with the name of the CUDA error, if the driver refuses.
        EPOutOfMemoryError: if the GPU is out of memory.
    """
    # CUfunction handles belong to a context, so a process with two GPUs has two of each.
    key = (kernel.name, arch, compiler.gpu_context(), tuple(constants.items()))
    loaded = LOADED.get(key)
    if loaded is None:
        with _loading:
            loaded = LOADED.get(key)
            if loaded is None:
                loaded = LOADED[key] = _load(kernel, constants, arch)
    return loaded


def _load(kernel: Kernel, constants: Constants, arch: str) -> LoadedKernel:
    code = (_read.pop((kernel.name, arch, tuple(constants.items())), None) or build(kernel, constants, arch)).code
    if not code.startswith(b"\x7fELF"):
        code += b"\0"  # the driver expects PTX to end with a zero
    shared_bytes = constants[kernel.shared] if kernel.shared else 0
    try:
        with relaxed_capture_mode():  # a capture may be under way in the first call
            library = ok(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))
            function = ok(driver.cuKernelGetFunction(ok(driver.cuLibraryGetKernel(library, kernel.name.encode()))))
            if shared_bytes > 0:
                attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                ok(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
    except EPUnavailableError as error:
        raise EPUnavailableError(
            f"kernel {kernel.name}, compiled for {arch} with {shared_bytes} bytes of dynamic shared memory, cannot be loaded on this "
            f"{compiler.gpu_arch()} GPU: {error}. Check DEEPEP_RT_ARCH, if it is set, and that the driver is not older than NVRTC "
            f"{nvrtc_version()}."
        ) from error
    if kernel.links_nvshmem(constants):
        nvshmem.init_device_library(int(library))
    return LoadedKernel(int(function), constants[kernel.threads], shared_bytes)


class Launcher:
    """One kernel, with the members of its Params that never change. A call packs the other members, and launches the kernel.

    Args:
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
        """Launch the kernel. `values` has every member of Params that is not fixed, in order."""
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

    `num_blocks` may be changed between launches.
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

    def members(self, first: str, last: str) -> Callable[..., None]:
        """Return a function that changes all members of Params from `first` to `last`, which it gets in their order, as `member` does."""
        names = tuple(self._dtype.names or ())
        names, start = names[names.index(first) : names.index(last) + 1], offset(self._dtype, first)
        return functools.partial(struct.Struct(_format(self._dtype, names, start)).pack_into, self._buffer, start)


def _format(dtype: np.dtype, names: tuple[str, ...], start: int) -> str:
    """Return the `struct` format of scalar members, with the padding that the C compiler inserts."""
    parts, end = ["<"], start
    for name in names:
        kind, begin = dtype[name], offset(dtype, name)
        parts.append(f"{begin - end}x" if begin > end else "")
        parts.append(_FORMATS[kind.str[1:]])
        end = begin + kind.itemsize
    return "".join(parts)


def launch_local(name: str, stream: int, values: Mapping[str, int], max_blocks: int, dtype: str | None = None) -> None:
    """Launch a kernel on the GPU of the current context. `values` are the members of its Params, in their order.

    `max_blocks` blocks have work. Without any, this launches nothing. `dtype` is for a kernel that is compiled once for each element type.
    """
    if max_blocks > 0:
        with _launching:
            launcher, gpu_blocks = _local_launcher(name, dtype, compiler.target_arch(), compiler.gpu_context())
            launcher(stream, min(max_blocks, gpu_blocks), values)


def load_local(*names: str, dtype: str | None = None) -> None:
    """Load kernels. A later launch then does not fail for want of a kernel."""
    with _launching:
        for name in names:
            _local_launcher(name, dtype, compiler.target_arch(), compiler.gpu_context())


def launch_zero_padding(stream: int, x: int, out: int, num_kept: int, num_rows: int, row_bytes: int) -> None:
    """Copy the first rows of `x` to `out`, and fill its other rows with zeros, `num_rows` in all.

    `x`, `out` and `num_kept` are addresses on the GPU. `num_kept` is that of the number of rows to copy (int32).
    """
    values = {"x": x, "out": out, "num_kept": num_kept, "num_rows": num_rows, "row_bytes": row_bytes}
    launch_local("zero_padding", stream, values, num_rows)


@functools.cache
def _local_launcher(name: str, dtype: str | None, arch: str, context: int) -> tuple[Launcher, int]:
    """Load a kernel; return its launcher, and the largest useful number of blocks on this GPU."""
    kernel, constants = KERNELS[name], local_constants(arch, dtype)
    function = load(kernel, constants, arch)
    return Launcher(kernel, function, constants, {}), _BLOCKS_PER_SM * cuda_driver.num_sms(cuda_driver.current_device())
