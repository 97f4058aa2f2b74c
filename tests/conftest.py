"""Makes the tests, and the processes that they start, run from a checkout that is not installed."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

try:
    importlib.metadata.distribution("deepep_rt")
except importlib.metadata.PackageNotFoundError:
    root = str(Path(__file__).resolve().parent.parent)
    sys.path.insert(0, root)
    os.environ["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
