"""Folders of the repository, and the PYTHONPATH of programs that tests start."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HELPERS = ROOT / "tests/helpers"
PROGRAMS = ROOT / "tests/programs"


def pythonpath() -> str:
    """Return the PYTHONPATH of programs that tests start. Tests themselves use `pythonpath` in pyproject.toml."""
    return os.pathsep.join([str(ROOT), str(HELPERS), str(PROGRAMS), *filter(None, [os.environ.get("PYTHONPATH")])])
