"""Compile kernels for the CPU, and keep the libraries as long as the process lives."""

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

from deepep_rt.kernels.kernel import Kernel

from . import translate

HERE = Path(__file__).resolve().parent
_OPTIONS = ["-std=c++17", "-O1", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-fwrapv", "-w", f"-I{HERE}"]


@functools.cache
def compiler() -> str | None:
    """Find a C++ compiler; None without one."""
    return shutil.which("g++") or shutil.which("clang++")


@functools.cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="kernels_on_cpu_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _compile(sources: list[Path], target: Path, *options: str) -> None:
    command = [compiler() or "g++", *_OPTIONS, *options, *map(str, sources), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise AssertionError(f"{sources[0].name} does not compile for the CPU; see ptx.h and cuda.h.\n{done.stderr[:4000]}")


@functools.cache
def runtime() -> ctypes.CDLL:
    """Compile and load the scheduler."""
    library = _folder() / "runtime.so"
    _compile(sorted(HERE.glob("*.cpp")), library, "-shared")
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


_loaded: dict[str, ctypes.CDLL] = {}


def load(kernel: Kernel, constants: Mapping[str, int], cuda_src: Path | None = None, *, every_access: bool = False) -> int:
    """Return the address of the function that runs one thread of a kernel. It takes the address of Params. Equal sources are compiled once.

    Args:
        kernel: An entry of the kernel table.
        constants: The constants to compile it with.
        cuda_src: The folder of the kernels; None: that of the package.
        every_access: Report each load and store to the runtime, not only those in PTX.
    """
    runtime()
    with tempfile.TemporaryDirectory(dir=_folder()) as name:
        folder = Path(name)
        source = translate.write_sources(kernel, constants, folder, cuda_src)
        texts = "".join(path.read_text() for path in sorted(folder.rglob("*")) if path.is_file())
        key = hashlib.sha256(texts.encode()).hexdigest() + str(every_access)
        if key not in _loaded:
            library = _folder() / f"{kernel.name}-{len(_loaded)}.so"
            instrumentation = ["-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"] if every_access else []
            _compile([source], folder / "kernel.o", "-c", f"-I{folder}", *instrumentation)
            _compile(
                [folder / "kernel.o", _folder() / "runtime.so"], library, "-shared"
            )  # the runtime replaces the sanitizer's library
            _loaded[key] = ctypes.CDLL(str(library))
    function = ctypes.cast(_loaded[key].start, ctypes.c_void_p).value
    assert function is not None
    return function
