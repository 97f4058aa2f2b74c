"""Compose the commands that install the extras of this package. No public index has it, so they name its checkout or wheel."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]
"""The checkout, if the package lies in one: `cuda_src` is next to it there, and inside it once installed."""

UNKNOWN = "CHECKOUT_OR_WHEEL"


def pip_install(extra: str) -> str:
    """Compose the command that adds an extra to this installation.

    It names the checkout or the wheel that the package came from, or `CHECKOUT_OR_WHEEL` if that is not recorded or gone.
    """
    if (CHECKOUT / "cuda_src").is_dir():
        return f"pip install -e '{CHECKOUT}[{extra}]'"
    return f"pip install '{_recorded_origin() or UNKNOWN}[{extra}]'"


def pip_install_cuda() -> str:
    """Compose the command that adds the CUDA libraries, for either CUDA."""
    return f"{pip_install('cuda12')}, or the same with cuda13, whichever matches the driver"


@contextmanager
def or_exit(what: str, extra: str) -> Iterator[None]:
    """Exit with the command that installs an extra, if the block imports a library that is missing. `what` needs the library."""
    try:
        yield
    except ModuleNotFoundError as error:
        library = (error.name or "").partition(".")[0]
        if library == __package__:
            raise
        sys.exit(f"{what} needs {library}, which is not installed. Run {pip_install(extra)}.")


def _recorded_origin() -> str | None:
    """Read the folder or wheel that an installer recorded (PEP 610)."""
    from importlib import metadata  # takes 12 ms
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    try:
        url = urlsplit(json.loads(metadata.distribution("deepep_rt").read_text("direct_url.json") or "{}").get("url", ""))
    except (metadata.PackageNotFoundError, ValueError):
        return None
    path = url2pathname(url.path)
    return path if url.scheme == "file" and Path(path).exists() else None
