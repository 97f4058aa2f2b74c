"""Find the CUDA libraries that compilation needs, and their versions: NVRTC, nvJitLink, NVSHMEM and the CUDA headers. No GPU is needed."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from .._install import pip_install_cuda
from ..errors import EPUnavailableError


@dataclass(frozen=True)
class Nvshmem:
    """The NVSHMEM that this process uses: headers and device library must match the host library."""

    include: Path
    device_library: Path
    version: str
    sha256: str


@contextmanager
def _available(name: str) -> Iterator[None]:
    """Turn the failure of an import into an error that names the package to install."""
    try:
        yield
    except (ImportError, OSError, RuntimeError) as error:
        # pathfinder's DynamicLibNotFoundError is a RuntimeError; some bindings raise ImportError or OSError instead
        raise EPUnavailableError(f"{name} is not installed ({error}). Run {pip_install_cuda()}.") from error


@functools.cache
def nvrtc_version() -> str:
    """Return NVRTC's version, such as "12.9.86"."""
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
    """Return a loaded library's version with its patch release. The library reports none, so read its file name or its wheel.

    If neither has it, return the version without a patch release: all patch releases then have the same key.
    """
    known: list[str] = []
    with suppress(Exception):
        from cuda import pathfinder

        path = Path(pathfinder.load_nvidia_dynamic_lib(library).abs_path).resolve()
        known.append(path.name.partition(".so.")[2])  # a toolkit's file: libnvrtc.so.12.9.86
        known += _wheel_versions(path, (wheel, f"{wheel}-cu{version.partition('.')[0]}"))
    return next((full for full in known if full.startswith(f"{version}.")), version)


def _wheel_versions(library: Path, wheels: Sequence[str]) -> list[str]:
    """Return the versions of these wheels in the site folder of a library.

    The names of their folders tell them, as in `nvidia_cuda_nvrtc_cu12-12.9.86.dist-info`. The import of `importlib.metadata` would take
    as long as all other modules of the compiler together, and each process makes keys.
    """
    nvidia = next((folder for folder in library.parents if folder.name == "nvidia"), None)
    if nvidia is None:
        return []
    found = (folder.name.removesuffix(".dist-info").rpartition("-") for folder in nvidia.parent.glob("nvidia?*-*.dist-info"))
    names = {re.sub(r"[-_.]+", "-", wheel).lower() for wheel in wheels}
    return [version for name, _, version in found if re.sub(r"[-_.]+", "-", name).lower() in names]


@functools.cache
def nvshmem() -> Nvshmem:
    """Find NVSHMEM's headers, and its device library in the folder of the host library. Raise EPUnavailableError if it is not installed."""
    host = _nvshmem_host_library()
    device_library = host.with_name("libnvshmem_device.a")
    include = next((d for d in (host.parent.parent / "include", *_header_folder("nvshmem")) if (d / "nvshmem.h").is_file()), None)
    if not device_library.is_file() or include is None:
        missing = "libnvshmem_device.a" if not device_library.is_file() else "nvshmem.h"
        raise EPUnavailableError(
            f"NVSHMEM's host library is {host}, but its installation has no {missing}. Run {pip_install_cuda()}."
        )
    digest = hashlib.sha256(device_library.read_bytes()).hexdigest()
    return Nvshmem(include, device_library, _nvshmem_version(include), digest)


def _nvshmem_host_library() -> Path:
    with _available("cuda-pathfinder"):
        from cuda import pathfinder
    try:
        return Path(pathfinder.load_nvidia_dynamic_lib("nvshmem_host").abs_path)
    except Exception as error:  # not installed, or not loadable without a driver: look for the wheel's file
        for folder in _nvidia_folders("nvshmem/lib"):
            for library in sorted(folder.glob("libnvshmem_host.so*")):
                return library
        raise EPUnavailableError(f"NVSHMEM is not installed ({error}). Run {pip_install_cuda()}.") from error


def _nvshmem_version(include: Path) -> str:
    for header in ("non_abi/nvshmem_version.h", "nvshmem_version.h"):
        parts = [_defined(include / header, f"NVSHMEM_VENDOR_{part}_VERSION") for part in ("MAJOR", "MINOR", "PATCH")]
        if all(parts):
            return ".".join(parts)
    return "unknown"


@functools.cache
def cuda_headers() -> tuple[Path, ...]:
    """Find the folders of the CUDA run-time and C++ core library headers, which NVSHMEM's headers include.

    Raise EPUnavailableError if they are not installed.
    """
    toolkit = Path("/usr/local/cuda/include")
    wheels = [*_nvidia_folders("cu13/include"), *_nvidia_folders("cuda_runtime/include"), *_nvidia_folders("cuda_cccl/include")]
    candidates = [*_header_folder("cudart"), *_header_folder("cccl"), *wheels, toolkit]
    candidates += [folder / "cccl" for folder in candidates]
    folders = []
    for header in ("cuda_runtime.h", "cuda/std/type_traits"):
        folder = next((candidate for candidate in candidates if (candidate / header).is_file()), None)
        if folder is None:
            raise EPUnavailableError(
                f"the CUDA header <{header}> was not found, and NVSHMEM's headers need it. Run {pip_install_cuda()}."
            )
        folders.append(folder)
    return tuple(dict.fromkeys(folders))


def headers_version() -> str:
    """Return the versions of the CUDA headers, which replace their text in a key."""
    runtime, cccl = cuda_headers()[0], cuda_headers()[-1]
    return f"{_defined(runtime / 'cuda_runtime_api.h', 'CUDART_VERSION')}-{_defined(cccl / 'cuda/std/__cccl/version.h', 'CCCL_VERSION')}"


def _nvidia_folders(inside: str) -> list[Path]:
    """Return the folder `inside` of each part of the `nvidia` package. Wheels share this namespace, in one or more site folders."""
    spec = importlib.util.find_spec("nvidia")
    parts = spec.submodule_search_locations if spec is not None and spec.submodule_search_locations else []
    return [folder for part in parts if (folder := Path(part) / inside).is_dir()]


def _header_folder(library: str) -> list[Path]:
    """Return the folder in which pathfinder finds a library's headers, if any. Its versions differ in the libraries they know."""
    try:
        from cuda import pathfinder

        found = pathfinder.find_nvidia_header_directory(library)
    except Exception:
        return []
    return [Path(found)] if found else []


def _defined(header: Path, name: str) -> str:
    """Return the value of a macro in a header; empty if the header lacks it."""
    try:
        match = re.search(rf"#\s*define\s+{name}\s+(\w+)", header.read_text(errors="replace"))
    except OSError:
        return ""
    return match[1] if match else ""
