"""Kernels at run time: NVRTC (and nvJitLink, with NVSHMEM) compiles what `kernels.source` puts together, the cache keeps, `load` loads.

    function = load(KERNELS["dispatch"], kernel_constants(Layout(config), "sm_90", KERNELS["dispatch"]))

`load` is a dictionary look-up after the first call; `build` is the same without a GPU.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import threading
import time
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .. import _env
from .._version import __version__
from ..errors import EPCacheError, EPUnavailableError
from ..kernels.source import Constants, prelude, source_dir, sources_of, unit, used_constants
from ..kernels.table import Kernel
from . import compiler as toolchain
from .cache import Entry, KernelCache

_log = logging.getLogger("deepep_rt")

_OPTIONS = ["--std=c++17", "--ptxas-options=-v"]
_NVSHMEM_OPTIONS = ["--relocatable-device-code=true", "--device-as-default-execution-space"]


@dataclass
class Stats:
    """How the requests of this process for a compiled kernel were answered."""

    hits: int = 0  # from the disk cache
    misses: int = 0  # compiled here


stats = Stats()


@dataclass(frozen=True)
class CompiledKernel:
    """A compiled kernel, not loaded.

    Attributes:
        key: Hexadecimal name of everything that decides the code.
        code: A cubin, or PTX.
        info: Registers, shared memory, stack, spills, constants, versions and times, as the cache lists them.
        compiled: Whether this call compiled it; False: it came from the cache.
    """

    key: str
    code: bytes
    info: dict[str, Any] = field(repr=False)
    compiled: bool


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


def build(kernel: Kernel, constants: Constants, arch: str, *, folder: Path | None = None) -> CompiledKernel:
    """Get a kernel's code from the disk cache, or compile it and put it there; no GPU is needed.

    Of several processes that want the same kernel, one compiles and the others wait for it.

    Args:
        kernel: An entry of the kernel table.
        constants: What `kernel_constants` gave.
        arch: "sm_XX" for a cubin; "compute_XX" for PTX (a cubin for the GPU in this machine where NVSHMEM is linked).
        folder: Folder of the sources, if not `source_dir()`.

    Raises:
        EPCompileError: with the compiler's log.
        EPCacheError: if the cache cannot be written, or `DEEPEP_RT_ASSERT_CACHED=1` and the kernel is not there.
        EPUnavailableError: if NVRTC, nvJitLink or NVSHMEM is not installed.
    """
    store = KernelCache()
    link_arch = _link_arch(arch) if kernel.links_nvshmem(constants) else None
    key = _key(kernel, constants, arch, link_arch, folder)
    versions = _versions(link_arch is not None)
    if entry := store.get(arch, key, kernel.name, versions):
        return _hit(entry)
    if _env.assert_cached():
        raise EPCacheError(
            f"DEEPEP_RT_ASSERT_CACHED=1, but kernel {kernel.name} for {arch} (key {key}) is not in the cache {store.folder}; "
            f"compile it first (python -m deepep_rt compile), or unset the variable"
        )
    toolchain.check_arch(arch)
    with store.locked(arch, key):
        if entry := store.get(arch, key, kernel.name, versions):  # another process was faster
            return _hit(entry)
        entry = _compile(kernel, constants, arch, link_arch, folder, key)
        store.put(entry)
    stats.misses += 1
    seconds = entry.info["compile_seconds"]
    _log.info("compiled %s for %s in %.2f s (%d hits, %d misses)", kernel.name, arch, seconds, stats.hits, stats.misses)
    return CompiledKernel(key, entry.code, entry.info, compiled=True)


def _hit(entry: Entry) -> CompiledKernel:
    stats.hits += 1
    _log.debug("%s for %s is in the cache (%d hits, %d misses)", entry.info["kernel"], entry.arch, stats.hits, stats.misses)
    return CompiledKernel(entry.key, entry.code, entry.info, compiled=False)


def _options(nvshmem: bool) -> list[str]:
    return _OPTIONS + (_NVSHMEM_OPTIONS if nvshmem else [])


def _link_arch(arch: str) -> str:
    """What nvJitLink makes code for: always a real architecture, so PTX is linked for the GPU of this process."""
    return arch if arch.startswith("sm_") else device_arch()


def _versions(nvshmem: bool) -> dict[str, str]:
    """The tools that decide the code."""
    if not nvshmem:
        return {"nvrtc": toolchain.nvrtc_version()}
    library = toolchain.nvshmem()
    return {
        "nvrtc": toolchain.nvrtc_version(),
        "nvjitlink": toolchain.nvjitlink_version(),
        "cuda_headers": toolchain.headers_version(),
        "nvshmem": library.version,
        "nvshmem_device_sha256": library.sha256,
    }


def _launch_constants(kernel: Kernel, constants: Constants) -> dict[str, int]:
    return {name: constants[name] for name in (kernel.threads, kernel.shared) if name is not None}


def _key(kernel: Kernel, constants: Constants, arch: str, link_arch: str | None, folder: Path | None) -> str:
    """Name of the code: no path is in it, so that a cache serves every checkout and machine with the same sources and tools."""
    nvshmem = link_arch is not None
    parts = {
        "kernel": kernel.name,
        "prelude": prelude(kernel, constants, folder),
        "sources": sources_of(kernel, folder),
        "launch": _launch_constants(kernel, constants),  # not in the code, but in what the entry says about it
        "arch": arch,
        "link_arch": link_arch,
        "options": _options(nvshmem),
        "versions": _versions(nvshmem),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _compile(kernel: Kernel, constants: Constants, arch: str, link_arch: str | None, folder: Path | None, key: str) -> Entry:
    start = time.perf_counter()
    nvshmem = link_arch is not None
    include = [(folder or source_dir()).resolve()]
    if nvshmem:
        include += [toolchain.nvshmem().include, *toolchain.cuda_headers()]
    code, log = toolchain.compile_unit(unit(kernel, constants, folder), kernel.name, arch, _options(nvshmem), include)
    link_log = ""
    if link_arch is not None:
        code, link_log = toolchain.link_nvshmem(code, kernel.name, link_arch)
        log = log if arch == link_arch else link_log  # of PTX, ptxas runs in the linker
    info = {
        "kernel": kernel.name,
        "arch": arch,
        "constants": {**used_constants(kernel, constants, folder), **_launch_constants(kernel, constants)},
        "bytes": len(code),
        **asdict(toolchain.usage(log, kernel.name, link_log)),
        "dynamic_shared_bytes": constants[kernel.shared] if kernel.shared else 0,
        "nvshmem": nvshmem,
        "compile_seconds": round(time.perf_counter() - start, 3),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"deepep_rt": __version__, **_versions(nvshmem)},
    }
    return Entry(key, arch, code, info)


# --- loaded functions --------------------------------------------------------------------------------------------------------------

_loaded: dict[tuple, LoadedKernel] = {}
_loading = threading.Lock()


def load(kernel: Kernel, constants: Constants, arch: str) -> LoadedKernel:
    """Load a kernel into the current CUDA context; after the first call, a dictionary look-up.

    Args:
        kernel: An entry of the kernel table.
        constants: What `kernel_constants` gave.
        arch: Target, mostly `current_arch()`.

    Raises:
        EPError: what `build` raises.
        EPUnavailableError: with the name of the CUDA error, if the driver refuses; EPOutOfMemoryError if memory is what it lacks.
    """
    # CUfunction handles belong to a context, so a process with two GPUs has two of each
    wanted = (kernel.name, arch, current_context(), tuple(constants.items()))
    function = _loaded.get(wanted)
    if function is None:
        with _loading:
            function = _loaded.get(wanted)
            if function is None:
                function = _loaded[wanted] = _load(kernel, constants, arch)
    return function


def _load(kernel: Kernel, constants: Constants, arch: str) -> LoadedKernel:
    from cuda.bindings import driver

    from ..cuda.driver import ok

    code = build(kernel, constants, arch).code
    if not code.startswith(b"\x7fELF"):
        code += b"\0"  # the driver reads PTX up to a zero
    shared_bytes = constants[kernel.shared] if kernel.shared else 0
    try:
        library = ok(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))
        function = ok(driver.cuKernelGetFunction(ok(driver.cuLibraryGetKernel(library, kernel.name.encode()))))
        if shared_bytes > 0:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            ok(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
    except EPUnavailableError as error:
        raise EPUnavailableError(
            f"kernel {kernel.name}, compiled for {arch} with {shared_bytes} bytes of dynamic shared memory, cannot be loaded on this "
            f"{device_arch()} GPU: {error}; if DEEPEP_RT_ARCH is set, check it; NVRTC is {toolchain.nvrtc_version()}, is the driver older?"
        ) from error
    if kernel.links_nvshmem(constants):
        import nvshmem.bindings

        nvshmem.bindings.culibrary_init(int(library))  # tells the device code where NVSHMEM's state is
    return LoadedKernel(int(function), constants[kernel.threads], shared_bytes)


def current_arch() -> str:
    """The target that kernels are compiled for: `DEEPEP_RT_ARCH`, or the current GPU's own.

    Raises:
        EPUnavailableError: if there is no GPU, or none is current.
    """
    return _env.arch() or device_arch()


def device_arch() -> str:
    """The current GPU's own target, such as "sm_90"."""
    return _arch_of(current_context())


@functools.cache
def _arch_of(context: int) -> str:
    from cuda.bindings import driver

    from ..cuda.driver import ok

    device, name = ok(driver.cuCtxGetDevice()), "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_"
    parts = (
        ok(driver.cuDeviceGetAttribute(getattr(driver.CUdevice_attribute, name + part), device)) for part in ("MAJOR", "MINOR")
    )
    return "sm_" + "".join(map(str, parts))


def current_context() -> int:
    """The current CUDA context."""
    try:
        from cuda.bindings import driver

        status, context = driver.cuCtxGetCurrent()
    except (ImportError, RuntimeError, OSError) as error:
        raise EPUnavailableError(f"no CUDA driver ({error}); without one kernels can be compiled, but not loaded") from error
    if status or not int(context):
        reason = f" ({status.name})" if status else ""
        raise EPUnavailableError(
            f"no CUDA context is current in this thread{reason}; choose a GPU first, as with torch.cuda.set_device(0)"
        )
    return int(context)
