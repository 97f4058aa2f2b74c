"""Read the environment. No other module does. An empty variable counts as unset."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._checks import argument_error
from .errors import EPConfigError

MAX_TIMEOUT_S = 1e9
"""Thirty years. Kernels count nanoseconds in 64 bits."""

_MAX_DIGITS = 18


def cache_dir() -> Path:
    """`DEEPEP_RT_CACHE_DIR`: folder of compiled kernels; default `$XDG_CACHE_HOME/deepep_rt` or `~/.cache/deepep_rt`.

    A relative `XDG_CACHE_HOME` is ignored, as the XDG Base Directory Specification demands.
    """
    chosen, base = os.environ.get("DEEPEP_RT_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME", "")
    try:
        if chosen:
            return _expanded(chosen)
        return (Path(base) if os.path.isabs(base) else _expanded("~/.cache")) / "deepep_rt"
    except (RuntimeError, KeyError):  # there is no home folder to expand ~ to
        raise EPConfigError(
            f"DEEPEP_RT_CACHE_DIR={chosen or ''!r}; expected a folder for compiled kernels, but the user has no home folder. "
            f"Set the variable to a folder."
        ) from None


def _expanded(path: str) -> Path:
    """Expand ~. An empty or relative `HOME` counts as unset, because the result would depend on the current folder.

    Raise RuntimeError or KeyError if there is no home folder.
    """
    first, *rest = Path(path).parts or (".",)
    if first == "~" and not os.path.isabs(os.environ.get("HOME", "")):
        home = Path(pwd.getpwuid(os.getuid()).pw_dir)
        if not home.is_absolute():
            raise RuntimeError("the account has no home folder")
        return Path(home, *rest)
    return Path(path).expanduser()


def assert_cached() -> bool:
    """`DEEPEP_RT_ASSERT_CACHED=1`: a kernel that is not in the cache raises instead of being compiled."""
    return _flag("DEEPEP_RT_ASSERT_CACHED")


def trust_cache() -> bool:
    """`DEEPEP_RT_TRUST_CACHE=1`: run compiled kernels that other users own or may write, with a warning."""
    return _flag("DEEPEP_RT_TRUST_CACHE")


def arch() -> str | None:
    """`DEEPEP_RT_ARCH`: compile for this target (`sm_80`, `compute_80`, ...) instead of the GPU's own."""
    return os.environ.get("DEEPEP_RT_ARCH") or None


def debug() -> bool:
    """`DEEPEP_RT_DEBUG=1`: expert numbers are checked on the device by default (`check_inputs`)."""
    return _flag("DEEPEP_RT_DEBUG")


def remeasure() -> bool:
    """`DEEPEP_RT_REMEASURE=1`: measure the links between ranks again, although rates of this topology were saved."""
    return _flag("DEEPEP_RT_REMEASURE")


def tuning() -> bool:
    """`DEEPEP_RT_TUNING=0`: Buffers use no stored tuning. It is 1 when unset."""
    return not os.environ.get("DEEPEP_RT_TUNING") or _flag("DEEPEP_RT_TUNING")


@contextmanager
def without_tunings() -> Iterator[None]:
    """Let Buffers that are made in the block use no stored tuning."""
    before = os.environ.get("DEEPEP_RT_TUNING")
    os.environ["DEEPEP_RT_TUNING"] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ["DEEPEP_RT_TUNING"]
        else:
            os.environ["DEEPEP_RT_TUNING"] = before


def share_gpus() -> bool:
    """`DEEPEP_RT_SHARE_GPUS=1`: several ranks may use one GPU, for development. They take turns and are slow, except under MPS."""
    return _flag("DEEPEP_RT_SHARE_GPUS")


def nvtx() -> str:
    """`DEEPEP_RT_NVTX`: "1" marks calls for profilers, "0" does not. "auto" when unset and a profiler listens, otherwise "0"."""
    if os.environ.get("DEEPEP_RT_NVTX"):
        return "1" if _flag("DEEPEP_RT_NVTX") else "0"
    return "auto" if os.environ.get("NVTX_INJECTION64_PATH") else "0"  # profilers set it


def statistics() -> bool:
    """`DEEPEP_RT_STATISTICS`: default of `Buffer(statistics=)`. `1`, or an absolute path: see `statistics_folder`."""
    return statistics_folder() is not None or _flag("DEEPEP_RT_STATISTICS", "0, 1 or the absolute path of a folder")


def statistics_folder() -> Path | None:
    """`DEEPEP_RT_STATISTICS`, if it is an absolute path: the folder that processes write their statistics to."""
    path = Path(os.environ.get("DEEPEP_RT_STATISTICS", ""))
    return path if path.is_absolute() else None


