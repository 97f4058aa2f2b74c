"""Compiles kernels for the CPU, and keeps what it made for as long as the process lives."""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from deepep_rt.kernels.table import Kernel

from . import translate

HERE = Path(__file__).resolve().parent
_OPTIONS = ["-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-fwrapv", "-w", f"-I{HERE}"]


@functools.cache
def compiler() -> str | None:
    """The C++ compiler, or None."""
    return shutil.which("g++") or shutil.which("clang++")


@functools.cache
def _folder() -> Path:
    made = tempfile.mkdtemp(prefix="kernels_on_cpu_")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def _compile(sources: list[Path], made: Path, *more: str) -> None:
    command = [compiler() or "g++", *_OPTIONS, *more, *map(str, sources), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise AssertionError(f"{sources[0].name} does not compile for the CPU; see ptx.h and cuda.h.\n{done.stderr[:4000]}")


@functools.cache
def runtime() -> ctypes.CDLL:
    """The scheduler."""
    made = _folder() / "runtime.so"
    _compile(sorted(HERE.glob("*.cpp")), made, "-shared")
    return ctypes.CDLL(str(made), mode=ctypes.RTLD_GLOBAL)


_loaded: dict[str, ctypes.CDLL] = {}


def load(kernel: Kernel, constants: Mapping[str, int], cuda_src: Path | None = None, *, every_access: bool = False) -> int:
    """The address of a kernel's function for one thread, which takes the address of Params; the same text is compiled once.

    Args:
        kernel: An entry of the kernel table.
        constants: What it is compiled with.
        cuda_src: Another folder of kernels.
        every_access: The runtime hears of each load and store, not only of those in PTX.
    """
    runtime()
    with tempfile.TemporaryDirectory(dir=_folder()) as name:
        folder = Path(name)
        source = translate.write_sources(kernel, constants, folder, cuda_src)
        texts = "".join(path.read_text() for path in sorted(folder.rglob("*")) if path.is_file())
        key = hashlib.sha256(texts.encode()).hexdigest() + str(every_access)
        if key not in _loaded:
            made = _folder() / f"{kernel.name}-{len(_loaded)}.so"
            hears = ["-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"] if every_access else []
            _compile([source], folder / "kernel.o", "-c", f"-I{folder}", *hears)
            _compile([folder / "kernel.o", _folder() / "runtime.so"], made, "-shared")  # and not the sanitizer's own library
            _loaded[key] = ctypes.CDLL(str(made))
    function = ctypes.cast(_loaded[key].start, ctypes.c_void_p).value
    assert function is not None
    return function
