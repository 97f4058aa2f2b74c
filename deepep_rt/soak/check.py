"""Compare arrays of a soak run, and describe differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from .arrays import Arrays

MOST_REPORTED = 8
"""Mismatches that one rank reports."""

_MOST_PENDING = 256


@dataclass(frozen=True)
class Mismatch:
    """An array that differs from the expected one."""

    rank: int
    round: int
    call: str
    array: str
    expected: str  # bytes in hexadecimal, or a value
    found: str
    bytes: int = 0  # of the compared piece
    differing_bytes: int = 0
    first_byte: int = 0  # in the array
    shown_from: int = 0  # the byte with which `expected` and `found` begin
    row: str = ""  # the row of the first differing byte
    seen_in_round: int = 0  # later than `round` for a result that was kept

    def described(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Pending:
    """A comparison that the GPU may not have finished."""

    place: tuple[int, str, str, int]  # round, call, array, round of the check
    rows: np.ndarray  # compared rows of the array
    first: int  # number of the first of them among the rows that are defined
    num_bytes: int
    row_bytes: int
    note: Callable[[int], str] | None
    outcome: Any


class Checker:
    """Compare arrays and collect differences. `settle` waits for the comparisons."""

    def __init__(self, arrays: Arrays, rank: int) -> None:
        self.arrays, self.rank = arrays, rank
        self.mismatches: list[Mismatch] = []
        self.num_bytes = 0
        self.now = 0  # the current round
        self._pending: list[_Pending] = []

    def value(self, made_in: int, call: str, name: str, got: Any, want: Any) -> None:
        """Compare values of the host, such as shapes, counts and None."""
        if got != want:
            self._report(Mismatch(self.rank, made_in, call, name, repr(want), repr(got), seen_in_round=self.now))

    def array(self, made_in: int, call: str, name: str, got: Any, want: np.ndarray) -> None:
        """Compare shape, type and bytes of a small array with one of the host."""
        if got is None:
            self.value(made_in, call, name, got, "an array")
            return
        self.value(made_in, call, f"{name}.shape", tuple(got.shape), want.shape)
        self.value(made_in, call, f"{name}.dtype", np.dtype(got.dtype).name, want.dtype.name)
        if tuple(got.shape) == want.shape and got.dtype == want.dtype:
            row_bytes, rows = want.nbytes // max(len(want), 1), (np.arange(len(want)), 0)
            self._compare(made_in, call, name, got, self.arrays.put(np.ascontiguousarray(want)), rows, row_bytes, None)

    def rows(
        self,
        made_in: int,
        call: str,
        name: str,
        got: Any,
        shape: tuple[int, ...],
        dtype: str,
        keys: np.ndarray,
        make: Callable[[np.ndarray], Any],
        note: Callable[[int], str] | None = None,
    ) -> None:
        """Compare the first rows of a large array with generated ones, chunk by chunk.

        The round `made_in` made the array. `keys` has a key for each defined row, from which `make` generates it. Further rows of `got` are
        undefined. `note` describes a row.
        """
        if got is None:
            self.value(made_in, call, name, got, "an array")
            return
        self.value(made_in, call, f"{name}.shape", tuple(got.shape), shape)
        self.value(made_in, call, f"{name}.dtype", np.dtype(got.dtype).name, dtype)
        if tuple(got.shape) == shape and np.dtype(got.dtype).name == dtype:
            self.raw_rows(made_in, call, name, self.arrays.rows(got), keys, make, note)

    def raw_rows(
        self,
        made_in: int,
        call: str,
        name: str,
        got: Any,
        keys: np.ndarray,
        make: Callable[[np.ndarray], Any],
        note: Callable[[int], str] | None = None,
        at: np.ndarray | None = None,
    ) -> None:
        """Compare `[rows, bytes]` uint8 as in `rows`. `at`: the defined rows of `got`. None: the first ones."""
        row_bytes = got.shape[1]
        for part in self.arrays.chunks(len(keys), row_bytes):
            found = got[part] if at is None else self.arrays.gather(got, at[part])
            rows = np.arange(part.start, part.stop) if at is None else at[part]
            self._compare(made_in, call, name, found, make(keys[part]), (rows, part.start), row_bytes, note)

    def forget(self, number: int) -> None:
        """Drop the mismatches of a round."""
        self.mismatches = [found for found in self.mismatches if found.seen_in_round != number]

    def settle(self) -> None:
        """Wait for the GPU, and report the differences of all comparisons."""
        pending, self._pending = self._pending, []
        for one in pending:
            numbers = one.outcome.get() if self.arrays.on_gpu else one.outcome
            if not numbers[0]:
                continue
            (count, first, start), shown = numbers[:3].tolist(), numbers[3:].astype(np.uint8)
            made_in, call, name, seen = one.place
            number, byte = divmod(first, max(one.row_bytes, 1))
            row = int(one.rows[number])
            where = f"row {row}, byte {byte}" + (f", {one.note(one.first + number)}" if one.note else "")
            at = row * one.row_bytes + byte
            half = len(shown) // 2
            end = max(0, min(half, one.num_bytes - start))
            self._report(
                Mismatch(
                    self.rank,
                    made_in,
                    call,
                    name,
                    expected=shown[:half][:end].tobytes().hex(),
                    found=shown[half:][:end].tobytes().hex(),
                    bytes=one.num_bytes,
                    differing_bytes=count,
                    first_byte=at,
                    shown_from=at - (first - start),
                    row=where,
                    seen_in_round=seen,
                )
            )

    def _compare(
        self,
        made_in: int,
        call: str,
        name: str,
        got: Any,
        want: Any,
        rows: tuple[np.ndarray, int],
        row_bytes: int,
        note: Callable[[int], str] | None,
    ) -> None:
        got, want = self.arrays.raw(got), self.arrays.raw(want)
        self.num_bytes += len(got)
        outcome = self.arrays.difference(got, want)
        if outcome is not None:
            place = made_in, call, name, self.now
            self._pending.append(_Pending(place, *rows, len(got), row_bytes, note, outcome))
            if len(self._pending) >= _MOST_PENDING:
                self.settle()

    def _report(self, found: Mismatch) -> None:
        if len(self.mismatches) < MOST_REPORTED:
            self.mismatches.append(found)
