"""Run the command line without a GPU."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("typer")
pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC comes with deepep_rt[cuda12] or [cuda13]")

import kept
from entries import entry
from launch import run_command
from without import without

import deepep_rt
from deepep_rt import Buffer, CopyShape, Tuning, TuningResult
from deepep_rt._install import pip_install
from deepep_rt.backends import saved_tunings
from deepep_rt.backends.path_choice import config_of_measurement
from deepep_rt.cli import app as cli
from deepep_rt.cli import compile as cli_compile
from deepep_rt.comm.store import StoreCommunicator
from deepep_rt.comm.store_client import StoreClient
from deepep_rt.comm.store_server import StoreServer
from deepep_rt.config import COMBINE_DTYPES, Config
from deepep_rt.errors import EPCompileError, EPUnavailableError
from deepep_rt.jit import build, compiler, disassembler, libraries
from deepep_rt.jit.store import SUFFIX, KernelCache
from deepep_rt.kernels import promises
from deepep_rt.kernels.layout import Layout
from deepep_rt.kernels.promises import Promise
from deepep_rt.kernels.source import kernel_constants
from deepep_rt.kernels.table import KERNELS, Kernel

ONE_NODE = {name: kernel for name, kernel in KERNELS.items() if not kernel.over_nodes}
"""The kernels that the commands compile unless nodes are declared."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DEEPEP_RT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def compile_kept(*words: str) -> list[dict[str, Any]]:
    """Run `compile` with the kept kernels, which a run of other tests has compiled. Return the JSON output."""
    command = [sys.executable, "-m", "deepep_rt", "compile", *words, "--json"]
    return json.loads(run_command(*command, limit_s=600, DEEPEP_RT_CACHE_DIR=str(kept.kernels()))[0])


def copy_kept(rows: list[dict[str, Any]], cache: Path) -> None:
    """Copy kernels that `compile_kept` returned to a cache."""
    for row in rows:
        (cache / row["arch"]).mkdir(parents=True, exist_ok=True)
        shutil.copy(kept.kernels() / row["arch"] / (row["key"] + SUFFIX), cache / row["arch"])


@pytest.fixture(scope="module")
def for_sm_90() -> list[dict[str, Any]]:
    """Compile every kernel, as a user does."""
    return compile_kept("--arch", "sm_90", "--strict")


@pytest.fixture
def filled(for_sm_90: list[dict[str, Any]], cache: Path) -> Path:
    """Fill the cache with every kernel for sm_90."""
    copy_kept(for_sm_90, cache)
    return cache


