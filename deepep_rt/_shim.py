"""Where the modules lie that have DeepEP's names."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).with_name("shim")


def shim_path() -> str:
    """The folder of `deep_ep` and `deep_ep_cpp`. On no path by itself: a DeepEP that is installed stays what it is.

    In front of PYTHONPATH it gives this library to every process that a program starts.

    Example:
        >>> subprocess.run(["vllm", "serve", ...], env={**os.environ, "PYTHONPATH": shim_path()})
    """
    return str(_FOLDER)
