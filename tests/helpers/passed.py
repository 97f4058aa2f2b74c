"""Tests that CI does not run again after it has installed more libraries: they passed, and the libraries cannot change their results."""

from __future__ import annotations

import functools
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Container
from pathlib import Path

from paths import ROOT

FOLDERS = ("tests/backends/cuda", "tests/cuda", "tests/jit", "tests/kernels")
"""Folders of tests that call the package itself. It looks for optional libraries only among the modules that its caller has imported."""

FILES = (
    "tests/backends/cuda/test_prepared.py",
    "tests/backends/test_growth.py",
    "tests/backends/test_host_nodes.py",
    "tests/backends/test_statistics.py",
    "tests/cli/test_cli.py",
    "tests/comm/test_membership.py",
    "tests/comm/test_relay.py",
    "tests/soak/test_kills.py",
    "tests/soak/test_soak.py",
)
"""Files that do so too. They name a library only in a text, or in tests that are skipped without it. Programs that they start name none."""

LIBRARIES = re.compile("torch|jax|matplotlib|sphinx|^from launch import", re.MULTILINE)
"""Shows that a file may use a library, or start programs that do."""


@functools.cache
def uses_no_libraries(file: str) -> bool:
    """Return whether no optional library changes the tests of a file. The path begins at the root of the repository."""
    is_in_folder = file.startswith(tuple(f"{folder}/" for folder in FOLDERS))
    return file in FILES or (is_in_folder and not LIBRARIES.search((ROOT / file).read_text()))


def tests_in(report: str | Path) -> set[str]:
    """Return the tests that passed, as a JUnit file names them."""
    cases = ElementTree.parse(report).iter("testcase")
    ended_well = (case for case in cases if not {"skipped", "failure", "error"} & {element.tag for element in case})
    return {f"{case.get('classname')}::{case.get('name')}" for case in ended_well}


def need_not_run_again(nodeid: str, passed: Container[str]) -> bool:
    """Return whether a test has passed, and would do the same with the optional libraries."""
    file, _, name = nodeid.partition("::")
    return f"{file.removesuffix('.py').replace('/', '.')}::{name}" in passed and uses_no_libraries(file)
