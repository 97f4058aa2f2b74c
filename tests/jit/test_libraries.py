"""CUDA's libraries, their versions, and the figures of ptxas."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC comes with deepep_rt[cuda12] or [cuda13]")


from deepep_rt import EPUnavailableError
from deepep_rt.jit import compiler, libraries

LOG = """\
ptxas info    : 2470 bytes gmem
ptxas info    : Compiling entry function 'ring' for 'sm_80'
ptxas info    : Function properties for ring
ptxas         .     64 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 24 registers, used 1 barriers, 64 bytes cumulative stack size, 400 bytes smem, 360 bytes cmem[0]
ptxas info    : Compile time = 11.080 ms
ptxas info    : Function properties for _Z14nvshmemi_fence
ptxas         .     8 bytes stack frame, 8 bytes spill stores, 8 bytes spill loads
"""
LINK_LOG = """\
info    : 2690 bytes gmem, 11500 bytes cmem[3]
info    : Function properties for 'ring':
info    : used 32 registers, used 0 barriers, 560 stack, 416 bytes smem, 400 bytes cmem[0], 0 bytes lmem
"""


def test_the_error_for_a_missing_nvrtc_names_the_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries.nvrtc_version.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(EPUnavailableError, match=r"NVRTC is not installed.*\. Run pip install.*\[cuda12\].* cuda13"):
        libraries.nvrtc_version()


@pytest.mark.parametrize(
    ("version", "wheel"), [(libraries.nvrtc_version, "nvidia-cuda-nvrtc"), (libraries.nvjitlink_version, "nvidia-nvjitlink")]
)
def test_versions_include_the_patch_release(version: Callable[[], str], wheel: str) -> None:
    """A patch release may make other code, so it is part of the key."""
    found = version()
    major, _, _ = found.split(".")
    for name in (f"{wheel}-cu{major}", wheel):
        with suppress(importlib.metadata.PackageNotFoundError):
            assert importlib.metadata.version(name) == found
            break


@pytest.mark.parametrize(
    ("file", "version"),
    [
        ("cuda/lib64/libnvrtc.so.12.9.41", "12.9.41"),
        ("site/nvidia/cuda_nvrtc/lib/libnvrtc.so.12", "12.9.86"),
        ("other/nvidia/cuda_nvrtc/lib/libnvrtc.so.12", "12.9.79"),  # from an older wheel, which did not normalise its name
        ("other/libnvrtc.so.12", "12.9"),
        ("cuda/lib64/libnvrtc.so.12.8.93", "12.9"),  # the file belongs to another version than the loaded library
    ],
)
def test_the_patch_release_comes_from_the_file_or_its_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, version: str
) -> None:
    pathfinder = pytest.importorskip("cuda.pathfinder")
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    (tmp_path / "link.so").symlink_to(tmp_path / file)
    wheels = "nvidia_cuda_nvrtc-13.0.88", "nvidia_cuda_nvrtc_cu12-12.9.86", "nvidia_cuda_nvcc_cu12-12.9.12"
    for wheel in (*(f"site/{name}" for name in wheels), "other/nvidia-cuda-nvrtc-cu12-12.9.79"):
        (tmp_path / f"{wheel}.dist-info").mkdir(parents=True)
    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", lambda name: SimpleNamespace(abs_path=str(tmp_path / "link.so")))
    assert libraries._with_patch("12.9", "nvrtc", "nvidia-cuda-nvrtc") == version


def test_usage_is_read_from_the_entry_point() -> None:
    assert compiler.usage(LOG, "ring") == compiler.Usage(24, 400, 64, 4, 12)


def test_linking_may_raise_the_registers() -> None:
    assert compiler.usage(LOG, "ring", LINK_LOG) == compiler.Usage(32, 416, 64, 4, 12)


def test_missing_figures_are_none() -> None:
    assert compiler.usage("", "ring") == compiler.Usage(None, None, None, None, None)


def test_nvshmem_is_found_when_its_host_library_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    pathfinder = pytest.importorskip("cuda.pathfinder")
    loaded = libraries.nvshmem()
    assert list(loaded.device_library.parent.glob("libnvshmem_host.so*"))
    assert re.fullmatch(r"3\.\d+\.\d+", loaded.version)
    pytest.importorskip("nvidia.nvshmem", reason="only the wheel is found without loading")

    def refuse(name: str) -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", refuse)
    assert libraries.nvshmem.__wrapped__() == loaded
