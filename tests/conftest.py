"""Let processes that tests start use this checkout without an installation, and run the slowest files first."""

from __future__ import annotations

import importlib.metadata
import os

import pytest
from paths import ROOT

try:
    importlib.metadata.distribution("deepep_rt")
except importlib.metadata.PackageNotFoundError:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])

# Workers take whole files in this order. A long file at the end would leave the others idle.
SLOWEST_FIRST = (
    "test_host_backend",
    "test_torch",
    "test_nodes_on_cpu",
    "test_kernels_compile",
    "test_store",
    "test_cli",
    "test_compat",
    "test_kernels_on_cpu",
    "test_jax",
    "test_examples",
    "test_doctor_gpus",
    "test_readme",
    "test_build",
    "test_relay",
    "test_package",
    "test_doctor_settings",
    "test_host_nodes",
    "test_soak",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the slowest files to the front; all others keep their order."""
    items.sort(key=lambda item: (*SLOWEST_FIRST, item.path.stem).index(item.path.stem))
