"""`build_together`: several kernels are compiled at a time, and a kernel that does not compile raises where it is needed."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC comes with deepep_rt[cuda12] or [cuda13]")

from deepep_rt import EPCompileError
from deepep_rt.config import Config
from deepep_rt.jit import build, compiler
from deepep_rt.jit.build import build_together
from deepep_rt.kernels.layout import Layout
from deepep_rt.kernels.source import Constants, kernel_constants
from deepep_rt.kernels.table import KERNELS, Kernel

NAMES = ["route", "dispatch", "zero_padding", "dispatch_layout", "expand_rows", "expert_positions"]
Request = tuple[Kernel, Constants]
CONFIG = Config(
    num_ranks=2, num_max_tokens_per_rank=16, hidden=512, num_topk=2, num_experts=4, ranks_per_node=1, low_latency=True
)


def requests(*names: str) -> list[Request]:
    return [(KERNELS[name], kernel_constants(Layout(CONFIG), "sm_90", KERNELS[name])) for name in names]


def compile_with(monkeypatch: pytest.MonkeyPatch, cores: int, compiled: Callable[[str], object]) -> None:
    """Let a function that gets the name of a kernel take the place of the compiler."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(compiler, "compile_unit", lambda unit, name, *_: (compiled(name), (b"\x7fELF", ""))[1])


@pytest.mark.parametrize("cores", [1, 2, 3])
def test_as_many_at_a_time_as_cores(cores: int, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one core, the calls of `build` that follow compile them."""
    together = threading.Barrier(cores)
    compiled: list[str] = []
    compile_with(monkeypatch, cores, lambda name: (together.wait(timeout=20), compiled.append(name)))
    before = build.stats.misses
    build_together(requests(*NAMES), "sm_90")
    assert sorted(compiled) == ([] if cores == 1 else sorted(NAMES))
    assert build.stats.misses - before == len(compiled)


def test_an_error_is_raised_where_the_kernel_is_needed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        if name == "route":
            raise EPCompileError("route did not compile")

    compile_with(monkeypatch, 2, fail)
    wanted = requests("route", "dispatch", "zero_padding")
    build_together(wanted, "sm_90")
    assert [build.build(kernel, constants, "sm_90").compiled for kernel, constants in wanted[1:]] == [False, False]
    with pytest.raises(EPCompileError, match="route did not compile"):
        build.build(*wanted[0], "sm_90")


@pytest.mark.full
def test_threads_compile_and_link_the_same_code(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With NVRTC, and with nvJitLink for kernels that use NVSHMEM."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    wanted = requests("ll_dispatch", "zero_padding", "expand_rows")
    assert [kernel.links_nvshmem(constants) for kernel, constants in wanted] == [True, False, False]
    build_together(wanted, "sm_90")
    found = [build.build(kernel, constants, "sm_90") for kernel, constants in wanted]
    assert not any(one.compiled for one in found)
    monkeypatch.setenv("DEEPEP_RT_CACHE_DIR", str(tmp_path / "one by one"))
    for (kernel, constants), one in zip(wanted, found, strict=True):
        alone = build.build(kernel, constants, "sm_90")
        assert alone.compiled
        assert alone.code == one.code


def test_linked_ptx_is_left_to_the_thread_of_the_context(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_with(monkeypatch, 2, compiled.append)
    build_together(requests("route_nodes", "zero_padding", "expand_rows"), "compute_90")
    assert sorted(compiled) == ["expand_rows", "zero_padding"]


def test_ctrl_c_stops_after_the_kernels_that_are_compiled_now(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    numbers, go_on, main = itertools.count(1), threading.Event(), threading.get_ident()

    def wait(name: str) -> None:
        started.append(name)
        if next(numbers) == 2:  # on one thread only: a second signal would interrupt the end of the first
            signal.pthread_kill(main, signal.SIGUSR1)
        go_on.wait(timeout=20)

    compile_with(monkeypatch, 2, wait)
    before = signal.signal(signal.SIGUSR1, signal.default_int_handler)  # SIGINT may be ignored where tests run
    try:
        with pytest.raises(KeyboardInterrupt):
            build_together(requests(*NAMES), "sm_90")
    finally:
        signal.signal(signal.SIGUSR1, before)
        go_on.set()
    for thread in threading.enumerate():
        if thread.name.startswith("ThreadPoolExecutor"):
            thread.join(20)
    assert len(started) == 2
