"""The CUDA tools that come as libraries: NVRTC compiles, nvJitLink links NVSHMEM's device library. No GPU and no driver is needed.

NVRTC is called through its own bindings, not through cuda.core's Program: Program asks the driver for its version when it makes PTX,
which would bind `compute_80` targets to machines with a GPU.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import EPCompileError, EPConfigError, EPUnavailableError
from ..kernels.tuning import MIN_ARCH, arch_number

_INSTALL = "pip install 'deepep_rt[cuda12]' or 'deepep_rt[cuda13]', whichever matches the driver"


@dataclass(frozen=True)
class Nvshmem:
    """The NVSHMEM that this process uses, or would use: headers and device library must match the host library."""

    include: Path
    device_library: Path
    version: str
    sha256: str


@dataclass(frozen=True)
class Usage:
    """What ptxas says about a kernel; None where it does not run before the kernel is loaded (PTX)."""

    registers: int | None = None
    static_shared_bytes: int | None = None
    stack_bytes: int | None = None
    spill_stores: int | None = None
    spill_loads: int | None = None


@contextmanager
def _available(what: str) -> Iterator[None]:
    """Turn a missing package or library into an error that says what to install."""
    try:
        yield
    except (ImportError, OSError, RuntimeError) as error:
        # pathfinder's DynamicLibNotFoundError is a RuntimeError; some bindings raise ImportError or OSError instead
        raise EPUnavailableError(f"{what} is not installed ({error}); {_INSTALL}") from error


@functools.cache
def nvrtc_version() -> str:
    """NVRTC's version, such as "12.9.86"."""
    with _available("NVRTC"):
        from cuda.bindings import nvrtc

        _, major, minor = nvrtc.nvrtcVersion()
    return _with_patch(f"{major}.{minor}", "nvrtc", "nvidia-cuda-nvrtc")


@functools.cache
def nvjitlink_version() -> str:
    with _available("nvJitLink"):
        from cuda.bindings import nvjitlink

        major, minor = nvjitlink.version()
    return _with_patch(f"{major}.{minor}", "nvJitLink", "nvidia-nvjitlink")


def _with_patch(version: str, library: str, wheel: str) -> str:
    """A loaded library's version with its patch release, which it does not tell: its file's name does, or its wheel.

    Without it, where nothing is known of the file: all patch releases then have one key.
    """
    known: list[str] = []
    with suppress(Exception):
        from cuda import pathfinder

        path = Path(pathfinder.load_nvidia_dynamic_lib(library).abs_path).resolve()
        known.append(path.name.partition(".so.")[2])  # of a toolkit: libnvrtc.so.12.9.86
        for name in (wheel, f"{wheel}-cu{version.partition('.')[0]}"):
            with suppress(importlib.metadata.PackageNotFoundError):
                found = importlib.metadata.distribution(name)
                if path.is_relative_to(Path(str(found.locate_file("nvidia"))).resolve()):
                    known.append(found.version)
    return next((full for full in known if full.startswith(f"{version}.")), version)


@functools.cache
def known_archs() -> tuple[str, ...]:
    """The GPU architectures that this NVRTC compiles for."""
    nvrtc_version()
    from cuda.bindings import nvrtc

    return tuple(f"sm_{number}" for number in nvrtc.nvrtcGetSupportedArchs()[1])


def check_arch(arch: str) -> None:
    """Raise EPConfigError if `arch` is no such name or too old for the kernels, EPCompileError if NVRTC does not know it."""
    if arch_number(arch) < arch_number(MIN_ARCH):
        raise EPConfigError(f"arch={arch!r}; expected {MIN_ARCH} or newer")
    if f"sm_{arch_number(arch)}" not in known_archs():
        raise EPCompileError(f"NVRTC {nvrtc_version()} does not know {arch}; it knows {', '.join(known_archs())}")


