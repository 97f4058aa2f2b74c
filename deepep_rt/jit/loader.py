"""Load compiled kernels into the current CUDA context. After the first call, `load` is a dictionary look-up.

loaded = load(KERNELS["dispatch"], kernel_constants(layout, "sm_90", KERNELS["dispatch"]), "sm_90")
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from cuda.bindings import driver

from ..cuda import nvshmem
from ..cuda.driver import ok, relaxed_capture_mode
from ..errors import EPUnavailableError
from ..kernels.source import Constants
from ..kernels.table import Kernel
from . import current_gpu
from .build import build
from .libraries import nvrtc_version


@dataclass(frozen=True)
class LoadedKernel:
    """A loaded kernel.

    Attributes:
        handle: CUfunction.
        threads: Threads of a block.
        shared_bytes: Dynamic shared memory of a block.
    """

    handle: int
    threads: int
    shared_bytes: int


LOADED: dict[tuple, LoadedKernel] = {}
"""The loaded kernels of this process, by name, target, context and constants."""

_loading = threading.Lock()


def load(kernel: Kernel, constants: Constants, arch: str) -> LoadedKernel:
    """Load a kernel into the current CUDA context, or return the one that was loaded before.

    Args:
        kernel: An entry of the kernel table.
        constants: The result of `kernel_constants`.
        arch: Target, usually `current_gpu.target_arch()`.

    Raises:
        EPError: the errors of `build`.
        EPUnavailableError: with the name of the CUDA error, if the driver refuses.
        EPOutOfMemoryError: if the GPU is out of memory.
    """
    # CUfunction handles belong to a context, so a process with two GPUs has two of each.
    key = (kernel.name, arch, current_gpu.context(), tuple(constants.items()))
    loaded = LOADED.get(key)
    if loaded is None:
        with _loading:
            loaded = LOADED.get(key)
            if loaded is None:
                loaded = LOADED[key] = _load(kernel, constants, arch)
    return loaded


def _load(kernel: Kernel, constants: Constants, arch: str) -> LoadedKernel:
    code = build(kernel, constants, arch).code
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
            f"{current_gpu.arch()} GPU: {error}. Check DEEPEP_RT_ARCH, if it is set, and that the driver is not older than NVRTC "
            f"{nvrtc_version()}."
        ) from error
    if kernel.links_nvshmem(constants):
        nvshmem.init_device_library(int(library))
    return LoadedKernel(int(function), constants[kernel.threads], shared_bytes)
