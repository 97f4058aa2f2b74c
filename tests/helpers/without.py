"""Processes that do not find some modules."""

from __future__ import annotations

import os
from pathlib import Path

from paths import ROOT

_SITECUSTOMIZE = """
import sys
class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in {modules} else self.finder.find_spec(name, path, target)
sys.meta_path[:] = map(Without, sys.meta_path)
"""


def without(folder: Path, *modules: str) -> dict[str, str]:
    """Variables of the environment with which no Python process finds some modules; `folder` is empty, and theirs from then on.

    Not `sys.modules[module] = None`: an import of `module.part` would then fail in words of its own.
    """
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(modules=modules))
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
