"""What all ranks have to give alike in a call: as numbers that they can tell each other, and in words for people."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from ..arrays.dtypes import DTYPES

CALL_KINDS = (
    "dispatch",
    "dispatch with a handle",
    "combine",
    "low_latency_dispatch",
    "low_latency_combine",
    "low_latency_combine with allow_multiple_reduction=False",
)

_DTYPES = (None, *DTYPES)  # None: the array was not given
_FIELDS: tuple[tuple[str, Sequence[str | None] | None], ...] = (  # names, and the words that a number stands for
    ("kind", CALL_KINDS),
    ("x", _DTYPES),
    ("topk_idx", _DTYPES),
    ("topk_weights", _DTYPES),
    ("x_scales", _DTYPES),
    ("bytes of a row of x_scales", None),
    ("handle (number of its dispatch)", None),
)
NUM_FIELDS = len(_FIELDS)
_BITS = (4, 5, 5, 5, 5, 20)  # of what kernels compare as one number; the low-latency ones have room for the first 32 of them


@functools.lru_cache
def fields(
    kind: str, x: str, topk_idx: str | None, topk_weights: str | None, x_scales: str | None, scale_bytes: int = 0
) -> tuple[int, ...]:
    """A call in numbers, all but the handle's: what kind of call, and dtypes of its arrays."""
    return (CALL_KINDS.index(kind), *(_DTYPES.index(dtype) for dtype in (x, topk_idx, topk_weights, x_scales)), scale_bytes)


@functools.lru_cache
def pack(
    kind: str, x: str, topk_idx: str | None, topk_weights: str | None, x_scales: str | None = None, scale_bytes: int = 0
) -> int:
    """The same as one number."""
    number = shift = 0
    for word, bits in zip(fields(kind, x, topk_idx, topk_weights, x_scales, scale_bytes), _BITS, strict=True):
        number |= word << shift
        shift += bits
    return number


def unpack(number: int) -> tuple[int, ...]:
    """What was packed."""
    found = []
    for bits in _BITS:
        found.append(number & (1 << bits) - 1)
        number >>= bits
    return tuple(found)


def is_low_latency(call: Sequence[int]) -> bool:
    """Whether such words are of a low-latency call."""
    return CALL_KINDS[call[0]].startswith("low_latency")


def describe_mismatch(signatures: Mapping[int, Sequence[int]]) -> str | None:
    """What ranks disagree on, and who gave what; None if on nothing.

    Args:
        signatures: For some ranks, their `fields` and their handle's number.
    """
    for i, (name, meanings) in enumerate(_FIELDS):
        numbers = {rank: int(theirs[i]) for rank, theirs in signatures.items()}
        if len(set(numbers.values())) > 1:
            shown = ", ".join(f"rank {rank}: {meanings[number] if meanings else number}" for rank, number in numbers.items())
            travels = name in ("x", "x_scales") and any(is_low_latency(theirs) for theirs in signatures.values())
            why = ", as use_fp8 and use_ue8m0 make it travel" if travels else ""
            return f"the ranks disagree on the {name} of this call{why}; all must give the same. {shown}"
    return None
