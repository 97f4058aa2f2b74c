"""Compress rows of channels for the way back of a combine, in NumPy, to the same bits as on GPUs (cuda_src/common/compressed.cuh).

Groups of 128 channels share a scale, a float32 that is a power of two. A channel is the product of a small number and the scale.

- "fp8": the small number is an e4m3fn number, a byte.
- "log10": the small number has a sign and a code of 9 bits. The size of the number, plus 2, is a bfloat16 from 2 to 31.75, and the code
  is the lower bits of this bfloat16. So steps are those of a logarithm, 128 in each octave of the size plus 2. This is the rule of the
  mu-law.

A compressed row has 16 bytes for each 16 channels, with "log10" then a word for each 16 channels, and then the scales. 16 channels of
"log10" are 8 pairs of 16 bits: the sign in bit 15, the code in bits 0 to 8. The first five pairs lie in the four words and in the fifth.
The other three fill the bits that the five leave free (`_PLACES`), with their signs in bit 9.

No word of a row has all bits set, because low-latency calls mark empty memory with it. Code 511 is therefore not used.
"""

from __future__ import annotations

import functools

import numpy as np

from .dtypes import FP8_GROUP, encode_e4m3

COMPRESSIONS = ("fp8", "log10")
"""Formats of rows on their way."""

LOW_LATENCY_CHANNELS = 512
"""Low-latency calls compress rows of a multiple of it: their warps convert so many channels at a time."""

LEAST_AMAX = np.float32(2.0**-100)
"""The least largest channel of a group that a scale is made for. Smaller groups lose precision, and scales stay normal numbers."""

SCALE_RULES = {
    "fp8": (0x1FFFFF, -8),  # the largest number, 448, is 1.75 * 2**8
    "log10": (0x117FFF, -4),  # 31.75 is the nearest bfloat16, of even code, up to 31.8125, which is 2 + 1.86328125 * 2**4
}
"""How the bits of the largest channel of a group, a float32, become the scale. Add the first number, so that a channel that would round to
more than the largest small number gets the next exponent. Add the second number to the exponent, and drop the mantissa."""

_LOG10_CHANNELS = 16  # whose numbers share words
_PLACES = (  # pair, word, shift to the left, and the bits of the word
    (5, 0, 9, 0x7E00), (5, 1, 5, 0x7800), (6, 1, 9, 0x0600), (6, 2, 7, 0x7E00), (6, 3, 5, 0x6000), (7, 3, 9, 0x1E00), (7, 4, 5, 0x7E00),
)  # fmt: skip
_NUMBER, _CODE, _SIGN, _TWO = (np.uint16(bits) for bits in (0x81FF, 0x01FF, 0x8000, 0x4000))


