"""Get a kernel's code without a GPU: from the disk cache, or from NVRTC, and from nvJitLink if the kernel uses NVSHMEM.

`build_together` compiles several kernels at the same time, for a Buffer that finds none of them in the cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .. import _env
from .._version import __version__
from ..errors import EPCacheError, EPError
from ..kernels.source import NVSHMEM_CALLS, Constants, nvshmem_calls, prelude, source_dir, sources_of, unit, used_constants
from ..kernels.table import Kernel
from . import compiler, libraries
from .store import Entry, KernelCache

_log = logging.getLogger("deepep_rt")

_OPTIONS = ["--std=c++17", "--ptxas-options=-v"]
_LINKED_OPTIONS = ["--relocatable-device-code=true"]
_NVSHMEM_OPTIONS = [*_OPTIONS, *_LINKED_OPTIONS, "--device-as-default-execution-space"]
_MOST_THREADS = 8


@dataclass
class Stats:
    """Requests of this process for compiled kernels."""

    hits: int = 0  # found in the disk cache
    misses: int = 0  # compiled here


stats = Stats()
_counting = threading.Lock()


@dataclass(frozen=True)
class CompiledKernel:
    """A compiled kernel that is not loaded yet."""

    key: str  # hexadecimal hash of everything that determines the code
    code: bytes  # a cubin, or PTX
    info: dict[str, Any] = field(repr=False)  # registers, shared memory, stack, spills, constants, versions: `store.FIELDS`
    compiled: bool  # False if it came from the cache


def build(kernel: Kernel, constants: Constants, arch: str, *, folder: Path | None = None) -> CompiledKernel:
    """Get a kernel's code from the disk cache, or compile it and write it to the cache. No GPU is needed.

    If several processes request the same kernel, one compiles it and the others wait. `constants` is the result of `kernel_constants`.

    `arch` is "sm_XX" for a cubin, and "compute_XX" for PTX. A kernel with NVSHMEM is always a cubin, for the GPU of this process. `folder`
    is that of the sources.

    Raises:
        EPCompileError: with the compiler's log.
        EPCacheError: if the cache cannot be written, or `DEEPEP_RT_ASSERT_CACHED=1` and the cache lacks the kernel.
        EPUnavailableError: if NVRTC, nvJitLink or NVSHMEM is not installed.
    """
    link_arch, key, versions = _identity(kernel, constants, arch, folder)
    cache = KernelCache()
    if entry := cache.get(arch, key, kernel.name, versions):
        return _hit(entry)
    if _env.assert_cached():
        raise EPCacheError(
            f"DEEPEP_RT_ASSERT_CACHED=1, but kernel {kernel.name} for {arch} (key {key}) is not in the cache {cache.folder}. "
            f"Compile it first (python -m deepep_rt compile), or unset the variable."
        )
    compiler.check_arch(arch)
    with cache.locked(arch, key):
        if entry := cache.get(arch, key, kernel.name, versions):  # another process compiled it meanwhile
            return _hit(entry)
        entry = _compile(kernel, constants, arch, link_arch, folder, key)
        cache.put(entry)
    with _counting:
        stats.misses += 1
    seconds = entry.info["compile_seconds"]
    _log.info("compiled %s for %s in %.2f s (%d hits, %d misses)", kernel.name, arch, seconds, stats.hits, stats.misses)
    return CompiledKernel(key, entry.code, entry.info, compiled=True)


def cached(kernel: Kernel, constants: Constants, arch: str) -> CompiledKernel | None:
    """Return what `build` would find in the disk cache, or None. Raise the errors of `build`."""
    _, key, versions = _identity(kernel, constants, arch, None)
    entry = KernelCache().get(arch, key, kernel.name, versions)
    return _hit(entry) if entry else None


def _identity(kernel: Kernel, constants: Constants, arch: str, folder: Path | None) -> tuple[str | None, str, dict[str, str]]:
    """Return the architecture to link for, the key, and the versions of the tools."""
    link_arch = _link_arch(arch) if kernel.links_nvshmem(constants) else None
    return link_arch, _key(kernel, constants, arch, link_arch, folder), _versions(link_arch is not None)


def is_current(kernel: Kernel, entry: Entry, *, folder: Path | None = None) -> bool:
    """Return whether `build` would return an entry: its sources and its tools are those of this installation.

    `kernel` has the name of the cached kernel, which is a cubin.
    """
    constants, link_arch = entry.info["constants"], entry.arch if entry.info["nvshmem"] else None
    if not _versions(link_arch is not None).items() <= entry.info["versions"].items():
        return False
    try:
        return _key(kernel, constants, entry.arch, link_arch, folder) == entry.key
    except KeyError:  # the sources have got a constant since
        return False


def _hit(entry: Entry) -> CompiledKernel:
    with _counting:
        stats.hits += 1
    _log.debug("%s for %s is in the cache (%d hits, %d misses)", entry.info["kernel"], entry.arch, stats.hits, stats.misses)
    return CompiledKernel(entry.key, entry.code, entry.info, compiled=False)


def _options(nvshmem: bool) -> list[str]:
    return _OPTIONS + (_LINKED_OPTIONS if nvshmem else [])


def _link_arch(arch: str) -> str:
    """Return the architecture that nvJitLink links for. It is always a real one, so PTX is linked for the GPU of this process."""
    return arch if arch.startswith("sm_") else compiler.gpu_arch()


def _versions(nvshmem: bool) -> dict[str, str]:
    """Return the versions of the tools that determine the code."""
    if not nvshmem:
        return {"nvrtc": libraries.nvrtc_version()}
    library = libraries.nvshmem()
    return {
        "nvrtc": libraries.nvrtc_version(),
        "nvjitlink": libraries.nvjitlink_version(),
        "cuda_headers": libraries.headers_version(),
        "nvshmem": library.version,
        "nvshmem_device_sha256": library.sha256,
    }


def _launch_constants(kernel: Kernel, constants: Constants) -> dict[str, int]:
    return {name: constants[name] for name in (kernel.threads, kernel.shared) if name is not None}


def _key(kernel: Kernel, constants: Constants, arch: str, link_arch: str | None, folder: Path | None) -> str:
    """Return the hash of everything that determines the code. It contains no path: machines with equal sources and tools share a cache."""
    nvshmem = link_arch is not None
    parts = {
        "kernel": kernel.name,
        "prelude": prelude(kernel, constants, folder),
        "sources": sources_of(kernel, folder),
        "launch": _launch_constants(kernel, constants),  # not in the code, but in the metadata of the entry
        "arch": arch,
        "link_arch": link_arch,
        "nvshmem_calls": _calls_key(link_arch) if link_arch else None,
        "options": _options(nvshmem),
        "versions": _versions(nvshmem),
    }
    return _hash(parts)


def _calls_key(arch: str) -> str:
    """Return the key of the file that makes the calls of NVSHMEM, compiled for `arch`."""
    sources = {name: (source_dir() / name).read_text() for name in (NVSHMEM_CALLS, NVSHMEM_CALLS + "h")}
    return _hash({"sources": sources, "arch": arch, "options": _NVSHMEM_OPTIONS, "versions": _versions(True)})


def _hash(parts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _nvshmem_calls(arch: str) -> bytes:
    """Return the file that makes the calls of NVSHMEM as relocatable code, from the cache if it is there."""
    cache, key, versions = KernelCache(), _calls_key(arch), _versions(True)
    with cache.locked(arch, key):
        entry = cache.get(arch, key, "nvshmem_calls", versions)
        if entry is None:
            start = time.perf_counter()
            include = [source_dir().resolve(), libraries.nvshmem().include, *libraries.cuda_headers()]
            code, _ = compiler.compile_unit(nvshmem_calls(), "nvshmem_calls", arch, _NVSHMEM_OPTIONS, include)
            entry = _entry(key, arch, code, start, kernel="nvshmem_calls", nvshmem=True)
            cache.put(entry)
    return entry.code


def _compile(kernel: Kernel, constants: Constants, arch: str, link_arch: str | None, folder: Path | None, key: str) -> Entry:
    start = time.perf_counter()
    include = [(folder or source_dir()).resolve()]
    nvshmem = link_arch is not None
    code, log = compiler.compile_unit(unit(kernel, constants, folder), kernel.name, arch, _options(nvshmem), include)
    link_log = ""
    if link_arch is not None:
        code, link_log = compiler.link_nvshmem(code, _nvshmem_calls(link_arch), kernel.name, link_arch)
        log = log if arch == link_arch else link_log  # for PTX, the linker runs ptxas
    usage = compiler.usage(log, kernel.name, link_log)
    used = {**used_constants(kernel, constants, folder), **_launch_constants(kernel, constants)}
    dynamic_shared_bytes = constants[kernel.shared] if kernel.shared else 0
    return _entry(
        key,
        arch,
        code,
        start,
        kernel=kernel.name,
        nvshmem=nvshmem,
        usage=usage,
        constants=used,
        dynamic_shared_bytes=dynamic_shared_bytes,
    )


def _entry(
    key: str,
    arch: str,
    code: bytes,
    start: float,
    *,
    kernel: str,
    nvshmem: bool,
    usage: compiler.Usage | None = None,
    constants: Constants | None = None,
    dynamic_shared_bytes: int = 0,
) -> Entry:
    info = {
        "kernel": kernel,
        "arch": arch,
        "constants": dict(constants or {}),
        "bytes": len(code),
        **asdict(usage or compiler.Usage()),
        "dynamic_shared_bytes": dynamic_shared_bytes,
        "nvshmem": nvshmem,
        "compile_seconds": round(time.perf_counter() - start, 3),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": {"deepep_rt": __version__, **_versions(nvshmem)},
    }
    return Entry(key, arch, code, info)


def most_threads() -> int:
    """Return how many kernels this process compiles at a time."""
    return min(_MOST_THREADS, len(os.sched_getaffinity(0)))


def build_together(requests: Sequence[tuple[Kernel, Constants]], arch: str) -> None:
    """Compile kernels into the disk cache, as many at a time as this process has cores, up to eight.

    It saves time only: `build` finds the kernels afterwards. A kernel that does not compile raises there and not here.
    """
    # PTX that is linked needs the CUDA context of the calling thread.
    possible = [
        (kernel, constants) for kernel, constants in requests if arch.startswith("sm_") or not kernel.links_nvshmem(constants)
    ]
    threads = min(most_threads(), len(possible))
    if threads < 2:
        return
    pool = ThreadPoolExecutor(threads)
    try:
        wait([pool.submit(_build, kernel, constants, arch) for kernel, constants in possible])
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after Ctrl-C, compile no further kernel


def _build(kernel: Kernel, constants: Constants, arch: str) -> None:
    try:
        build(kernel, constants, arch)
    except EPError as error:
        _log.debug("%s for %s: %s", kernel.name, arch, error)
