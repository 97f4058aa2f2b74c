"""The run-time compiler, without a GPU: the generated text, keys, errors, several processes at once, and every kernel of the table."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import deepep_rt
from deepep_rt import EPCacheError, EPCompileError, EPConfigError, EPUnavailableError
from deepep_rt.config import COMBINE_DTYPES, Config
from deepep_rt.jit import build, compiler, current_gpu, libraries, loader
from deepep_rt.jit.cache import SUFFIX
from deepep_rt.kernels import structs
from deepep_rt.kernels.layout import Layout
from deepep_rt.kernels.source import kernel_constants, prelude, source_dir, unit
from deepep_rt.kernels.table import KERNELS, Kernel

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC comes with deepep_rt[cuda12] or [cuda13]")

CONFIG = Config(num_ranks=8, num_max_tokens_per_rank=4096, hidden=7168, num_topk=8, num_experts=256)
TINY = Kernel("tiny", "    u64 out;\n    i32 count[kNumRanks];\n", threads="kTinyThreads", shared="kTinyShared")
CONSTANTS = {
    "kNumRanks": 3,
    "kNumLocalExperts": 2,
    "kTinyThreads": 64,
    "kTinyShared": 1024,
    "kFactor": 7,
    "kUnused": 5,
    "kFactorial": 1,
}
SOURCE = """\
#include "inner.cuh"
extern "C" __global__ void __launch_bounds__(kTinyThreads) tiny(const __grid_constant__ Params p) {
  __shared__ int held[100];
  held[threadIdx.x] = p.count[0];
  __syncthreads();
  reinterpret_cast<int*>(p.out)[threadIdx.x] = twice(held[63 - threadIdx.x]);
}
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "tiny.cu").write_text(SOURCE)
    (folder / "inner.cuh").write_text(
        '#pragma once\n#include "innermost.cuh"\n__device__ int twice(int x) { return 2 * scaled(x); }\n'
        "static_assert(sizeof(RouteMessage) > 0);\n"
    )
    (folder / "innermost.cuh").write_text("#pragma once\n__device__ int scaled(int x) { return kFactor * x; }\n")
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEEPEP_RT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


# --- text --------------------------------------------------------------------------------------------------------------------------


def test_prelude_has_the_used_constants_and_no_others(sources: Path) -> None:
    text = prelude(TINY, CONSTANTS, sources)
    printed = dict(re.findall(r"^constexpr int (\w+) = (\d+);$", text, re.M))
    assert printed == {"kNumRanks": "3", "kNumLocalExperts": "2", "kTinyThreads": "64", "kFactor": "7"}


def test_prelude_defines_and_checks_the_used_structs(sources: Path) -> None:
    text = prelude(TINY, CONSTANTS, sources)
    for struct in (structs.RouteMessage, TINY.struct):
        assert f"struct {struct.name} {{" in text
        assert f"static_assert(sizeof({struct.name}) == {struct.size(CONSTANTS)});" in text
    assert "Mailbox" not in text, "a structure that the kernel does not name"
    assert text.index("kNumLocalExperts = ") < text.index("struct RouteMessage")


def test_large_constants_are_long(sources: Path) -> None:
    text = prelude(TINY, {**CONSTANTS, "kFactor": 2**31}, sources)
    assert "constexpr long long kFactor = 2147483648;" in text
    assert "constexpr int kFactor = 2147483647;" in prelude(TINY, {**CONSTANTS, "kFactor": 2**31 - 1}, sources)


def test_unit_ends_with_the_source_under_its_own_name(sources: Path) -> None:
    assert unit(TINY, CONSTANTS, sources).endswith(f'#line 1 "{sources.resolve()}/tiny.cu"\n{SOURCE}')


def test_the_table_and_the_sources_agree() -> None:
    folder = source_dir()
    found = {str(path.relative_to(folder)) for path in folder.rglob("*.cu")}
    assert found == {kernel.source for kernel in KERNELS.values()}


