"""Define the probes. Each collects facts about one part of the machine and returns plain data (JSON).

A probe may fail, hang or crash, so `runner` runs probes in child processes. The rules interpret the facts.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .. import _env
from .._version import __version__
from ..comm.nixl_traffic import load_nixl, nixl_objection
from ..cuda.nics import list_nics, read_text
from ..errors import EPCacheError, EPCompileError, EPConfigError, EPUnavailableError
from ..jit import compiler, libraries
from ..jit.store import CorruptEntry, KernelCache
from . import addresses
from . import gpus as doctor_gpus

_PACKAGES = re.compile(
    r"numpy|mpi4py|mpich|openmpi|impi-rt|ml-dtypes|torch|jax|jaxlib|cupy-cuda1\dx|cuda-(bindings|core|pathfinder|python)"
    r"|nvshmem4py-cu1\d|nvidia-(ml-py|cuda-nvrtc|nvjitlink|cuda-runtime|cuda-cccl|nvshmem)(-cu1\d)?"
)
_MPIRUN_LIMIT_S = 10
_MPIRUNS, _PROXY, _SHELLS = ("mpirun", "mpiexec", "mpiexec.hydra"), "hydra_pmi_proxy", ("sh", "bash", "dash", "zsh")
_NVIDIA_PCI_VENDOR, _DISPLAY_CLASS = "0x10de", "0x03"


def python() -> dict[str, Any]:
    """Report the interpreter and the installed packages that matter."""
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if _PACKAGES.fullmatch(name):
            found.setdefault(name, distribution.version)  # an import finds the first one on the path
    return {
        "version": platform.python_version(),
        "executable": sys.executable,
        "deepep_rt": __version__,
        "folder": str(Path(__file__).parents[1]),
        "packages": dict(sorted(found.items())),
    }


def settings() -> dict[str, Any]:
    """Report the environment variables that matter, mistakes in ours, and two flags that other rules need."""
    mistakes = _env.mistakes()
    try:
        _arch()
    except (EPConfigError, EPCompileError) as error:
        mistakes.append(f"DEEPEP_RT_ARCH: {error}")
    found: dict[str, Any] = {"variables": _env.variables(), "mistakes": mistakes, "unknown": _env.unknown()}
    for flag in (_env.share_gpus, _env.assert_cached):
        with contextlib.suppress(EPConfigError):  # `mistakes` has it
            found[flag.__name__] = flag()
    return found


def _arch() -> None:
    if arch := _env.arch():
        with contextlib.suppress(EPUnavailableError):  # a missing NVRTC has another finding
            compiler.check_arch(arch)


def machine(root: Path = Path("/")) -> dict[str, Any]:
    """Report the host: its name, its limits, and the NVIDIA GPUs on its PCI bus, usable or not."""
    devices = [(read_text(path / "vendor"), read_text(path / "class")) for path in (root / "sys/bus/pci/devices").glob("*")]
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)),
        "pci_gpus": sum(vendor == _NVIDIA_PCI_VENDOR and kind.startswith(_DISPLAY_CLASS) for vendor, kind in devices),
        "shm_free_bytes": shutil.disk_usage(root / "dev/shm").free if (root / "dev/shm").is_dir() else None,
        "memlock_bytes": None if memlock == resource.RLIM_INFINITY else memlock,
    }


def mpi() -> dict[str, Any]:
    """Report mpi4py, its MPI library, and the mpirun on the PATH. Do not start MPI."""
    return {**_mpi_library(), **_mpirun(), "survivors_end": survivors_end()}


def survivors_end(root: Path = Path("/"), pid: int | None = None) -> str | None:
    """Tell why the mpirun of MPICH that started this process ends all ranks when one dies. Empty: it does not. None: it is not seen, as on
    other hosts.
    """
    pid = os.getpid() if pid is None else pid
    rank = child = ""  # the programs that mpirun's proxy has started for this rank, and the last one seen
    with contextlib.suppress(OSError, ValueError, IndexError):
        while pid > 1:
            program, *words = (root / f"proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            name = Path(program).name
            if name in _MPIRUNS:
                if not any(word.lstrip("-") == "disable-auto-cleanup" for word in words):
                    return "runs without -disable-auto-cleanup"
                return (
                    ""
                    if rank in _SHELLS
                    else "has started the ranks without a shell around each, and ends all if a signal kills one"
                )
            if name == _PROXY:
                rank = child
            child = name
            pid = int((root / f"proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


def _mpi_library() -> dict[str, Any]:
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI
    except Exception as error:  # ImportError; RuntimeError when no MPI library can be loaded
        return {"error": f"{type(error).__name__}: {error}"}
    text = MPI.Get_library_version().rstrip("\0")
    return {
        "mpi4py": mpi4py.__version__,
        "library": re.sub(r"[\s:]+", " ", text.splitlines()[0].partition(",")[0].replace("Version", "")).strip(),
        "family": mpi_family(text),
        "path": doctor_gpus.loaded("libmpi"),
    }


def _mpirun() -> dict[str, Any]:
    found = shutil.which("mpirun") or shutil.which("mpiexec")
    if found is None:
        near_python = Path(sys.executable).with_name("mpirun")
        return {"mpirun": None, "mpirun_beside_python": str(near_python) if near_python.exists() else None}
    done = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=_MPIRUN_LIMIT_S, check=False)
    text = done.stdout + done.stderr
    version = re.search(r"\d+\.\d+(\.\d+)*", text)
    return {"mpirun": found, "mpirun_version": version[0] if version else None, "mpirun_family": mpi_family(text)}


def mpi_family(text: str) -> str | None:
    """Return the family of a launcher or library: Open MPI, or MPICH and its derivatives. None: unknown."""
    if "Open MPI" in text or "OpenRTE" in text or "open-mpi" in text:
        return "Open MPI"
    return "MPICH" if re.search(r"MPICH|HYDRA|Intel\(R\) MPI|MVAPICH", text) else None


def nvrtc() -> dict[str, Any]:
    """Report NVRTC, which compiles the kernels."""
    version = libraries.nvrtc_version()
    return {"version": version, "path": doctor_gpus.loaded("libnvrtc.so"), "archs": list(compiler.known_archs())}


def nvjitlink() -> dict[str, Any]:
    """Report nvJitLink, which links kernels with NVSHMEM."""
    version = libraries.nvjitlink_version()
    return {"version": version, "path": doctor_gpus.loaded("libnvJitLink.so")}


def nvshmem_device() -> dict[str, Any]:
    """Report the NVSHMEM of the kernels: headers and device library."""
    found = libraries.nvshmem()
    return {"version": found.version, "path": str(found.device_library), "include": str(found.include)}


def nvshmem_host() -> dict[str, Any]:
    """Load NVSHMEM's host library and report it. Do not start NVSHMEM."""
    from cuda import pathfinder

    path = pathfinder.load_nvidia_dynamic_lib("nvshmem_host").abs_path
    numbers = [ctypes.c_int() for _ in range(3)]
    ctypes.CDLL(path).nvshmemx_vendor_get_version_info(*(ctypes.byref(number) for number in numbers))
    return {"version": ".".join(str(number.value) for number in numbers), "path": path}


