"""Read figures of other systems or of earlier results, and compare ours with them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import EPConfigError
from .checks import NUM_RANKS, NUMERAL, SIZES, TEXT, TIME_US, Either, Fields, InvalidValue, Names, check, check_problem, plain
from .results import Row, Sizes, fp8_or_bf16, low_latency_rows, on_gpu, read, read_json, throughput_rows

_ROUTING = re.compile("_(known|unknown|worst)$")


class Point(NamedTuple):
    """Time and bandwidth of one work."""

    us: float
    remote_gb_s: float


@dataclass(frozen=True)
class Reference:
    """Figures of another system, or of an earlier result, to compare with."""

    name: str
    where: str
    """Machine, date and boundary of the measurement, as the file gives them."""
    sizes: Sizes
    throughput: Mapping[tuple[str, int, int], Point] = field(default_factory=dict)
    """By work, tokens and SMs."""
    low_latency: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """Microseconds by part (dispatch_fp8, dispatch_bf16, combine, both_fp8, both_bf16) and tokens."""


_PEERS_PROBLEM = {"num_ranks": 8, "settings": {"hidden": 7168, "topk": 8, "experts": 256}}
"""The problem of a file of references that has no `num_ranks` and `settings`."""

_FILE = Fields(
    {
        **dict.fromkeys(("machine", "date", "boundary"), TEXT),
        "systems": Names(
            TEXT,
            Fields(
                {},
                {
                    "throughput_us": Names(NUMERAL, Names(TEXT, Either(dict, Names(NUMERAL, TIME_US), TIME_US))),
                    "low_latency_us": Names(NUMERAL, Names(TEXT, TIME_US)),
                },
            ),
        ),
    },
    {"num_ranks": NUM_RANKS, "settings": Fields(SIZES)},
)
"""A file of references."""


def load(path: Path) -> list[Reference]:
    """Read figures to compare with: a result of these benchmarks, or a file of references (`bench/reference/*.json`).

    Raise EPConfigError if the file cannot be read or is of another type.
    """
    found = read_json(path)
    if "rows" in found:
        return [_our_figures(read(path))]
    problem = {**_PEERS_PROBLEM, **found}
    try:
        plain(found, "file")
        check(found, _FILE, "file")
        check_problem(problem["num_ranks"], problem["settings"])
    except InvalidValue as error:
        raise EPConfigError(
            f"{path}: {error}. Pass a result of these benchmarks, or a file of references like bench/reference/h200x8_peers.json."
        ) from None
    where, sizes = f"{found['machine']}, {found['date']}: {found['boundary']}", Sizes.of(problem)
    return [_peer_figures(name, where, sizes, entry) for name, entry in found["systems"].items()]


def low_latency_parts(result: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """Return microseconds by part (as in `Reference.low_latency`) and tokens: of a call in a graph, or of a plain call without a GPU."""
    kind, rows = fp8_or_bf16(result), low_latency_rows(result)
    names = ("graph_dispatch_us", "graph_combine_us", "graph_both_us")
    if not on_gpu(result):
        names = ("host_dispatch_us", "host_combine_us", "call_us")
    parts = (f"dispatch_{kind}", "combine", f"both_{kind}")
    return {part: {row.tokens: getattr(row, name) for row in rows} for part, name in zip(parts, names, strict=True)}


def _our_figures(result: Mapping[str, Any]) -> Reference:
    name = f"commit {(result['commit'].get('id') or 'unknown')[:12]}"
    where = f"{result['num_ranks']} x {result['machine']}, {result['date']}: {result['boundary']}"
    throughput = {(row.work, row.tokens, row.sms): Point(row.us, row.remote_gb_s) for row in throughput_rows(result)}
    parts = low_latency_parts(result).items() if low_latency_rows(result) else ()
    low_latency = {(part, tokens): us for part, by_tokens in parts for tokens, us in by_tokens.items() if us is not None}
    return Reference(name, where, Sizes.of(result), throughput, low_latency)


def _peer_figures(name: str, where: str, sizes: Sizes, entry: Mapping[str, Any]) -> Reference:
    """Convert the figures of one system. Works that these benchmarks do not measure stay, and pair with no row."""
    throughput = {}
    for tokens, works in entry.get("throughput_us", {}).items():
        for work, value in works.items():
            named = re.fullmatch(r"(.+)_([1-9][0-9]{0,8})sm", work)
            by_sms = value if isinstance(value, dict) else {named[2]: value} if named else {}
            key = work if isinstance(value, dict) or not named else named[1]
            for sms, us in by_sms.items():
                throughput[key, int(tokens), int(sms)] = Point(us, sizes.remote_bytes(key, int(tokens)) / us / 1e3)
    low_latency = {
        (part.replace("graph_both", "both_fp8"), int(tokens)): us
        for tokens, parts in entry.get("low_latency_us", {}).items()
        for part, us in parts.items()
    }
    return Reference(name, where, sizes, throughput, low_latency)


def is_shown(result: Mapping[str, Any], reference: Reference) -> bool:
    """Tell whether a picture or table shows a figure of this reference next to one of the result."""
    if low_latency_rows(result):
        return any(part in low_latency_parts(result) for part, _ in reference.low_latency)
    panels = {(_ROUTING.sub("", row.work), row.tokens) for row in throughput_rows(result)}
    return any((_ROUTING.sub("", work), tokens) in panels for work, tokens, _ in reference.throughput)


class Pair(NamedTuple):
    """The same work of two systems."""

    work: str
    tokens: int
    sms: int | str
    """ "best": the best of each side at any number of SMs."""
    ours: Point
    theirs: Point

    def ratio(self, same_problem: bool) -> str:
        """Divide their time by ours, or our remote bandwidth by theirs if the problems differ. "-": no bytes cross a link."""
        if same_problem:
            return f"{self.theirs.us / self.ours.us:.2f}"
        return f"{self.ours.remote_gb_s / self.theirs.remote_gb_s:.2f}" if self.theirs.remote_gb_s else "-"


def pair_rows(rows: Iterable[Row], theirs: Mapping[tuple[str, int, int], Point]) -> list[Pair]:
    """Pair our rows with those of another system, for equal numbers of SMs and for the best number of each side."""
    ours = {(row.work, row.tokens, row.sms): Point(row.us, row.remote_gb_s) for row in rows}
    pairs = [Pair(*key, point, theirs[key]) for key, point in ours.items() if key in theirs]
    for work, tokens in dict.fromkeys(key[:2] for key in ours):
        mine, best = (min((p for key, p in side.items() if key[:2] == (work, tokens)), default=None) for side in (ours, theirs))
        if mine is not None and best is not None:
            pairs.append(Pair(work, tokens, "best", mine, best))
    return sorted(pairs, key=lambda pair: pair[:2])


def ratio_note(sizes: Sizes, reference: Reference) -> str:
    """Explain the ratio of a comparison."""
    if other := difference_note(sizes, reference):
        return f"Ratio: of remote bandwidth, above 1 this run is faster. {other}"
    return "Ratio: of times, above 1 this run is faster."


def difference_note(sizes: Sizes, reference: Reference) -> str:
    """Name the differences between the measured problems. Empty: there are none."""
    different = [
        f"{name} {theirs} (here {ours})"
        for name, ours, theirs in zip(("ranks", "hidden", "top-k", "experts"), sizes, reference.sizes, strict=True)
        if ours != theirs
    ]
    return f"Another problem was measured there, so times do not compare: {', '.join(different)}." if different else ""
