"""Print what calls cost the host in Python and its bindings, with a CUDA driver that does nothing.

    PYTHONPATH=.:tests/helpers python tests/helpers/host_time.py
    PYTHONPATH=.:tests/helpers python tests/helpers/host_time.py --steps torch    # or plain: arrays that only hold a pointer
    PYTHONPATH=.:tests/helpers python tests/helpers/host_time.py --once           # whether it runs; its times mean nothing

With `--steps` it prints what each step of a call takes (`bench/host_path.py`). It needs gcc and cuda-python, and PyTorch but for plain
arrays. It needs no GPU. A real driver adds its own time, most of it in the launch.
"""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_ROWS, _CALLS = (1, 1) if "--once" in sys.argv else (7, 20_000)  # the best row counts


def main() -> None:
    """Build the driver, start this program again with it, and measure."""
    if "EMPTY_DRIVER" in os.environ:
        if sys.argv[1:2] == ["--steps"]:
            measure_steps(sys.argv[2])
        else:
            measure()
        os._exit(0)  # the driver has no memory that destructors could free
    with tempfile.TemporaryDirectory() as folder:
        build_empty_driver(folder)
        environment = {**os.environ, "EMPTY_DRIVER": "1", "LD_LIBRARY_PATH": folder}
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode)


def build_empty_driver(folder: str) -> None:
    """Compile the driver into a folder for `LD_LIBRARY_PATH`."""
    source = Path(__file__).with_name("empty_driver.c")
    command = ["gcc", "-O2", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", f"{folder}/libcuda.so.1", source]
    subprocess.run(command, check=True)


def make_buffer() -> Any:
    """Make a Buffer of rank 0 of 4. Its kernels are not loaded."""
    import pytest
    from fake_gpu import FakeCommunicator, FixedMemory

    from deepep_rt import Buffer
    from deepep_rt.backends import agreement, factory
    from deepep_rt.backends.cuda import backend
    from deepep_rt.comm import convert
    from deepep_rt.cuda import topology
    from deepep_rt.jit import compiler, launch

    patch = pytest.MonkeyPatch().setattr
    patch(backend, "allocator_of", lambda config, setting: SimpleNamespace(allocate=FixedMemory, check_available=lambda: None))
    patch(convert, "communicator_of", lambda comm: comm)
    patch(factory, "agree", lambda *_: "cuda")
    patch(topology, "placed", lambda communicator, config: config)
    patch(agreement, "announce", lambda *_: None)
    patch(backend, "MEASURE", None)
    patch(backend, "choose_device", lambda *_: 0)
    patch(compiler, "target_arch", lambda: "sm_90")
    patch(launch, "load", lambda kernel, constants, arch: launch.LoadedKernel(7, constants[kernel.threads], 0))
    sizes = dict(num_max_tokens_per_rank=64, hidden=256, num_topk=4, num_experts=32)
    return Buffer(FakeCommunicator(4), **sizes, timeout_s=1.0, check_inputs=False, low_latency=True)


def use_torch_as_if_on_a_gpu() -> None:
    """Take PyTorch's CPU tensors for tensors of GPU 0, with a current stream."""
    import torch

    from deepep_rt.arrays import frameworks
    from deepep_rt.arrays.view import View

    framework: Any = frameworks.framework_of(torch.zeros(1), "x")
    view_on_host: Callable[..., View] = framework.view

    def view(array: Any, name: str, stream: int | None) -> View:
        made = view_on_host(array, name, stream)
        made.device = 0
        return made

    framework.view, framework._current_stream = view, lambda device: 11
    framework.wrap = lambda view: view  # this PyTorch may know no GPUs


def measure_steps(library: str) -> None:
    """Print the table of `bench/host_path.py`."""
    from paths import ROOT

    sys.path.append(str(ROOT / "bench"))
    import host_path

    from deepep_rt.bench.results import python_build

    make: Callable[..., Any]
    if library == "torch":
        import torch

        use_torch_as_if_on_a_gpu()
        make = lambda dtype, *shape: torch.zeros(*shape, dtype=getattr(torch, dtype))  # noqa: E731
    else:
        from fake_gpu import Array, FakeGpu, _Library

        from deepep_rt.arrays import frameworks

        fake, frameworks.FRAMEWORK_OF_CLASS[Array] = FakeGpu(), _Library()
        make = lambda dtype, *shape: Array(fake, dtype, *shape)  # noqa: E731
    rows = ((10, 256), (8, 256, 256), (40, 256))
    x, low_latency_y, y = (make("bfloat16", *shape) for shape in rows)
    arrays = host_path.Arrays(x, make("int64", 10, 4), make("float32", 10, 4), low_latency_y, y)
    let_counts_arrive_at_once()
    print(f"{python_build()}, {library}")
    print(host_path.markdown([vars(row) for row in host_path.measure(make_buffer(), arrays, 300, 60, lambda: None)]))


def report(name: str, call: Callable[[], Any]) -> None:
    call()
    gc.collect()
    best = min(timeit.repeat(call, number=_CALLS, repeat=_ROWS)) / _CALLS
    print(f"{name:42} {1e6 * best:6.2f} us", flush=True)


def measure() -> None:
    import torch

    use_torch_as_if_on_a_gpu()
    buffer = make_buffer()
    x, idx, weights = torch.zeros(10, 256, dtype=torch.bfloat16), torch.zeros(10, 4, dtype=torch.int64), torch.zeros(10, 4)
    y, other = (torch.zeros(8, 256, 256, dtype=torch.bfloat16) for _ in range(2))
    held: list[Any] = [None]  # as in a program, a result lives until the next call has returned

    def dispatch(**options: Any) -> Any:
        held[0] = buffer.low_latency_dispatch(x, idx, topk_weights=weights, **options)
        return held[0]

    handle = buffer.low_latency_dispatch(x, idx, topk_weights=weights).handle

    def combine(rows: Any = y, **options: Any) -> None:
        held[0] = buffer.low_latency_combine(rows, idx, weights, handle, **options)

    step = buffer.prepare_low_latency(x, idx, weights)
    with_hooks = buffer.prepare_low_latency(x, idx, weights, return_recv_hook=True)
    in_turns = itertools.cycle([y, other])
    report("dispatch", dispatch)
    report("prepared dispatch", step.dispatch)
    report("combine", combine)
    report("prepared combine", lambda: step.combine(y))
    report("prepared combine, another y each time", lambda: step.combine(next(in_turns)))
    report("dispatch and its hook", lambda: dispatch(return_recv_hook=True).hook())
    report("prepared dispatch and its hook", lambda: with_hooks.dispatch().hook())
    other_stream = buffer.prepare_low_latency(x, idx, weights, async_finish=True)
    report("dispatch with async_finish", lambda: dispatch(async_finish=True))
    report("prepared dispatch with async_finish", other_stream.dispatch)
    measure_throughput(buffer, x, idx)


def let_counts_arrive_at_once() -> None:
    """Let the status page have the counts of a routing before its kernel is launched."""
    from deepep_rt.backends.cuda.monitor import StatusPage

    def expect_counts(page: StatusPage) -> None:
        page.counted.value = page.started.value = 1

    StatusPage.expect_counts = expect_counts  # type: ignore[method-assign]


def measure_throughput(buffer: Any, x: Any, idx: Any) -> None:
    """Measure dispatches and combines."""
    import torch

    handle = buffer.dispatch(x, idx, num_worst_tokens=40).handle
    y, other = (torch.zeros(40, 256, dtype=torch.bfloat16) for _ in range(2))
    held: list[Any] = [None]

    def dispatch() -> None:
        held[0] = buffer.dispatch(x, handle=handle)

    def combine() -> None:
        held[0] = buffer.combine(y, handle)

    def dispatch_anew() -> None:
        held[0] = buffer.dispatch(x, idx)

    def prepare() -> None:
        held[0] = buffer.prepare_throughput(x, handle, y=y)

    in_turns = itertools.cycle([y, other])
    report("throughput dispatch with a handle", dispatch)
    let_counts_arrive_at_once()
    report("throughput dispatch with a new routing", dispatch_anew)
    report("throughput combine", combine)
    report("preparation of both", prepare)
    held[0] = None
    step = buffer.prepare_throughput(x, handle)
    report("prepared throughput dispatch", step.dispatch)
    report("prepared throughput combine", lambda: step.combine(y))
    report("the same, another y each time", lambda: step.combine(next(in_turns)))


if __name__ == "__main__":
    main()