def test_constants_of_a_kernel() -> None:
    route = kernel_constants(Layout(CONFIG), "sm_90", KERNELS["route"])
    assert route["kNumRanks"] == 8
    assert route["kHasTma"] == 1
    assert "kRowBytes" not in route
    combine = kernel_constants(Layout(CONFIG), "sm_80", KERNELS["combine"], "float16")
    assert combine["kElement"] == combine["kFloat16"] not in (combine["kBfloat16"], combine["kFloat32"])
    with pytest.raises(EPConfigError, match="dtype=None; expected the element type that kernel combine"):
        kernel_constants(Layout(CONFIG), "sm_80", KERNELS["combine"])


# --- build -------------------------------------------------------------------------------------------------------------------------


def test_build_compiles_once_and_knows_what_it_made(sources: Path, cache: Path) -> None:
    before = build.stats.hits, build.stats.misses
    first = build.build(TINY, CONSTANTS, "sm_90", folder=sources)
    second = build.build(TINY, CONSTANTS, "sm_90", folder=sources)
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


def test_ptx_needs_no_driver(sources: Path, cache: Path) -> None:
    built = build.build(TINY, CONSTANTS, "compute_80", folder=sources)
    assert b".entry tiny" in built.code
    assert built.info["registers"] is None


def _key(sources: Path, arch: str = "sm_90", **constants: int) -> str:
    return build.build(TINY, {**CONSTANTS, **constants}, arch, folder=sources).key


