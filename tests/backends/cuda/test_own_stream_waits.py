"""What the Buffer's own stream waits for in calls with `previous_event`: not for later work of the caller. On a fake GPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from fake_gpu import OWN_STREAM, Array, FakeGpu, arguments, fake, make

from deepep_rt.cuda import driver

__all__ = ["fake", "make"]

PREVIOUS = 1234
KINDS = (
    "dispatch",
    "dispatch with a handle",
    "dispatch by expert",
    "dispatch by expert with a handle",
    "dispatch in FP8",
    "combine",
    "combine by expert",
    "combine by expert and choice",
)


def call_of(kind: str, fake: FakeGpu, buffer: Any) -> Callable[[], Any]:
    """Return a function that makes a call of a kind."""
    x, idx, weights = arguments(fake)
    how: dict[str, Any] = dict(async_finish=True, previous_event=SimpleNamespace(cuda_event=PREVIOUS))
    layout = "expert" if "by expert" in kind else "token"
    y, handle = Array(fake, "bfloat16", 40, 256), buffer.dispatch(x, idx, weights, num_worst_tokens=40, layout=layout).handle
    if kind.startswith("combine"):
        return lambda: buffer.combine(y, handle, reduce="topk" if "choice" in kind else "rank", **how)
    if "handle" in kind:
        return lambda: buffer.dispatch(x, handle=handle, layout=layout, **how)
    return lambda: buffer.dispatch(x, idx, weights, num_worst_tokens=40, layout=layout, use_fp8="FP8" in kind, **how)


@pytest.mark.parametrize("sizes", [{}, dict(ranks_per_node=2)], ids=["one node", "two nodes"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_call_does_not_wait_for_later_work_of_the_caller(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, kind: str, sizes: dict[str, Any]
) -> None:
    """Results of earlier calls were dropped, and memory that served their calls only. The caller's stream has got long work since then."""
    with make(**sizes) as buffer, monkeypatch.context() as busy:
        make_call = call_of(kind, fake, buffer)
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
