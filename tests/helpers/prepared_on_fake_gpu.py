"""Shared by the tests of prepared calls on a fake GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fake_gpu import FakeGpu


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Memory has to be free without the garbage collector, which runs at any time."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def collected(fake: FakeGpu) -> Iterator[None]:
    """Errors that a Buffer keeps hold the frames that raised them. Free their memory before the fake driver is gone."""
    yield
    fake.on_launch = None
    gc.collect()


def without(launch: SimpleNamespace, *names: str) -> dict[str, Any]:
    """Return the members of a launch, but for some."""
    return {name: value for name, value in vars(launch).items() if name not in names}
