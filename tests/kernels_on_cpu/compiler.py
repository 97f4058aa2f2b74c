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

from deepep_rt.kernels import Kernel

from . import translate

HERE = Path(__file__).resolve().parent
_OPTIONS = ["-std=c++17", "-O1", "-fPIC", "-shared", "-ffp-contract=off", "-fno-strict-aliasing", "-fwrapv", "-w", f"-I{HERE}"]


@functools.cache
def compiler() -> str | None:
    """The C++ compiler, or None."""
    return shutil.which("g++") or shutil.which("clang++")


@functools.cache
def _folder() -> Path:
    made = tempfile.mkdtemp(prefix="kernels_on_cpu_")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return Path(made)


def _compile(source: Path, made: Path, *more: str) -> None:
    command = [compiler() or "g++", *_OPTIONS, *more, str(source), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise AssertionError(f"{source.name} does not compile for the CPU; see ptx.h and cuda.h.\n{done.stderr[:4000]}")


@functools.cache
def runtime() -> ctypes.CDLL:
    """The scheduler."""
    made = _folder() / "runtime.so"
    _compile(HERE / "runtime.cpp", made, "-O2")
    return ctypes.CDLL(str(made), mode=ctypes.RTLD_GLOBAL)


_loaded: dict[str, ctypes.CDLL] = {}


def load(kernel: Kernel, constants: Mapping[str, int], cuda_src: Path | None = None) -> int:
    """The address of a kernel's function for one thread, which takes the address of Params; the same text is compiled once."""
    runtime()
    with tempfile.TemporaryDirectory(dir=_folder()) as name:
        folder = Path(name)
        source = translate.write_sources(kernel, constants, folder, cuda_src)
        key = hashlib.sha256("".join(path.read_text() for path in sorted(folder.iterdir())).encode()).hexdigest()
        if key not in _loaded:
            made = _folder() / f"{kernel.name}-{key[:16]}.so"
            _compile(source, made, f"-I{folder}", str(_folder() / "runtime.so"))
            _loaded[key] = ctypes.CDLL(str(made))
    function = ctypes.cast(_loaded[key].start, ctypes.c_void_p).value
    assert function is not None
    return function
