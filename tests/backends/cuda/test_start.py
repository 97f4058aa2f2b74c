"""What a Buffer reads and loads when a process makes its first one. Each file is read once, and no library without need."""

from __future__ import annotations

import builtins
import io
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC comes with deepep_rt[cuda12] or [cuda13]")

from fake_gpu import FakeGpu, fake, make
from paths import pythonpath

from deepep_rt.backends.cuda import runtime
from deepep_rt.jit import build, compiler, launch
from deepep_rt.kernels import source
from deepep_rt.kernels.table import KERNELS

__all__ = ["fake", "make"]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count how often each file is opened, by name."""
    counts: Counter[str] = Counter()
    real = io.open

    def counted(file: Any, *arguments: Any, **options: Any) -> Any:
        counts[str(file)] += 1
        return real(file, *arguments, **options)

    monkeypatch.setattr(io, "open", counted)
    monkeypatch.setattr(builtins, "open", counted)
    return counts


def test_a_first_buffer_reads_each_source_once(
    fake: FakeGpu, make: Any, opened: Counter[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Kernels share their headers. They had been read and searched for each kernel anew, which took most of a Buffer's time."""
    monkeypatch.setenv("DEEPEP_RT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(source, "_known", {})
    monkeypatch.setattr(source, "_SETTLED_NS", 0)  # a developer may have saved a source just now
    compiled: list[str] = []
    monkeypatch.setattr(compiler, "compile_unit", lambda unit, name, *_: compiled.append(name) or (b"\x7fELF", ""))
    searched: Counter[str] = Counter()
    monkeypatch.setattr(source, "words_of", lambda text: searched.update([text]) or frozenset(text.split()))
    found: list[str] = []

    def load(kernel: Any, constants: Any, arch: str) -> Any:
        found.append(kernel.name)
        build.build(kernel, constants, arch)
        return fake.load(kernel, constants, arch)

    monkeypatch.setattr(launch, "load", load)
    with make(low_latency=True):
        assert sorted(compiled) == sorted(found), "threads compile them in any order"
        assert {"route", "dispatch", "combine", "ll_dispatch", "ll_combine"} <= set(found)
    for counts in (source._known, opened, searched):  # as in a process that finds its kernels in the cache
        counts.clear()
    compiled.clear()
    with make(low_latency=True):
        assert not compiled
    read = {name: count for name, count in opened.items() if name.endswith((".cu", ".cuh"))}
    assert {os.path.basename(KERNELS[name].source) for name in found} <= {os.path.basename(name) for name in read}
    assert len(read) > len(found), "headers count too"
    assert set(read.values()) == {1}, read
    assert set(searched.values()) == {1}


def test_kernels_after_the_first_that_is_missing_are_compiled_together(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A first Buffer on a machine had compiled its kernels one after the other."""
    monkeypatch.setenv("DEEPEP_RT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "compile_unit", lambda *_: (b"\x7fELF", ""))
    asked: list[list[str]] = []
    monkeypatch.setattr(runtime, "build_together", lambda kernels, arch: asked.append([kernel.name for kernel, _ in kernels]))

    def load(kernel: Any, constants: Any, arch: str) -> Any:
        build.build(kernel, constants, arch)
        return fake.load(kernel, constants, arch)

    monkeypatch.setattr(launch, "load", load)
    with make(low_latency=True):
        assert asked[:2] == [["dispatch", "combine"], ["combine"]]
        assert asked[2][:2] == ["ll_dispatch_opaque", "ll_combine"]
    asked.clear()
    with make(low_latency=True):
        assert not asked


def test_keys_ask_for_no_file_of_another_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`folder` chooses the sources, whatever was read from another folder before."""
    texts = source.sources_of(KERNELS["route"], None)
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "// another")
    other = source.sources_of(KERNELS["route"], tmp_path)
    assert other == {name: text + "// another" for name, text in texts.items()}


_NOT_NEEDED = ("torch", "jax", "jaxlib", "cupy", "typer", "rich", "matplotlib", "pynvml", "ml_dtypes", "cuda.core", "pytest")
_NOT_OURS = ("importlib.metadata", "email", "asyncio", "socket")  # they take 15 ms, and the libraries below need none of them


def test_a_first_buffer_loads_no_library_without_need() -> None:
    """The modules of the CUDA backend, and the version of the compiler, which is a part of each kernel's key."""
    code = f"""
import sys
import cuda.bindings.driver, mpi4py.MPI, numpy
theirs = set(sys.modules)
import deepep_rt.backends.cuda.backend, deepep_rt.backends.factory, deepep_rt.comm.convert, deepep_rt.comm.mpi
from deepep_rt.jit import libraries
libraries.nvrtc_version()
print([name for name in {_NOT_NEEDED + _NOT_OURS} if name in set(sys.modules) - theirs])
"""
    environment = {**os.environ, "PYTHONPATH": pythonpath()}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=False, cwd="/"
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
