"""What `Buffer.autotune` measured and chose: the settings of dispatch and combine that decide their speed and nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

WITHIN = 0.02
"""A choice is at most this much slower than the fastest candidate."""

_LIMIT = 0.015  # that a choice may cost by the measured times. The rest of `WITHIN` is for their errors
_SHAPE_LIMIT = 0.005  # of it, for a usual shape instead of a faster one

CALLS = ("dispatch", "combine")
"""The kernels that are tuned."""


@dataclass(frozen=True)
class CopyShape:
    """How the copy warps of a block move rows with bulk copies. No result depends on it, and ranks may differ in it.

    Args:
        warps: Copy warps of a block.
        stages: Copies that each warp has memory for, half of them on their way in and half on their way out.
        copy_bytes: The most bytes of one copy, unless a single row is larger.

    Example:
        >>> print(CopyShape(warps=2, stages=6, copy_bytes=16384))
        2 warps, 6 stages, 16384 bytes
    """

    warps: int
    stages: int
    copy_bytes: int

    def __str__(self) -> str:
        return f"{self.warps} warp{'s' if self.warps > 1 else ''}, {self.stages} stages, {self.copy_bytes} bytes"


@dataclass(frozen=True)
class Tuning:
    """The chosen settings.

    Args:
        num_sms: SMs of dispatch and combine.
        dispatch: The shape of dispatch. None: the usual one.
        combine: The shape of combine. None: the usual one.

    Example:
        >>> print(Tuning(16, None, CopyShape(warps=3, stages=5, copy_bytes=14336)))
        16 SMs; dispatch: usual; combine: 3 warps, 5 stages, 14336 bytes
    """

    num_sms: int
    dispatch: CopyShape | None = None
    combine: CopyShape | None = None

    @property
    def shapes(self) -> dict[str, CopyShape]:
        """The shapes that are not the usual ones, by kernel."""
        both = zip(CALLS, (self.dispatch, self.combine), strict=True)
        return {call: shape for call, shape in both if shape is not None}

    def __str__(self) -> str:
        return f"{self.num_sms} SMs; dispatch: {self.dispatch or 'usual'}; combine: {self.combine or 'usual'}"


@dataclass(frozen=True)
class TuningRow:
    """The time of one candidate.

    Args:
        call: "dispatch" or "combine".
        num_sms: Its SMs.
        shape: Its shape. None: the usual one.
        us: Microseconds of a call: median of the rounds, slowest rank of each.

    Example:
        >>> row = buffer.autotune().rows[0]
        >>> row.call, row.num_sms, row.us
        ('dispatch', 8, 512.3)
    """

    call: str
    num_sms: int
    shape: CopyShape | None
    us: float


@dataclass(frozen=True)
class TuningResult:
    """What `Buffer.autotune` returns. It prints as a table, and is the same on all ranks.

    Args:
        chosen: The settings for later Buffers.
        rows: All candidates that were measured.
        num_tokens: Tokens of each rank in the measurement.
        dtype: Element type of the dispatched rows.
        seconds: Time that the measurement took.
        file: The file with the choice on the host of rank 0. None: it was not saved.

    Example:
        >>> tuned = buffer.autotune()
        >>> tuned.chosen.num_sms
        >>> print(tuned)
    """

    chosen: Tuning
    rows: tuple[TuningRow, ...]
    num_tokens: int
    dtype: str
    seconds: float
    file: str | None = None

    def __str__(self) -> str:
        best = {num_sms: choice_for(self.rows, num_sms) for num_sms in _sms_of(self.rows)}
        table = [("SMs", "dispatch", "us", "combine", "us", "sum", "")]
        for num_sms, picked in best.items():
            cells: list[str] = []
            for call in CALLS:
                row = picked.get(call)
                cells += [str(row.shape or "usual"), f"{row.us:.1f}"] if row else ["-", "-"]
            total = f"{sum(row.us for row in picked.values()):.1f}"
            table.append((str(num_sms), *cells, total, "chosen" if num_sms == self.chosen.num_sms else ""))  # type: ignore[arg-type]
        shapes = [("call", "shape", "us", "")]
        for row in sorted(self.rows, key=lambda row: (row.call != "dispatch", row.us)):
            if row.num_sms == self.chosen.num_sms:
                is_chosen = row.shape == getattr(self.chosen, row.call)
                shapes.append((row.call, str(row.shape or "usual"), f"{row.us:.1f}", "chosen" if is_chosen else ""))
        head = f"{self.num_tokens} tokens of {self.dtype} a rank, measured in {self.seconds:.0f} s"
        parts = (head, _table(table), f"Shapes with {self.chosen.num_sms} SMs:", _table(shapes))
        return "\n".join([*parts, *([f"saved in {self.file}"] if self.file else [])])


def choose(rows: Sequence[TuningRow]) -> Tuning:
    """Choose the fewest SMs whose dispatch and combine together take hardly longer than the fastest candidate, and their shapes.

    SMs that are left free are worth something to the model.
    """
    picked = {num_sms: choice_for(rows, num_sms) for num_sms in _sms_of(rows)}
    least = min(sum(_fastest(rows, call, num_sms).us for call in calls) for num_sms, calls in picked.items())
    totals = {num_sms: sum(row.us for row in calls.values()) for num_sms, calls in picked.items()}
    num_sms = next(num_sms for num_sms, total in totals.items() if total <= (1 + _LIMIT) * least)
    return Tuning(num_sms, **{call: row.shape for call, row in picked[num_sms].items()})


def choice_for(rows: Iterable[TuningRow], num_sms: int) -> dict[str, TuningRow]:
    """Return the row of each call to take with so many SMs: the fastest, or the usual shape if it is hardly slower."""
    found = {}
    for call in CALLS:
        mine = [row for row in rows if (row.call, row.num_sms) == (call, num_sms)]
        if mine:
            fastest = min(mine, key=lambda row: row.us)
            usual = next((row for row in mine if row.shape is None), fastest)
            found[call] = usual if usual.us <= (1 + _SHAPE_LIMIT) * fastest.us else fastest
    return found


def _fastest(rows: Iterable[TuningRow], call: str, num_sms: int) -> TuningRow:
    return min((row for row in rows if (row.call, row.num_sms) == (call, num_sms)), key=lambda row: row.us)


def _sms_of(rows: Iterable[TuningRow]) -> list[int]:
    return sorted({row.num_sms for row in rows})


def _table(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)