def compressed_row_bytes(hidden: int, compression: str) -> int:
    """Return the bytes of a compressed row, a multiple of 16. `hidden` is a multiple of 128."""
    used = hidden + (hidden // 4 if compression == "log10" else 0) + 4 * (hidden // FP8_GROUP)
    return -(-used // 16) * 16


def compress(rows: np.ndarray, compression: str) -> np.ndarray:
    """Compress `[n, hidden]` float32, `hidden` a multiple of 128, to `[n, compressed_row_bytes]` uint8.

    A group becomes NaN if one of its channels is NaN, infinite, or more than 1.75 * 2**127.
    """
    groups = np.ascontiguousarray(rows).reshape(len(rows), rows.shape[1] // FP8_GROUP, FP8_GROUP)
    scales, inverses = _scales(groups, compression)
    with np.errstate(all="ignore"):
        scaled = (groups * inverses[:, :, None]).reshape(rows.shape)
    parts = (encode_e4m3(scaled), scales) if compression == "fp8" else (*_pack(_to_log10(scaled)), scales)
    packed = np.zeros((len(rows), compressed_row_bytes(rows.shape[1], compression)), np.uint8)
    start = 0
    for part in parts:
        num_bytes = part.nbytes // max(len(rows), 1)
        held = np.ascontiguousarray(part).reshape(len(rows), num_bytes // part.itemsize)
        packed[:, start : start + num_bytes] = held.view(np.uint8)
        start += num_bytes
    return packed


def expand(packed: np.ndarray, hidden: int, compression: str) -> np.ndarray:
    """Convert compressed rows, `[n, compressed_row_bytes]` uint8, to float32, `[n, hidden]`."""
    start = hidden + (hidden // 4 if compression == "log10" else 0)
    scales = np.ascontiguousarray(packed[:, start : start + 4 * (hidden // FP8_GROUP)]).view(np.float32)
    if compression == "fp8":
        numbers = _e4m3_numbers()[packed[:, :hidden]]
    else:
        numbers = _from_log10(_unpack(packed[:, :hidden], packed[:, hidden:start]))
    with np.errstate(all="ignore"):
        return (numbers.reshape(len(packed), hidden // FP8_GROUP, FP8_GROUP) * scales[:, :, None]).reshape(len(packed), hidden)


def _scales(groups: np.ndarray, compression: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the scale of each group and its inverse, or NaN."""
    round_up, more = SCALE_RULES[compression]
    largest = np.maximum((groups.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(axis=2), LEAST_AMAX.view(np.uint32))
    bits = largest + np.uint32(round_up) & ~np.uint32(0x7FFFFF)  # NaN reaches the sign
    fits = bits < np.uint32(0x7F800000)
    scales = np.where(fits, bits + np.uint32(more << 23 & 0xFFFFFFFF), np.uint32(0x7FC00000))
    inverses = np.where(fits, np.uint32(254 << 23) - scales, np.uint32(0x7FC00000))
    return scales.astype(np.uint32).view(np.float32), inverses.astype(np.uint32).view(np.float32)


def _to_log10(scaled: np.ndarray) -> np.ndarray:
    """Return signs and codes, `[n, hidden]` uint16. The sign of NaN is zero."""
    sums = (np.abs(scaled) + np.float32(2)).view(np.uint32)
    sums += np.uint32(0x7FFF) + (sums >> 16 & 1)  # to the nearest bfloat16, ties to even
    codes = (sums >> 16).astype(np.uint16) & _CODE
    signs = (np.ascontiguousarray(scaled).view(np.uint32) >> 16).astype(np.uint16) & _SIGN
    return np.where(np.isnan(scaled), _CODE, codes | signs)


def _from_log10(numbers: np.ndarray) -> np.ndarray:
    sizes = ((numbers & _CODE | _TWO).astype(np.uint32) << 16).view(np.float32) - np.float32(2)
    return np.where(numbers & _SIGN, -sizes, sizes)


def _pack(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first four words and the fifth word of each 16 channels."""
    pairs = numbers.reshape(len(numbers), numbers.shape[1] // _LOG10_CHANNELS, _LOG10_CHANNELS // 2, 2)
    words = pairs[:, :, :5].copy()
    close = pairs & _CODE | pairs >> np.uint16(6) & np.uint16(0x200)
    for pair, word, shift, bits in _PLACES:
        words[:, :, word] |= close[:, :, pair] << np.uint16(shift) & np.uint16(bits)
    return words[:, :, :4], words[:, :, 4]


def _unpack(first: np.ndarray, fifth: np.ndarray) -> np.ndarray:
    """Return the numbers of `_pack`, `[n, hidden]` uint16."""
    count = first.shape[1] // _LOG10_CHANNELS
    parts = [np.ascontiguousarray(part).view(np.uint16) for part in (first, fifth)]
    words = np.concatenate([part.reshape(len(first), count, part.shape[1] // count // 2, 2) for part in parts], axis=2)
    pairs = np.zeros((*words.shape[:2], _LOG10_CHANNELS // 2, 2), np.uint16)
    pairs[:, :, :5] = words & _NUMBER
    for pair, word, shift, bits in _PLACES:
        pairs[:, :, pair] |= (words[:, :, word] & np.uint16(bits)) >> np.uint16(shift)
    pairs[:, :, 5:] = pairs[:, :, 5:] & _CODE | pairs[:, :, 5:] << np.uint16(6) & _SIGN
    return pairs.reshape(first.shape)


@functools.cache
def _e4m3_numbers() -> np.ndarray:
    """Return the number of each e4m3fn code, `[256]` float32."""
    codes = np.arange(256)
    exponents, mantissas = codes >> 3 & 15, codes & 7
    sizes = np.where(exponents == 0, mantissas * 2.0**-9, (8 + mantissas) * 2.0 ** (exponents - 10.0))
    return np.where(codes & 0x7F == 0x7F, np.nan, np.where(codes & 0x80, -sizes, sizes)).astype(np.float32)
