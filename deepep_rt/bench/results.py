"""Hold results of the benchmarks: rows, the measured problem, and the file."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from ..arrays.compressed_rows import COMPRESSIONS, compressed_row_bytes
from ..errors import EPConfigError
from .checks import (
    ANYTHING,
    FLAG,
    NUM_RANKS,
    NUMERAL,
    SIZES,
    TEXT,
    TIME_US,
    Fields,
    InvalidValue,
    Names,
    check,
    check_problem,
    matching,
    number,
    optional,
    plain,
    whole,
)

BYTE_FORMULA = (
    "received rows (each token once for each destination rank, own rank included) x bytes of a row on the way (with scales; "
    "compressed rows: as they travel), mean over ranks; remote: the rows that cross between ranks, or with several nodes between nodes"
)
_PACKAGES = re.compile(
    r"deepep.rt|numpy|mpi4py|mpich|cupy.*|cuda-(python|core|bindings)|nvshmem4py.*|nvidia-(cuda-nvrtc|nvjitlink|nvshmem).*"
)


@dataclass(frozen=True)
class Row:
    """One measurement of the throughput mode. Bandwidths are in GB/s (1e9 bytes)."""

    work: str  # dispatch_bf16_unknown, dispatch_fp8_known, combine_bf16...
    tokens: int
    sms: int
    us: float
    gb_s: float
    remote_gb_s: float
    host_us: float | None = None  # time of the host in a call, without waiting for its end
    row_bytes: int | None = None  # of a row on the way
    percent_of_combine: float | None = None  # compressed combines: their time, of the plain combine's with these tokens and SMs
    host_prepared_us: float | None = None  # as host_us, through prepared calls


@dataclass(frozen=True)
class LowLatencyRow:
    """Times for one number of tokens in the low-latency mode, in microseconds. None: measured on GPUs only."""

    tokens: int
    call_us: float  # dispatch and combine without a graph
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
    graph_combine_fp8_us: float | None = None  # with compress="fp8"; None too where rows or GPUs do not fit
    graph_combine_log10_us: float | None = None
    prepared_call_us: float | None = None  # as call_us, host_dispatch_us and host_combine_us, through prepared calls
    host_prepared_dispatch_us: float | None = None
    host_prepared_combine_us: float | None = None
    graph_cold_us: float | None = None  # of both, after a kernel that fills the caches
    graph_dispatch_quantised_us: float | None = None  # of rows that the program has quantised, as many bytes as FP8 rows


# --- sizes -------------------------------------------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """The measured problem. Figures of different problems do not compare."""

    num_ranks: int
    hidden: int
    topk: int
    experts: int

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Sizes:
        """Read the sizes from a result file or a file of references."""
        settings = document["settings"]
        return cls(document["num_ranks"], settings["hidden"], settings["topk"], settings["experts"])

    def rows_per_peer(self, tokens: int) -> float:
        """Rows that a rank is expected to send to each rank, if each token takes its experts at random."""
        each = self.experts // self.num_ranks
        return tokens * (1 - math.comb(self.experts - each, self.topk) / math.comb(self.experts, self.topk))

    def remote_bytes(self, work: str, tokens: int) -> float:
        """Bytes of the rows that a rank is expected to get from the other ranks in one call."""
        return (self.num_ranks - 1) * self.rows_per_peer(tokens) * row_bytes(work, self.hidden)


def row_bytes(work: str, hidden: int) -> int:
    """Bytes of a row on the way, with its scales."""
    kind, _, compression = work.partition("_")
    if kind == "combine" and compression in COMPRESSIONS:
        return compressed_row_bytes(hidden, compression)
    return hidden + hidden // 128 * 4 if "fp8" in work else 2 * hidden


# --- the table of fields -----------------------------------------------------------------------------------------------------------

_MOST_SIZES = 64  # numbers of tokens in a result: each is a row of pictures
_COUNT, _GB_S = whole(1, 999_999_999), number(0, 1e9)
_KINDS = {
    "work": matching(
        "dispatch_(bf16|fp8)_(unknown|known|worst)|dispatch_expert_(unknown|known)|(copy|permute)_expert|"
        "combine_(bf16|expert|topk|fp8|log10)|nccl_all_to_all"
    ),
    **dict.fromkeys(("tokens", "sms"), _COUNT),
    **dict.fromkeys(("gb_s", "remote_gb_s"), _GB_S),
    "row_bytes": whole(1, 1 << 30),
}
"""Fields of rows. All others are times, or shares of times."""


def _row(row: type, *always: str) -> Fields:
    """Expect a row. Fields with a default are optional, but for those in `always`."""
    kinds = {field.name: _KINDS.get(field.name, TIME_US) for field in fields(row)}
    needed = {field.name for field in fields(row) if field.default is MISSING} | set(always)
    others = {name: optional(kind) for name, kind in kinds.items() if name not in needed}
    return Fields({name: kind for name, kind in kinds.items() if name in needed}, others, is_closed=True)


def _file(row: Fields, **more: Any) -> Fields:
    settings = Fields(
        {"backend": matching("cuda|host"), **SIZES}, {"ranks_per_node": optional(NUM_RANKS), "bf16": FLAG, "quick": FLAG}
    )
    needed = {
        "num_ranks": NUM_RANKS,
        **dict.fromkeys(("machine", "date", "boundary", "deepep_rt"), TEXT),
        "commit": Fields({}, {"id": optional(TEXT), "dirty": FLAG}),
        "settings": settings,
        "copy_ceiling_gb_s": Fields({"used": _GB_S, "by_sms": Names(NUMERAL, _GB_S)}, {"by_method": Names(TEXT, _GB_S)}),
        "rows": [row],
        **more,
    }
    facts = optional(Names(TEXT, ANYTHING))
    return Fields(needed, {"left_out": optional(Names(TEXT, TEXT)), "drivers": facts, "versions": facts})


_THROUGHPUT = _file(_row(Row))
_LOW_LATENCY = {
    "cuda": _file(
        _row(LowLatencyRow, "graph_dispatch_us", "graph_combine_us", "graph_both_us"), low_latency_sms=whole(1, 1 << 16)
    ),
    "host": _file(_row(LowLatencyRow)),
}


def check_result(found: dict[str, Any]) -> None:
    """Check the contents of a result file. Raise InvalidValue if they are not a result of the benchmarks."""
    plain(found, "file")
    rows, settings = found.get("rows"), found.get("settings")
    is_throughput = isinstance(rows, list) and any(isinstance(row, dict) and "work" in row for row in rows)
    on_gpu = isinstance(settings, dict) and settings.get("backend") == "cuda"
    check(found, _THROUGHPUT if is_throughput else _LOW_LATENCY["cuda" if on_gpu else "host"], "file")
    check_problem(found["num_ranks"], found["settings"])
    if len({row["tokens"] for row in found["rows"]}) > _MOST_SIZES:
        raise InvalidValue(f"file.rows has more than {_MOST_SIZES} numbers of tokens")


# --- files -------------------------------------------------------------------------------------------------------------------------


def provenance(commit: str | None = None) -> dict[str, Any]:
    """Record the date and the code of a measurement."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": {"id": commit} if commit else _git(),
        "versions": _versions(),
    }


