"""An exception in the middle of a call, such as Ctrl-C, on a fake GPU: no later call of this rank may match the call of the others."""

from __future__ import annotations

import gc
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-python comes with deepep_rt[cuda12] or [cuda13]")

from calls_on_fake_gpu import CALLS
from fake_gpu import FakeGpu, fake, make, routed

from deepep_rt import EPInputError, EPTimeoutError, EPUnavailableError
from deepep_rt.jit import launch
from deepep_rt.kernels.table import LOCAL_KERNELS

__all__ = ["fake", "make"]

ONE_NODE, TWO_NODES = {}, dict(ranks_per_node=2)
TOPOLOGIES = pytest.mark.parametrize(
    "sizes", [pytest.param(ONE_NODE, id="one-node"), pytest.param(TWO_NODES, id="two-nodes", marks=pytest.mark.full)]
)


@pytest.fixture(autouse=True)
def no_garbage(fake: FakeGpu) -> Iterator[None]:
    """Free what the interrupted calls hold while the fake GPU is there."""
    yield
    gc.collect()


def prepared(name: str, fake: FakeGpu, make: Any, sizes: dict[str, Any]) -> tuple[Any, Callable[[], Any]]:
    """Make a Buffer, and what a call needs. Return the function that makes the call."""
    low_latency = dict(low_latency=True) if name.startswith("low-latency") else {}
    # A combine by choice takes two windows of tokens.
    buffer = make(**sizes, **low_latency, num_topk=8, num_max_tokens_per_rank=256)
    fake.on_launch = routed(buffer, 24, [3] * 8)
    call = CALLS[name](fake, buffer)
    fake.pop_launches()
    return buffer, call


def num_shared(launches: list[Any]) -> int:
    """Count the launches that other ranks take part in."""
    return sum(one.kernel not in {kernel.name for kernel in LOCAL_KERNELS} for one in launches)


def gaps(name: str) -> set[str]:
    """Return the gaps between parts of a call that the errors of interrupted calls name."""
    if "half" in name:
        return {"halves"}
    if "by choice" in name:
        return {"windows"}
    if name.startswith("dispatch"):
        return {"counts and its rows", *(["rows by token and by expert"] if "by expert" in name else [])}
    return set()


class Interruption:
    """Raises KeyboardInterrupt before a request to the driver, or after a launch. All of them count, from 0."""

    def __init__(self, fake: FakeGpu, number: int) -> None:
        self._act, self._note, self._left = fake.on_launch, fake.note, number

    @property
    def has_come(self) -> bool:
        return self._left < 0

    def note(self, request: str) -> None:
        self._count()
        self._note(request)

    def on_launch(self, one: Any) -> None:
        self._act(one)
        self._count()

    def _count(self) -> None:
        self._left -= 1
        if self._left == -1:
            raise KeyboardInterrupt


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # finalizers are interrupted too, and calls then go on
@pytest.mark.parametrize("name", CALLS)
@TOPOLOGIES
def test_a_call_that_is_interrupted(fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, sizes: Any, name: str) -> None:
    """It is interrupted before each request to the driver, and after each launch. If it has reached the others, it breaks the Buffer."""
    num_broken, found = 0, set()
    for number in itertools.count():
        buffer, call = prepared(name, fake, make, sizes)
        interruption = Interruption(fake, number)
        with monkeypatch.context() as patches:
            patches.setattr(fake, "note", interruption.note)
            patches.setattr(fake, "on_launch", interruption.on_launch)
            try:
                call()
                is_interrupted = False
            except KeyboardInterrupt:
                is_interrupted = True
        launches = fake.pop_launches()
        if is_interrupted and num_shared(launches):
            num_broken += 1
            with pytest.raises((EPTimeoutError, EPInputError), match=r"interrupted|this hook .* was called already"):
                call()
            with pytest.raises(EPTimeoutError, match="interrupted") as caught:
                buffer.check()
            found |= {*re.findall("interrupted between its (.*)", str(caught.value))}
            assert fake.pop_launches() == [], "another call would meet the interrupted call of the others"
        buffer.destroy()
        if not interruption.has_come:
            break
    assert num_broken >= num_shared(launches)
    assert found == gaps(name)


@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith("low-latency")])
@TOPOLOGIES
def test_a_call_whose_later_launch_fails(
    fake: FakeGpu, make: Any, monkeypatch: pytest.MonkeyPatch, sizes: Any, name: str
) -> None:
    """The driver refuses each launch in turn, but for the first that reaches the others."""
    number = 0
    while True:
        buffer, call = prepared(name, fake, make, sizes)
        left = number

        def refuse(*launched: Any) -> tuple:
            nonlocal left
            left -= 1
            if left < 0:
                raise EPUnavailableError("the launch failed")
            return fake.launch(*launched)

        with monkeypatch.context() as patches:
            patches.setattr(launch.driver, "cuLaunchKernelEx", refuse)
            try:
                call()
                is_over = True
            except EPUnavailableError:
                is_over = False
        if is_over:
            buffer.destroy()
            break
        if num_shared(fake.pop_launches()):
            with pytest.raises(EPTimeoutError, match="interrupted"):
                call()
            assert fake.pop_launches() == []
        number += 1
        buffer.destroy()
