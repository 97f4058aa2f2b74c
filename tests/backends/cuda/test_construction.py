"""Construction and destruction of Buffers of the CUDA backend, on a fake GPU that records requests."""

from __future__ import annotations

import ctypes
import gc
import itertools
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from calls_on_fake_gpu import CALLS, received
from fake_gpu import BASE, Array, FakeCommunicator, FakeGpu, arguments, fake, make, region, routed

from deepep_rt import (
    Buffer,
    EPCacheError,
    EPConfigError,
    EPDestroyedError,
    EPOutOfMemoryError,
    EPTimeoutError,
    EPUnavailableError,
    LinkRates,
    NetworkOptions,
)
from deepep_rt.backends.cuda import backend as cuda_backend
from deepep_rt.backends.cuda import link_rates
from deepep_rt.backends.cuda.low_latency import LowLatency
from deepep_rt.backends.cuda.monitor import Monitor
from deepep_rt.comm.consensus import Consensus
from deepep_rt.cuda import driver, nvshmem, transport
from deepep_rt.jit import launch
from deepep_rt.kernels.layout import Layout

__all__ = ["fake", "make"]


def _is_memory(gathered: Any) -> bool:
    """Tell whether a rank says its free bytes, its target and the stored tuning."""
    return isinstance(gathered, tuple) and len(gathered) == 3 and isinstance(gathered[0], int) and isinstance(gathered[1], str)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_buffer_that_does_not_fit_allocates_nothing(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """All ranks learn which rank has too little memory, and what to lower. No rank waits in a collective allocation."""
    few, plenty = 1 << 20, 1 << 50
    monkeypatch.setattr(driver, "free_bytes", lambda: plenty if rank else few)
    monkeypatch.setattr(
        FakeCommunicator,
        "allgather",
        lambda _, mine: [(few if r == rank else plenty, *mine[1:]) if _is_memory(mine) else mine for r in range(4)],
    )
    monkeypatch.setattr(fake.allocator, "allocate", lambda *_: pytest.fail("symmetric memory was allocated"))
    need = Buffer.size_hint(num_ranks=4, num_max_tokens_per_rank=4096, hidden=7168, num_topk=4, num_experts=32)["total"]
    with pytest.raises(EPOutOfMemoryError) as caught:
        make(num_max_tokens_per_rank=4096, hidden=7168)
    message = str(caught.value)
    for words in (f"takes {need / 1e9:.2f} GB", f"rank {rank} has 0.00 GB free", "Lower num_max_tokens_per_rank or num_slots"):
        assert words in message
    assert not [name for name in fake.requests if name.startswith(("allocate", "fill", "acquire_stream"))]


def test_new_memory_that_is_not_zero(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend does not take old bytes for a report, a count or a mask."""
    pinned = driver.allocate_pinned

    def allocate_pinned(num_bytes: int) -> int:
        return ctypes.memset(pinned(num_bytes), 0xFF, num_bytes)

    monkeypatch.setattr(driver, "allocate_pinned", allocate_pinned)
    with make(low_latency=True) as buffer:
        assert buffer.query_masked_ranks() == []
        buffer.dispatch(*arguments(fake), num_worst_tokens=40)
        fills = {at: (byte, num_bytes) for at, byte, num_bytes in fake.fills}
        backend, layout = buffer._backend, Layout(buffer.config)
        inboxes = layout.low_latency
        rows = inboxes.offsets["messages"]
        assert fills[region(buffer, "control").start] == (0, len(region(buffer, "control")))
        assert fills[region(buffer, "low_latency").start] == (0, rows)
        assert fills[region(buffer, "low_latency").start + rows] == (0xFF, inboxes.num_bytes - rows)
        assert fills[backend.runtime.state] == (0, layout.local.num_bytes)


def test_memory_is_cleared_before_peers_write_to_it(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(Consensus, "all_ok", lambda *_: asked.append([*fake.requests]) or True)
    with make():
        _, made = asked
    assert "synchronize" in made[len(made) - made[::-1].index("fill") :]


@pytest.mark.parametrize(("on_timeout", "limit_s"), [("raise", 30.0), ("mask", 1.0)])
def test_how_long_destroy_waits(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, on_timeout: str, limit_s: float
) -> None:
    buffer, limits = make(on_timeout=on_timeout), []
    monkeypatch.setattr(Consensus, "all_ok", lambda self, sound, what, timeout_s=None: limits.append(timeout_s) or sound)
    x, idx, _ = arguments(fake)
    seen = weakref.ref(x)
    with monkeypatch.context() as busy:
        busy.setattr(driver.CudaEvent, "done", lambda event: False)
        buffer.dispatch(x, idx, num_worst_tokens=40, async_finish=True)
        busy.setattr(buffer._backend.runtime.order, "end", lambda: SimpleNamespace(done=lambda: True, synchronize=lambda: None))
        order = buffer._backend.runtime.order
        buffer.destroy()
    del x
    gc.collect()
    assert limits == [limit_s]
    assert seen() is None, "no call reads the arguments any more"
    del order


@pytest.mark.parametrize("nodes", [{}, dict(ranks_per_node=2), dict(ranks_per_node=2, network=NetworkOptions(transport="mpi"))])
@pytest.mark.parametrize("low_latency", [False, True])
def test_a_destroyed_buffer_leaves_nothing_to_the_garbage_collector(
    fake: FakeGpu, make: Any, nodes: dict[str, Any], low_latency: bool
) -> None:
    """The collector runs in any thread, also in the one of a relay, which must not call CUDA."""
    gc.collect()
    gc.disable()
    try:
        with make(**nodes, low_latency=low_latency) as buffer:
            backend = buffer._backend
            parts = [
                weakref.ref(part) for part in (buffer, backend, backend.runtime, backend.runtime.monitor, backend.runtime.order)
            ]
            fake.on_launch = routed(buffer, 24, [3] * 8)
            kept: list[Any] = []
            for how, (name, prepare) in itertools.product(({}, {"async_finish": True}), CALLS.items()):
                if low_latency or not name.startswith("low-latency"):
                    kept.append(call := prepare(fake, buffer, **how))
                    kept.append(received(call()))
        kept.clear()
        fake.on_launch = lambda call: None
        del buffer, backend, call, prepare
        assert [part() for part in parts] == [None] * len(parts)
    finally:
        gc.enable()


@pytest.mark.parametrize("on_timeout", ["raise", "mask"])
def test_a_rank_that_does_not_destroy_its_buffer(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[float], float], on_timeout: str
) -> None:
    """The error names it. The memory stays allocated: a rank cannot free it alone."""
    buffer, start = make(on_timeout=on_timeout, timeout_s=0.2), time.monotonic()
    monkeypatch.setattr(FakeCommunicator, "Irecv", lambda self, word, peer, tag: SimpleNamespace(Test=lambda: peer != 2))
    monkeypatch.setattr("deepep_rt.backends.cuda.backend._MIN_DESTROY_TIMEOUT_S", 0.0)
    if on_timeout == "raise":
        with pytest.raises(
            EPTimeoutError, match=r"expected all ranks to destroy their Buffer.*for rank 2, which did not arrive"
        ) as caught:
            buffer.destroy()
        assert caught.value.peer == 2
    else:
        with pytest.warns(UserWarning, match=r"for rank 2, which did not arrive.*The memory of this Buffer stays allocated"):
            buffer.destroy()
    assert time.monotonic() - start < seconds(3)
    assert BASE not in fake.freed
    buffer.destroy()


def test_events_outlive_the_buffer(fake: FakeGpu, make: Any) -> None:
    """They do not read freed memory."""
    buffer = make()
    event = buffer.dispatch(*arguments(fake), num_worst_tokens=40).event
    page = buffer._backend.runtime.page
    buffer.destroy()
    ctypes.memset(page.ptr, 0xFF, Layout(buffer.config).status_page.num_bytes)  # another owner's data
    event.synchronize()


def test_when_memory_is_freed(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is freed only if nothing failed. In any case, the other ranks learn whether this rank can free."""
    answers: list[bool] = []
    monkeypatch.setattr(Consensus, "all_ok", lambda self, sound, what, timeout_s=None: answers.append(sound) or sound)

    def fail(*_: Any) -> None:
        raise EPUnavailableError("the CUDA driver reports CUDA_ERROR_ILLEGAL_ADDRESS")

    buffer = make()
    monkeypatch.setattr(buffer._backend.runtime.order, "synchronize", fail)
    with pytest.raises(EPUnavailableError):
        buffer.destroy()
    make().destroy(in_touch=False)
    with pytest.raises(KeyError), make():
        raise KeyError
    buffer = make(low_latency=True)
    buffer.mask_rank(2)
    buffer.destroy()
    assert (answers, fake.freed.count(BASE)) == ([True, True, False] * 4, 0)  # twice in construction, and once in destroy
    answers.clear()
    make().destroy()
    assert (answers, fake.freed.count(BASE)) == ([True, True, True], 1)


def test_ranks_with_different_memory_are_refused(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = FakeCommunicator.allgather

    def allgather(self: FakeCommunicator, value: Any) -> list[Any]:
        told = usual(self, value)
        return [*told[:-1], (value[0], "heap")] if isinstance(value, tuple) and value[1:] == ("nvshmem",) else told

    monkeypatch.setenv("DEEPEP_RT_SYMMETRIC_MEMORY", "nvshmem")

    monkeypatch.setattr(FakeCommunicator, "allgather", allgather)
    with pytest.raises(EPConfigError, match="nvshmem, nvshmem, nvshmem, heap on ranks 0 to 3; expected the same on all ranks"):
        make()


def test_a_rank_frees_memory_of_its_own_alone(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """After any failure, and without asking the other ranks, once kernels wait for no rank any more."""
    monkeypatch.setattr(fake.allocator.allocate, "is_local", True)
    answers: list[bool] = []
    monkeypatch.setattr(Consensus, "all_ok", lambda self, sound, *_: answers.append(sound) or sound)

    def fail(*_: Any) -> None:
        raise EPUnavailableError("the CUDA driver reports CUDA_ERROR_ILLEGAL_ADDRESS")

    make().destroy()
    assert "write_int32_now" not in fake.requests, "no kernel waits in a Buffer that is sound"
    buffer = make()
    with monkeypatch.context() as failing:
        failing.setattr(buffer._backend.runtime.order, "synchronize", fail)
        failing.setattr(driver, "end_of_work", fail)
        with pytest.raises(EPUnavailableError):
            buffer.destroy()
    make().destroy(in_touch=False)
    with pytest.raises(KeyError), make():
        raise KeyError
    buffer = make(low_latency=True)
    buffer.mask_rank(2)
    buffer.destroy()
    assert (answers, fake.freed.count(BASE)) == ([True, True] * 5, 5)  # both in construction
    assert fake.requests.count("write_int32_now") == 4
    monkeypatch.setattr("deepep_rt.backends.cuda.backend._STOP_S", 0.01)
    buffer = make()
    monkeypatch.setattr(driver, "end_of_work", lambda: SimpleNamespace(done=lambda: False))
    with pytest.warns(UserWarning, match="the GPU does not end its work.*stays allocated"):
        buffer.destroy(in_touch=False)
    assert fake.freed.count(BASE) == 5


@pytest.mark.parametrize(
    ("module", "name", "steps_before"),
    [(None, "check_available", 0), (driver, "allocate_pinned", 1), (launch, "load", 1), (LowLatency, "clear_inboxes", 1)],
)
def test_a_rank_that_fails_in_construction(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, steps_before: int
) -> None:
    """The others learn of it, and all ranks free what they have acquired."""
    answers: list[bool] = []
    monkeypatch.setattr(Consensus, "all_ok", lambda self, mine, what, limit=None: answers.append(mine) or mine)
    taken, given = (("allocate", "allocate_pinned"), ("free", "free_pinned"))

    def fail(*_: Any) -> None:
        raise EPCacheError("the folder is full")

    with monkeypatch.context() as broken:
        broken.setattr(module or fake.allocator, name, fail)
        with pytest.raises(EPCacheError):
            make(low_latency=True)
    assert answers == [True] * steps_before + [False] + [True] * steps_before, "the last time to free memory together"
    assert (BASE in fake.freed) == bool(steps_before)
    assert sum(map(fake.requests.count, taken)) == sum(map(fake.requests.count, given))
    for last in (1, 2):
        answers.clear()
        monkeypatch.setattr(
            Consensus, "all_ok", lambda self, mine, what, limit=None, last=last: answers.append(mine) or len(answers) != last
        )
        with pytest.raises(EPUnavailableError, match="another rank"):
            make(low_latency=True)
        assert answers == [True] * (2 * last - 1)
    monkeypatch.setattr(Consensus, "all_ok", lambda self, mine, what, limit=None: answers.append(mine) or mine)
    monkeypatch.setattr(fake.allocator.allocate, "consensus", SimpleNamespace(silent_ranks=[]))
    answers.clear()
    fake.freed.clear()
    with monkeypatch.context() as broken:
        broken.setattr(launch, "load", fail)
        with pytest.raises(EPCacheError):
            make(low_latency=True)
    assert (answers, BASE in fake.freed) == ([True, False, False], False), "Buffers of other groups live in the same allocation"
    make(low_latency=True)


def test_hosts_allocate_for_themselves_with_a_relay(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another host has no memory, all ranks of this one free theirs. With nodes of one rank, the driver allocates."""
    relay = NetworkOptions(transport="mpi")
    with make(ranks_per_node=2, network=relay) as buffer:
        assert buffer.config.transport == "mpi"
        assert list(buffer._backend.runtime.memory.peers) == [BASE + (rank << 36) for rank in range(4)]
    assert fake.freed.count(BASE) == 1
    with make(ranks_per_node=1, network=relay) as buffer:
        own, *others = buffer._backend.runtime.memory.peers
    assert own in fake.freed
    assert others == [0, 0, 0]
    steps: list[bool] = []
    monkeypatch.setattr(Consensus, "all_ok", lambda self, mine, what, limit=None: steps.append(mine) or len(steps) != 2)
    with pytest.raises(EPUnavailableError, match="another rank"):
        make(ranks_per_node=2, network=relay)
    assert fake.freed.count(BASE) == 2

    def be_silent(consensus: Consensus, *_: Any) -> bool:
        steps.append(True)
        consensus.silent_ranks = [2] if len(steps) == 2 else []
        return len(steps) != 2

    monkeypatch.setattr(Consensus, "all_ok", be_silent)
    for is_local in (False, True):
        steps.clear()
        monkeypatch.setattr(fake.allocator.allocate, "is_local", is_local)
        with pytest.raises(EPTimeoutError, match="for rank 2, which did not arrive"):
            make(ranks_per_node=2, network=relay)
        assert fake.freed.count(BASE) == 2 + is_local, "NVSHMEM frees on all ranks together"


def test_the_description_of_a_buffer(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEEPEP_RT_CACHE_DIR", str(tmp_path))
    with make() as buffer:
        found = buffer.describe()
    assert (found.backend, found.num_nodes, found.transport, found.path) == ("cuda", 1, "", "")
    assert found.gpus == ("Fake GPU (sm_90)",) * 4
    assert found.memory["total"] == Layout(buffer.config).size_hint["total"]
    assert found.provider == "NVSHMEM"
    monkeypatch.setattr(fake.allocator.allocate, "way", "sockets")
    with make() as buffer:
        assert buffer.describe().provider == "CUDA virtual memory, shared by descriptors over sockets"
    with make(ranks_per_node=1, network=NetworkOptions(transport="mpi")) as buffer:
        assert buffer.describe().provider == "CUDA driver, not shared"
    monkeypatch.setattr(transport, "nixl_objection", lambda: "")
    with make(ranks_per_node=2, network=NetworkOptions(transport="nixl")) as buffer:
        found = buffer.describe()
    assert (found.transport, found.transport_reason) == ("nixl", "transport='nixl' was passed")
    with make(ranks_per_node=2) as buffer:
        found = buffer.describe()
    assert (found.transport, found.transport_reason) == ("nvshmem", "all ranks are on one host")
    assert found.path == buffer.config.path != "auto"
    assert "nothing was measured" in found.path_reason
    rates = LinkRates(1e9, 1e-6, 100e9, 1e-6)
    monkeypatch.setattr(cuda_backend, "MEASURE", lambda comm, config, **_: rates)
    with make(ranks_per_node=2) as buffer:
        found = buffer.describe()
    assert (found.path, buffer.config.path, found.measured) == ("direct", "direct", rates)


@pytest.fixture
def measured(make: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Measure links as on a GPU."""
    monkeypatch.setenv("DEEPEP_RT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cuda_backend, "MEASURE", link_rates.measure_links)
    monkeypatch.setattr(driver, "elapsed_ms", lambda begin, end: 2.0)


@pytest.mark.usefixtures("measured")
def test_a_buffer_measures_in_memory_of_its_own(fake: FakeGpu, make: Any) -> None:
    with make(ranks_per_node=2) as buffer:
        assert buffer.describe().measured is not None
        assert {call.kernel for call in fake.pop_launches()} == {"link_rates"}
        assert fake.freed.count(BASE) == 1
    with make(ranks_per_node=2) as buffer:
        assert "measured earlier" in buffer.describe().path_reason
    assert not fake.pop_launches()
    assert fake.requests.count("allocate") + fake.requests.count("allocate_pinned") == sum(
        fake.requests.count(name) for name in ("free", "free_pinned")
    )


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("reason", ["groups", "cache"])
def test_no_rank_measures_if_one_cannot(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """Other groups of NVSHMEM's ranks may have saved rates, and would allocate nothing for a measurement."""
    if reason == "groups":
        monkeypatch.setattr(nvshmem, "_runtime", SimpleNamespace(num_pes=8))
    else:
        monkeypatch.setenv("DEEPEP_RT_ASSERT_CACHED", "1")
    with make(ranks_per_node=2) as buffer:
        assert "nothing was measured" in buffer.describe().path_reason
    assert not fake.pop_launches()


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("fails", ["kernel", "wait"])
def test_a_measurement_that_fails(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    """Memory that a peer may still write to stays allocated."""

    def fail(*_: Any) -> None:
        raise EPTimeoutError("rank 1 is silent", rank=0, peer=1, phase="links")

    module, name = (launch, "load") if fails == "kernel" else (Monitor, "check")
    monkeypatch.setattr(module, name, fail)
    monkeypatch.setattr(Consensus, "all_ok", lambda self, mine, what, limit=None: mine)
    with pytest.raises(EPTimeoutError, match="rank 1 is silent"):
        make(ranks_per_node=2)
    fake.outside_context.clear()  # the constructor works in the context that is current
    assert fake.freed.count(BASE) == (fails == "kernel")


def test_calls_after_destroy(fake: FakeGpu, make: Any) -> None:
    buffer = make(low_latency=True)
    x, idx, weights = arguments(fake)
    sent = buffer.low_latency_dispatch(x, idx, return_recv_hook=True)
    buffer.destroy()
    assert BASE in fake.freed
    assert buffer.destroy() is None
    for call in (sent.hook, lambda: buffer.dispatch(x, idx, weights), buffer.synchronize):
        with pytest.raises(EPDestroyedError):
            call()


def test_first_access_to_results_after_destroy(fake: FakeGpu, make: Any) -> None:
    with make(low_latency=True) as buffer:
        x, idx, weights = arguments(fake)
        sent = buffer.dispatch(x, idx, weights, num_worst_tokens=8)
        back = buffer.combine(Array(fake, "bfloat16", 8, 256), sent.handle)
        soon = buffer.low_latency_dispatch(x, idx)
    for access in (lambda: sent.recv_x, lambda: back.x, lambda: soon.num_recv_tokens_per_expert):
        with pytest.raises(EPDestroyedError, match=r"Access result arrays before destroy\(\)"):
            access()