def test_key_follows_everything_that_decides_the_code(sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_ptx_is_linked_for_the_gpu_at_hand(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another GPU that shares the cache needs other code."""
    monkeypatch.setattr(current_gpu, "arch", lambda: "sm_90")
    assert [build._link_arch(arch) for arch in ("compute_80", "sm_100")] == ["sm_90", "sm_100"]
    monkeypatch.setattr(build, "_versions", lambda nvshmem: {})
    keys = {build._key(TINY, CONSTANTS, "compute_80", arch, sources) for arch in ("sm_90", "sm_100")}
    assert len(keys) == 2


def test_key_does_not_follow_unused_constants_or_places(sources: Path, cache: Path, tmp_path: Path) -> None:
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
        build.build(TINY, CONSTANTS, "sm_90", folder=sources)
    assert f"{path.resolve()}({line}): error" in str(caught.value)
    assert "tiny did not compile for sm_90" in str(caught.value)
    assert not list(cache.glob(f"*/*{SUFFIX}"))


def test_python_and_the_compiler_must_agree_on_a_struct(sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structs.CStruct, "size", lambda self, constants: 1)
    with pytest.raises(EPCompileError, match=r"static assertion failed|static_assert"):
        build.build(TINY, CONSTANTS, "sm_90", folder=sources)


def test_a_missing_source_is_named(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(EPCompileError, match=r"kernel tiny cannot be read.*tiny\.cu"):
        build.build(TINY, CONSTANTS, "sm_90", folder=tmp_path)


def test_unknown_architectures_are_refused_with_the_known_ones(sources: Path, cache: Path) -> None:
    with pytest.raises(EPCompileError, match=r"arch='sm_999'; expected one that NVRTC .* knows: .*sm_90"):
        build.build(TINY, CONSTANTS, "sm_999", folder=sources)
    with pytest.raises(EPConfigError, match="arch='sm_70'; expected sm_80 or newer"):
        build.build(TINY, CONSTANTS, "sm_70", folder=sources)
    with pytest.raises(EPConfigError, match="arch='hopper'"):
        build.build(TINY, CONSTANTS, "hopper", folder=sources)


@pytest.mark.parametrize("keep", [0.5, 0.999, 0])
def test_a_truncated_entry_is_compiled_again(sources: Path, cache: Path, caplog: pytest.LogCaptureFixture, keep: float) -> None:
    first = build.build(TINY, CONSTANTS, "sm_90", folder=sources)
    (path,) = cache.glob(f"*/*{SUFFIX}")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    again = build.build(TINY, CONSTANTS, "sm_90", folder=sources)
    assert again.compiled
    assert again.code == first.code
    assert "corrupt" in caplog.text
    assert not build.build(TINY, CONSTANTS, "sm_90", folder=sources).compiled


def test_an_entry_of_other_sizes_under_this_key_is_compiled_again(
    sources: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, other = (build.build(TINY, {**CONSTANTS, "kFactor": factor}, "sm_90", folder=sources) for factor in (7, 8))
    assert first.code != other.code
    shutil.copy(cache / "sm_90" / f"{other.key}{SUFFIX}", cache / "sm_90" / f"{first.key}{SUFFIX}")
    again = build.build(TINY, CONSTANTS, "sm_90", folder=sources)
    assert (again.compiled, again.code) == (True, first.code)
    assert "it is the entry of another kernel" in caplog.text


def test_an_entry_of_another_kernel_or_version_is_compiled_again(
    sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the key is right: it names the code only as long as nothing is wrong with how it is made."""
    build.build(TINY, CONSTANTS, "sm_90", folder=sources)
    (key,) = (path.stem for path in cache.glob(f"*/*{SUFFIX}"))
    monkeypatch.setattr(build, "_key", lambda *_: key)
    assert not build.build(TINY, CONSTANTS, "sm_90", folder=sources).compiled
    monkeypatch.setattr(build, "_versions", lambda nvshmem: {"nvrtc": "99.0"})
    assert build.build(TINY, CONSTANTS, "sm_90", folder=sources).compiled
    assert not build.build(TINY, CONSTANTS, "sm_90", folder=sources).compiled
    (sources / "other.cu").write_text(SOURCE.replace("tiny(", "other("))
    assert build.build(replace(TINY, name="other"), CONSTANTS, "sm_90", folder=sources).compiled


def test_an_unwritable_cache_is_explained_before_anything_is_compiled(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DEEPEP_RT_CACHE_DIR", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(compiler, "compile_unit", lambda *_: pytest.fail("compiled"))
    with pytest.raises(EPCacheError, match="DEEPEP_RT_CACHE_DIR") as caught:
        build.build(TINY, CONSTANTS, "sm_90", folder=sources)
    assert str(tmp_path / "file" / "cache") in str(caught.value)


def test_assert_cached_forbids_compiling(sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPEP_RT_ASSERT_CACHED", "1")
    with pytest.raises(EPCacheError) as caught:
        build.build(TINY, CONSTANTS, "sm_90", folder=sources)
    monkeypatch.delenv("DEEPEP_RT_ASSERT_CACHED")
    key = build.build(TINY, CONSTANTS, "sm_90", folder=sources).key
    assert all(part in str(caught.value) for part in ("DEEPEP_RT_ASSERT_CACHED", "tiny", "sm_90", key))
    monkeypatch.setenv("DEEPEP_RT_ASSERT_CACHED", "1")
    assert not build.build(TINY, CONSTANTS, "sm_90", folder=sources).compiled


def test_missing_nvrtc_names_the_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries.nvrtc_version.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(EPUnavailableError, match=r"NVRTC is not installed.*deepep_rt\[cuda12\].*deepep_rt\[cuda13\]"):
        libraries.nvrtc_version()


@pytest.mark.parametrize(
    ("version", "wheel"), [(libraries.nvrtc_version, "nvidia-cuda-nvrtc"), (libraries.nvjitlink_version, "nvidia-nvjitlink")]
)
def test_versions_name_the_patch_release(version: Callable[[], str], wheel: str) -> None:
    """Which may make other code, and so is part of the key."""
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
        ("other/libnvrtc.so.12", "12.9"),
        ("cuda/lib64/libnvrtc.so.12.8.93", "12.9"),  # that would be another one than what answered
    ],
)
def test_where_the_patch_release_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, version: str) -> None:
    pathfinder = pytest.importorskip("cuda.pathfinder")
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).touch()
    (tmp_path / "link.so").symlink_to(tmp_path / file)
    wheels = {"nvidia-cuda-nvrtc": "13.0.88", "nvidia-cuda-nvrtc-cu12": "12.9.86"}
    monkeypatch.setattr(
        importlib.metadata,
        "distribution",
        lambda name: SimpleNamespace(version=wheels[name], locate_file=lambda part: tmp_path / "site" / part),
    )
    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", lambda name: SimpleNamespace(abs_path=str(tmp_path / "link.so")))
    assert libraries._with_patch("12.9", "nvrtc", "nvidia-cuda-nvrtc") == version


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
    time.sleep(0.3)  # everybody else arrives meanwhile
    return compile_unit(*args)
