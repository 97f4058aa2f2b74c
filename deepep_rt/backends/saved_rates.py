"""Measured rates of links, kept on disk by topology next to the compiled kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .._documents import has_fields
from ..description import LinkRates
from .saved_files import SavedFiles


def _is_rate(value: Any) -> bool:
    return type(value) in (int, float) and 1e-12 < value < 1e18  # of seconds and of bytes a second


_RATES = has_fields(dict.fromkeys((field.name for field in dataclasses.fields(LinkRates)), _is_rate))
_FILES = SavedFiles("links", "measured rates", "topology", {"topology": lambda value: True, "rates": _RATES})


def load(topology: Mapping[str, Any]) -> LinkRates | None:
    """Return the saved rates of a topology, or None. A file that another user may have written is ignored, with a message in the log."""
    return _FILES.load(topology, _parse)


def save(topology: Mapping[str, Any], rates: LinkRates) -> None:
    """Write the rates of a topology. If that fails, the next Buffer measures again."""
    _FILES.save(topology, {"rates": dataclasses.asdict(rates)})


def _parse(document: dict[str, Any]) -> LinkRates:
    return LinkRates(**{name: float(value) for name, value in document["rates"].items()})
