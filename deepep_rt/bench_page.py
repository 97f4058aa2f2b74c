"""The page of a benchmark's results: one HTML file that holds its pictures and needs no network."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from matplotlib.figure import Figure

from . import bench_figures as figures
from . import bench_report as report
from .bench_references import COMPARED, Reference, about_ratios, caution, compare, compared, is_shown, low_latency_parts
from .bench_results import BYTE_FORMULA, Sizes, figure, low_latency_rows, on_gpu, throughput_rows, title

TEMPLATE = Path(__file__).with_name("bench_page.html.j2")

HOST = (
    "These are times of the host backend: the same calls in NumPy and MPI, made for tests and for machines without a GPU. "
    "They say nothing about GPUs."
)
ON_THE_LINKS = "For references, bytes are what random routing is expected to send with the sizes of their file."


def pictures(
    result: Mapping[str, Any], references: Sequence[Reference], theme: str = "light", *, is_narrow: bool = False
) -> dict[str, Figure]:
    """The pictures of a result by name: "throughput" or "low_latency"."""
    found = {}
    if throughput_rows(result):
        found["throughput"] = figures.throughput(result, references, theme, is_narrow=is_narrow)
    if low_latency_rows(result):
        found["low_latency"] = figures.low_latency(result, references, theme, is_narrow=is_narrow)
    return found


def html(results: Sequence[Mapping[str, Any]], references: Sequence[Reference] = ()) -> str:
    """The page.

    Args:
        results: What `bench_results.read` gives, or a run has made; a section each.
        references: Figures to compare with.

    Returns:
        The text of an HTML file.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(TEMPLATE.read_text())
    return template.render(sections=[_section(result, references) for result in results]) + "\n"


def _section(result: Mapping[str, Any], references: Sequence[Reference]) -> dict[str, Any]:
    sizes, fast = Sizes.of(result), bool(low_latency_rows(result))
    used = [reference for reference in references if is_shown(result, reference)]
    commit = result["commit"].get("id") or "unknown"
    return {
        "name": "Low latency" if fast else "Throughput",
        "title": title(result),
        "date": result["date"],
        "version": result["deepep_rt"],
        "commit": commit[:12] + (", with changes" if result["commit"].get("dirty") else ""),
        "boundary": result["boundary"],
        "warnings": _warnings(result, used),
        "picture": {theme: _embedded(result, used, theme, is_narrow=False) for theme in figures.INK},
        "narrow": {theme: _embedded(result, used, theme, is_narrow=True) for theme in figures.INK},
        "alt": "Latency against the number of tokens" if fast else "Bandwidth against the number of SMs",
        "caption": _latency_caption(result) if fast else f"Bytes: {BYTE_FORMULA}. {ON_THE_LINKS if used else ''}",
        "tables": _low_latency_tables(result, used) if fast else _throughput_tables(result, used),
        "facts": _facts(result, sizes),
    }


def _embedded(result: Mapping[str, Any], references: Sequence[Reference], theme: str, *, is_narrow: bool) -> str:
    (figure,) = pictures(result, references, theme, is_narrow=is_narrow).values()
    return "data:image/svg+xml;base64," + base64.b64encode(figures.svg(figure)).decode()


def _warnings(result: Mapping[str, Any], references: Sequence[Reference]) -> list[str]:
    found = [] if on_gpu(result) else [HOST]
    if result["settings"].get("quick"):
        found.append("A quick run: too few calls for figures that hold.")
    names: dict[str, list[str]] = {}
    for reference in references:
        names.setdefault(caution(Sizes.of(result), reference), []).append(reference.name)
    return found + [f"{'; '.join(those)}: {text}" for text, those in names.items() if text]


def _latency_caption(result: Mapping[str, Any]) -> str:
    text = (
        "The dotted line is the time that the rows which random routing is expected to send between ranks take at the copy ceiling "
        f"of the run, {result['copy_ceiling_gb_s']['used']:.4g} GB/s. "
    )
    graph = "In a graph: mean of a call in a captured chain. A step alone: dispatch and combine, one replay after the other. "
    return text + (graph + "No graph: launched one by one. " if on_gpu(result) else "") + "References: timed as their file says."


def _throughput_tables(result: Mapping[str, Any], references: Sequence[Reference]) -> list[dict[str, Any]]:
    rows, ceiling = throughput_rows(result), result["copy_ceiling_gb_s"]
    by_sms = ", ".join(f"{gb_s:.4g} with {sms} SMs" for sms, gb_s in ceiling["by_sms"].items())
    tables = [
        {
            "title": "All rows",
            "heads": ["work", "tokens of a rank", "SMs", "µs", "GB/s", "remote GB/s", "% of copy ceiling", "host µs"],
            "rows": [report.throughput_cells(row, ceiling["used"]) for row in rows],
            "caption": f"Copy ceiling of the run: {report.ceiling_said(result)} ({by_sms}). "
            "Host µs: time of the host in a call that it does not wait for.",
        }
    ]
    for reference in references:
        same = not caution(Sizes.of(result), reference)
        if pairs := compare(rows, reference.throughput):
            tables.append(
                {
                    "title": f"Compared with {reference.name}",
                    "heads": ["work", *COMPARED],
                    "rows": [[pair.work, *compared(pair, same)] for pair in pairs],
                    "caption": f"Theirs: {reference.where}. {about_ratios(Sizes.of(result), reference)}",
                }
            )
    return tables


def _low_latency_tables(result: Mapping[str, Any], references: Sequence[Reference]) -> list[dict[str, Any]]:
    rows, columns, parts = low_latency_rows(result), report.low_latency_columns(result), low_latency_parts(result)
    tables = [
        {
            "title": "All rows",
            "heads": ["tokens of a rank", *(f"{head}, µs" for head in columns)],
            "rows": [[row.tokens, *(figure(getattr(row, name)) for name in columns.values())] for row in rows],
            "caption": "D: dispatch, C: combine. graph: mean of a call in a captured chain; step: both, in a graph of their own; send, "
            "recv: the halves of a call with a hook; one by one: both, launched without a graph; host: time of the host in a call.",
        }
    ]
    for reference in references:
        other = caution(Sizes.of(result), reference)
        pairs = [
            [part, tokens, figure(us), figure(their), "-" if other else f"{their / us:.2f}"]
            for part, by_tokens in parts.items()
            for tokens, us in by_tokens.items()
            if us is not None and (their := reference.low_latency.get((part, tokens))) is not None
        ]
        if pairs:
            tables.append(
                {
                    "title": f"Compared with {reference.name}",
                    "heads": ["part", "tokens of a rank", "µs", "their µs", "ratio"],
                    "rows": pairs,
                    "caption": f"Theirs: {reference.where}. {other or about_ratios(Sizes.of(result), reference)}",
                }
            )
    return tables


def _facts(result: Mapping[str, Any], sizes: Sizes) -> dict[str, str]:
    settings = ", ".join(f"{name} {value}" for name, value in result["settings"].items())
    return {
        "machine": f"{sizes.num_ranks} x {result['machine']}",
        "MPI": str(result.get("mpi", "unknown")),
        **{name: str(value) for name, value in (result.get("drivers") or {}).items()},
        "settings": settings,
        "commit": str(result["commit"].get("id")),
        **{name: str(value) for name, value in (result.get("versions") or {}).items()},
    }
