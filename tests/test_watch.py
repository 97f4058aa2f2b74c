"""`watch`: what the host hears of calls while it waits for them."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from deepep_rt import watch
from deepep_rt.config import Config


def test_other_threads_run_while_counts_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes its lock away from a thread only now and then; here, not within the time that the counts may take."""
    found: list[Any] = [None]
    page = SimpleNamespace(counts=lambda: found[0], check_peers=lambda: None, has_started=lambda: True)
    monkeypatch.setattr(watch, "_GRACE_S", 1.0)
    for name in ("check_peers", "start_listening", "listen"):
        monkeypatch.setattr(watch.Watch, name, lambda self: None)
    waiting = watch.Watch.__new__(watch.Watch)
    waiting._config, waiting._page, waiting._rank, waiting._broken = Config(1, 8, 64, 1, 1, timeout_s=1.0), page, 0, None
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
        sys.setswitchinterval(60.0)
        assert waiting.await_counts() == (7, [7])
    finally:
        sys.setswitchinterval(before)
        thread.join()
