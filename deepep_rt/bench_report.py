"""Results of the benchmarks: the file, the tables of the terminal, and other systems' figures to compare with."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import math
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.table import Table

from .errors import EPConfigError
from .screen import console

_WIDTH_OF_LOGS = 120

if TYPE_CHECKING:
    from mpi4py.MPI import Intracomm

BYTE_FORMULA = (
    "received rows (each token once for each destination rank, own rank included) x row bytes (with scales), mean over ranks; "
    "remote: the same without the rows of the own rank"
)
_PACKAGES = re.compile(
    r"deepep.rt|numpy|mpi4py|mpich|cupy.*|cuda-(python|core|bindings)|nvshmem4py.*|nvidia-(cuda-nvrtc|nvjitlink|nvshmem).*"
)


@dataclass(frozen=True)
class Row:
    """One measured point of the throughput mode. Bandwidths in GB/s (1e9 bytes)."""

    work: str  # dispatch_bf16_unknown, dispatch_fp8_known, combine_bf16...
    tokens: int
    sms: int
    us: float
    gb_s: float
    remote_gb_s: float
    host_us: float | None = None  # time of the host in a call that it does not wait for


@dataclass(frozen=True)
class LowLatencyRow:
    """One number of tokens in the low-latency mode; microseconds. None: not measured without a GPU."""

    tokens: int
    call_us: float  # dispatch and combine, launched one by one
    host_dispatch_us: float
    host_combine_us: float
    graph_dispatch_us: float | None = None
    graph_combine_us: float | None = None
    graph_both_us: float | None = None
    step_p50_us: float | None = None
    step_p99_us: float | None = None
    dispatch_send_us: float | None = None
    dispatch_receive_us: float | None = None
    combine_send_us: float | None = None
    combine_receive_us: float | None = None


# --- sizes -------------------------------------------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """The problem that was measured; figures of different problems do not compare."""

    num_ranks: int
    hidden: int
    topk: int
    experts: int

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Sizes:
        """Of a result file, or of a file of references."""
        settings = document["settings"]
        return cls(document["num_ranks"], settings["hidden"], settings["topk"], settings["experts"])

    def rows_per_peer(self, tokens: int) -> float:
        """Rows that a rank is expected to send to each rank, if each token takes its experts at random."""
        each = self.experts // self.num_ranks
        return tokens * (1 - math.comb(self.experts - each, self.topk) / math.comb(self.experts, self.topk))

    def remote_bytes(self, work: str, tokens: int) -> float:
        """Bytes of the rows that a rank is expected to get from the other ranks in one call."""
        row = self.hidden + self.hidden // 128 * 4 if "fp8" in work else 2 * self.hidden
        return (self.num_ranks - 1) * self.rows_per_peer(tokens) * row


# --- files -------------------------------------------------------------------------------------------------------------------------


def document(
    rows: Sequence[Row | LowLatencyRow],
    ceilings_gb_s: Mapping[int, float],
    settings: Mapping[str, Any],
    commit: str | None = None,
) -> dict[str, Any]:
    """The result file: everything that somebody else needs to repeat or to doubt the figures."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": {"id": commit} if commit else _git(),
        "versions": _versions(),
        "byte_formula": BYTE_FORMULA,
        **settings,
        "copy_ceiling_gb_s": {"by_sms": dict(ceilings_gb_s), "used": max(ceilings_gb_s.values())},
        "rows": [asdict(row) for row in rows],
    }


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result file, and the folders that it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def read(path: Path) -> dict[str, Any]:
    """Read a result file.

    Raises:
        EPConfigError: if it cannot be read, or is no result of these benchmarks.
    """
    found = _json(path)
    try:
        throughput_rows(found), low_latency_rows(found), Sizes.of(found), title(found)
        _ = found["copy_ceiling_gb_s"]["used"], found["boundary"], found["date"], found["commit"]
    except (KeyError, TypeError, AttributeError) as error:
        raise EPConfigError(
            f"{path} is no result of bench/throughput.py or bench/low_latency.py ({type(error).__name__}: {error})"
        ) from None
    return found


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise EPConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise EPConfigError(
            f"{path} holds a {type(found).__name__}; expected a result file of these benchmarks, or a file of references"
        )
    return found


