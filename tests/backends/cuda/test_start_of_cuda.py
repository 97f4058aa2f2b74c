"""CUDA starts in a thread while a first Buffer is made. The driver is a fake, whose calls end after the other work, so no clock counts."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC comes with deepep_rt[cuda12] or [cuda13]")

from cuda.bindings import driver as cuda
from fake_gpu import FakeCommunicator, FakeGpu, fake, make
from paths import pythonpath

from deepep_rt import EPUnavailableError
from deepep_rt.backends import agreement, factory
from deepep_rt.backends.cuda import backend as cuda_backend
from deepep_rt.cuda import driver, start, topology
from deepep_rt.jit import compiler, launch
from deepep_rt.kernels import table

__all__ = ["fake", "make"]

_REAL = SimpleNamespace(
    begin_driver=start.begin_driver,
    begin_context=start.begin_context,
    agree=agreement.agree,
    choose_device=topology.choose_device,
    target_arch=compiler.target_arch,
)
OK = cuda.CUresult.CUDA_SUCCESS
CONTEXT = 77


class Driver:
    """The driver of a process whose CUDA has not started. A call that starts it takes until `work`, which is done meanwhile, has come."""

    def __init__(self, limit_s: float) -> None:
        self.log: list[str] = []
        self.work = {"cuInit": threading.Event(), "cuDevicePrimaryCtxRetain": threading.Event()}
        self.results = dict.fromkeys(self.work, OK)
        self.done: set[str] = set()
        self.current: dict[int, int] = {}  # by thread
        self._limit_s = limit_s

    def _start(self, name: str) -> Any:
        if name not in self.done:
            is_beside = self.work[name].wait(self._limit_s) and threading.current_thread() is not threading.main_thread()
            self.log.append(f"{name} beside the other work" if is_beside else f"{name} alone")
            self.done |= {name} if self.results[name] == OK else set()
        return self.results[name]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        no_context = cuda.CUresult.CUDA_ERROR_NOT_INITIALIZED, None
        functions = {
            "cuInit": lambda flags: (self._start("cuInit"),),
            "cuDevicePrimaryCtxRetain": lambda device: (self._start("cuDevicePrimaryCtxRetain"), CONTEXT),
            "cuDevicePrimaryCtxGetState": lambda device: (OK, 0, int("cuDevicePrimaryCtxRetain" in self.done)),
            "cuDeviceGetCount": lambda: (OK, 4),
            "cuDeviceGet": lambda ordinal: (OK, ordinal),
            "cuDeviceGetAttribute": lambda attribute, device: (OK, 9 if attribute.name.endswith("MAJOR") else 0),
            "cuCtxGetCurrent": lambda: (OK, self.current.get(threading.get_ident(), 0)) if "cuInit" in self.done else no_context,
            "cuCtxSetCurrent": lambda context: (self.current.update({threading.get_ident(): context}) or OK,),
        }
        for name, function in functions.items():
            monkeypatch.setattr(cuda, name, function)


@pytest.fixture
def starting(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, seconds: Any) -> Driver:
    """Let Buffers of `make` start CUDA. What a Buffer makes meanwhile is done."""
    made = Driver(seconds(0.5))
    made.install(monkeypatch)
    monkeypatch.setenv("DEEPEP_RT_SHARE_GPUS", "1")
    monkeypatch.setattr(start, "begin_driver", _REAL.begin_driver)
    monkeypatch.setattr(start, "begin_context", _REAL.begin_context)
    monkeypatch.setattr(factory, "agree", _REAL.agree)
    monkeypatch.setattr(cuda_backend, "choose_device", _REAL.choose_device)
    monkeypatch.setattr(compiler, "target_arch", _REAL.target_arch)
    monkeypatch.setattr(driver, "device_uuid", lambda ordinal: "GPU")
    monkeypatch.setattr(driver, "use_device", driver.use_device)
    monkeypatch.setattr(compiler, "_arch_of", lambda current: "sm_90")
    meet = FakeCommunicator.meet

    def meet_slowly(self: FakeCommunicator, *arguments: Any) -> FakeCommunicator:
        made.work["cuInit"].set()
        return meet(self, *arguments)

    def read(kernel: Any, constants: Any, arch: str) -> None:
        made.log.append(f"{kernel.name} read for {arch}")
        if kernel.name == "combine":
            made.work["cuDevicePrimaryCtxRetain"].set()

    monkeypatch.setattr(FakeCommunicator, "meet", meet_slowly)
    monkeypatch.setattr(launch, "read", read)
    return made


def test_cuda_starts_while_ranks_meet_and_kernels_are_read(starting: Driver, make: Any) -> None:
    """The driver starts beside the imports and the meeting, and the context beside the kernels."""
    with make(backend="cuda"):
        assert starting.log == [
            "cuInit beside the other work",
            *(f"{name} read for sm_90" for name in ("route", "dispatch", "combine")),
            "cuDevicePrimaryCtxRetain beside the other work",
        ]
        assert starting.current == {threading.get_ident(): CONTEXT}
    starting.log.clear()
    with make(backend="cuda"):
        assert starting.log == [], "CUDA has started, so a second Buffer reads no kernels in advance"


def test_the_context_of_the_program_stays(starting: Driver, make: Any) -> None:
    """PyTorch has chosen a GPU."""
    starting.done = {"cuInit"}
    starting.current = {threading.get_ident(): 5}
    starting.log.clear()
    assert start.begin_context(0) is None
    starting.done |= {"cuDevicePrimaryCtxRetain"}
    starting.current = {}
    assert start.begin_context(0) is None, "another thread of the program uses it"
    assert starting.log == []


def test_errors_are_those_of_a_start_without_the_thread(starting: Driver, make: Any) -> None:
    """They come out of the step that all ranks take together."""
    for event in starting.work.values():
        event.set()
    starting.results["cuDevicePrimaryCtxRetain"] = cuda.CUresult.CUDA_ERROR_DEVICE_UNAVAILABLE
    with pytest.raises(EPUnavailableError, match="the CUDA driver reports CUDA_ERROR_DEVICE_UNAVAILABLE"):
        make(backend="cuda")
    starting.results["cuInit"] = cuda.CUresult.CUDA_ERROR_SYSTEM_NOT_READY
    starting.done.clear()
    for backend in ("cuda", "auto"):
        with pytest.raises(EPUnavailableError, match="the CUDA driver fails: CUDA_ERROR_SYSTEM_NOT_READY"):
            make(backend=backend)
    assert not start._thread.is_alive()


def test_the_host_backend_starts_no_cuda(starting: Driver, make: Any) -> None:
    with contextlib.suppress(Exception):  # these ranks have no messages
        make(backend="host")
    assert starting.log == []


def test_no_bindings_and_no_driver(starting: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("libcuda.so.1 was not found")

    before = start._thread
    monkeypatch.setattr(cuda, "cuCtxGetCurrent", fail)
    start.begin_driver()
    assert start.begin_context(0) is None
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    start.begin_driver()
    assert start.begin_context(0) is None
    assert start._thread is before


def test_a_kernel_that_was_read_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    code = SimpleNamespace(code=b"\x7fELF")
    monkeypatch.setattr(launch, "cached", lambda kernel, constants, arch: code if kernel.name == "route" else None)
    monkeypatch.setattr(launch, "build", lambda kernel, constants, arch: asked.append(kernel.name) or code)
    monkeypatch.setattr(launch, "_read", {})
    constants = {"kRouteThreads": 256, "kDispatchThreads": 128, "kDispatchSharedBytes": 0}
    loaded = SimpleNamespace(
        cuLibraryLoadData=lambda *_: (OK, 1), cuLibraryGetKernel=lambda *_: (OK, 2), cuKernelGetFunction=lambda _: (OK, 3)
    )
    monkeypatch.setattr(launch, "driver", loaded)
    monkeypatch.setattr(launch, "relaxed_capture_mode", lambda: pytest.MonkeyPatch.context())
    for name in ("route", "dispatch"):
        launch.read(table.KERNELS[name], constants, "sm_90")
        launch._load(table.KERNELS[name], constants, "sm_90")
    assert asked == ["dispatch"]
    assert launch._read == {}
    launch._load(table.KERNELS["route"], constants, "sm_90")
    assert asked == ["dispatch", "route"], "another context needs it again"


def test_an_import_starts_no_cuda() -> None:
    """A program may fork, or choose its GPUs, until it makes a Buffer."""
    code = "import deepep_rt, sys; from deepep_rt.cuda import start; print(start._thread, 'cuda.bindings.driver' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": pythonpath()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, ["None", "False"]), done.stderr
