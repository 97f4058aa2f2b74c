"""Measured rates of links, kept on disk by topology next to the compiled kernels."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from .. import _env
from ..description import LinkRates
from ..errors import EPConfigError
from ..jit.trusted_files import Folder, objection, open_file, open_folder, open_inner, status_of

_log = logging.getLogger("deepep_rt")

FORMAT = 1
"""The version of the files. Others are ignored."""

_FOLDER, _MAX_BYTES = "links", 1 << 20


def load(topology: Mapping[str, Any]) -> LinkRates | None:
    """Return the saved rates of a topology, or None. A file that another user may have written is ignored, with a message in the log."""
    try:
        folder = _env.cache_dir()
        with open_folder(folder) as base, open_inner(_FOLDER, base) as links:
            number = open_file(_name(topology), links, os.O_RDONLY)
            with os.fdopen(number, "rb") as file:
                reason = base.objection or links.objection or objection(status_of(number), links.is_enclosed)
                text = file.read(_MAX_BYTES + 1)
    except (OSError, EPConfigError):  # there is none, or no folder for it
        return None
    rates = None if reason else _parse(text, topology)
    if rates is None:
        why = reason or "it is not one that this version wrote"
        _log.warning("measured rates: %s is ignored: %s", folder / _FOLDER / _name(topology), why)
    return rates


def save(topology: Mapping[str, Any], rates: LinkRates) -> None:
    """Write the rates of a topology. If that fails, the next Buffer measures again."""
    document = {"format": FORMAT, "topology": dict(topology), "rates": dataclasses.asdict(rates)}
    data = json.dumps(document, indent=1, sort_keys=True).encode()
    try:
        with open_folder(_env.cache_dir(), make=True) as base, open_inner(_FOLDER, base, make=True) as links:
            _replace(links, _name(topology), data)
    except (OSError, EPConfigError) as error:
        _log.info("measured rates cannot be saved: %s", error)


def _name(topology: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(dict(topology), sort_keys=True).encode()).hexdigest() + ".json"


def _parse(text: bytes, topology: Mapping[str, Any]) -> LinkRates | None:
    try:
        document = json.loads(text)
        if (document["format"], document["topology"]) != (FORMAT, json.loads(json.dumps(dict(topology)))):
            return None
        rates = LinkRates(**{name: float(value) for name, value in document["rates"].items()})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return rates if all(math.isfinite(rate) and rate > 0 for rate in dataclasses.astuple(rates)) else None


def _replace(folder: Folder, name: str, data: bytes) -> None:
    """Write a file whole. A reader sees the old content or the new one."""
    temporary = f".{secrets.token_hex(8)}.tmp"
    number = open_file(temporary, folder, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(data)
            os.fchmod(number, 0o644)
            os.replace(temporary, name, src_dir_fd=folder.number, dst_dir_fd=folder.number)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary, dir_fd=folder.number)
        raise