def throughput_rows(result: Mapping[str, Any]) -> list[Row]:
    """The rows of a result of the throughput benchmark; none if it is another's."""
    return [Row(**row) for row in result["rows"] if "work" in row]


def low_latency_rows(result: Mapping[str, Any]) -> list[LowLatencyRow]:
    """The rows of a result of the low-latency benchmark; none if it is another's."""
    return [LowLatencyRow(**row) for row in result["rows"] if "work" not in row]


def on_gpu(result: Mapping[str, Any]) -> bool:
    """Whether a result was measured on GPUs."""
    return result["settings"]["backend"] == "cuda"


def title(result: Mapping[str, Any]) -> str:
    """Machine and sizes of a result, in a line."""
    sizes, settings = Sizes.of(result), result["settings"]
    machine = f"{sizes.num_ranks} x {result['machine']}" if on_gpu(result) else f"{sizes.num_ranks} ranks on {result['machine']}"
    text = f"{machine}, hidden {sizes.hidden}, top-{sizes.topk} of {sizes.experts}"
    if throughput_rows(result):
        return f"{text}, random routing"
    groups = "" if settings.get("ranks_per_node") is None else f", nodes of {settings['ranks_per_node']}"
    return f"{text}, {fp8_or_bf16(result).upper()} dispatch{groups}" + (
        f", {result['low_latency_sms']} SMs" if on_gpu(result) else ""
    )


def fp8_or_bf16(result: Mapping[str, Any]) -> str:
    """What a low-latency result's dispatch sent."""
    return "bf16" if result["settings"].get("bf16") else "fp8"


# --- references --------------------------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """Time and bandwidth of one work."""

    us: float
    remote_gb_s: float


@dataclass(frozen=True)
class Reference:
    """Figures of another system, or of an earlier result, to compare with."""

    name: str
    where: str
    """The file's own words about where and how it was measured."""
    sizes: Sizes
    throughput: Mapping[tuple[str, int, int], Point] = field(default_factory=dict)
    """By work, tokens and SMs."""
    low_latency: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """Microseconds by part (dispatch_fp8, dispatch_bf16, combine, both_fp8, both_bf16) and tokens."""


def load(path: Path) -> list[Reference]:
    """Read figures to compare with: a result of ours, or other systems' (`bench/reference/*.json`).

    Raises:
        EPConfigError: if the file cannot be read, or is neither.
    """
    found = _json(path)
    if "rows" in found:
        return [_our_figures(read(path))]
    try:
        where, sizes = f"{found['machine']}, {found['date']}: {found['boundary']}", Sizes.of(found)
        return [_peer_figures(name, where, sizes, entry) for name, entry in found["systems"].items()]
    except (KeyError, TypeError, AttributeError) as error:
        raise EPConfigError(
            f"{path} is neither a result of these benchmarks nor a file of references like bench/reference/h200x8_peers.json "
            f"({type(error).__name__}: {error})"
        ) from None


