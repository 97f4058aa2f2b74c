"""`build`: keys, errors, the cache, and several processes at once. No GPU is needed."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC comes with deepep_rt[cuda12] or [cuda13]")

from tiny_kernel import CONSTANTS, SOURCE, TINY

import deepep_rt
from deepep_rt import EPCacheError, EPCompileError, EPConfigError
from deepep_rt.config import Config
from deepep_rt.jit import build, compiler, libraries
from deepep_rt.jit.store import SUFFIX, KernelCache
from deepep_rt.kernels import structs
from deepep_rt.kernels.layout import Layout
from deepep_rt.kernels.source import kernel_constants, source_dir
from deepep_rt.kernels.table import KERNELS, Kernel


def _build(sources: Path, arch: str = "sm_90", **constants: int) -> build.CompiledKernel:
    return build.build(TINY, {**CONSTANTS, **constants}, arch, folder=sources)


def _key(sources: Path, arch: str = "sm_90", **constants: int) -> str:
    return _build(sources, arch, **constants).key


WORKER = """
import json, os, sys, time
from dataclasses import replace
from pathlib import Path
from deepep_rt.jit import build, compiler
from deepep_rt.kernels.table import Kernel
folder, go, params, constants = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4])
kernel = Kernel("tiny", params, threads="kTinyThreads", shared="kTinyShared")
compiler.known_archs()
compile_unit = compiler.compile_unit
def slow(*args):
    time.sleep(0.3)  # the other processes reach the lock meanwhile
    return compile_unit(*args)
compiler.compile_unit = slow
Path(f"{go}.{os.getpid()}").touch()
while not go.exists():
    time.sleep(0.001)
print(json.dumps([build.build(kernel, constants, "sm_90", folder=folder).compiled, build.stats.misses]))
"""


def test_build_compiles_once_and_describes_the_kernel(sources: Path, cache: Path) -> None:
    before = build.stats.hits, build.stats.misses
    first = _build(sources)
    second = _build(sources)
    assert (first.compiled, second.compiled) == (True, False)
    assert (build.stats.hits - before[0], build.stats.misses - before[1]) == (1, 1)
    assert first.code == second.code
    assert first.code.startswith(b"\x7fELF")
    assert second.info == first.info
    assert re.fullmatch(r"[0-9a-f]{64}", first.key)
    info = first.info
    assert (info["kernel"], info["arch"]) == ("tiny", "sm_90")
    assert 8 <= info["registers"] <= 64
    assert (info["static_shared_bytes"], info["dynamic_shared_bytes"]) == (400, 1024)
    assert (info["stack_bytes"], info["spill_stores"], info["spill_loads"]) == (0, 0, 0)
    assert info["bytes"] == len(first.code)
    assert info["constants"] == {name: CONSTANTS[name] for name in CONSTANTS if name not in ("kUnused", "kFactorial")}
    assert info["versions"] == {"deepep_rt": deepep_rt.__version__, "nvrtc": libraries.nvrtc_version()}
    assert info["nvshmem"] is False
    assert info["created"].endswith("+00:00")


def test_only_entries_of_this_installation_are_current(sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = _key(sources)
    (cached,) = KernelCache().entries()
    assert cached.key == key
    assert build.is_current(TINY, cached, folder=sources)
    fewer = {name: value for name, value in cached.info["constants"].items() if name != "kTinyThreads"}
    assert not build.is_current(TINY, replace(cached, info={**cached.info, "constants": fewer}), folder=sources)
    (sources / "tiny.cu").write_text(SOURCE + "\n")
    assert not build.is_current(TINY, cached, folder=sources)
    (sources / "tiny.cu").write_text(SOURCE)
    monkeypatch.setattr(libraries, "nvrtc_version", lambda: "99.0")
    assert not build.is_current(TINY, cached, folder=sources)


def test_ptx_needs_no_driver(sources: Path, cache: Path) -> None:
    built = _build(sources, "compute_80")
    assert b".entry tiny" in built.code
    assert built.info["registers"] is None


def test_the_key_depends_on_everything_that_determines_the_code(
    sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {_key(sources), _key(sources, "sm_80"), _key(sources, kFactor=8), _key(sources, kTinyShared=2048)}
    assert len(keys) == 4
    header = sources / "innermost.cuh"
    header.write_text(header.read_text() + "// a word more\n")
    keys.add(_key(sources))
    (sources / "tiny.cu").write_text(SOURCE + "\n")
    keys.add(_key(sources))
    monkeypatch.setattr(libraries, "nvrtc_version", lambda: "99.0")
    keys.add(_key(sources))
    monkeypatch.setattr(build, "_OPTIONS", [*build._OPTIONS, "--use_fast_math"])
    keys.add(_key(sources))
    assert len(keys) == 8


def test_ptx_is_linked_for_the_current_gpu(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another GPU with the same cache needs other code."""
    monkeypatch.setattr(compiler, "gpu_arch", lambda: "sm_90")
    assert [build._link_arch(arch) for arch in ("compute_80", "sm_100")] == ["sm_90", "sm_100"]
    monkeypatch.setattr(build, "_versions", lambda nvshmem: {})
    keys = {build._key(TINY, CONSTANTS, "compute_80", arch, sources) for arch in ("sm_90", "sm_100")}
    assert len(keys) == 2


