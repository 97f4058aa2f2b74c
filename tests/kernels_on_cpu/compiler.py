"""Compile kernels for the CPU, and keep the libraries for later runs."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import kept

from deepep_rt.kernels.table import Kernel

from . import translate

HERE = Path(__file__).resolve().parent
_OPTIONS = ["-std=c++17", "-Og", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing", "-fwrapv", "-w", f"-I{HERE}"]
_WHOLE_RUNTIME = ["-O3", "-flto", "-fno-semantic-interposition"]  # kernels call it at each access
_EVERY_ACCESS = ["-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0"]


@functools.cache
def compiler() -> str | None:
    """Find a C++ compiler; None without one."""
    return shutil.which("g++") or shutil.which("clang++")


@functools.cache
def _common_key() -> str:
    """Hash all that every library depends on: the compiler, its options, the scheduler and its headers."""
    version = subprocess.run([compiler() or "g++", "-v"], capture_output=True, text=True, check=True, timeout=60).stderr
    files = [path for path in sorted(HERE.iterdir()) if path.suffix in (".cpp", ".h")]
    return _hash(version, repr(_OPTIONS[:-1] + _WHOLE_RUNTIME + _EVERY_ACCESS), *(path.name + path.read_text() for path in files))


def _hash(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _compile(sources: list[Path], target: Path, *options: str) -> None:
    command = [compiler() or "g++", *_OPTIONS, *options, *map(str, sources), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise AssertionError(f"{sources[0].name} does not compile for the CPU; see ptx.h and cuda.h.\n{done.stderr[:4000]}")


def _library(name: str, make: Callable[[Path], None]) -> Path:
    """Return the path of a library in the folder of kept libraries, where `make` puts it if it is not there yet."""
    folder = kept.folder() / "cpu"
    library = folder / name
    try:
        os.utime(library)  # it is in use, so delete_oldest keeps it
    except FileNotFoundError:
        folder.mkdir(exist_ok=True)
        with _alone(library.with_suffix(".lock")):
            if not library.exists():
                with tempfile.TemporaryDirectory(prefix=kept.UNFINISHED, dir=folder) as unfinished:
                    made = Path(unfinished) / name
                    make(made)
                    made.replace(library)  # other processes see a complete library or none
    return library


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Let one process at a time run the block: the others would compile the same. A process that dies gives the lock up."""
    with path.open("w") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # a process that waits still has the file, and then finds the library


@functools.cache
def _runtime_path() -> Path:
    return _library(
        f"runtime-{_common_key()}.so", lambda made: _compile(sorted(HERE.glob("*.cpp")), made, "-shared", *_WHOLE_RUNTIME)
    )


@functools.cache
def runtime() -> ctypes.CDLL:
    """Compile and load the scheduler."""
    return ctypes.CDLL(str(_runtime_path()), mode=ctypes.RTLD_GLOBAL)


def load(kernel: Kernel, constants: Mapping[str, int], cuda_src: Path | None = None) -> int:
    """Return the address of the function that runs one thread of a kernel. It takes the address of Params. Equal sources are compiled once.

    This process translates a kernel once, so the files of a folder must not change afterwards.

    Args:
        kernel: An entry of the kernel table.
        constants: The constants to compile it with.
        cuda_src: The folder of the kernels; None: that of the package.
    """
    return _load(kernel, tuple(constants.items()), cuda_src)


@functools.cache
def _load(kernel: Kernel, items: tuple[tuple[str, int], ...], cuda_src: Path | None) -> int:
    runtime()
    constants = dict(items)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = translate.write_sources(kernel, constants, folder, cuda_src)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        texts = (str(path.relative_to(folder)) + path.read_text() for path in files)
        key = _hash(_common_key(), *texts)

        def make(library: Path) -> None:
            _compile([source], folder / "kernel.o", "-c", f"-I{folder}", *_EVERY_ACCESS)
            # The runtime replaces the sanitizer's library.
            _compile([folder / "kernel.o", _runtime_path()], library, "-shared")

        function = ctypes.cast(_loaded(_library(f"{kernel.name}-{key}.so", make)).start, ctypes.c_void_p).value
    assert function is not None
    return function


@functools.cache
def _loaded(library: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(library))
