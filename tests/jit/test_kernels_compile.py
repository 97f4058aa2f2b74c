"""Every kernel of the table compiles without spills, for several sizes and architectures."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import kept
import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC comes with deepep_rt[cuda12] or [cuda13]")


from deepep_rt import EPUnavailableError
from deepep_rt.config import COMBINE_DTYPES, Config
from deepep_rt.jit import build, compiler
from deepep_rt.kernels.layout import Layout
from deepep_rt.kernels.source import kernel_constants
from deepep_rt.kernels.table import KERNELS, Kernel

CONFIG = Config(num_ranks=8, num_max_tokens_per_rank=4096, hidden=7168, num_topk=8, num_experts=256)
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
    "256 ranks, 8 a node, direct, relay": replace(CONFIG, num_ranks=256, ranks_per_node=8, path="direct", transport="mpi"),
    "6 ranks, 1 a node, top-32, relay": Config(
        num_ranks=6, num_max_tokens_per_rank=100, hidden=512, num_topk=32, num_experts=96, ranks_per_node=1, transport="mpi"
    ),
    "4 ranks, 2 a node, wire": replace(CONFIG, num_ranks=4, ranks_per_node=2, transport="wire"),
}
FOR_SM_100 = ("8 ranks", "16 ranks, 8 a node")
FOR_COMPRESSED_ROWS = ("8 ranks", "3 ranks, top-32", "8 ranks, masking", "16 ranks, 8 a node")


def _archs() -> list[str]:
    try:
        return [arch for arch in ("sm_80", "sm_90", "sm_100") if arch in compiler.known_archs()]
    except EPUnavailableError:
        return []


def _differs(kernel: Kernel, dtype: str | None, arch: str, shape: str) -> bool:
    """Return whether the code differs from that of another case, so that compiling it too is worth the time."""
    config = SHAPES[shape]
    if (kernel.low_latency or kernel.over_nodes or kernel.compression) and not kernel.fits(config):
        return False
    if config.transport == "wire":  # the other kernels are those of a relay
        return bool(kernel.carries)
    return not (
        (config.on_timeout == "mask" and not kernel.low_latency)  # the same kernel as without
        or (
            config.has_network and not (kernel.low_latency or kernel.over_nodes)
        )  # the same, or one that such a Buffer does not use
        or (kernel.over_nodes and dtype not in (None, "bfloat16"))  # little would differ, and compiling takes long
        or (kernel.compression and shape not in FOR_COMPRESSED_ROWS)  # numbers of ranks and of choices change little
        or (arch == "sm_100" and shape not in FOR_SM_100)  # the code of sm_90, which this test compiles for all shapes
        or (kernel.is_local and shape != "8 ranks")  # one configuration is enough
    )


def _cases() -> Iterator[Any]:
    for shape, arch, (name, dtype) in itertools.product(SHAPES, _archs(), VARIANTS):
        if _differs(KERNELS[name], dtype, arch, shape):
            quick = arch == "sm_90" and (shape in FOR_SM_100 or KERNELS[name].carries) and dtype in (None, "bfloat16")
            yield pytest.param(arch, name, dtype, shape, marks=() if quick else pytest.mark.full)


@pytest.mark.parametrize(("arch", "name", "dtype", "shape"), list(_cases()))
def test_every_kernel_compiles_without_spills(
    arch: str, name: str, dtype: str | None, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEPEP_RT_CACHE_DIR", str(kept.kernels()))
    kernel, config = KERNELS[name], SHAPES[shape]
    constants = kernel_constants(Layout(config), arch, kernel, dtype)
    if arch == "sm_100":
        # NVSHMEM's library for CUDA 12 has no sm_100 code, so nvJitLink compiles all of it for two minutes. ptxas reports spills before.
        monkeypatch.setattr(compiler, "link_nvshmem", lambda code, *_: (code, ""))
        monkeypatch.setenv("DEEPEP_RT_CACHE_DIR", str(kept.folder() / "kernels_without_nvshmem"))
    built = build.build(kernel, constants, arch)
    assert built.code.startswith(b"\x7fELF")
    assert built.info["registers"] > 0
    assert (built.info["spill_stores"], built.info["spill_loads"]) == (0, 0)
    assert built.info["stack_bytes"] <= kernel.max_stack_bytes
    assert built.info["static_shared_bytes"] + built.info["dynamic_shared_bytes"] <= 227 * 1024
    assert built.info["nvshmem"] == (config.has_network and not config.has_ring)
    if built.info["nvshmem"]:
        assert {"nvshmem", "nvshmem_device_sha256", "nvjitlink"} <= set(built.info["versions"])
        assert arch == "sm_100" or built.info["bytes"] > 100_000, "the device library is missing"


def test_each_kernel_has_a_quick_case() -> None:
    assert {case.values[1] for case in _cases() if not case.marks} == set(KERNELS)