@functools.cache
def nvshmem() -> Nvshmem:
    """Find NVSHMEM's headers and its device library beside the host library.

    Raises:
        EPUnavailableError: if it is not installed.
    """
    host = _nvshmem_host_library()
    device_library = host.with_name("libnvshmem_device.a")
    include = next((d for d in (host.parent.parent / "include", *_header_folder("nvshmem")) if (d / "nvshmem.h").is_file()), None)
    if not device_library.is_file() or include is None:
        missing = "libnvshmem_device.a" if not device_library.is_file() else "nvshmem.h"
        raise EPUnavailableError(f"NVSHMEM's host library is {host}, but {missing} is not beside it; {_INSTALL}")
    digest = hashlib.sha256(device_library.read_bytes()).hexdigest()
    return Nvshmem(include, device_library, _nvshmem_version(include), digest)


def _nvshmem_host_library() -> Path:
    with _available("cuda-pathfinder"):
        from cuda import pathfinder
    try:
        return Path(pathfinder.load_nvidia_dynamic_lib("nvshmem_host").abs_path)
    except Exception as error:  # not there, or not loadable on a machine without a driver: then look for the wheel's file
        for folder in _nvidia_folders("nvshmem/lib"):
            for library in sorted(folder.glob("libnvshmem_host.so*")):
                return library
        raise EPUnavailableError(f"NVSHMEM is not installed ({error}); {_INSTALL}") from error


def _nvshmem_version(include: Path) -> str:
    for header in ("non_abi/nvshmem_version.h", "nvshmem_version.h"):
        parts = [_defined(include / header, f"NVSHMEM_VENDOR_{part}_VERSION") for part in ("MAJOR", "MINOR", "PATCH")]
        if all(parts):
            return ".".join(parts)
    return "unknown"


@functools.cache
def cuda_headers() -> tuple[Path, ...]:
    """The folders of the CUDA run-time and C++ core library headers, which NVSHMEM's headers include.

    Raises:
        EPUnavailableError: if they are not installed.
    """
    toolkit = Path("/usr/local/cuda/include")
    wheels = [*_nvidia_folders("cu13/include"), *_nvidia_folders("cuda_runtime/include"), *_nvidia_folders("cuda_cccl/include")]
    places = [*_header_folder("cudart"), *_header_folder("cccl"), *wheels, toolkit]
    places += [place / "cccl" for place in places]
    folders = []
    for wanted in ("cuda_runtime.h", "cuda/std/type_traits"):
        folder = next((place for place in places if (place / wanted).is_file()), None)
        if folder is None:
            raise EPUnavailableError(f"the CUDA header <{wanted}> was not found, and NVSHMEM's headers need it; {_INSTALL}")
        folders.append(folder)
    return tuple(dict.fromkeys(folders))


def headers_version() -> str:
    """What stands for the text of the CUDA headers in a key."""
    runtime, cccl = cuda_headers()[0], cuda_headers()[-1]
    return f"{_defined(runtime / 'cuda_runtime_api.h', 'CUDART_VERSION')}-{_defined(cccl / 'cuda/std/__cccl/version.h', 'CCCL_VERSION')}"


