"""The folder of the modules with DeepEP's names."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).with_name("shim")


def shim_path() -> str:
    """Return the folder of `deep_ep` and `deep_ep_cpp`. No path includes it by default, so an installed DeepEP keeps working.

    If PYTHONPATH begins with it, every process that a program starts imports this library as `deep_ep`.

    Example:
        >>> subprocess.run(["vllm", "serve", ...], env={**os.environ, "PYTHONPATH": shim_path()})
    """
    return str(_FOLDER)
