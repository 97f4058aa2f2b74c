"""What the Buffer's own stream waits for in calls with `previous_event`: not for later work of the caller. On a fake GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from calls_on_fake_gpu import CALLS, NEED_COUNTS
from fake_gpu import OWN_STREAM, FakeGpu, fake, make, routed

from deepep_rt.cuda import driver

__all__ = ["fake", "make"]

PREVIOUS = 1234
KINDS = [kind for kind in CALLS if kind not in NEED_COUNTS and not kind.startswith(("low-latency", "prepared"))]


@pytest.mark.parametrize("sizes", [{}, dict(ranks_per_node=2)], ids=["one node", "two nodes"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_does_not_wait_for_later_work_of_the_caller(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, kind: str, sizes: dict[str, Any]
) -> None:
    """Results of earlier calls were dropped, and memory that served their calls only. The caller's stream has got long work since then."""
    with make(**sizes) as buffer, monkeypatch.context() as busy:
        fake.on_launch = routed(buffer, 24, [3] * 8)
        make_call = CALLS[kind](fake, buffer, async_finish=True, previous_event=SimpleNamespace(cuda_event=PREVIOUS))
        for _ in range(4):
            make_call()
        busy.setattr(driver.CudaEvent, "record", lambda event, stream: setattr(event, "handle", ("work of", stream)))
        busy.setattr(driver.CudaEvent, "done", lambda event: event.handle == 5)
        fake.waits.clear()
        for _ in range(2):  # the second drops the result of the first
            make_call()
        assert set(fake.waits) == {(OWN_STREAM, PREVIOUS)}
        held = [make_call() for _ in range(2)]
        assert set(fake.waits) == {(OWN_STREAM, PREVIOUS)}
        del held
