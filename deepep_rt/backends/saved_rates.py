"""Measured rates of links, kept on disk by topology next to the compiled kernels."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from ..description import LinkRates
from .saved_files import SavedFiles

_FILES = SavedFiles("links", "measured rates", "topology")


def load(topology: Mapping[str, Any]) -> LinkRates | None:
    """Return the saved rates of a topology, or None. A file that another user may have written is ignored, with a message in the log."""
    return _FILES.load(topology, _parse)


def save(topology: Mapping[str, Any], rates: LinkRates) -> None:
    """Write the rates of a topology. If that fails, the next Buffer measures again."""
    _FILES.save(topology, {"rates": dataclasses.asdict(rates)})


def _parse(document: dict[str, Any]) -> LinkRates:
    rates = LinkRates(**{name: float(value) for name, value in document["rates"].items()})
    if not all(math.isfinite(rate) and rate > 0 for rate in dataclasses.astuple(rates)):
        raise ValueError("a rate is no positive number")
    return rates
