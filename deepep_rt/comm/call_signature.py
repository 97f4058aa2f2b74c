"""Signature of a call that all ranks must agree on, as numbers for the ranks to compare and as text for messages."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from ..arrays.compressed_rows import COMPRESSIONS
from ..arrays.dtypes import DTYPES

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
)

_DTYPES = (None, *DTYPES)  # None: the caller did not pass the array
_FIELDS: tuple[tuple[str, Sequence[str | None] | None], ...] = (  # name, and the text of each number
    ("kind", CALL_KINDS),
    ("x", _DTYPES),
    ("topk_idx", _DTYPES),
    ("topk_weights", _DTYPES),
    ("x_scales", _DTYPES),
    ("bytes of a row of x_scales", None),
    ("handle (number of its dispatch)", None),
)
NUM_FIELDS = len(_FIELDS)
_BITS = (5, 5, 5, 5, 5, 20)  # of the fields in a packed signature; low-latency kernels have room for its lower 32 bits


def dispatch_kind(layout: str) -> str:
    """Return the kind of a throughput dispatch with this layout."""
    return "dispatch" if layout == "token" else "dispatch with layout='expert'"


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
def fields(
    kind: str, x: str, topk_idx: str | None, topk_weights: str | None, x_scales: str | None, scale_bytes: int = 0
) -> tuple[int, ...]:
    """Return the numbers of a signature, without the handle's: the kind of call, the dtypes, and the bytes of scales."""
    return (CALL_KINDS.index(kind), *(_DTYPES.index(dtype) for dtype in (x, topk_idx, topk_weights, x_scales)), scale_bytes)


@functools.lru_cache
def pack(
    kind: str, x: str, topk_idx: str | None, topk_weights: str | None, x_scales: str | None = None, scale_bytes: int = 0
) -> int:
    """Return the fields as one number, for kernels."""
    number = shift = 0
    for field, bits in zip(fields(kind, x, topk_idx, topk_weights, x_scales, scale_bytes), _BITS, strict=True):
        number |= field << shift
        shift += bits
    return number


def unpack(number: int) -> tuple[int, ...]:
    """Return the fields of a packed signature."""
    found = []
    for bits in _BITS:
        found.append(number & (1 << bits) - 1)
        number >>= bits
    return tuple(found)


def is_low_latency(signature: Sequence[int]) -> bool:
    """Return whether a signature is that of a low-latency call."""
    return CALL_KINDS[signature[0]].startswith("low_latency")


def describe_mismatch(signatures: Mapping[int, Sequence[int]]) -> str | None:
    """Return what the ranks disagree on, with the value of each rank, or None if they agree.

    Args:
        signatures: By rank, the fields of its call and the number of its handle.
    """
    for i, (name, texts) in enumerate(_FIELDS):
        values = {rank: int(signature[i]) for rank, signature in signatures.items()}
        if len(set(values.values())) > 1:
            listed = ", ".join(f"rank {rank}: {texts[value] if texts else value}" for rank, value in values.items())
            is_cast = name in ("x", "x_scales") and any(map(is_low_latency, signatures.values()))
            when = ", after use_fp8 and use_ue8m0 have taken effect" if is_cast else ""
            return f"the ranks disagree on the {name} of this call{when}; expected the same on all ranks. {listed}"
    return None
