"""The text that NVRTC compiles: constants, structures and sources. A source is read once in a process, as long as it stays the same."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_kernel import CONSTANTS, SOURCE, TINY

from deepep_rt import EPConfigError
from deepep_rt.config import Config
from deepep_rt.kernels import source, structs
from deepep_rt.kernels.layout import Layout
from deepep_rt.kernels.source import NVSHMEM_CALLS, kernel_constants, prelude, read_source, source_dir, unit
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


# --- reading ---------------------------------------------------------------------------------------------------------------------

_LONG_AGO_NS = 1_600_000_000_000_000_000


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(source, "_known", {})
    path = tmp_path / "tiny.cu"
    _write(path, '#include "common/wait.cuh"\n  # include "a.cuh"\n#include <b>\nint kFactor = 7;')
    return path


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    os.utime(path, ns=(_LONG_AGO_NS, _LONG_AGO_NS))


def test_what_a_source_holds(path: Path) -> None:
    found = read_source(str(path))
    assert found.text == path.read_text()
    assert found.includes == ("common/wait.cuh", "a.cuh")
    assert {"kFactor", "int", "7", "include"} <= found.words
    assert "kFact" not in found.words


def test_a_settled_source_is_read_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_SETTLED_NS", -(10**12))  # ctime cannot be set
    read: list[Path] = []
    read_text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: read.append(path) or read_text(path))
    assert read_source(str(path)) is read_source(str(path))
    assert read == [path]
    _write(path, "int kFactor = 8;")
    assert read_source(str(path)).text == "int kFactor = 8;"
    assert read == [path, path]


def test_a_change_that_no_clock_shows(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two changes within a tick of the file system's clock leave the same stamp. So a new file is read each time."""
    status = os.stat(path)
    monkeypatch.setattr(source, "os", SimpleNamespace(stat=lambda _: status))
    assert "7" in read_source(str(path)).words
    _write(path, path.read_text().replace("7", "8"))
    assert "8" in read_source(str(path)).words


def test_a_missing_source(path: Path) -> None:
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read_source(str(path))
