"""The text that NVRTC compiles: constants, structures and sources."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC comes with deepep_rt[cuda12] or [cuda13]")

from tiny_kernel import CONSTANTS, SOURCE, TINY

from deepep_rt import EPConfigError
from deepep_rt.config import Config
from deepep_rt.kernels import structs
from deepep_rt.kernels.layout import Layout
from deepep_rt.kernels.source import NVSHMEM_CALLS, kernel_constants, prelude, source_dir, unit
from deepep_rt.kernels.table import KERNELS

CONFIG = Config(num_ranks=8, num_max_tokens_per_rank=4096, hidden=7168, num_topk=8, num_experts=256)


def test_the_prelude_has_only_used_constants(sources: Path) -> None:
    text = prelude(TINY, CONSTANTS, sources)
    printed = dict(re.findall(r"^constexpr int (\w+) = (\d+);$", text, re.M))
    assert printed == {"kNumRanks": "3", "kNumLocalExperts": "2", "kTinyThreads": "64", "kFactor": "7"}


def test_the_prelude_defines_and_checks_used_structs(sources: Path) -> None:
    text = prelude(TINY, CONSTANTS, sources)
    for struct in (structs.RouteMessage, TINY.struct):
        assert f"struct {struct.name} {{" in text
        assert f"static_assert(sizeof({struct.name}) == {struct.size(CONSTANTS)});" in text
    assert "Mailbox" not in text, "the kernel does not name this structure"
    assert text.index("kNumLocalExperts = ") < text.index("struct RouteMessage")


def test_large_constants_are_long(sources: Path) -> None:
    text = prelude(TINY, {**CONSTANTS, "kFactor": 2**31}, sources)
    assert "constexpr long long kFactor = 2147483648;" in text
    assert "constexpr int kFactor = 2147483647;" in prelude(TINY, {**CONSTANTS, "kFactor": 2**31 - 1}, sources)


def test_a_unit_ends_with_the_source_and_its_path(sources: Path) -> None:
    assert unit(TINY, CONSTANTS, sources).endswith(f'#line 1 "{sources.resolve()}/tiny.cu"\n{SOURCE}')


def test_the_table_lists_all_sources() -> None:
    folder = source_dir()
    found = {str(path.relative_to(folder)) for path in folder.rglob("*.cu")}
    assert found == {NVSHMEM_CALLS, *(kernel.source for kernel in KERNELS.values())}


@pytest.mark.parametrize("name", KERNELS)
def test_a_unit_has_the_entry_point_of_its_kernel(name: str) -> None:
    kernel = KERNELS[name]
    layout = Layout(dataclasses.replace(CONFIG, ranks_per_node=4) if kernel.over_nodes else CONFIG)
    text = unit(kernel, kernel_constants(layout, "sm_90", kernel, "bfloat16" if kernel.per_dtype else None))
    (entry,) = re.findall(r'^extern "C" __global__ void __launch_bounds__\([^)]*\) (\w+)\(', text, re.M)
    assert entry == ("KERNEL" if kernel.compression else name)
    assert re.findall(r"^#define KERNEL (\w+)$", text, re.M) == ([name] if kernel.compression else [])


def test_constants_of_a_kernel() -> None:
    route = kernel_constants(Layout(CONFIG), "sm_90", KERNELS["route"])
    assert route["kNumRanks"] == 8
    assert route["kHasTma"] == 1
    assert "kRowBytes" not in route
    combine = kernel_constants(Layout(CONFIG), "sm_80", KERNELS["combine"], "float16")
    assert combine["kElement"] == combine["kFloat16"] not in (combine["kBfloat16"], combine["kFloat32"])
    with pytest.raises(EPConfigError, match="dtype=None; expected the element type that kernel combine"):
        kernel_constants(Layout(CONFIG), "sm_80", KERNELS["combine"])
