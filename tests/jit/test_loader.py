"""`launch.load`: a kernel is loaded once for each context. A fake driver records its arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC comes with deepep_rt[cuda12] or [cuda13]")

from tiny_kernel import CONSTANTS, TINY

from deepep_rt.jit import build, compiler, launch
from deepep_rt.kernels.table import Kernel


def test_load_is_a_lookup_after_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load(kernel: Kernel, constants: dict[str, int], arch: str) -> launch.LoadedKernel:
        calls.append((kernel.name, arch))
        return launch.LoadedKernel(1, 64, 0)

    monkeypatch.setattr(launch, "_load", load)
    monkeypatch.setattr(compiler, "gpu_context", lambda: 1)
    monkeypatch.setattr(launch, "LOADED", {})
    first = launch.load(TINY, CONSTANTS, "sm_90")
    monkeypatch.setattr(launch, "build", lambda *_: pytest.fail("called on the hot path"))
    monkeypatch.setattr(build, "_key", lambda *_: pytest.fail("called on the hot path"))
    assert launch.load(TINY, dict(CONSTANTS), "sm_90") is first
    launch.load(TINY, {**CONSTANTS, "kFactor": 8}, "sm_90")
    monkeypatch.setattr(compiler, "gpu_context", lambda: 2)  # another GPU of the same process
    launch.load(TINY, CONSTANTS, "sm_90")
    monkeypatch.setenv("DEEPEP_RT_ARCH", "compute_80")
    launch.load(TINY, CONSTANTS, compiler.target_arch())
    assert calls == [("tiny", "sm_90")] * 3 + [("tiny", "compute_80")]


def test_arguments_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """PTX ends with a zero. Shared memory is requested, because the driver allows only 48 KB otherwise. A capture may be under way."""
    from cuda.bindings import driver

    modes: list[str] = []

    @contextmanager
    def relaxed_capture_mode() -> Iterator[None]:
        modes.append("relaxed")
        yield
        assert len(given) == modes.count("relaxed"), "the kernel was loaded in this mode"
        modes.append("as before")

    monkeypatch.setattr(launch, "relaxed_capture_mode", relaxed_capture_mode)
    given: list[bytes] = []
    asked: list[int] = []
    success = driver.CUresult.CUDA_SUCCESS
    monkeypatch.setattr(driver, "cuLibraryLoadData", lambda code, *_: given.append(code) or (success, 5))
    monkeypatch.setattr(driver, "cuLibraryGetKernel", lambda library, name: (success, 6))
    monkeypatch.setattr(driver, "cuKernelGetFunction", lambda kernel: (success, 7))
    monkeypatch.setattr(driver, "cuFuncSetAttribute", lambda function, name, value: asked.append(value) or (success,))
    for code in (b"\x7fELF cubin", b".version 8.0"):
        monkeypatch.setattr(launch, "build", lambda *_, code=code: SimpleNamespace(code=code))
        assert launch._load(TINY, CONSTANTS, "sm_90") == launch.LoadedKernel(7, 64, 1024)
    assert given == [b"\x7fELF cubin", b".version 8.0\0"]
    assert asked == [1024, 1024]
    assert modes == ["relaxed", "as before"] * 2
