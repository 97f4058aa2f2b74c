"""Report the GPUs as the CUDA driver and NVML see them.

The CUDA driver is read from its C library. Its Python bindings may be missing, too old or made for another CUDA version, and doctor has
to work then too. NVML is read through pynvml, which is pure Python and fits every driver.
"""

from __future__ import annotations

import ctypes
import itertools
import uuid
from collections.abc import Callable
from ctypes import byref, c_char, c_int, c_size_t
from typing import Any

from .. import _env
from . import memory_trial

try:
    import pynvml  # of nvidia-ml-py
except ImportError:
    pynvml = None

_CAPABILITY = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, ..._MINOR
_READ, _WRITE, _NVLINK = 0, 1, 2  # NVML_P2P_CAPS_INDEX_...; pynvml makes a tuple of the first
_PATHS = {0: "board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # nvmlGpuTopologyLevel_t, as nvidia-smi calls them


class CallFailed(Exception):
    """A function of the CUDA driver failed. The message is the name of its error."""


class _Driver:
    """Call functions of libcuda.so.1, all of which return 0 when they succeed."""

    def __init__(self) -> None:
        self.c = ctypes.CDLL("libcuda.so.1")

    def __call__(self, function: str, *arguments: Any) -> None:
        status = getattr(self.c, function)(*arguments)
        if status:
            text = ctypes.c_char_p()
            known = self.c.cuGetErrorName(status, byref(text)) == 0 and text.value
            raise CallFailed(known.decode() if known else f"error {status}")

    def number(self, function: str, *arguments: Any, kind: Any = c_int) -> int:
        """Return the number that a function writes to its first argument."""
        value = kind()
        self(function, byref(value), *arguments)
        return int(value.value or 0)


def driver() -> dict[str, Any]:
    """Report the CUDA driver: its version, whether it starts, the visible GPUs, and the access between them.

    Returns:
        `library` (None if there is none), `error` (the reason if it cannot be loaded), `cuda` (the newest CUDA that it supports),
        `init` (name of the result of cuInit), `gpus` (`ordinal`, `uuid`, `name`, `arch`, `total_bytes`) and `access` (`[i][j]`: whether
        GPU i can map memory of GPU j) and `not_shared` (why processes cannot share virtual memory of this rank's GPU; empty if they can).
    """
    try:
        cuda = _Driver()
    except OSError as error:
        return {"library": None, "error": str(error), "gpus": [], "access": []}
    version = cuda.number("cuDriverGetVersion")
    found: dict[str, Any] = {"library": loaded("libcuda.so"), "cuda": f"{version // 1000}.{version % 1000 // 10}"}
    try:
        cuda("cuInit", 0)
    except CallFailed as error:
        return {**found, "init": str(error), "gpus": [], "access": []}
    handles = [cuda.number("cuDeviceGet", ordinal) for ordinal in range(cuda.number("cuDeviceGetCount"))]
    gpus = [_gpu(cuda, ordinal, handle) for ordinal, handle in enumerate(handles)]
    access = [[a == b or bool(cuda.number("cuDeviceCanAccessPeer", a, b)) for b in handles] for a in handles]
    not_shared = memory_trial.why_not_shared(cuda, handles[_number_of_rank() % len(handles)]) if handles else None
    return {**found, "init": "CUDA_SUCCESS", "gpus": gpus, "access": access, "not_shared": not_shared}


def _number_of_rank() -> int:
    """Return a number that differs between ranks of a host, so that they try different GPUs."""
    launch = _env.launch()
    return (launch.rank if launch else _env.local_rank()) or 0


def _gpu(cuda: _Driver, ordinal: int, handle: int) -> dict[str, Any]:
    raw, name = (c_char * 16)(), (c_char * 256)()
    cuda("cuDeviceGetUuid_v2" if hasattr(cuda.c, "cuDeviceGetUuid_v2") else "cuDeviceGetUuid", raw, handle)
    cuda("cuDeviceGetName", name, len(name), handle)
    major, minor = (cuda.number("cuDeviceGetAttribute", attribute, handle) for attribute in _CAPABILITY)
    return {
        "ordinal": ordinal,
        "uuid": str(uuid.UUID(bytes=bytes(raw))),
        "name": name.value.decode(errors="replace"),
        "arch": f"sm_{major}{minor}",
        "total_bytes": cuda.number("cuDeviceTotalMem_v2", handle, kind=c_size_t),
    }


def nvml() -> dict[str, Any]:
    """List all GPUs of the machine (or container), also those that CUDA_VISIBLE_DEVICES hides, as NVML reports them.

    Returns:
        `library`, `driver` (version of the kernel driver), `error`, `gpus` (`uuid`, `name`, `mig`, `free_bytes`, `total_bytes`,
        `nvlinks`: active links), `lost` (GPUs that do not answer), `paths` (`[i][j]`: "NV" and the links of a GPU if NVLink connects
        them, else how far apart they are on PCIe), `access` (`[i][j]`: whether GPU i reads and writes memory of GPU j; None where NVML
        does not say). NVSHMEM asks NVML for this access where CUDA_VISIBLE_DEVICES hides a GPU.
    """
    nothing: dict[str, Any] = {"gpus": [], "paths": [], "access": []}
    if pynvml is None:
        return {"library": None, "error": "pynvml is not installed. Do: pip install nvidia-ml-py", **nothing}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {"library": loaded("libnvidia-ml.so"), "error": str(error), **nothing}
    handles, lost = [], []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handles.append(pynvml.nvmlDeviceGetHandleByIndex(index))
        except pynvml.NVMLError_NoPermission:
            continue  # another container has this GPU
        except pynvml.NVMLError as error:
            lost.append(f"GPU {index}: {error}")
    gpus = [_nvml_gpu(handle) for handle in handles]
    return {
        "library": loaded("libnvidia-ml.so"),
        "driver": _ask(pynvml.nvmlSystemGetDriverVersion),
        "gpus": gpus,
        "lost": lost,
        "paths": [[_path(a, b, gpus[i]["nvlinks"]) for b in handles] for i, a in enumerate(handles)],
        "access": [[_has_access(a, b) for b in handles] for a in handles],
    }


def _nvml_gpu(handle: Any) -> dict[str, Any]:
    mig, memory = _ask(pynvml.nvmlDeviceGetMigMode, handle), _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    links = (_ask(pynvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(pynvml.NVML_NVLINK_MAX_LINKS))
    known = itertools.takewhile(lambda state: state is not None, links)  # NVML refuses the first link that is missing
    return {
        "uuid": pynvml.nvmlDeviceGetUUID(handle).removeprefix("GPU-"),
        "name": _ask(pynvml.nvmlDeviceGetName, handle),
        "mig": None if mig is None else bool(mig[0]),  # now, and after the next reset
        "free_bytes": None if memory is None else memory.free,
        "total_bytes": None if memory is None else memory.total,
        "nvlinks": sum(known),
    }


def _has_access(a: Any, b: Any) -> bool | None:
    if a is b:
        return True
    states = [_ask(pynvml.nvmlDeviceGetP2PStatus, a, b, index) for index in (_READ, _WRITE)]
    return None if None in states else not any(states)


def _path(a: Any, b: Any, nvlinks: int) -> str:
    if a is b:
        return "-"
    if nvlinks and _ask(pynvml.nvmlDeviceGetP2PStatus, a, b, _NVLINK) == 0:
        return f"NV{nvlinks}"
    level = _ask(pynvml.nvmlDeviceGetTopologyCommonAncestor, a, b)
    return "unknown" if level is None else _PATHS.get(level, "PCIe")


def _ask(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call NVML. Return None where this driver or GPU has no answer."""
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None


def loaded(name: str) -> str | None:
    """Find the path of a shared library of this process by the beginning of its file's name."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(None, 5)[5].strip() for line in maps if line.count("/")}
    return next((path for path in sorted(paths) if path.rpartition("/")[2].startswith(name)), None)
