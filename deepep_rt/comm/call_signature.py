"""Signature of a call that all ranks must agree on, as numbers for the ranks to compare and as text for messages."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..arrays.compressed_rows import COMPRESSIONS
from ..arrays.dtypes import DTYPES
from ..config import MAX_ALIGNMENT, MAX_ROW_BYTES, MAX_SCALE_BYTES, ROW_ALIGNMENT

CALL_KINDS = (
    "dispatch",
    "dispatch with a handle",
    "combine",
    "low_latency_dispatch",
    "low_latency_combine",
    "low_latency_combine with allow_multiple_reduction=False",
    "dispatch with layout='expert'",
    "combine with weighted=True",
    "combine with reduce='topk'",
    "combine with weighted=True and reduce='topk'",
    *(f"combine with {weighted}compress={name!r}" for weighted in ("", "weighted=True and ") for name in COMPRESSIONS),
    *(f"low_latency_combine with compress={name!r}" for name in COMPRESSIONS),
    "dispatch with layout='expert' and signals=True",
    "dispatch with a handle and signals=True",
)

_ROW_BYTES = "bytes of a row of x"
_DTYPES = (None, *DTYPES)  # None: the caller did not pass the array
_FIELDS: tuple[tuple[str, Sequence[Any]], ...] = (  # name, and its values; the number of a value is its position
    ("kind", CALL_KINDS),
    ("x", _DTYPES),
    ("topk_idx", (None, "int32", "int64")),
    ("topk_weights", (None, "float32")),
    ("x_scales", _DTYPES),
    ("round_scale", (False, True)),
    ("zero_padding", (False, True)),
    ("scales_layout", ("row", "column")),
    (_ROW_BYTES, range(0, MAX_ROW_BYTES + 1, ROW_ALIGNMENT)),
    ("bytes of a row of x_scales", range(MAX_SCALE_BYTES + 1)),
    ("expert_alignment", range(1, MAX_ALIGNMENT + 1)),
)
_HANDLE = "handle (number of its dispatch)"
_STEP = "step (a rank did not end its last call)"
_MAX_TOKENS = "num_max_tokens"
_REMEDIES = {  # by field, if it is no array or argument
    "kind": "Make the same calls in the same order on every rank",
    _HANDLE: "Pass the handle of the same dispatch on every rank",
    _STEP: "Make a new Buffer on all ranks",
}
NUM_FIELDS = len(_FIELDS) + 1  # with the number of the handle
_SIZES = tuple(len(values) for _, values in _FIELDS)


class Signature(NamedTuple):
    """What all ranks must give the same in a call. The kernels of low-latency combines compare 32 bits, so these calls leave out the last
    three fields. A low-latency dispatch that converts its rows leaves out their bytes.
    """

    kind: str
    x: str
    topk_idx: str | None = None
    topk_weights: str | None = None
    x_scales: str | None = None
    round_scale: bool = False
    zero_padding: bool = False
    scales_layout: str = "row"
    row_bytes: int = 0
    scale_bytes: int = 0
    alignment_or_step: int = 1
    """The `expert_alignment` of a dispatch, or `num_max_tokens` of a low-latency dispatch. If a combine takes several launches, the number
    of the launch, from 1."""


def dispatch_kind(layout: str, has_handle: bool, signals: bool = False) -> str:
    """Return the kind of a throughput dispatch with this layout, which a handle has already."""
    if signals:
        return "dispatch with a handle and signals=True" if has_handle else "dispatch with layout='expert' and signals=True"
    return "dispatch with a handle" if has_handle else "dispatch" if layout == "token" else "dispatch with layout='expert'"


@functools.lru_cache
def combine_kind(weighted: bool, reduce: str, compress: str | None) -> str:
    """Return the kind of a throughput combine with these arguments."""
    given = {"weighted=True": weighted, "reduce='topk'": reduce == "topk", f"compress={compress!r}": compress is not None}
    arguments = [text for text, is_given in given.items() if is_given]
    return "combine with " + " and ".join(arguments) if arguments else "combine"


def low_latency_combine_kind(reduce_early: bool, compress: str | None) -> str:
    """Return the kind of a low-latency combine with these arguments."""
    if not reduce_early:
        return "low_latency_combine with allow_multiple_reduction=False"
    return f"low_latency_combine with compress={compress!r}" if compress else "low_latency_combine"


@functools.lru_cache
def fields(signature: Signature) -> tuple[int, ...]:
    """Return the numbers of a signature, without the handle's."""
    return tuple(values.index(value) for (_, values), value in zip(_FIELDS, signature, strict=True))


@functools.lru_cache
def pack(signature: Signature) -> int:
    """Return a signature as one number of 64 bits, for kernels."""
    number, unit = 0, 1
    for field, size in zip(fields(signature), _SIZES, strict=True):
        number += field * unit
        unit *= size
    return number


def unpack(number: int) -> tuple[int, ...]:
    """Return the fields of a packed signature."""
    found = []
    for size in _SIZES:
        number, field = divmod(number, size)
        found.append(field)
    return tuple(found)


def is_low_latency(signature: Sequence[int]) -> bool:
    """Return whether a signature is that of a low-latency call."""
    return CALL_KINDS[signature[0]].startswith("low_latency")


def describe_mismatch(signatures: Mapping[int, Sequence[int]]) -> str | None:
    """Return what the ranks disagree on, with the value of each rank, or None if they agree.

    `signatures` are by rank: the fields of its call and the number of its handle.
    """
    for i, (name, values) in enumerate((*_FIELDS, (_HANDLE, ()))):
        numbers = {rank: int(signature[i]) for rank, signature in signatures.items()}
        if len(set(numbers.values())) > 1:
            call = CALL_KINDS[next(iter(signatures.values()))[0]]  # the same on all ranks, unless it is what differs
            if name == "expert_alignment" and not call.startswith("dispatch"):
                name = _STEP if call.startswith("combine") else _MAX_TOKENS
            said = {0: "converted by the call"} if name == _ROW_BYTES and call == "low_latency_dispatch" else {}
            listed = ", ".join(
                f"rank {rank}: {said.get(number, values[number] if values else number)}" for rank, number in numbers.items()
            )
            is_cast = name in ("x", "x_scales") and _may_be_cast(signatures)
            when = ", after use_fp8 and use_ue8m0 have taken effect" if is_cast else ""
            remedy = _REMEDIES.get(name, f"Pass arrays of the same dtypes, and the same arguments, to {call} on every rank")
            text = f"the ranks disagree on the {name} of this call{when}: {listed}; expected the same on all ranks. {remedy}"
            return text if name == "kind" else f"{call}: {text}"
    return None


def _may_be_cast(signatures: Mapping[int, Sequence[int]]) -> bool:
    """Return whether these calls may have converted their rows."""
    return any(is_low_latency(signature) or _DTYPES[signature[1]] == "float8_e4m3fn" for signature in signatures.values())
