"""`Monitor`: what the host learns of calls, from kernels and from other ranks, while it waits."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from memory_store import Store

from deepep_rt import EPInputError, EPPeerLostError, EPTimeoutError, EPUnavailableError
from deepep_rt.backends.cuda import monitor
from deepep_rt.comm.store import StoreCommunicator
from deepep_rt.config import Config
from deepep_rt.cuda import driver
from deepep_rt.kernels import structs


def test_other_threads_run_while_counts_are_awaited(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[float], float]) -> None:
    """Python switches threads only at intervals. The interval here is longer than the limit for the counts."""
    found: list[Any] = [None]
    page = SimpleNamespace(counts=lambda: found[0], check_peers=lambda: None, has_started=lambda: True)
    monkeypatch.setattr(monitor, "_GRACE_S", 1.0)
    for name in ("check_peers", "begin_wait", "check_failure_notices"):
        monkeypatch.setattr(monitor.Monitor, name, lambda self: None)
    waiting = monitor.Monitor.__new__(monitor.Monitor)
    waiting._config, waiting._page, waiting._rank, waiting._error = Config(1, 8, 64, 1, 1, timeout_s=seconds(1.0)), page, 0, None
    waiting._check_ended = lambda: None
    begun = threading.Event()

    def other() -> None:
        begun.set()
        time.sleep(0.05)
        found[0] = 7, [7]

    thread, before = threading.Thread(target=other), sys.getswitchinterval()
    thread.start()
    begun.wait()
    try:
        sys.setswitchinterval(600.0)
        assert waiting.await_counts() == (7, [7])
    finally:
        sys.setswitchinterval(before)
        thread.join()


class Page:
    """A status page. It reports nothing unless a test sets an error."""

    def __init__(self) -> None:
        self.peers_error: Exception | None = None
        self.input_error: EPInputError | None = None
        self.asked = 0

    def check_peers(self) -> None:
        self.asked += 1
        if self.peers_error is not None:
            raise self.peers_error

    def check_inputs(self) -> None:
        if self.input_error is not None:
            raise self.input_error


@pytest.fixture
def ranks() -> list[StoreCommunicator]:
    store = Store()
    return [StoreCommunicator(store, "test", rank, 3) for rank in range(3)]


def test_a_time_out_counts_more_than_what_follows_from_it(ranks: list[StoreCommunicator]) -> None:
    """A combine reports the handle of a dispatch that a lost rank has ended. Both reports come while the host looks at arguments."""

    class LatePage(Page):
        def check_inputs(self) -> None:
            self.peers_error = EPTimeoutError("rank 0 waited", rank=0, peer=1, phase="rows", expected=1, seen=0)
            raise EPInputError("handle is of generation 31, and the Buffer is in generation 32")

    watching = make(ranks[0], LatePage())
    for check in (watching.check_inputs, watching.check):
        with pytest.raises(EPTimeoutError, match="rank 0 waited"):
            check()


def make(comm: StoreCommunicator, page: Any, check_network: Any = None, **settings: Any) -> monitor.Monitor:
    config = Config(3, 8, 64, 2, 12, low_latency=True, ranks_per_node=1, **settings)
    return monitor.Monitor(comm, config, page, 1 << 20, check_network=check_network)


def test_an_error_that_breaks_a_buffer_is_raised_again(ranks: list[StoreCommunicator]) -> None:
    page = Page()
    waiting = make(ranks[0], page)
    waiting.check()
    assert not waiting.is_broken
    page.peers_error = EPTimeoutError("rank 2 is silent", rank=0, peer=2, phase="")
    with pytest.raises(EPTimeoutError, match="rank 2 is silent"):
        waiting.check()
    assert waiting.is_broken
    page.peers_error = None
    asked = page.asked
    with pytest.raises(EPTimeoutError, match="rank 2 is silent"):
        waiting.check_peers()
    assert page.asked == asked, "the page may be freed by then"


def test_a_relay_that_has_failed_explains_a_timeout(ranks: list[StoreCommunicator]) -> None:
    """Kernels know only which rank's data did not come. The relay knows why, also if no call of the host waits."""
    page, failed = Page(), [EPUnavailableError("the relay of rank 0 on node 0 failed: MemoryError")]

    def check_network() -> None:
        if failed:
            raise failed[0]

    waiting = make(ranks[0], page, check_network)
    waiting.check()
    silent = page.peers_error = EPTimeoutError("rank 2 is silent", rank=0, peer=2, phase="")
    for _ in range(2):
        with pytest.raises(EPUnavailableError, match="the relay of rank 0 on node 0 failed: MemoryError") as caught:
            waiting.check()
        assert caught.value.__cause__ is silent
    failed.clear()
    with pytest.raises(EPTimeoutError, match="rank 2 is silent"):
        make(ranks[0], page, check_network).check()


