"""Where the modules lie that have DeepEP's names."""

from __future__ import annotations

import sys
from pathlib import Path

_FOLDER = Path(__file__).with_name("shim")
_MODULES = ("deep_ep", "deep_ep_cpp")


def shim_path() -> str:
    """The folder of `deep_ep` and `deep_ep_cpp`. On no path by itself: a DeepEP that is installed stays what it is.

    In front of PYTHONPATH it gives this library to every process that a program starts.

    Example:
        >>> subprocess.run(["vllm", "serve", ...], env={**os.environ, "PYTHONPATH": shim_path()})
    """
    return str(_FOLDER)


def foreign() -> str | None:
    """The first module of DeepEP itself that this process has imported."""
    for name in _MODULES:
        file = getattr(sys.modules.get(name), "__file__", None) or ""
        if name in sys.modules and _FOLDER not in Path(file).parents:
            return name
    return None
