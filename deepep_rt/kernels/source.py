"""The text of a kernel: a prelude with the constants and structures that Python owns, then the kernel's source and headers.

A file of CUDA source is read once in a process. Each kernel's key holds the texts of its source and headers. Kernels share most headers,
so a Buffer would read each header many times.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import EPCompileError, EPConfigError, EPUnavailableError
from ..tuned import CopyShape
from . import structs
from .layout import Layout
from .table import Kernel
from .tuning import combine_constants, compressed_stages, compression_constants, copy_constants, local_constants, tuning

_SETTLED_NS = 2_000_000_000
"""The age from which a file counts as settled. Within the resolution of a file system's clock, a second change would not show."""

Constants = Mapping[str, int]

NVSHMEM_CALLS = "common/nvshmem_calls.cu"
"""The file that is linked to kernels that call NVSHMEM, relative to the folder of the CUDA sources."""


@dataclass(frozen=True)
class SourceFile:
    """A file of CUDA source.

    Attributes:
        text: Its content.
        words: Each identifier, keyword and number in it.
        includes: The headers that it names in quotes, relative to the folder of the sources.
    """

    text: str
    words: frozenset[str]
    includes: tuple[str, ...]


_known: dict[str, tuple[tuple[int, ...], SourceFile]] = {}
"""Stamp and content of each settled file, by path."""


def read_source(path: str) -> SourceFile:
    """Read a file, or return what it held when it was read before. A changed file is read again.

    Raises:
        OSError: if it cannot be read.
    """
    status = os.stat(path)
    stamp = status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino
    known = _known.get(path)
    if known is not None and known[0] == stamp:
        return known[1]
    text = Path(path).read_text()
    found = SourceFile(text, words_of(text), tuple(re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.M)))
    if time.time_ns() - max(stamp[:2]) > _SETTLED_NS:
        _known[path] = stamp, found
    return found


def words_of(text: str) -> frozenset[str]:
    """Return each identifier, keyword and number in a text."""
    return frozenset(re.findall(r"\w+", text))


def kernel_constants(
    layout: Layout, arch: str, kernel: Kernel, dtype: str | None = None, shape: CopyShape | None = None
) -> dict[str, int]:
    """Return each constant that `kernel` may use.

    Args:
        layout: Of the Buffer.
        arch: Target, such as "sm_90".
        kernel: An entry of the kernel table.
        dtype: Element type, for a kernel that is compiled once for each.
        shape: The shape of the copy warps of `dispatch` or `combine`. None: the usual one.

    Raises:
        EPConfigError: if `kernel` needs a dtype and there is none.
    """
    config = layout.config
    constants = {**layout.constants, **tuning(config, arch), **local_constants(arch, dtype)}
    constants["kSentRowBytes"] = layout.low_latency_row_bytes  # throughput kernels have their own
    constants["kCallKind"] = kernel.call_kind
    constants["kIsLowLatency"] = int(kernel.low_latency)
    constants["kMasksOnTimeout"] = int(kernel.low_latency and config.on_timeout == "mask")
    if kernel.per_dtype:
        if dtype is None:
            raise EPConfigError(f"dtype=None; expected the element type that kernel {kernel.name} adds up")
        constants.update(combine_constants(config, dtype))
        if kernel.compression and constants["kHasTma"]:
            constants.update(compressed_stages(config, dtype, kernel.compression))
    if kernel.compression:
        constants.update(compression_constants(config, kernel.compression))
    if shape is not None:
        constants.update(copy_constants(kernel.name, config, shape, bool(constants["kHasTma"])))
    return constants


@functools.cache
def source_dir() -> Path:
    """Return the folder of the CUDA sources: inside an installed package, one level up in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "cuda_src", package.parent / "cuda_src"):
        if folder.is_dir():
            return folder
    raise EPUnavailableError(
        f"no folder cuda_src in {package} or {package.parent}; this installation is incomplete. Install deepep_rt again"
    )


def prelude(kernel: Kernel, constants: Constants, folder: Path | None = None) -> str:
    """Return the text before a kernel's source: types, the constants and shared structures that it uses, and its Params."""
    used = used_constants(kernel, constants, folder)
    lines = [
        f"constexpr {'int' if -(2**31) <= value < 2**31 else 'long long'} {name} = {value};"
        for name, value in sorted(used.items())  # so that the constants of a cached kernel give its key again
    ]
    return "\n".join(
        [
            f"// Generated by deepep_rt.kernels.source for {kernel.name}: Python owns every number and every struct that both sides share.",
            structs.PRELUDE_TYPES,
            *lines,
            "",
            *(struct.text(constants) for struct in _shared_structs(kernel, folder)),
            kernel.struct.text(constants),
        ]
    )


def unit(kernel: Kernel, constants: Constants, folder: Path | None = None) -> str:
    """Return the whole text that NVRTC compiles."""
    return prelude(kernel, constants, folder) + _with_its_name(kernel.source, sources_of(kernel, folder)[kernel.source], folder)


def nvshmem_calls() -> str:
    """Return the whole text of the file that is linked to kernels that call NVSHMEM. It uses no constant."""
    return _with_its_name(NVSHMEM_CALLS, (source_dir() / NVSHMEM_CALLS).read_text())


def _with_its_name(source: str, text: str, folder: Path | None = None) -> str:
    """Let messages about a text show its real file and line."""
    path = (folder or source_dir()).resolve() / source
    name = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'#line 1 "{name}"\n{text}'


def used_constants(kernel: Kernel, constants: Constants, folder: Path | None = None) -> dict[str, int]:
    """Return the constants whose names occur in the kernel's source, its headers or a struct. Others do not change its key."""
    shared = _shared_structs(kernel, folder)
    words = [file.words for file in _files_of(kernel, folder).values()]
    words += [_words(text) for text in (*(struct.members for struct in shared), kernel.params)]
    used = set[str]().union(*(constants.keys() & some for some in words))
    return {name: value for name, value in constants.items() if name in used}


def _shared_structs(kernel: Kernel, folder: Path | None) -> list[structs.CStruct]:
    """Return the structures whose names occur in the kernel's source or its headers."""
    files = _files_of(kernel, folder).values()
    return [struct for struct in structs.SHARED if any(struct.name in file.words for file in files)]


def sources_of(kernel: Kernel, folder: Path | None) -> dict[str, str]:
    """Return the kernel's source and, transitively, the headers that it includes: path relative to `folder` -> text."""
    return {name: file.text for name, file in _files_of(kernel, folder).items()}


def _files_of(kernel: Kernel, folder: Path | None) -> dict[str, SourceFile]:
    base = str(folder or source_dir())
    files: dict[str, SourceFile] = {}
    waiting = [kernel.source]
    while waiting:
        name = waiting.pop(0)
        if name in files:
            continue
        try:
            files[name] = read_source(f"{base}/{name}")
        except OSError as error:
            if files and not os.path.isfile(f"{base}/{name}"):  # a header of NVSHMEM; the key has NVSHMEM's version
                continue
            raise EPCompileError(f"the source of kernel {kernel.name} cannot be read: {error}") from error
        waiting += files[name].includes
    return files


@functools.lru_cache(maxsize=64)
def _words(text: str) -> frozenset[str]:
    return words_of(text)
