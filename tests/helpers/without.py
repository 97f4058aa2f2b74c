"""Run code at the start of processes that tests start, and hide modules from them."""

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


def starting_with(folder: Path, code: str) -> dict[str, str]:
    """Return environment variables with which Python runs some code when it starts. They use `folder`, which must be empty."""
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


def without(folder: Path, *modules: str) -> dict[str, str]:
    """Return environment variables with which Python does not find some modules. `folder`: as of `starting_with`.

    With `sys.modules[module] = None`, an import of `module.part` would fail with another message.
    """
    return starting_with(folder, _SITECUSTOMIZE.format(modules=modules))
