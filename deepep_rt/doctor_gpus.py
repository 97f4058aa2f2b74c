"""What the CUDA driver and NVML say about the GPUs, read from their C libraries.

Not through Python bindings: those are among what may be missing, too old or of another CUDA version, and this has to speak then.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable, Iterable
from ctypes import byref, c_char, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from typing import Any

_CAPABILITY = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, ..._MINOR
_READ, _WRITE, _NVLINK = 0, 1, 2  # NVML_P2P_CAPS_INDEX_...
_MAX_NVLINKS = 64  # more than any GPU has; the driver refuses the first number that there is not
_PATHS = {0: "board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}  # nvmlGpuTopologyLevel_t, as nvidia-smi calls them


class CallFailed(Exception):
    """A function of a C library said no; the message is its name for the reason."""


class _Memory(ctypes.Structure):
    _fields_ = (("total", c_ulonglong), ("free", c_ulonglong), ("used", c_ulonglong))


class _Library:
    """A C library all of whose functions return 0 when they succeed."""

    def __init__(self, name: str, describe: Callable[[Any, int], str]) -> None:
        self.c = ctypes.CDLL(name)
        self._describe = describe

    def __call__(self, function: str, *arguments: Any) -> None:
        status = getattr(self.c, function)(*arguments)
        if status:
            raise CallFailed(self._describe(self.c, status))

    def has(self, function: str) -> bool:
        return hasattr(self.c, function)

    def number(self, function: str, *arguments: Any, kind: Any = c_int) -> int:
        """The number that a function writes to its first argument."""
        value = kind()
        self(function, byref(value), *arguments)
        return int(value.value or 0)

    def text(self, function: str, *arguments: Any) -> str:
        """The text that a function writes to the last two arguments: memory and its size."""
        value = (c_char * 256)()
        self(function, *arguments, value, len(value))
        return value.value.decode(errors="replace")


def driver() -> dict[str, Any]:
    """The CUDA driver: its version, whether it starts, the GPUs that it shows to this process, and who reaches whom.

    Returns:
        `library` (None if there is none), `error` (why it cannot be loaded), `cuda` (the newest CUDA it serves), `init` (name of what
        cuInit returned), `gpus` (`ordinal`, `uuid`, `name`, `arch`, `total_bytes`), `access` (`[i][j]`: whether GPU i can map memory
        of GPU j).
    """
    try:
        cuda = _Library("libcuda.so.1", _cuda_error)
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
    return {**found, "init": "CUDA_SUCCESS", "gpus": gpus, "access": access}


def _gpu(cuda: _Library, ordinal: int, handle: int) -> dict[str, Any]:
    raw, name = (c_char * 16)(), (c_char * 256)()
    cuda("cuDeviceGetUuid_v2" if cuda.has("cuDeviceGetUuid_v2") else "cuDeviceGetUuid", raw, handle)
    cuda("cuDeviceGetName", name, len(name), handle)
    major, minor = (cuda.number("cuDeviceGetAttribute", attribute, handle) for attribute in _CAPABILITY)
    return {
        "ordinal": ordinal,
        "uuid": str(uuid.UUID(bytes=bytes(raw))),
        "name": name.value.decode(errors="replace"),
        "arch": f"sm_{major}{minor}",
        "total_bytes": cuda.number("cuDeviceTotalMem_v2", handle, kind=c_size_t),
    }


def _cuda_error(cuda: Any, status: int) -> str:
    text = ctypes.c_char_p()
    if cuda.cuGetErrorName(status, byref(text)) or not text.value:
        return f"error {status}"
    return text.value.decode()


def nvml() -> dict[str, Any]:
    """All GPUs of the machine (or container), also those that CUDA_VISIBLE_DEVICES hides, by NVML.

    Returns:
        `library`, `driver` (version of the kernel driver), `error`, `gpus` (`uuid`, `name`, `mig`, `free_bytes`, `total_bytes`,
        `nvlinks`: active links), `lost` (GPUs that do not answer), `paths` (`[i][j]`: "NV" and the links of a GPU if NVLink connects
        them, else how far apart they are on PCIe), `access` (`[i][j]`: whether GPU i reads and writes memory of GPU j; None where NVML
        does not say). NVSHMEM asks NVML for this access where CUDA_VISIBLE_DEVICES hides a GPU.
    """
    try:
        lib = _Library("libnvidia-ml.so.1", _nvml_error)
    except OSError as error:
        return {"library": None, "error": str(error), "gpus": [], "paths": [], "access": []}
    found: dict[str, Any] = {"library": loaded("libnvidia-ml.so")}
    try:
        lib("nvmlInit_v2")
    except CallFailed as error:
        return {**found, "error": str(error), "gpus": [], "paths": [], "access": []}
    number = lib.number("nvmlDeviceGetCount_v2", kind=c_uint)
    handles, lost = [], []
    for index in range(number):
        handle = c_void_p()
        try:
            lib("nvmlDeviceGetHandleByIndex_v2", c_uint(index), byref(handle))
            handles.append(handle)
        except CallFailed as error:
            if "Permission" not in str(error):  # a GPU that was given to another container is not lost
                lost.append(f"GPU {index}: {error}")
    gpus = [_nvml_gpu(lib, handle) for handle in handles]
    paths = [[_path(lib, a, b, gpus[i]["nvlinks"]) for b in handles] for i, a in enumerate(handles)]
    version = _maybe(lambda: lib.text("nvmlSystemGetDriverVersion"))
    access = [[_reaches(lib, a, b) for b in handles] for a in handles]
    return {**found, "driver": version, "gpus": gpus, "lost": lost, "paths": paths, "access": access}


def _nvml_gpu(lib: _Library, handle: c_void_p) -> dict[str, Any]:
    def memory() -> _Memory:
        answer = _Memory()
        lib("nvmlDeviceGetMemoryInfo", handle, byref(answer))
        return answer

    def mig() -> bool:
        now, pending = c_uint(), c_uint()
        lib("nvmlDeviceGetMigMode", handle, byref(now), byref(pending))
        return bool(now.value)

    known = _maybe(memory)
    return {
        "uuid": lib.text("nvmlDeviceGetUUID", handle).removeprefix("GPU-"),
        "name": _maybe(lambda: lib.text("nvmlDeviceGetName", handle)),
        "mig": _maybe(mig),
        "free_bytes": known.free if known else None,
        "total_bytes": known.total if known else None,
        "nvlinks": sum(_active_links(lib, handle)),
    }


def _active_links(lib: _Library, handle: c_void_p) -> Iterable[int]:
    for link in range(_MAX_NVLINKS):
        active = c_uint()
        try:
            lib("nvmlDeviceGetNvLinkState", handle, c_uint(link), byref(active))
        except (CallFailed, AttributeError):
            return
        yield active.value


def _of_two(lib: _Library, function: str, a: c_void_p, b: c_void_p, *more: Any) -> int | None:
    """What NVML says of two GPUs."""

    def ask() -> int:
        answer = c_uint()
        lib(function, a, b, *more, byref(answer))
        return answer.value

    return _maybe(ask)


def _reaches(lib: _Library, a: c_void_p, b: c_void_p) -> bool | None:
    if a.value == b.value:
        return True
    states = [_of_two(lib, "nvmlDeviceGetP2PStatus", a, b, c_int(index)) for index in (_READ, _WRITE)]
    return None if None in states else not any(states)


def _path(lib: _Library, a: c_void_p, b: c_void_p, nvlinks: int) -> str:
    if a.value == b.value:
        return "-"
    if nvlinks and _of_two(lib, "nvmlDeviceGetP2PStatus", a, b, c_int(_NVLINK)) == 0:
        return f"NV{nvlinks}"
    level = _of_two(lib, "nvmlDeviceGetTopologyCommonAncestor", a, b)
    return "unknown" if level is None else _PATHS.get(level, "PCIe")


def _nvml_error(lib: Any, status: int) -> str:
    lib.nvmlErrorString.restype = ctypes.c_char_p
    text = lib.nvmlErrorString(status)
    return text.decode(errors="replace") if text else f"error {status}"


def _maybe(ask: Callable[[], Any]) -> Any:
    """An answer, or None where this driver or GPU has none."""
    try:
        return ask()
    except (CallFailed, AttributeError):
        return None


def loaded(name: str) -> str | None:
    """The path of a shared library of this process, by how its file's name begins."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(None, 5)[5].strip() for line in maps if line.count("/")}
    return next((path for path in sorted(paths) if path.rpartition("/")[2].startswith(name)), None)