def compile_unit(unit: str, name: str, arch: str, options: list[str], include: list[Path]) -> tuple[bytes, str]:
    """Compile one translation unit with NVRTC.

    Args:
        unit: The text.
        name: The kernel's name, for messages.
        arch: "sm_XX" gives a cubin, "compute_XX" PTX.
        options: NVRTC's options besides the architecture and the include folders.
        include: Folders of headers.

    Returns:
        The code and NVRTC's log.

    Raises:
        EPCompileError: with NVRTC's log.
        EPUnavailableError: if NVRTC is not installed.
    """
    check_arch(arch)
    from cuda.bindings import nvrtc

    def ok(result: tuple, log: str = "") -> tuple:
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise EPCompileError(f"{name} did not compile for {arch}: {result[0].name} (NVRTC {nvrtc_version()})\n{log.strip()}")
        return result[1:]

    (program,) = ok(nvrtc.nvrtcCreateProgram(unit.encode(), f"{name}.generated".encode(), 0, [], []))
    try:
        flags = [f"--gpu-architecture={arch}", *options, *(f"--include-path={folder}" for folder in include)]
        result = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
        (log_bytes,) = ok(nvrtc.nvrtcGetProgramLogSize(program))
        buffer = bytearray(log_bytes)
        ok(nvrtc.nvrtcGetProgramLog(program, buffer))
        log = buffer.rstrip(b"\0").decode(errors="replace")
        ok(result, log)
        kind = "PTX" if arch.startswith("compute_") else "CUBIN"
        (num_bytes,) = ok(getattr(nvrtc, f"nvrtcGet{kind}Size")(program))
        code = bytearray(num_bytes)
        ok(getattr(nvrtc, f"nvrtcGet{kind}")(program, code))
        return bytes(code), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def link_nvshmem(code: bytes, name: str, arch: str) -> tuple[bytes, str]:
    """Link relocatable code (a cubin, or PTX) with NVSHMEM's device library into a cubin for `arch`.

    Returns:
        The cubin and nvJitLink's log.

    Raises:
        EPCompileError: with nvJitLink's log.
        EPUnavailableError: if nvJitLink or NVSHMEM is not installed.
    """
    library = nvshmem()
    nvjitlink_version()  # cuda.core would fall back to the driver's own linker
    from cuda.core import Linker, LinkerOptions, ObjectCode

    make = ObjectCode.from_cubin if code.startswith(b"\x7fELF") else ObjectCode.from_ptx
    parts = make(code, name=name), ObjectCode.from_library(library.device_library.read_bytes(), name=library.device_library.name)
    try:
        linker = Linker(*parts, options=LinkerOptions(name=name, arch=arch, verbose=True, ptxas_options=["-v"]))
        return bytes(linker.link("cubin").code), str(linker.get_info_log())
    except Exception as error:  # nvJitLinkError, CUDAError or RuntimeError, by version; its text holds the log
        raise EPCompileError(
            f"{name} did not link for {arch} with {library.device_library} (NVSHMEM {library.version}, "
            f"nvJitLink {nvjitlink_version()})\n{error}"
        ) from error


def usage(log: str, name: str, link_log: str = "") -> Usage:
    """Read what ptxas says about the entry point `name`.

    The stack frame and the spills are those of the relocatable compile, where ptxas counts for each function apart (its sections for
    NVSHMEM's own functions are skipped). Linking raises the registers to what the functions called need, so the linker's figure wins.
    """
    own = re.search(rf"Function properties for {re.escape(name)}\n(.*?)(?=Function properties for|Compiling entry|\Z)", log, re.S)
    text = own[1] if own else ""
    linked = re.search(rf"Function properties for '{re.escape(name)}':\n(.*)", link_log)
    used = re.search(r"[Uu]sed (\d+) registers", linked[1] if linked else text)
    shared = re.search(r"(\d+) bytes smem", linked[1] if linked else text)
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
    if used is None:
        return Usage()
    stack, stores, loads = (int(group) for group in frame.groups()) if frame else (None, None, None)
    return Usage(int(used[1]), int(shared[1]) if shared else 0, stack, stores, loads)


def _nvidia_folders(inside: str) -> list[Path]:
    """`inside` in each place of the `nvidia` package (wheels share this namespace; there may be several site folders)."""
    spec = importlib.util.find_spec("nvidia")
    places = spec.submodule_search_locations if spec is not None and spec.submodule_search_locations else []
    return [folder for place in places if (folder := Path(place) / inside).is_dir()]


def _header_folder(library: str) -> list[Path]:
    """Where pathfinder sees a library's headers, if it does; versions differ in which libraries they know."""
    try:
        from cuda import pathfinder

        found = pathfinder.find_nvidia_header_directory(library)
    except Exception:
        return []
    return [Path(found)] if found else []


def _defined(header: Path, name: str) -> str:
    """The value of a macro in a header; empty if it is not there."""
    try:
        match = re.search(rf"#\s*define\s+{name}\s+(\w+)", header.read_text(errors="replace"))
    except OSError:
        return ""
    return match[1] if match else ""