def bindings() -> dict[str, Any]:
    """Import the Python bindings of the CUDA backend. `module` and `error` describe the first that fails."""
    for module in ("cuda.bindings.driver", "cuda.core", "nvshmem.bindings"):
        try:
            if module == "nvshmem.bindings":
                nvshmem_host()  # the bindings find the host library only if it is loaded
            __import__(module)
        except Exception as error:
            return {"module": module, "error": f"{type(error).__name__}: {error}"}
    return {"module": None}


def network(root: Path = Path("/")) -> dict[str, Any]:
    """Report RDMA NICs, and the modules and settings that connect them to GPUs. Read only files of the kernel."""
    modules = {line.split()[0] for line in read_text(root / "proc/modules").splitlines() if line}
    lines = (line.partition(":") for line in read_text(root / "proc/driver/nvidia/params").splitlines())
    return {
        "nics": list_nics(root),
        "peermem": bool(modules & {"nvidia_peermem", "nv_peer_mem"}),
        "open_driver": "Open Kernel Module" in read_text(root / "proc/driver/nvidia/version"),
        "gdrdrv": "gdrdrv" in modules or (root / "dev/gdrdrv").exists(),
        "gdrapi": _loads("libgdrapi.so.2") or _loads("libgdrapi.so"),
        "driver_parameters": {name: value.strip().strip('"') for name, _, value in lines},
        "interfaces": addresses.interfaces(root),
        "own_addresses": addresses.own_addresses(platform.node()),
    }


def nixl() -> dict[str, Any]:
    """Import NIXL, which the relay of `transport="nixl"` sends with. `error`: why it cannot."""
    if error := nixl_objection():
        return {"version": None, "path": None, "error": error}
    module = load_nixl()
    package = module.__name__.partition(".")[0]
    return {"version": importlib.metadata.version(package.replace("_", "-")), "path": module.__file__, "error": None}


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def kernel_cache() -> dict[str, Any]:
    """Report the disk cache of compiled kernels. Do not create its folder."""
    store = KernelCache()
    entries, unreadable = [], None
    try:
        entries = store.entries()
    except EPCacheError as error:
        unreadable = str(error)
    corrupt = [entry for entry in entries if isinstance(entry, CorruptEntry)]
    files = (path.lstat().st_size for path in store.folder.glob("*/*"))
    return {
        "folder": str(store.folder),
        "exists": store.folder.is_dir(),
        "error": _why_not_writable(store.folder) or unreadable,
        "entries": len(entries) - len(corrupt),
        "corrupt": [f"{entry.arch}/{entry.key[:12]}: {entry.reason}" for entry in corrupt],
        "bytes": sum(files),
    }


def _why_not_writable(folder: Path) -> str | None:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        return f"{existing}: {error.strerror}"


PROBES: dict[str, Callable[[], dict[str, Any]]] = {
    "python": python,
    "settings": settings,
    "machine": machine,
    "mpi": mpi,
    "driver": doctor_gpus.driver,
    "nvml": doctor_gpus.nvml,
    "nvrtc": nvrtc,
    "nvjitlink": nvjitlink,
    "nvshmem_host": nvshmem_host,
    "nvshmem_device": nvshmem_device,
    "bindings": bindings,
    "nixl": nixl,
    "network": network,
    "cache": kernel_cache,
}