class Terminal:
    """Run commands in this process and keep their output."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *args: str, status: int = 0) -> str:
        with pytest.raises(SystemExit) as caught:
            cli.run(args)
        self.out, self.err = self._capsys.readouterr()
        assert (caught.value.code or 0) == status, self.out + self.err
        return self.out

    def json(self, *args: str, status: int = 0) -> Any:
        return json.loads(self(*args, "--json", status=status))


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture[str]) -> Terminal:
    return Terminal(capsys)


@pytest.mark.usefixtures("filled")
def test_compile_makes_every_kernel(terminal: Terminal, for_sm_90: list[dict[str, Any]]) -> None:
    assert [(row["arch"], row["kernel"]) for row in for_sm_90] == [("sm_90", name) for name in ONE_NODE]
    assert all(row["registers"] > 0 and row["spill_stores"] == 0 for row in for_sm_90)
    again = terminal.json("compile", "--arch", "sm_90")
    assert {row["status"] for row in again} == {"cached"}
    assert [row["key"] for row in again] == [row["key"] for row in for_sm_90]


@pytest.mark.full
def test_compile_makes_every_kernel_for_every_target() -> None:
    rows = compile_kept("--arch", "sm_80", "--arch", "sm_90", "--strict")
    old = [name for name, kernel in ONE_NODE.items() if not kernel.needs_fp8]
    assert [(row["arch"], row["kernel"]) for row in rows] == [("sm_80", name) for name in old] + [
        ("sm_90", name) for name in ONE_NODE
    ]
    assert {row["status"] for row in rows} <= {"compiled", "cached"}


@pytest.mark.usefixtures("filled")
def test_compile_shows_its_progress_in_a_terminal(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm", "COLUMNS": "120"}.items():  # rich takes that for a terminal
        monkeypatch.setenv(name, value)
    rows = terminal.json("compile", "--arch", "sm_90")
    assert "compiling" in terminal.err
    assert f"{len(rows)}/{len(rows)}" in terminal.err
    assert f"{rows[-1]['kernel']} for sm_90" in terminal.err


def test_compile_takes_a_configuration(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_compile, "KERNELS", {name: KERNELS[name] for name in ("route", "combine", "fp8_encode")})
    sizes = ["--ranks", "3", "--tokens", "100", "--hidden", "512", "--topk", "2", "--experts", "6", "--dtype", "float32"]
    rows = terminal.json("compile", "--arch", "sm_90", *sizes, "--combine-dtype", "float32", "--combine-dtype", "float16")
    assert [row["dtype"] for row in rows if row["kernel"] == "combine"] == ["float32", "float16"]
    assert {row["status"] for row in rows} == {"compiled"}
    assert {row["constants"]["kNumRanks"] for row in rows if not KERNELS[row["kernel"]].is_local} == {3}
    table = terminal("compile", "--arch", "sm_90", *sizes)
    assert "combine (float32)" in table
    assert "cached" in table


def test_compile_for_statistics(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_compile, "KERNELS", {"route": KERNELS["route"]})
    words = ["compile", "--arch", "sm_90", "--ranks", "2", "--tokens", "8", "--hidden", "64", "--topk", "2", "--experts", "4"]
    (plain,), (counting,) = terminal.json(*words), terminal.json(*words, "--statistics")
    assert plain["constants"]["kHasStatistics"] == 0
    assert counting["constants"]["kHasStatistics"] == 1
    monkeypatch.setenv("DEEPEP_RT_STATISTICS", "/a/folder")
    (again,) = terminal.json(*words)
    assert (again["key"], again["status"]) == (counting["key"], "cached")


def test_compile_for_slots(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """The kernels are those of a Buffer with slots, whatever nodes are declared for others, and the cache tells them apart."""
    monkeypatch.setenv("DEEPEP_RT_CACHE_DIR", str(kept.kernels()))
    names = ("route", "ll_dispatch")
    monkeypatch.setattr(cli_compile, "KERNELS", {name: KERNELS[name] for name in names})
    sizes = ["--tokens", "8", "--hidden", "64", "--topk", "2", "--experts", "8", "--arch", "sm_90"]
    monkeypatch.setenv("DEEPEP_RT_RANKS_PER_NODE", "3")
    rows = terminal.json("compile", "--max-ranks", "4", *sizes, "--strict")
    assert {row["constants"]["kHasSlots"] for row in rows} == {1}
    settings: dict[str, Any] = dict(num_max_tokens_per_rank=8, hidden=64, num_topk=2, num_experts=8, backend="host")
    server = StoreServer()
    server.serve_in_thread()
    try:
        comm = StoreCommunicator(StoreClient("127.0.0.1", int(server.address.rpartition(":")[2])), "start", 0, 1)
        buffer = Buffer(comm, max_ranks=4, rendezvous=server.address, **settings)
        layout = Layout(buffer.config)
        buffer.destroy()
    finally:
        server.close()
    wanted = [build.build(KERNELS[name], kernel_constants(layout, "sm_90", KERNELS[name]), "sm_90").key for name in names]
    assert [row["key"] for row in rows] == wanted
    monkeypatch.delenv("DEEPEP_RT_RANKS_PER_NODE")
    rows += terminal.json("compile", "--ranks", "4", *sizes)
    assert len({row["key"] for row in rows}) == 4

    copy_kept(rows, cache)
    monkeypatch.setenv("DEEPEP_RT_CACHE_DIR", str(cache))
    listed = [re.split(r"  +", line.strip())[:4] for line in terminal("cache", "list").splitlines()[1:-1]]
    found = {key: differences for _, _, key, differences in listed}
    assert found == {row["key"][:12]: f"kHasSlots {row['constants']['kHasSlots']}" for row in rows}
    _needs_nvdisasm()
    assert {row["key"] for row in terminal.json("cache", "check")} == {row["key"] for row in rows}


@pytest.mark.full
def test_a_buffer_finds_the_compiled_kernels(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Nodes, masks and slots are compiled in, and the keys agree."""
    monkeypatch.setenv("DEEPEP_RT_CACHE_DIR", str(kept.kernels()))
    low_latency = {name: kernel for name, kernel in KERNELS.items() if kernel.low_latency and not kernel.scale_up_only}
    monkeypatch.setattr(cli_compile, "KERNELS", low_latency)
    sizes = ["--ranks", "4", "--tokens", "64", "--hidden", "512", "--topk", "4", "--experts", "16"]
    settings = ["--arch", "sm_90", *sizes, "--slots", "3", "--on-timeout", "mask", "--path", "direct", "--transport", "nvshmem"]
    rows = terminal.json("compile", *settings, "--ranks-per-node", "2")
    assert all(row["nvshmem"] for row in rows)
    monkeypatch.setenv("DEEPEP_RT_RANKS_PER_NODE", "2")
    assert [row["constants"] for row in terminal.json("compile", *settings)] == [row["constants"] for row in rows]
    monkeypatch.delenv("DEEPEP_RT_RANKS_PER_NODE")
    copy_kept(rows, cache)
    monkeypatch.setenv("DEEPEP_RT_CACHE_DIR", str(cache))
    monkeypatch.setenv("DEEPEP_RT_ASSERT_CACHED", "1")
    nodes = dict(ranks_per_node=2, path="direct")
    config = Config(4, 64, 512, 4, 16, num_slots=3, low_latency=True, on_timeout="mask", timeout_s=3.0, **nodes)
    for kernel in low_latency.values():
        build.build(kernel, kernel_constants(Layout(config), "sm_90", kernel), "sm_90")