def low_latency_parts(result: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """Microseconds by part (as in `Reference.low_latency`) and tokens: in a graph, or, without a GPU, of a call."""
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
    """Entries without a number of SMs, and other kinds of work, have no counterpart here."""
    throughput = {}
    for tokens, works in entry.get("throughput_us", {}).items():
        for work, value in works.items():
            named = re.fullmatch(r"(.+)_(\d+)sm", work)
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


class Pair(NamedTuple):
    """The same work of two systems."""

    work: str
    tokens: int
    sms: int | str
    """ "best": of each side, at any number of SMs."""
    ours: Point
    theirs: Point

    def ratio(self, same_problem: bool) -> str:
        """How many times faster ours is: by time, or by remote bandwidth if the problems differ. A dash if nothing crosses a link."""
        if same_problem:
            return f"{self.theirs.us / self.ours.us:.2f}"
        return f"{self.ours.remote_gb_s / self.theirs.remote_gb_s:.2f}" if self.theirs.remote_gb_s else "-"


def compare(rows: Iterable[Row], theirs: Mapping[tuple[str, int, int], Point]) -> list[Pair]:
    """Pair our rows with another system's: the same work at the same number of SMs, and the best of each at any number."""
    ours = {(row.work, row.tokens, row.sms): Point(row.us, row.remote_gb_s) for row in rows}
    pairs = [Pair(*key, point, theirs[key]) for key, point in ours.items() if key in theirs]
    for work, tokens in dict.fromkeys(key[:2] for key in ours):
        mine, best = (min((p for key, p in side.items() if key[:2] == (work, tokens)), default=None) for side in (ours, theirs))
        if mine is not None and best is not None:
            pairs.append(Pair(work, tokens, "best", mine, best))
    return sorted(pairs, key=lambda pair: pair[:2])


COMPARED = ("tokens", "SMs", "µs", "their µs", "remote GB/s", "their remote GB/s", "ratio")
"""Headings of a comparison, after the work."""


def compared(pair: Pair, same_problem: bool) -> list[str]:
    """The cells under `COMPARED`."""
    bandwidths = (f"{pair.ours.remote_gb_s:.4g}", f"{pair.theirs.remote_gb_s:.4g}")
    return [str(pair.tokens), str(pair.sms), figure(pair.ours.us), figure(pair.theirs.us), *bandwidths, pair.ratio(same_problem)]


def about_ratios(sizes: Sizes, reference: Reference) -> str:
    """What the ratio of a comparison is."""
    if other := caution(sizes, reference):
        return f"Ratio: of remote bandwidth, above 1 this run is faster. {other}"
    return "Ratio: of times, above 1 this run is faster."


def caution(sizes: Sizes, reference: Reference) -> str:
    """A sentence if another problem was measured there, otherwise nothing."""
    different = [
        f"{name} {theirs} (here {ours})"
        for name, ours, theirs in zip(("ranks", "hidden", "top-k", "experts"), sizes, reference.sizes, strict=True)
        if ours != theirs
    ]
    return f"Another problem was measured there, times do not compare: {', '.join(different)}." if different else ""


# --- the programs ------------------------------------------------------------------------------------------------------------------


def described(args: argparse.Namespace, boundary: str) -> dict[str, Any]:
    """How it was measured, for `document`."""
    settings = {name: value for name, value in vars(args).items() if name not in ("json", "compare", "commit")}
    return {"boundary": boundary, "settings": settings}


def program(
    comm: Intracomm, args: argparse.Namespace, run: Callable[[Intracomm, argparse.Namespace], dict[str, Any] | None]
) -> None:
    """What `bench/*.py` do: measure, print, write and compare."""
    references = load(args.compare) if args.compare else []
    result = run(comm, args)
    if result is None:
        return
    print_result(result, references)
    if args.json:
        write(args.json, result)


# --- the terminal ------------------------------------------------------------------------------------------------------------------

_LOW_LATENCY_COLUMNS = {
    "graph D": "graph_dispatch_us",
    "graph C": "graph_combine_us",
    "graph D+C": "graph_both_us",
    "step p50": "step_p50_us",
    "step p99": "step_p99_us",
    "D send": "dispatch_send_us",
    "D recv": "dispatch_receive_us",
    "C send": "combine_send_us",
    "C recv": "combine_receive_us",
    "one by one": "call_us",
    "host D": "host_dispatch_us",
    "host C": "host_combine_us",
}


def low_latency_columns(result: Mapping[str, Any]) -> dict[str, str]:
    """Headings of the columns that a low-latency result fills, and the fields of `LowLatencyRow` that they show."""
    rows = low_latency_rows(result)
    return {head: name for head, name in _LOW_LATENCY_COLUMNS.items() if any(getattr(row, name) is not None for row in rows)}


def print_result(result: Mapping[str, Any], references: Iterable[Reference] = ()) -> None:
    """Print the tables of a result, and the comparisons with other systems."""
    if throughput_rows(result):
        _print_throughput(result, references)
    if low_latency_rows(result):
        _print_low_latency(result, references)


def share(row: Row, ceiling_gb_s: float) -> str:
    """The remote bandwidth in percent of the copy ceiling."""
    return f"{100 * row.remote_gb_s / ceiling_gb_s:.1f}" if ceiling_gb_s else "-"


def figure(value: float | None) -> str:
    """Microseconds with one decimal; a dash for what was not measured."""
    return "-" if value is None else f"{value:.1f}"


def _print_throughput(result: Mapping[str, Any], references: Iterable[Reference]) -> None:
    rows, ceiling = throughput_rows(result), result["copy_ceiling_gb_s"]["used"]
    caption = f"GB/s: {BYTE_FORMULA}. Copy ceiling of this run: {ceiling:.4g} GB/s remote."
    table = Table("work", title=title(result), caption=caption)
    for name in ("tokens", "SMs", "us", "GB/s", "remote GB/s", "% of ceiling", "host us"):
        table.add_column(name, justify="right")
    for row in rows:
        bandwidths = (f"{row.gb_s:.4g}", f"{row.remote_gb_s:.4g}", share(row, ceiling))
        table.add_row(row.work, str(row.tokens), str(row.sms), f"{row.us:.1f}", *bandwidths, figure(row.host_us))
    console(_WIDTH_OF_LOGS).print(table)
    for reference in references:
        if reference.throughput:
            _print_comparison(rows, Sizes.of(result), reference)


def _print_comparison(rows: list[Row], sizes: Sizes, reference: Reference) -> None:
    caption = f"Theirs: {reference.where}. {about_ratios(sizes, reference)}"
    table = Table("work", title=f"compared with {reference.name}", caption=caption)
    for name in COMPARED:
        table.add_column(name, justify="right")
    pairs = compare(rows, reference.throughput)
    for pair in pairs:
        table.add_row(pair.work, *compared(pair, not caution(sizes, reference)))
    console(_WIDTH_OF_LOGS).print(
        table if pairs else f"compared with {reference.name}: no figure for this work and these numbers of tokens"
    )


def _print_low_latency(result: Mapping[str, Any], references: Iterable[Reference]) -> None:
    both, sizes = f"both_{fp8_or_bf16(result)}", Sizes.of(result)
    others = [reference for reference in references if any(part == both for part, _ in reference.low_latency)]
    cautions = dict.fromkeys(filter(None, (caution(sizes, reference) for reference in others)))
    caption = " ".join([f"us; D: dispatch, C: combine. {result['boundary']}.", *cautions])
    table = Table("tokens", title=title(result), caption=caption)
    rows, columns = low_latency_rows(result), low_latency_columns(result)
    for name in (*columns, *(f"{reference.name.partition(' (')[0]} D+C" for reference in others)):
        table.add_column(name, justify="right")
    for row in rows:
        theirs = [reference.low_latency.get((both, row.tokens)) for reference in others]
        figures = [getattr(row, column) for column in columns.values()]
        table.add_row(str(row.tokens), *map(figure, [*figures, *theirs]))
    console(_WIDTH_OF_LOGS).print(table)


def _git() -> dict[str, Any]:
    def ask(*words: str) -> str:
        folder = Path(__file__).parent
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        ask("ls-files", "--error-unmatch", Path(__file__).name)  # an installation may lie in somebody else's checkout
        return {"id": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.CalledProcessError):
        return {"id": None}  # an export without its history; --commit tells


def _versions() -> dict[str, str]:
    installed = {dist.name: dist.version for dist in importlib.metadata.distributions() if dist.name}
    return {
        "python": platform.python_version(),
        **{name: installed[name] for name in sorted(installed) if _PACKAGES.fullmatch(name)},
    }