def python_build() -> dict[str, Any]:
    """Describe the interpreter: its version, and whether it has the global lock."""
    has_lock = getattr(sys, "_is_gil_enabled", lambda: True)()
    return {"python": platform.python_version(), "has_global_lock": has_lock}


def document(
    rows: Sequence[Row | LowLatencyRow],
    ceilings: Mapping[int, Mapping[str, float]],
    settings: Mapping[str, Any],
    commit: str | None = None,
) -> dict[str, Any]:
    """Make the contents of a result file. It has all data that a reader needs to repeat the measurement.

    `ceilings` has for each number of SMs what `Buffer.copy_ceilings` returned. `settings` are of the machine too. `commit` is that of the
    code, if the package is not in a git checkout.
    """
    return {
        **provenance(commit),
        "byte_formula": BYTE_FORMULA,
        **settings,
        "copy_ceiling_gb_s": _ceiling(ceilings),
        "rows": [asdict(row) for row in rows],
    }


def _ceiling(ceilings: Mapping[int, Mapping[str, float]]) -> dict[str, Any]:
    """Return the copy ceiling in GB/s: by SMs for the method that uses so many, the largest by method, and the largest of all."""
    by_method: dict[str, float] = {}
    for rates in ceilings.values():
        for method, rate in rates.items():
            by_method[method] = max(rate / 1e9, by_method.get(method, 0.0))
    by_sms = {sms: next(iter(rates.values())) / 1e9 for sms, rates in ceilings.items()}
    return {"by_sms": by_sms, "by_method": by_method, "used": max(by_method.values())}


