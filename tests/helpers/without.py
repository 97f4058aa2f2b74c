"""Hide modules from processes that tests start."""

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
    """Return environment variables with which Python does not find some modules. They use `folder`, which must be empty.

    With `sys.modules[module] = None`, an import of `module.part` would fail with another message.
    """
    (folder / "sitecustomize.py").write_text(_SITECUSTOMIZE.format(modules=modules))
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