def test_a_timeout_tells_what_the_network_has_carried(ranks: list[StoreCommunicator], caplog: pytest.LogCaptureFixture) -> None:
    page = Page()
    waiting = monitor.Monitor(
        ranks[0], make(ranks[0], page)._config, page, 1 << 20, network_progress=lambda: "its relay has sent 3 puts"
    )
    page.peers_error = EPTimeoutError("rank 2 is silent", rank=0, peer=2, phase="")
    for _ in range(2):
        with pytest.raises(EPTimeoutError, match="rank 2 is silent"):
            waiting.check()
    assert [record.message for record in caplog.records] == [
        "rank 0: a wait of a kernel has timed out; its relay has sent 3 puts"
    ]


def test_wrong_input_is_raised_after_the_call(ranks: list[StoreCommunicator]) -> None:
    page = Page()
    waiting = make(ranks[0], page)
    page.input_error = EPInputError("expert 99")
    for check in (waiting.check, waiting.check_inputs):
        with pytest.raises(EPInputError, match="expert 99") as caught:
            check()
        assert caught.value.call_made
        caught.value.call_made = False
    assert not waiting.is_broken
    page.input_error = None
    waiting.check()


@pytest.mark.parametrize("on_timeout", ["raise", "mask"])
def test_a_rank_that_leaves(
    ranks: list[StoreCommunicator], monkeypatch: pytest.MonkeyPatch, seconds: Callable[[float], float], on_timeout: str
) -> None:
    """Its peers set the abort flag, so that their kernels stop waiting. If timeouts mask, they do not."""
    written: list[tuple[int, int]] = []
    monkeypatch.setattr(driver, "write_int32_now", lambda ptr, value: written.append((ptr, value)))
    waiting, leaving = make(ranks[0], Page(), on_timeout=on_timeout), make(ranks[2], Page())
    waiting.check_failure_notices()
    sender = threading.Thread(target=leaving.failure_notice.notify, args=(KeyError("mine"),))
    sender.start()
    end = time.monotonic() + seconds(1.0)
    waiting.begin_wait()

    def wait() -> None:
        while time.monotonic() < end:
            waiting.check_failure_notices()

    if on_timeout == "mask":
        wait()
        assert not written
        assert not waiting.is_broken
    else:
        with pytest.raises(EPTimeoutError, match=r"rank 2 on node 2 left.*\(a call on the GPU\).*KeyError: 'mine'") as caught:
            wait()
        assert (caught.value.peer, caught.value.node) == (2, 2)
        assert written == [((1 << 20) + structs.offset(structs.State.dtype({}), "abort"), 1)]
        assert waiting.is_broken
    sender.join()


@pytest.mark.parametrize("has_slots", [False, True])
def test_a_store_that_ends(
    ranks: list[StoreCommunicator], monkeypatch: pytest.MonkeyPatch, has_slots: bool, seconds: Callable[[float], float]
) -> None:
    """Ranks of a Buffer with slots go on: only changes of the members need the store. They still hear of processes that end."""
    monkeypatch.setattr(driver, "write_int32_now", lambda *_: None)
    waiting = make(ranks[0], Page(), has_slots=has_slots)
    ranks[0]._store.fails = True
    waiting.begin_wait()
    time.sleep(0.05)
    if not has_slots:
        with pytest.raises(EPUnavailableError, match="store"):
            waiting.check_failure_notices()
        return
    waiting.check_failure_notices()
    waiting.failure_notice.lose(2, "its process has ended")
    end = time.monotonic() + seconds(10)

    def wait() -> None:
        while time.monotonic() < end:
            waiting.check_failure_notices()

    with pytest.raises(EPPeerLostError, match="rank 2 on node 2 is lost"):
        wait()


def test_call_half(ranks: list[StoreCommunicator]) -> None:
    waiting = make(ranks[1], Page())
    with waiting.call_half():
        pass
    assert not waiting.is_broken
    with pytest.raises(KeyboardInterrupt), waiting.call_half():
        raise KeyboardInterrupt
    with pytest.raises(EPTimeoutError, match="interrupted between its halves") as caught:
        waiting.check_peers()
    assert (caught.value.rank, caught.value.peer, caught.value.phase) == (1, 1, "the rows of a low-latency dispatch")
    with pytest.raises(KeyError), waiting.call_half():
        raise KeyError
    with pytest.raises(EPTimeoutError, match="interrupted between its halves"):
        waiting.check_peers()


def test_a_limit_counts_from_the_start_of_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    clock = [100.0]
    monkeypatch.setattr(monitor, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(driver, "free_bytes", lambda: asked.append(clock[0]))
    limit = monitor._StartedKernelLimit(3, 5.0)
    for clock[0] in (100.5, 101.5, 102.0, 102.6):
        assert not limit.is_over(False)
    assert asked == [101.5, 102.6], "one check of the GPU per second"
    clock[0] = 131.0
    with pytest.warns(UserWarning, match="rank 3: the GPU has not started this dispatch after 31 s"):
        assert not limit.is_over(False)
    clock[0] = 140.0
    assert not limit.is_over(False), "the last warning is recent"
    assert not limit.is_over(True)
    clock[0] = 144.9
    assert not limit.is_over(True)
    clock[0] = 145.1
    assert limit.is_over(True)
    assert limit.is_over(False), "the start of a kernel is remembered"