def ceiling_note(result: Mapping[str, Any]) -> str:
    """Describe the copy ceiling of a result, with the figure of each method if there are several."""
    ceiling = result["copy_ceiling_gb_s"]
    where = "remote" if result["num_ranks"] > 1 else "within the one rank"
    methods = [f"{method} {gb_s:.4g}" for method, gb_s in (ceiling.get("by_method") or {}).items()]
    return f"{ceiling['used']:.4g} GB/s {where}" + (f" ({', '.join(methods)})" if len(methods) > 1 else "")


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result file and create its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def read(path: Path) -> dict[str, Any]:
    """Read a result file. Raise EPConfigError if it cannot be read or is not a result of these benchmarks."""
    found = read_json(path)
    try:
        check_result(found)
    except InvalidValue as error:
        raise EPConfigError(f"{path}: {error}. Pass a result of bench/throughput.py or bench/low_latency.py.") from None
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raise EPConfigError if it cannot be read or is not an object."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:  # ValueError: not text, not JSON, or a number of too many digits
        raise EPConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise EPConfigError(
            f"{path} holds a {type(found).__name__}; expected an object. Pass a result of these benchmarks or a file of references."
        )
    return found


def throughput_rows(result: Mapping[str, Any]) -> list[Row]:
    """List the rows of a throughput result. A low-latency result has none."""
    return [Row(**row) for row in result["rows"] if "work" in row]


def low_latency_rows(result: Mapping[str, Any]) -> list[LowLatencyRow]:
    """List the rows of a low-latency result. A throughput result has none."""
    return [LowLatencyRow(**row) for row in result["rows"] if "work" not in row]


def on_gpu(result: Mapping[str, Any]) -> bool:
    """Tell whether a result was measured on GPUs."""
    return result["settings"]["backend"] == "cuda"


def has_one_number_of_sms(result: Mapping[str, Any]) -> bool:
    """Tell whether all rows of a throughput result have the same number of SMs. The host backend has none, and measures one number."""
    return len({row.sms for row in throughput_rows(result)}) == 1


def title(result: Mapping[str, Any]) -> str:
    """Format machine and sizes of a result in a line."""
    sizes, settings = Sizes.of(result), result["settings"]
    machine = f"{sizes.num_ranks} x {result['machine']}" if on_gpu(result) else f"{sizes.num_ranks} ranks on {result['machine']}"
    text = f"{machine}, hidden {sizes.hidden}, top-{sizes.topk} of {sizes.experts}"
    groups = "" if settings.get("ranks_per_node") is None else f", nodes of {settings['ranks_per_node']}"
    if throughput_rows(result):
        return f"{text}, random routing{groups}"
    return f"{text}, {fp8_or_bf16(result).upper()} dispatch{groups}" + (
        f", {result['low_latency_sms']} SMs" if on_gpu(result) else ""
    )


def fp8_or_bf16(result: Mapping[str, Any]) -> str:
    """Return the rows' type of a low-latency result's dispatch: "fp8" or "bf16"."""
    return "bf16" if result["settings"].get("bf16") else "fp8"


def format_us(value: float | None) -> str:
    """Format microseconds with one decimal. None becomes a dash."""
    return "-" if value is None else f"{value:.1f}"


def _git() -> dict[str, Any]:
    def ask(*words: str) -> str:
        folder = Path(__file__).parent
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        ask("ls-files", "--error-unmatch", Path(__file__).name)  # an installation may lie in the checkout of another project
        return {"id": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.CalledProcessError):
        return {"id": None}  # without a git history, use --commit


def _versions() -> dict[str, str]:
    installed = {dist.name: dist.version for dist in importlib.metadata.distributions() if dist.name}
    return {
        "python": platform.python_version(),
        **{name: installed[name] for name in sorted(installed) if _PACKAGES.fullmatch(name)},
    }