def test_each_choice_of_a_buffer_between_nodes_is_compiled(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Buffer chooses transport and path when it is made, and may measure the links first."""
    asked: set[str] = set()

    def name(kernel: Kernel, constants: Mapping[str, int]) -> str:
        return kernel.name if kernel.is_local else f"{kernel.name} {sorted(constants.items())}"

    def build_nothing(kernel: Kernel, constants: Mapping[str, int], _arch: str) -> SimpleNamespace:
        asked.add(name(kernel, constants))
        return SimpleNamespace(info={}, key=name(kernel, constants), compiled=True)

    monkeypatch.setattr(build, "build", build_nothing)
    sizes = {"ranks": 4, "ranks-per-node": 2, "tokens": 600, "hidden": 512, "topk": 4, "experts": 16}
    command = ["compile", "--arch", "sm_90", *(f"--{name}={number}" for name, number in sizes.items())]
    rows = terminal.json(*command)
    every = [(transport, path) for transport in ("nvshmem", "mpi") for path in ("hierarchical", "direct")]
    assert [(row["transport"], row["path"]) for row in rows if row["kernel"] == "dispatch_nodes"] == every
    assert len([row for row in rows if row["kernel"] == "fp8_encode"]) == 1
    terminal.json(*command, "--low-latency")
    for (transport, path), low_latency in itertools.product(every, (False, True)):
        config = Config(4, 600, 512, 4, 16, ranks_per_node=2, transport=transport, path=path, low_latency=low_latency)
        measured = config_of_measurement(dataclasses.replace(config, path="auto"))
        for one, kernel in ((config, "dispatch_nodes"), (config, "ll_dispatch"), (measured, "link_rates")):
            wanted = name(KERNELS[kernel], kernel_constants(Layout(one), "sm_90", KERNELS[kernel]))
            assert wanted in asked, (transport, path, kernel)

    chosen = terminal.json(*command, "--path", "direct", "--transport", "mpi")
    assert {(row["transport"], row["path"]) for row in chosen if not KERNELS[row["kernel"]].is_local} == {("mpi", "direct")}
    over_nixl = terminal.json(*command, "--path", "direct", "--transport", "nixl")
    assert [row["key"] for row in over_nixl] == [row["key"] for row in chosen], "relays share their kernels"
    for option in ("--path", "--transport"):
        terminal(*command, option, "tcp", status=1)
        assert "'tcp'; expected" in terminal.err


def test_ranks_of_several_hosts_have_low_latency_calls_only() -> None:
    sizes = dict(hidden=512, num_topk=4, num_experts=64, low_latency=True)
    names = [{kernel.name for kernel, _ in cli_compile.variants(Config(ranks, 16, **sizes), None)} for ranks in (8, 16)]
    assert names[0] - names[1] == {
        *("route", "dispatch", "copy_bandwidth"),
        *("combine", "combine_fp8", "combine_log10", "combine_choices", "combine_tiles", "await_tiles", "expand_tiles"),
    }
    local = {name for name, kernel in KERNELS.items() if kernel.is_local}
    of_one_node = {f"ll_combine_large{form}" for form in ("", "_fp8", "_log10")}
    both = {"ll_dispatch", "ll_dispatch_opaque", *(f"ll_combine{form}" for form in ("", "_fp8", "_log10"))}
    assert names[1] == both | of_one_node | local
    far = {kernel.name for kernel, _ in cli_compile.variants(Config(16, 16, ranks_per_node=8, **sizes), None)}
    assert names[1] - far == of_one_node


def test_fp8_buffers_have_no_combine_by_default(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "build", lambda *_: SimpleNamespace(info={}, key="", compiled=True))
    names = [row["kernel"] for row in terminal.json("compile", "--arch", "sm_90", "--dtype", "float8_e4m3fn")]
    assert "route" in names
    assert "combine" not in names


def test_all_means_the_architectures_that_nvrtc_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli_compile.targets_of(["all"]) == [arch for arch in cli_compile.ALL_ARCHS if arch in compiler.known_archs()]
    monkeypatch.setattr(compiler, "known_archs", lambda: ("sm_75", "sm_80", "sm_86", "sm_90"))
    assert cli_compile.targets_of(["all", "sm_80", "compute_86"]) == ["sm_80", "sm_90", "compute_86"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--arch", "sm_999"], "expected one that NVRTC"),
        (["--arch", "sm_90", "--arch", "sm_70"], "arch='sm_70'; expected sm_80 or newer"),
        (["--arch", "compute_75"], "arch='compute_75'; expected sm_80 or newer"),
        (["--arch", "hopper"], "arch='hopper'"),
        (["--arch", "sm_90", "--experts", "255"], "num_experts=255"),
        (["--arch", "sm_90", "--combine-dtype", "int8"], "--combine-dtype=int8"),
        (["--arch", "sm_90", "--max-ranks", "16"], "--max-ranks=16; expected a whole number from 1 to 8"),
        (
            ["--arch", "sm_90", "--max-ranks", "8", "--ranks-per-node", "4"],
            "--ranks-per-node=4 with --max-ranks=8; expected one node",
        ),
    ],
)
def test_wrong_arguments_are_explained(terminal: Terminal, cache: Path, args: list[str], message: str) -> None:
    terminal("compile", *args, status=1)
    assert not cache.exists(), "the error comes before the first compilation"
    assert len(terminal.err.splitlines()) == 1
    assert terminal.err.startswith("error: ")
    assert message in terminal.err
    assert "Traceback" not in terminal.err


@pytest.mark.usefixtures("filled")
def test_a_kernel_that_does_not_compile_fails_the_command_but_not_the_others(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = build.build

    def replaced(kernel: Any, *args: Any) -> build.CompiledKernel:
        if kernel.name == "dispatch":
            raise EPCompileError("dispatch.cu(7): error: nonsense")
        return real(kernel, *args)

    monkeypatch.setattr(build, "build", replaced)
    rows = terminal.json("compile", "--arch", "sm_90", status=1)
    assert "dispatch.cu(7): error: nonsense" in terminal.err
    assert {row["kernel"]: row["status"] for row in rows} == {
        name: "failed" if name == "dispatch" else "cached" for name in ONE_NODE
    }


@pytest.mark.usefixtures("filled")
@pytest.mark.parametrize(
    ("figure", "message"), [("spill_stores", "spills registers"), ("stack_bytes", "stack frame of 8 bytes; 0 are declared")]
)
def test_strict_objects_to_spills_and_frames(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, figure: str, message: str
) -> None:
    real = build.build

    def replaced(*args: Any) -> build.CompiledKernel:
        built = real(*args)
        built.info[figure] = 8
        return built

    monkeypatch.setattr(build, "build", replaced)
    terminal("compile", "--arch", "sm_90")
    terminal("compile", "--arch", "sm_90", "--strict", status=1)
    assert message in terminal.err


def test_the_cache_can_be_listed_shown_and_cleared(terminal: Terminal, cache: Path, for_sm_90: list[dict[str, Any]]) -> None:
    assert f"{cache} is empty" in terminal("cache", "list")
    assert terminal.json("cache", "list") == []
    copy_kept(for_sm_90, cache)
    listed = terminal.json("cache", "list")
    assert {entry["kernel"] for entry in listed} == set(ONE_NODE)
    table = terminal("cache", "list")
    assert all(entry["key"][:12] in table and entry["created"] in table for entry in listed)
    assert f"{len(listed)} kernels" in table

    entry = next(entry for entry in listed if entry["kernel"] == "combine")  # a kernel with the constants of a Buffer
    key = entry["key"]
    text = terminal("cache", "show", key[:12])
    assert key in text
    assert all(name in text for name in ("kNumRanks", "registers", "nvrtc", "compile_seconds", libraries.nvrtc_version()))
    assert terminal.json("cache", "show", key) == entry

    assert f"removed {len(listed)} kernels" in terminal("cache", "clear")
    assert "removed 0 kernels" in terminal("cache", "clear")
    assert terminal.json("cache", "list") == []


def test_stored_tunings_are_listed_and_stay_until_they_are_asked_for(terminal: Terminal, cache: Path) -> None:
    """A choice costs a measurement, so clearing the kernels keeps it."""
    assert "no stored tunings" in terminal("cache", "tunings")
    assert terminal.json("cache", "tunings") == []
    config = Config(2, 4096, 7168, 8, 256)
    chosen = Tuning(16, dispatch=CopyShape(2, 7, 14336))
    for key in (
        saved_tunings.key_of(config, ["H100 (sm_90)"] * 2),
        {**saved_tunings.key_of(config, ["H200 (sm_90)"] * 2), "kernels": "old"},
    ):
        saved_tunings.save(key, TuningResult(chosen, (), 4096, "bfloat16", 1.0))
    (cache / "tunings" / f"{'0' * 64}.json").write_text("{}")
    assert "2 stored tunings; see: python -m deepep_rt cache tunings" in terminal("cache", "list")
    assert "removed 0 kernels" in terminal("cache", "clear")
    table = terminal("cache", "tunings")
    lines = {line.split()[1]: line for line in table.splitlines() if "sm_90" in line}
    assert all(word in lines["H100"] for word in ("4096", "7168", "bfloat16", str(chosen), "these"))
    assert "others" in lines["H200"]
    assert f"2 stored tunings in {cache / 'tunings'}" in table
    assert {document["tuning"]["num_sms"] for document in terminal.json("cache", "tunings")} == {16}
    assert "removed 3 stored tunings" in terminal("cache", "clear", "--tuning")
    assert terminal.json("cache", "tunings") == []


def test_the_kernels_keep_their_promises(terminal: Terminal, filled: Path) -> None:
    _needs_nvdisasm()
    checked = terminal.json("cache", "check")
    assert {row["kernel"] for row in checked} == set(ONE_NODE)
    assert not any(row["broken"] for row in checked)
    combine = next(row for row in checked if row["kernel"] == "combine")
    assert (combine["bulk_loads"] > 0, combine["bulk_stores"] > 0, combine["loads_at_once"]) == (True, True, 16)
    assert combine["registers"] <= 65536 // 512


def test_a_broken_promise_is_reported(terminal: Terminal, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _needs_nvdisasm()
    layout = kernel_constants(Layout(Config(2, 64, 1024, 2, 8)), "sm_90", KERNELS["zero_padding"])
    names = ("zero_padding", "dispatch_layout")
    keys = [build.build(KERNELS[name], layout, "sm_90").key for name in names]
    KernelCache().put(entry(key="ef" * 32, kernel="route", versions={"deepep_rt": "0.0", "nvrtc": libraries.nvrtc_version()}))
    monkeypatch.setitem(promises.PROMISES, "zero_padding", Promise(bulk_copies=True))
    table = terminal("cache", "check", status=1)
    ok, broken = sorted(line for line in table.splitlines() if line.startswith(names))
    assert ok.split()[-1] == "ok"
    assert broken.split()[-1] == "broken"
    assert f"2 kernels checked, 1 left out, in {cache}" in table
    message = f"zero_padding for sm_90 (key {keys[0][:12]}): 0 bulk loads and 0 bulk stores; expected at least one of each"
    assert terminal.err.splitlines() == [f"error: {message}"]
    rows = terminal.json("cache", "check", status=1)
    assert [len(row["broken"]) for row in rows] == [0, 1]


def test_a_check_of_nothing_fails(terminal: Terminal, cache: Path) -> None:
    KernelCache().put(entry())
    terminal("cache", "check", status=1)
    assert "has no machine code of this installation; expected at least one kernel to check" in terminal.err


def _needs_nvdisasm() -> None:
    try:
        disassembler.nvdisasm()
    except EPUnavailableError:
        pytest.skip("nvdisasm comes with deepep_rt[dev]")


def test_entries_of_one_kernel_can_be_told_apart(terminal: Terminal, cache: Path) -> None:
    """List differs by element type and sizes, and by other constants only if the sizes are equal."""
    sizes = {"kNumRanks": 8, "kHidden": 7168, "kTuned": 3}
    kinds = [
        {**sizes, "kElement": 0},
        {**sizes, "kElement": 1},
        {**sizes, "kElement": 1, "kHidden": 4096, "kTuned": 4},
        {**sizes, "kElement": 99},
    ]
    for i, constants in enumerate(kinds):
        KernelCache(cache).put(entry(f"{i:064}", kernel="combine", constants=constants))
    for i, tuned in enumerate((5, 6)):
        KernelCache(cache).put(entry(f"{10 + i:064}", kernel="route", constants={**sizes, "kTuned": tuned}))
    lines = [re.split(r"  +", line.strip())[:4] for line in terminal("cache", "list").splitlines()[1:-1]]
    key = "0" * 12
    assert sorted(lines) == [
        ["combine", "sm_90", key, "-"],
        [f"combine ({COMBINE_DTYPES[0]})", "sm_90", key, "-"],
        [f"combine ({COMBINE_DTYPES[1]})", "sm_90", key, "kHidden 4096"],
        [f"combine ({COMBINE_DTYPES[1]})", "sm_90", key, "kHidden 7168"],
        ["route", "sm_90", key, "kTuned 5"],
        ["route", "sm_90", key, "kTuned 6"],
    ]
    listed = terminal.json("cache", "list")
    assert [row["dtype"] for row in listed] == [COMBINE_DTYPES[0], COMBINE_DTYPES[1], COMBINE_DTYPES[1], None, None, None]
    assert "dtype                 -" in terminal("cache", "show", listed[-1]["key"])


def test_texts_of_entries_are_not_markup(terminal: Terminal, cache: Path) -> None:
    store = KernelCache(cache)
    store.put(entry(created="[/red] :smile:", versions={"nvrtc": "[bold]12"}, spill_loads=None))
    (cache / "sm_90" / f"\x1b[31m{SUFFIX}").write_bytes(b"")
    (cache / "\x1b[31m").mkdir()
    table = terminal("cache", "list")
    assert "[/red] :smile:" in table
    assert "nvrtc [bold]12" in table
    assert "\x1b" not in table + terminal("cache", "show", "ab") + terminal("cache", "list", "--json")


def test_show_asks_for_one_key(terminal: Terminal, cache: Path) -> None:
    for number in range(13):
        KernelCache(cache).put(entry(f"ab{number:062}"))
    for key, message in (("xyz", "no kernel has a key that begins with 'xyz'"), ("", "key=''; expected a key")):
        terminal("cache", "show", key, status=1)
        assert message in terminal.err
        assert len(terminal.err.splitlines()) == 1
    terminal("cache", "show", "ab", status=1)
    first, *keys, more = terminal.err.splitlines()
    assert "13 kernels have keys that begin with 'ab'" in first
    assert keys == [f"  ab{number:062} tiny sm_90" for number in range(10)]
    assert more == "  ... and 3 more"


@pytest.mark.parametrize("command", ["cache list", "cache list --json", "cache show ab", "cache clear", "compile --arch sm_90"])
def test_a_cache_that_is_a_file_is_one_error(terminal: Terminal, cache: Path, command: str) -> None:
    cache.write_text("not a folder")
    printed = terminal(*command.split(), status=1)
    assert printed == "" or command.startswith("compile")
    assert terminal.err.count("error: ") == terminal.err.count("Set DEEPEP_RT_CACHE_DIR") == 1


@pytest.mark.parametrize("command", ["cache list", "compile --arch sm_90"])
def test_a_cache_in_an_unknown_home(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setenv("DEEPEP_RT_CACHE_DIR", "~nosuchuser/x")
    terminal(*command.split(), status=1)
    assert "error: DEEPEP_RT_CACHE_DIR='~nosuchuser/x'" in terminal.err


def test_compile_names_every_kernel_that_must_not_be_compiled(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPEP_RT_ASSERT_CACHED", "1")
    terminal("compile", "--arch", "sm_90", status=1)
    assert terminal.err.count("is not in the cache") == len(ONE_NODE)


def test_corrupt_entries_are_marked(terminal: Terminal, filled: Path) -> None:
    path = sorted(filled.glob(f"*/*{SUFFIX}"))[0]
    path.write_bytes(path.read_bytes()[:-1])
    table = terminal("cache", "list")
    assert "CORRUPT" in table
    assert "wrong checksum" in table
    (corrupt,) = (entry for entry in terminal.json("cache", "list") if "corrupt" in entry)
    assert corrupt["key"] + SUFFIX == path.name
    assert "wrong checksum" in terminal("cache", "show", corrupt["key"])
    assert [row["status"] for row in terminal.json("compile", "--arch", "sm_90")].count("compiled") == 1


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_a_missing_library_of_the_command_line_is_named(missing: str, tmp_path: Path) -> None:
    _, errors = run_command(sys.executable, "-m", "deepep_rt", status=1, **without(tmp_path, missing))
    assert f"the command line needs {missing}" in errors
    assert f"Run {pip_install('cli')}." in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(("arch", "moment"), [("sm_90", "compiling"), ("compute_90", "compiling"), ("sm_90", "freeing")])
def test_an_interrupted_compilation_ends_at_once(arch: str, moment: str, tmp_path: Path) -> None:
    """Each kernel takes ten minutes here, and nothing interrupts it, as in NVRTC. Python ignores exceptions while it frees an object."""
    program = """
import os, signal, sys, threading, time
from deepep_rt.cli import compile
from deepep_rt.cli.app import run
from deepep_rt.jit import build
def slow(*_):
    assert threading.current_thread() is not threading.main_thread()
    os.write(1, b"compiling\\n")  # print writes a text and its end apart, and several threads are here
    time.sleep(600)
build.build = slow
class Freed:
    def __del__(self):
        os.write(1, b"freeing\\n")
        time.sleep(1)
def links_ptx(*job):
    if sys.argv[2] == "freeing":
        Freed()
    return False
compile._links_ptx = links_ptx
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells let programs in the background ignore it
run(["compile", "--arch", sys.argv[1]])
"""
    words = [sys.executable, "-c", program, arch, moment]
    environment = {**os.environ, "DEEPEP_RT_CACHE_DIR": str(tmp_path)}
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"{moment}\n"
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == -signal.SIGINT
    assert "Traceback" not in errors
    assert "interrupted" in errors


@pytest.mark.parametrize("command", ["bench", "soak"])
def test_a_missing_mpi_is_named(command: str) -> None:
    nowhere = dict(MPI4PY_LIBMPI="/nowhere/libmpi.so")
    if run_command(sys.executable, "-c", "from mpi4py import MPI; print('loads')", status=None, **nowhere)[0]:
        pytest.skip("this mpi4py was built for one MPI, and looks for no other")
    _, errors = run_command(sys.executable, "-m", "deepep_rt", command, status=1, **nowhere)
    assert errors.startswith("error: MPI does not load (")
    assert f"Run {pip_install('mpich')}" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("words", ["", "cache", "bench", "cache check"])
def test_help_uses_the_width_and_describes_each_command_in_a_whole_line(
    words: str, columns: int, terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "get_terminal_size", lambda *_: os.terminal_size((columns, 24)))
    shown = terminal(*words.split(), "--help")
    assert max(map(len, shown.splitlines())) <= columns
    if words in ("", "cache"):
        commands = dict(re.findall(r"^  ([a-z-]+)  +(\S.*)$", shown.partition("Commands:")[2], re.M))
        assert len(commands) >= 5
        assert all(text.endswith(".") and not text.endswith("...") for text in commands.values()), shown
    elif columns == 120:
        assert max(map(len, shown.splitlines())) > 90


def test_version(terminal: Terminal) -> None:
    assert terminal("--version").strip() == deepep_rt.__version__