compiler.compile_unit = slow
Path(f"{go}.{os.getpid()}").touch()
while not go.exists():
    time.sleep(0.001)
print(json.dumps([build.build(kernel, constants, "sm_90", folder=folder).compiled, build.stats.misses]))
"""


def test_of_eight_processes_one_compiles(sources: Path, cache: Path, tmp_path: Path) -> None:
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


# --- ptxas' figures ----------------------------------------------------------------------------------------------------------------

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


def test_usage_is_that_of_the_entry_point() -> None:
    assert compiler.usage(LOG, "ring") == compiler.Usage(24, 400, 64, 4, 12)


def test_linking_may_raise_the_registers() -> None:
    assert compiler.usage(LOG, "ring", LINK_LOG) == compiler.Usage(32, 416, 64, 4, 12)


def test_no_figures_are_not_zero() -> None:
    assert compiler.usage("", "ring") == compiler.Usage(None, None, None, None, None)


def test_a_stack_frame_is_seen(sources: Path, cache: Path) -> None:
    (sources / "inner.cuh").write_text(
        "__device__ int twice(int x) { int b[64]; for (int i = 0; i < 64; ++i) b[(i * x) & 63] = i * kFactor; return b[x & 63]; }\n"
    )
    assert build.build(TINY, CONSTANTS, "sm_90", folder=sources).info["stack_bytes"] >= 256


# --- load --------------------------------------------------------------------------------------------------------------------------


def test_load_is_a_look_up_after_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def load(kernel: Kernel, constants: dict[str, int], arch: str) -> loader.LoadedKernel:
        calls.append((kernel.name, arch))
        return loader.LoadedKernel(1, 64, 0)

    monkeypatch.setattr(loader, "_load", load)
    monkeypatch.setattr(current_gpu, "context", lambda: 1)
    monkeypatch.setattr(loader, "LOADED", {})
    first = loader.load(TINY, CONSTANTS, "sm_90")
    monkeypatch.setattr(loader, "build", lambda *_: pytest.fail("not on the hot path"))
    monkeypatch.setattr(build, "_key", lambda *_: pytest.fail("not on the hot path"))
    assert loader.load(TINY, dict(CONSTANTS), "sm_90") is first
    loader.load(TINY, {**CONSTANTS, "kFactor": 8}, "sm_90")
    monkeypatch.setattr(current_gpu, "context", lambda: 2)  # another GPU of the same process
    loader.load(TINY, CONSTANTS, "sm_90")
    monkeypatch.setenv("DEEPEP_RT_ARCH", "compute_80")
    loader.load(TINY, CONSTANTS, current_gpu.target_arch())
    assert calls == [("tiny", "sm_90")] * 3 + [("tiny", "compute_80")]


def test_what_the_driver_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """PTX has to end in a zero; and a kernel is refused more than 48 KB of shared memory unless it is asked for."""
    from cuda.bindings import driver

    given: list[bytes] = []
    asked: list[int] = []
    success = driver.CUresult.CUDA_SUCCESS
    monkeypatch.setattr(driver, "cuLibraryLoadData", lambda code, *_: given.append(code) or (success, 5))
    monkeypatch.setattr(driver, "cuLibraryGetKernel", lambda library, name: (success, 6))
    monkeypatch.setattr(driver, "cuKernelGetFunction", lambda kernel: (success, 7))
    monkeypatch.setattr(driver, "cuFuncSetAttribute", lambda function, name, value: asked.append(value) or (success,))
    for code in (b"\x7fELF cubin", b".version 8.0"):
        monkeypatch.setattr(loader, "build", lambda *_, code=code: SimpleNamespace(code=code))
        assert loader._load(TINY, CONSTANTS, "sm_90") == loader.LoadedKernel(7, 64, 1024)
    assert given == [b"\x7fELF cubin", b".version 8.0\0"]
    assert asked == [1024, 1024]


# --- the real kernels --------------------------------------------------------------------------------------------------------------

VARIANTS = [(kernel, dtype) for kernel in KERNELS for dtype in (COMBINE_DTYPES if KERNELS[kernel].per_dtype else [None])]
SHAPES = {
    "8 ranks": CONFIG,
    "1 rank, small rows": Config(num_ranks=1, num_max_tokens_per_rank=1, hidden=8, num_topk=1, num_experts=1),
    "3 ranks, top-32": Config(
        num_ranks=3, num_max_tokens_per_rank=1000, hidden=5120, num_topk=32, num_experts=96, dtype="float32"
    ),
    "8 ranks, masking": replace(CONFIG, on_timeout="mask"),
    "8 ranks, 4 a node, masking": replace(CONFIG, ranks_per_node=4, on_timeout="mask"),
    "16 ranks, 8 a node": replace(CONFIG, num_ranks=16, ranks_per_node=8),
}


def _archs() -> list[str]:
    try:
        return [arch for arch in ("sm_80", "sm_90", "sm_100") if arch in compiler.known_archs()]
    except EPUnavailableError:
        return []


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "dtype"), VARIANTS)
@pytest.mark.parametrize("arch", _archs())
def test_every_kernel_compiles_without_spills(
    arch: str, name: str, dtype: str | None, shape: str, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, config = KERNELS[name], SHAPES[shape]
    if (config.has_network or config.on_timeout == "mask") and not kernel.low_latency:
        return  # the same as without
    if config.has_network and kernel.scale_up_only:
        return
    if kernel.is_local and shape != "8 ranks":
        return  # one will do
    constants = kernel_constants(Layout(config), arch, kernel, dtype)
    if arch == "sm_100":
        # NVSHMEM's library for CUDA 12 has no sm_100 code: nvJitLink compiles all of it, for two minutes. Spills are known before.
        monkeypatch.setattr(compiler, "link_nvshmem", lambda code, *_: (code, ""))
    built = build.build(kernel, constants, arch)
    assert built.code.startswith(b"\x7fELF")
    assert built.info["registers"] > 0
    assert (built.info["spill_stores"], built.info["spill_loads"]) == (0, 0)
    assert built.info["stack_bytes"] <= kernel.max_stack_bytes
    assert built.info["static_shared_bytes"] + built.info["dynamic_shared_bytes"] <= 227 * 1024
    assert built.info["nvshmem"] == (config.has_network and kernel.low_latency)
    if built.info["nvshmem"]:
        assert {"nvshmem", "nvshmem_device_sha256", "nvjitlink"} <= set(built.info["versions"])
        assert arch == "sm_100" or built.info["bytes"] > 100_000, "the device library is in it"


def test_undefined_symbols_are_named_by_the_linker(sources: Path, cache: Path) -> None:
    kernel = Kernel("tiny", TINY.params, threads="kTinyThreads", low_latency=True)
    (sources / "inner.cuh").write_text("__device__ int twice(int x);\n")
    with pytest.raises(EPCompileError, match=r"tiny did not link for sm_90 with .*libnvshmem_device\.a") as caught:
        build.build(kernel, {**CONSTANTS, "kRanksPerNode": 1}, "sm_90", folder=sources)
    assert "twice" in str(caught.value)


def test_nvshmem_is_found_beside_its_host_library_also_where_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    pathfinder = pytest.importorskip("cuda.pathfinder")
    loaded = libraries.nvshmem()
    assert list(loaded.device_library.parent.glob("libnvshmem_host.so*"))
    assert re.fullmatch(r"3\.\d+\.\d+", loaded.version)
    pytest.importorskip("nvidia.nvshmem", reason="only the wheel is looked for without loading")

    def refuse(name: str) -> None:
        raise RuntimeError("no driver")

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", refuse)
    assert libraries.nvshmem.__wrapped__() == loaded