def timeout_s(usual: float = 300.0) -> float:
    """`DEEPEP_RT_TIMEOUT_S`: default of `Buffer(timeout_s=)`, in seconds; `usual` when unset."""
    text = os.environ.get("DEEPEP_RT_TIMEOUT_S") or str(usual)
    with suppress(ValueError):
        if 0 < (found := float(text)) <= MAX_TIMEOUT_S:
            return found
    raise argument_error(
        text, "DEEPEP_RT_TIMEOUT_S", f"a number of seconds, {MAX_TIMEOUT_S:g} at most", "Set a number such as 300.", EPConfigError
    )


_DEEPEP_VERSIONS = {"1": "1.2.1", "2": "2.1.0"}


def deepep_version() -> str:
    """`DEEPEP_RT_DEEPEP_VERSION`: the version of DeepEP that `deepep_rt.compat` says it is: 1.2.1, also when unset, or with 2, 2.1.0."""
    text = os.environ.get("DEEPEP_RT_DEEPEP_VERSION") or "1"
    if text not in _DEEPEP_VERSIONS:
        raise argument_error(text, "DEEPEP_RT_DEEPEP_VERSION", "1 or 2", "Set one of them, or unset it.", EPConfigError)
    return _DEEPEP_VERSIONS[text]


def deepep_service_level(given: Any) -> Any:
    """`EP_OVERRIDE_RDMA_SL` of DeepEP V2: the service level of InfiniBand, whatever the program has given."""
    if not (text := os.environ.get("EP_OVERRIDE_RDMA_SL")):
        return given
    return text if (number := _whole(text)) is None else number


def ranks_per_node() -> int | None:
    """`DEEPEP_RT_RANKS_PER_NODE`: default of `Buffer(ranks_per_node=)`; None when unset: the ranks of a host."""
    text = os.environ.get("DEEPEP_RT_RANKS_PER_NODE") or None
    if text is None:
        return None
    if not (number := _whole(text)):
        remedy = "Set a number such as 8, or unset the variable."
        raise argument_error(text, "DEEPEP_RT_RANKS_PER_NODE", "a number of ranks, 1 or more", remedy, EPConfigError)
    return number


def nvshmem_transport() -> str:
    """`NVSHMEM_REMOTE_TRANSPORT`: the transport of NVSHMEM to other hosts; empty if NVSHMEM chooses."""
    return os.environ.get("NVSHMEM_REMOTE_TRANSPORT", "")


def ucx_net_devices() -> str:
    """`UCX_NET_DEVICES`: the networks that UCX may use, and with it NIXL; empty if UCX chooses."""
    return os.environ.get("UCX_NET_DEVICES", "")


_SYMMETRIC_MEMORY = "auto", "heap", "nvshmem"
DEFAULT_SYMMETRIC_MEMORY = "auto"
MEMORY_WAYS = "sockets", "files", "pidfd", "fabric", "ipc"
"""The ways in which ranks pass virtual memory to each other, in the order in which they are tried."""


def symmetric_memory() -> str:
    """`DEEPEP_RT_SYMMETRIC_MEMORY`: who provides memory that the GPUs of a host share: "heap", CUDA's virtual memory; "nvshmem"; or
    "auto", also when unset: CUDA's where it works. What crosses a network of NVSHMEM is always in NVSHMEM's memory. "heap:" with one
    of `MEMORY_WAYS` forces this way.
    """
    return _memory_setting()[0]


def memory_way() -> str:
    """Return the way that `DEEPEP_RT_SYMMETRIC_MEMORY` forces, or an empty text."""
    return _memory_setting()[1]


def _memory_setting() -> tuple[str, str]:
    text = os.environ.get("DEEPEP_RT_SYMMETRIC_MEMORY") or DEFAULT_SYMMETRIC_MEMORY
    provider, colon, way = text.partition(":")
    if provider not in _SYMMETRIC_MEMORY or (colon and (provider != "heap" or way not in MEMORY_WAYS)):
        expected = f"{', '.join(_SYMMETRIC_MEMORY)}, or heap: with one of {', '.join(MEMORY_WAYS)}"
        remedy = "Set one of these names, or unset the variable."
        raise argument_error(text, "DEEPEP_RT_SYMMETRIC_MEMORY", expected, remedy, EPConfigError)
    return provider, way


def socket_dir() -> Path | None:
    """`DEEPEP_RT_SOCKET_DIR`: a folder where ranks of a host meet that have no common network namespace. Only this user may write to it."""
    text = os.environ.get("DEEPEP_RT_SOCKET_DIR")
    if text and not os.path.isabs(text):
        raise argument_error(text, "DEEPEP_RT_SOCKET_DIR", "an absolute path", "Set one, or unset the variable.", EPConfigError)
    return Path(text) if text else None


def store_token() -> str:
    """`DEEPEP_RT_STORE_TOKEN`: the secret that a store and its clients know; empty when unset."""
    return os.environ.get(_STORE_TOKEN, "")


def with_store_token(token: str) -> dict[str, str]:
    """Return the environment for the process of a store with this token."""
    return {**os.environ, _STORE_TOKEN: token}


