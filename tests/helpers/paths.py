"""Folders of the repository, and how programs find the tests' modules."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HELPERS = ROOT / "tests/helpers"
PROGRAMS = ROOT / "tests/programs"


def pythonpath() -> str:
    """Return the PYTHONPATH for programs that tests start. (Tests themselves get theirs from `pythonpath` in pyproject.toml.)"""
    return os.pathsep.join([str(ROOT), str(HELPERS), str(PROGRAMS), *filter(None, [os.environ.get("PYTHONPATH")])])
