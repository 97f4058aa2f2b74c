"""Write the report of a soak run: commands that repeat a round, the JSON document and the text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .buffers import Options
from .check import Mismatch


def command(options: Options, backend: str, timeout_s: float, number: int, since: int | None = None) -> str:
    """Format the command that repeats a round of a run. `since` is the first round of the repetition. None: only this round."""
    sizes = ("tokens", "low_latency_tokens", "hidden", "topk", "experts", "ranks_per_node")
    words = ["mpirun", "-n", options.num_ranks, "python", "-m", "deepep_rt", "soak", "--backend", backend]
    for name in sizes:
        if (value := getattr(options, name)) is not None:
            words += ["--" + name.replace("_", "-"), value]
    words += [
        "--rounds-per-buffer",
        options.rounds_per_buffer,
        "--sleep-every",
        options.sleep_every,
        "--timeout-s",
        f"{timeout_s:g}",
    ]
    words += ["--seed", options.seed, "--round", number]
    words += [] if since is None else ["--since", since]
    return " ".join(map(str, words))


def with_commands(found: Mismatch, options: Options, backend: str, timeout_s: float) -> dict[str, Any]:
    """Describe a mismatch with two commands: one repeats its round alone, one repeats its Buffer from the first round."""
    seen, first = found.seen_in_round, found.seen_in_round - found.seen_in_round % options.rounds_per_buffer
    since = found.round if found.round < seen else None  # a kept result
    return {
        **found.described(),
        "command": command(options, backend, timeout_s, seen, since),
        "command_from_buffer": command(options, backend, timeout_s, seen, first),
    }


def percentiles(seconds: Sequence[float] | np.ndarray) -> dict[str, Any]:
    """Return the number of calls, and p50, p99 and maximum in microseconds. Without a call these are None."""
    if not len(seconds):
        return {"count": 0, "p50_us": None, "p99_us": None, "max_us": None}
    us = 1e6 * np.asarray(seconds)
    return {
        "count": len(us),
        "p50_us": round(float(np.percentile(us, 50)), 2),
        "p99_us": round(float(np.percentile(us, 99)), 2),
        "max_us": round(float(us.max()), 2),
    }


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Write the document. A reader finds the old or the new file, never a part of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    draft.write_text(json.dumps(document, indent=1) + "\n")
    draft.replace(path)


def lines(document: Mapping[str, Any]) -> Iterable[str]:
    """Format the report as text."""
    rounds, ranks, buffers, sleeps = (
        f"{document[key]} {word}{'s' * (document[key] != 1)}"
        for key, word in (("rounds", "round"), ("num_ranks", "rank"), ("buffers", "Buffer"), ("sleeps", "sleep"))
    )
    what = f"{rounds} in {document['seconds']:.0f} s on {ranks}"
    where = f"{document['backend']} backend, seed {document['seed']}, {buffers}, {sleeps}"
    if document["replays_after_sleep"]:
        where += f", {document['replays_after_sleep']} replays after one"
    yield f"{document['status']}: {what} ({where}), {document['checked_bytes'] / 1e9:.2f} GB checked"
    yield ""
    yield f"{'call':24}{'timed':>8}{'p50 us':>12}{'p99 us':>12}{'max us':>12}"
    for name, times in document["calls"].items():
        figures = ("-" if times[key] is None else f"{times[key]:.1f}" for key in ("p50_us", "p99_us", "max_us"))
        yield f"{name:24}{times['count']:>8}" + "".join(f"{figure:>12}" for figure in figures)
    for found in document["mismatches"]:
        yield ""
        yield from mismatch(found, document["seed"])


def mismatch(found: Mapping[str, Any], seed: int) -> Iterable[str]:
    """Format one mismatch as text."""
    later = "" if found["round"] == found["seen_in_round"] else f", kept until round {found['seen_in_round']}"
    yield f"MISMATCH on rank {found['rank']} in round {found['round']}{later} of seed {seed}: {found['array']} of {found['call']}"
    if found["bytes"]:
        yield (
            f"  first differing byte {found['first_byte']} ({found['row']}); {found['differing_bytes']} of {found['bytes']} "
            f"compared bytes differ"
        )
        yield f"  bytes from {found['shown_from']} on:"
    yield f"  expected {found['expected']}"
    yield f"  found    {found['found']}"
    if "command_from_buffer" in found:
        yield f"  this round alone:          {found['command']}"
        yield f"  with the rounds before it: {found['command_from_buffer']}"