def with_temporary_folder(folder: str) -> dict[str, str]:
    """Return the environment for a process whose temporary files go to this folder."""
    return {**os.environ, "TMPDIR": folder}


def put_gpu_first(index: int, count: int) -> None:
    """Set `CUDA_VISIBLE_DEVICES` to the same GPUs with another one first. CUDA reads it when it starts."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")[:count]
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join([names[index], *names[:index], *names[index + 1 :]])


_STORE_TOKEN = "DEEPEP_RT_STORE_TOKEN"
_READERS = {
    "DEEPEP_RT_CACHE_DIR": cache_dir,
    "DEEPEP_RT_ASSERT_CACHED": assert_cached,
    "DEEPEP_RT_TRUST_CACHE": trust_cache,
    "DEEPEP_RT_ARCH": arch,
    "DEEPEP_RT_DEBUG": debug,
    "DEEPEP_RT_REMEASURE": remeasure,
    "DEEPEP_RT_TUNING": tuning,
    "DEEPEP_RT_SHARE_GPUS": share_gpus,
    "DEEPEP_RT_SYMMETRIC_MEMORY": symmetric_memory,
    "DEEPEP_RT_SOCKET_DIR": socket_dir,
    _STORE_TOKEN: store_token,
    "DEEPEP_RT_DEEPEP_VERSION": deepep_version,
    "DEEPEP_RT_NVTX": nvtx,
    "DEEPEP_RT_STATISTICS": statistics,
    "DEEPEP_RT_TIMEOUT_S": timeout_s,
    "DEEPEP_RT_RANKS_PER_NODE": ranks_per_node,
}


def mistakes() -> list[str]:
    """Return the errors in the values of the `DEEPEP_RT_*` variables."""
    found = []
    for read in _READERS.values():
        try:
            read()
        except EPConfigError as error:
            found.append(str(error))
    return found


def unknown() -> list[str]:
    """Return the names of `DEEPEP_RT_*` variables that do not exist."""
    return sorted(name for name in os.environ if name.startswith("DEEPEP_RT_") and name not in _READERS)


SETTINGS = ("DEEPEP_RT_", "NVSHMEM_", "CUDA_")
"""Prefixes of the variables of this library, NVSHMEM and CUDA."""


def variables() -> dict[str, str]:
    """Return every set variable that affects this library, NVSHMEM or CUDA. Reports show them, so a token is left out."""
    names = ("LD_LIBRARY_PATH", "NVIDIA_VISIBLE_DEVICES")
    found = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(SETTINGS) or name in names}
    return {name: "(a secret)" if name == _STORE_TOKEN and value else value for name, value in found.items()}


@dataclass(frozen=True)
class Launch:
    """The launcher of this process, with the rank and the number of ranks."""

    launcher: str
    rank: int
    size: int


_LAUNCHERS = (
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPICH", "PMI_RANK", "PMI_SIZE"),  # also Intel MPI, MVAPICH, and srun with PMI
    ("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # last, because mpirun in a Slurm job inherits these
)


def world_size() -> int:
    """`WORLD_SIZE`: the number of processes, set by torchrun and similar launchers; 0 if unset."""
    return _number("WORLD_SIZE") or 0


def local_rank() -> int | None:
    """`LOCAL_RANK`: the number of this process on its host, set by torchrun and similar launchers."""
    return _number("LOCAL_RANK")


def meets_without_mpi() -> bool:
    """Whether torchrun, or a launcher that sets the same variables, has started this process and others, and not MPI's.

    `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT` tell them where they meet. srun or mpirun may have started torchrun itself, which
    then sets `TORCHELASTIC_RUN_ID`.
    """
    names = "RANK", "MASTER_ADDR", "MASTER_PORT"
    has_launcher = launch() is not None and "TORCHELASTIC_RUN_ID" not in os.environ
    return world_size() > 1 and all(os.environ.get(name) for name in names) and not has_launcher


def _number(name: str) -> int | None:
    return _whole(os.environ.get(name, ""))


def _whole(text: str) -> int | None:
    """Return the whole number of a text, or None. Python converts at most 4,300 digits, and some digits of other scripts not at all."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else None


def launch() -> Launch | None:
    """Return the MPI launcher of this process, or None. Each launcher sets variables of its own."""
    for launcher, rank, size in _LAUNCHERS:
        numbers = _number(rank), _number(size)
        if numbers[0] is not None and numbers[1] is not None:
            return Launch(launcher, numbers[0], numbers[1])
    return None


@contextmanager
def overridden(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables during the block. Variables that the user has set keep their values."""
    added = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def _flag(name: str, expected: str = "0 or 1") -> bool:
    text = os.environ.get(name, "0").strip().lower()
    if text in ("", "0", "false", "no", "off"):
        return False
    if text in ("1", "true", "yes", "on"):
        return True
    raise argument_error(text, name, expected, "Set one of them.", EPConfigError)
