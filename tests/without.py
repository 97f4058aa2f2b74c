"""Processes that do not find some module."""

from __future__ import annotations

import os
from pathlib import Path

_SITECUSTOMIZE = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "{module}":
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Blocker())
"""


def without(folder: Path, module: str) -> dict[str, str]:
    """Variables of the environment with which no Python process finds a module; `folder` is empty, and theirs from then on.

    Not `sys.modules[module] = None`: an import of `module.part` would then fail in words of its own.
    """
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(module=module))
    root = Path(__file__).parents[1]
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(root), *filter(None, [os.environ.get("PYTHONPATH")])])}
