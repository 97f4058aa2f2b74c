"""What a run of the benchmark says about itself: the table, the JSON file, and the comparison with another result."""

import datetime
import importlib.metadata
import json
import platform
import re
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

BYTE_FORMULA = (
    "received rows (each token once for each destination rank, own rank included) x row bytes (with scales), mean over ranks; "
    "remote: the same without the rows of the own rank"
)
_PACKAGES = re.compile(
    r"deepep.rt|numpy|mpi4py|mpich|cupy.*|cuda-(python|core|bindings)|nvshmem4py.*|nvidia-(cuda-nvrtc|nvjitlink|nvshmem).*"
)


@dataclass(frozen=True)
class Row:
    """One measured point. Bandwidths in GB/s (1e9 bytes)."""

    work: str  # dispatch_bf16_unknown, dispatch_fp8_known, combine_bf16...
    tokens: int
    sms: int
    us: float
    gb_s: float
    remote_gb_s: float
    host_us: float | None = None  # time of the host in a call that it does not wait for


def console():
    return Console(width=None if Console().is_terminal else 120)


def print_table(rows, ceiling_gb_s, title):
    """Print the rows, with the remote bandwidth as a share of the copy ceiling."""
    table = Table("work", title=title, caption=f"GB/s: {BYTE_FORMULA}. Copy ceiling of this run: {ceiling_gb_s:.4g} GB/s remote.")
    for name in ("tokens", "SMs", "us", "GB/s", "remote GB/s", "% of ceiling", "host us"):
        table.add_column(name, justify="right")
    for row in rows:
        share = f"{100 * row.remote_gb_s / ceiling_gb_s:.1f}" if ceiling_gb_s else "-"
        host = "-" if row.host_us is None else f"{row.host_us:.1f}"
        figures = (f"{row.us:.1f}", f"{row.gb_s:.4g}", f"{row.remote_gb_s:.4g}", share, host)
        table.add_row(row.work, str(row.tokens), str(row.sms), *figures)
    console().print(table)


def document(rows, ceilings_gb_s, settings, commit=None):
    """The result file: everything that somebody else needs to repeat or to doubt the figures."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": {"id": commit} if commit else _git(),
        "versions": _versions(),
        "byte_formula": BYTE_FORMULA,
        **settings,
        "copy_ceiling_gb_s": {"by_sms": ceilings_gb_s, "used": max(ceilings_gb_s.values())},
        "rows": [asdict(row) for row in rows],
    }


def load(path):
    """Read a result of ours, or the figures of other systems.

    Returns:
        The file's own words about where it was measured, and {system: {(work, tokens, sms): us}}.
    """
    text = json.loads(Path(path).read_text())
    if "rows" in text:
        commit = (text["commit"].get("id") or "unknown commit")[:12]
        where = f"{text['num_ranks']} x {text['machine']}, {text['date']}: {text['boundary']}"
        return where, {commit: {(row["work"], row["tokens"], row["sms"]): row["us"] for row in text["rows"]}}
    systems = {name: _peer_figures(entry.get("throughput_us", {})) for name, entry in text["systems"].items()}
    return f"{text['machine']}, {text['date']}: {text['boundary']}", {name: found for name, found in systems.items() if found}


def _peer_figures(throughput_us):
    """{tokens: {"work": {sms: us}, "work_24sm": us}} flattened; entries without a number of SMs have no counterpart here."""
    found = {}
    for tokens, works in throughput_us.items():
        for work, value in works.items():
            if isinstance(value, dict):
                found.update({(work, int(tokens), int(sms)): us for sms, us in value.items()})
            elif match := re.fullmatch(r"(.+)_(\d+)sm", work):
                found[match[1], int(tokens), int(match[2])] = value
    return found


def compare(rows, theirs):
    """Pair our rows with another system's: the same work at the same number of SMs, and the best of each at any number.

    Returns:
        (work, tokens, SMs or "best", our us, their us) of each pair.
    """
    ours = {(row.work, row.tokens, row.sms): row.us for row in rows}
    pairs = [(*key, us, theirs[key]) for key, us in ours.items() if key in theirs]
    for work, tokens in dict.fromkeys(key[:2] for key in ours):
        best = [min((us for key, us in side.items() if key[:2] == (work, tokens)), default=None) for side in (ours, theirs)]
        if None not in best:
            pairs.append((work, tokens, "best", *best))
    return sorted(pairs, key=lambda pair: pair[:2])


def print_comparison(rows, path):
    """Print how many times faster these rows are than those of a file."""
    where, systems = load(path)
    for system, theirs in systems.items():
        table = Table("work", title=f"compared with {system}", caption=f"Theirs: {where}. Above 1: this run is faster.")
        for name in ("tokens", "SMs", "us", "their us", "theirs / this"):
            table.add_column(name, justify="right")
        pairs = compare(rows, theirs)
        for work, tokens, sms, us, their_us in pairs:
            table.add_row(work, str(tokens), str(sms), f"{us:.1f}", f"{their_us:.1f}", f"{their_us / us:.2f}")
        console().print(table if pairs else f"compared with {system}: it has no figure for this work and these numbers of tokens")


def _git():
    def ask(*words):
        folder = Path(__file__).parent
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return {"id": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.CalledProcessError):
        return {"id": None}  # an export without its history; --commit tells


def _versions():
    installed = {dist.name: dist.version for dist in importlib.metadata.distributions() if dist.name}
    return {
        "python": platform.python_version(),
        **{name: installed[name] for name in sorted(installed) if _PACKAGES.fullmatch(name)},
    }
