"""Shared by the tests of prepared calls on a fake GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fake_gpu import Array, FakeGpu, arguments, routed

ROWS = 24  # that the dispatch of `handle_of` brings


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


def handle_of(fake: FakeGpu, buffer: Any, num_rows: int = ROWS) -> Any:
    """Return the handle of a dispatch that brings so many rows."""
    fake.on_launch = routed(buffer, num_rows, [3] * 8)
    handle = buffer.dispatch(*arguments(fake)).handle
    fake.on_launch = lambda call: None
    fake.pop_launches()
    return handle


def rows_of_handle(fake: FakeGpu, dtype: str = "bfloat16") -> Array:
    return Array(fake, dtype, ROWS, 256)
