"""Fixtures of the tests of communicators."""

from __future__ import annotations

import pytest
from memory_store import make_ranks

from deepep_rt.comm.store import StoreCommunicator


@pytest.fixture
def ranks() -> list[StoreCommunicator]:
    """Return the communicators of three ranks over one store."""
    return make_ranks()