def test_the_key_ignores_unused_constants_and_paths(sources: Path, cache: Path, tmp_path: Path) -> None:
    key = _key(sources)
    assert _key(sources, kUnused=6) == key
    moved = tmp_path / "elsewhere"
    sources.rename(moved)
    assert _key(moved) == key
    (moved / "unrelated.cuh").write_text("int x;")
    assert _key(moved) == key


@pytest.mark.parametrize(("name", "line"), [("tiny.cu", 4), ("innermost.cuh", 2)])
def test_errors_show_the_real_file_and_line(sources: Path, cache: Path, name: str, line: int) -> None:
    path = sources / name
    lines = path.read_text().splitlines()
    lines[line - 1] += " int wrong = no_such_name;"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(EPCompileError, match="no_such_name") as caught:
        _build(sources)
    assert f"{path.resolve()}({line}): error" in str(caught.value)
    assert "tiny did not compile for sm_90" in str(caught.value)
    assert not list(cache.glob(f"*/*{SUFFIX}"))


def test_python_and_the_compiler_must_agree_on_a_struct(sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structs.CStruct, "size", lambda self, constants: 1)
    with pytest.raises(EPCompileError, match=r"static assertion failed|static_assert"):
        _build(sources)


def test_the_error_names_a_missing_source(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(EPCompileError, match=r"kernel tiny cannot be read.*tiny\.cu"):
        build.build(TINY, CONSTANTS, "sm_90", folder=tmp_path)


@pytest.mark.parametrize(
    ("arch", "error", "message"),
    [
        ("sm_999", EPCompileError, "arch='sm_999'; expected one that NVRTC .* knows: .*sm_90"),
        ("sm_70", EPConfigError, "arch='sm_70'; expected sm_80 or newer"),
        ("hopper", EPConfigError, "arch='hopper'"),
    ],
)
def test_errors_for_architectures(sources: Path, cache: Path, arch: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _build(sources, arch)


@pytest.mark.parametrize("is_cut", [True, False], ids=["truncated", "of other sizes"])
def test_a_corrupt_entry_is_compiled_again(sources: Path, cache: Path, caplog: pytest.LogCaptureFixture, is_cut: bool) -> None:
    first, other = _build(sources), _build(sources, kFactor=8)
    assert first.code != other.code
    path, found = (cache / "sm_90" / f"{key}{SUFFIX}" for key in (first.key, other.key))
    path.write_bytes(path.read_bytes()[:-1] if is_cut else found.read_bytes())
    again = _build(sources)
    assert (again.compiled, again.code) == (True, first.code)
    assert ("wrong checksum" if is_cut else "it is the entry of another kernel") in caplog.text
    assert not _build(sources).compiled


def test_an_entry_of_another_kernel_or_version_is_compiled_again(
    sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check also finds entries whose key is wrong because of an error in the computation of keys."""
    _build(sources)
    (key,) = (path.stem for path in cache.glob(f"*/*{SUFFIX}"))
    monkeypatch.setattr(build, "_key", lambda *_: key)
    assert not _build(sources).compiled
    monkeypatch.setattr(build, "_versions", lambda nvshmem: {"nvrtc": "99.0"})
    assert _build(sources).compiled
    assert not _build(sources).compiled
    (sources / "other.cu").write_text(SOURCE.replace("tiny(", "other("))
    assert build.build(replace(TINY, name="other"), CONSTANTS, "sm_90", folder=sources).compiled


def test_an_unwritable_cache_raises_before_compiling(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DEEPEP_RT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(compiler, "compile_unit", lambda *_: pytest.fail("compiled"))
    with pytest.raises(EPCacheError, match="DEEPEP_RT_CACHE_DIR") as caught:
        _build(sources)
    assert str(tmp_path / "file" / "cache") in str(caught.value)


def test_assert_cached_forbids_compiling(sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = _key(sources)
    monkeypatch.setenv("DEEPEP_RT_ASSERT_CACHED", "1")
    assert not _build(sources).compiled
    KernelCache().clear()
    with pytest.raises(EPCacheError) as caught:
        _build(sources)
    assert all(part in str(caught.value) for part in ("DEEPEP_RT_ASSERT_CACHED", "tiny", "sm_90", key))


def test_one_of_eight_processes_compiles(sources: Path, cache: Path, tmp_path: Path) -> None:
    go = tmp_path / "go"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(deepep_rt.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-c", WORKER, str(sources), str(go), TINY.params, json.dumps(CONSTANTS)]
    workers = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    deadline = time.monotonic() + 120
    while len(list(tmp_path.glob("go.*"))) < len(workers) and time.monotonic() < deadline:
        time.sleep(0.01)
    go.touch()
    answers = [json.loads(worker.communicate(timeout=120)[0]) for worker in workers]
    assert sorted(answers) == [[False, 0]] * 7 + [[True, 1]]
    assert len(list(cache.glob(f"*/*{SUFFIX}"))) == 1


def test_build_reports_a_stack_frame(sources: Path, cache: Path) -> None:
    (sources / "inner.cuh").write_text(
        "__device__ int twice(int x) { int b[64]; for (int i = 0; i < 64; ++i) b[(i * x) & 63] = i * kFactor; return b[x & 63]; }\n"
    )
    assert _build(sources).info["stack_bytes"] >= 256


@pytest.mark.full
def test_the_linker_names_undefined_symbols(sources: Path, cache: Path) -> None:
    kernel = Kernel("tiny", TINY.params, threads="kTinyThreads", low_latency=True)
    (sources / "inner.cuh").write_text("__device__ int twice(int x);\n")
    with pytest.raises(EPCompileError, match=r"tiny did not link for sm_90 with .*libnvshmem_device\.a") as caught:
        build.build(kernel, {**CONSTANTS, "kRanksPerNode": 1, "kHasRelay": 0}, "sm_90", folder=sources)
    assert "twice" in str(caught.value)


@pytest.mark.full
def test_the_calls_of_nvshmem_are_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVSHMEM's headers take seconds; each further kernel that calls NVSHMEM takes the code from the cache."""
    layout = Layout(Config(num_ranks=4, ranks_per_node=2, num_experts=8, num_topk=2, hidden=512, num_max_tokens_per_rank=16))
    names: list[str] = []
    compile_unit = compiler.compile_unit
    monkeypatch.setattr(compiler, "compile_unit", lambda *arguments: names.append(arguments[1]) or compile_unit(*arguments))
    for name in ("link_rates", "route_nodes"):
        kernel = KERNELS[name]
        assert build.build(kernel, kernel_constants(layout, "sm_90", kernel), "sm_90").info["nvshmem"]
    assert names == ["link_rates", "nvshmem_calls", "route_nodes"]
    monkeypatch.setattr(compiler, "gpu_arch", lambda: "sm_90")
    kernel = KERNELS["link_rates"]  # PTX of the kernel links with code for the GPU
    assert build.build(kernel, kernel_constants(layout, "compute_80", kernel), "compute_80").code.startswith(b"\x7fELF")
    assert names[3:] == ["link_rates"]


def test_the_calls_of_nvshmem_determine_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_versions", lambda nvshmem: {})
    shutil.copytree(source_dir(), tmp_path / "cuda_src")
    monkeypatch.setattr(build, "source_dir", lambda: tmp_path / "cuda_src")
    key = build._calls_key("sm_90")
    for name in ("nvshmem_calls.cu", "nvshmem_calls.cuh"):
        with (tmp_path / "cuda_src" / "common" / name).open("a") as file:
            file.write("// a word more\n")
        assert build._calls_key("sm_90") != key
        key = build._calls_key("sm_90")
