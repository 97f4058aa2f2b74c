"""Choices of `Buffer.autotune`, kept on disk next to the compiled kernels. A later Buffer of the same sizes on the same GPUs uses them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .. import _env
from .._documents import Check, has_fields, is_count, is_flag, is_in, is_list_of, is_seconds, is_text
from .._version import __version__
from ..config import MAX_SMS, Config
from ..errors import EPConfigError
from ..jit.store import SavedFiles
from ..kernels.source import sources_of
from ..kernels.table import KERNELS
from ..kernels.tuning import is_possible
from ..tuned import CALLS, CopyShape, Tuning, TuningResult

_SIZES = ("num_ranks", "num_max_tokens_per_rank", "hidden", "dtype", "num_topk", "num_experts", "statistics")
_KEY: dict[str, Check] = {
    **dict.fromkeys(_SIZES, is_in(1, 1 << 20)),
    "dtype": is_text,
    "statistics": is_flag,
    "ranks_per_node": is_in(1, 1 << 20),
    "between_nodes": is_list_of(is_text),
    "gpus": is_list_of(is_text),
    "kernels": is_text,
}
_SHAPE = has_fields(dict.fromkeys((field.name for field in dataclasses.fields(CopyShape)), is_in(1, 1 << 20)))


def _is_shape_or_none(value: Any) -> bool:
    return value is None or _SHAPE(value)


_NUM_SMS = is_in(1, MAX_SMS)
_ROW: dict[str, Check] = {"call": is_text, "num_sms": _NUM_SMS, "shape": _is_shape_or_none, "us": is_seconds}
_FIELDS: dict[str, Check] = {
    "buffer": has_fields(_KEY),
    "tuning": has_fields({"num_sms": _NUM_SMS, **dict.fromkeys(CALLS, _is_shape_or_none)}),
    "num_tokens": is_count,
    "dtype_of_rows": is_text,
    "rows": is_list_of(has_fields(_ROW)),
    "created": is_text,
}
FILES = SavedFiles("tunings", "stored tunings", "buffer", _FIELDS)


def key_of(config: Config, gpus: Sequence[str]) -> dict[str, Any]:
    """Return everything that a choice depends on: sizes, the path between nodes, and name and target of each rank's GPU."""
    return {
        **{name: getattr(config, name) for name in _SIZES},
        "ranks_per_node": config.node_size,
        "between_nodes": [config.transport, config.path] if config.has_network else [],
        "gpus": list(gpus),
        "kernels": _version_of_kernels(config.has_network),
    }


def load(key: Mapping[str, Any], config: Config) -> Tuning | None:
    """Return the stored choice for a Buffer, or None. `DEEPEP_RT_TUNING=0` ignores all of them.

    With `DEEPEP_RT_ASSERT_CACHED=1`, kernels of other shapes may not be compiled, so only the number of SMs counts.
    """
    try:
        if not _env.tuning():
            return None
        is_complete = _env.assert_cached()
    except EPConfigError:  # the variable is wrong; the Buffer says so
        return None
    tuning = FILES.load(key, functools.partial(_parse, config=config))
    return Tuning(tuning.num_sms) if tuning is not None and is_complete else tuning


def save(key: Mapping[str, Any], result: TuningResult) -> Path | None:
    """Write a choice. Return the file, or None if it cannot be written."""
    content = {
        "tuning": plain(result.chosen),
        "num_tokens": result.num_tokens,
        "dtype_of_rows": result.dtype,
        "rows": [dataclasses.asdict(row) for row in result.rows],
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    return FILES.save(key, content)


def is_current(key: Mapping[str, Any]) -> bool:
    """Return whether a stored key is of this version of the kernels, so that a Buffer may use its choice."""
    return key["kernels"] == _version_of_kernels(bool(key["between_nodes"]))


def plain(tuning: Tuning) -> dict[str, Any]:
    """Return a choice as values that files and communicators can hold."""
    return dataclasses.asdict(tuning)


def of_plain(found: Mapping[str, Any]) -> Tuning:
    """Return the choice that `plain` made values of."""
    return Tuning(found["num_sms"], **{call: None if found[call] is None else CopyShape(**found[call]) for call in CALLS})


def _parse(document: dict[str, Any], config: Config) -> Tuning:
    tuning = of_plain(document["tuning"])
    if config.has_network and tuning.shapes:
        raise ValueError("kernels over nodes have no shapes")
    if not all(is_possible(call, shape, config) for call, shape in tuning.shapes.items()):
        raise ValueError("a shape is none of those that are tried")
    return tuning


@functools.cache
def _version_of_kernels(over_nodes: bool) -> str:
    """Return a digest of the sources of the tuned kernels. A choice for others may be a bad one."""
    names = [f"{call}_nodes" if over_nodes else call for call in CALLS]
    texts = {name: sources_of(KERNELS[name], None) for name in names}
    return hashlib.sha256(json.dumps([__version__, texts], sort_keys=True).encode()).hexdigest()[:16]
