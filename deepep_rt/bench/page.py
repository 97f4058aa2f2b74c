"""Write the results of benchmarks as a Markdown report with pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from . import figures, report
from .references import Reference, difference_note, is_shown
from .report import markdown_table, markdown_text
from .results import Sizes, low_latency_rows, on_gpu, title

HOST = (
    "These are times of the host backend: the same calls in NumPy and MPI, made for tests and for machines without a GPU. "
    "They say nothing about GPUs."
)


def write(results: Sequence[Mapping[str, Any]], references: Sequence[Reference], folder: Path) -> Path:
    """Write `report.md` and its pictures into an existing folder. Return the path of the report.

    Each result of `results.read` or of a run gets a section and a picture. `references` are figures to compare with.
    """
    drawn: Counter[str] = Counter()
    sections = ["# deepep_rt bench\n"]
    for result in results:
        kind = "low_latency" if low_latency_rows(result) else "throughput"
        drawn[kind] += 1
        file = f"{kind}_{drawn[kind]}.png" if drawn[kind] > 1 else f"{kind}.png"
        (folder / file).write_bytes(figures.png(picture(result, references)))
        sections.append(section(result, references, file))
    path = folder / "report.md"
    path.write_text("\n".join(sections))
    return path


def picture(result: Mapping[str, Any], references: Sequence[Reference]) -> Figure:
    """Draw a result."""
    draw = figures.low_latency if low_latency_rows(result) else figures.throughput
    return draw(result, references)


def section(result: Mapping[str, Any], references: Sequence[Reference], picture_file: str) -> str:
    """Write the Markdown of a result. `picture_file` is the file of the picture, relative to the report."""
    is_low_latency, used = bool(low_latency_rows(result)), [reference for reference in references if is_shown(result, reference)]
    name, alt = ("Low latency", "Latency by tokens") if is_low_latency else ("Throughput", "Bandwidth")
    commit = (result["commit"].get("id") or "unknown")[:12] + (", with changes" if result["commit"].get("dirty") else "")
    parts = [
        f"## {name}: {markdown_text(title(result))}",
        markdown_text(
            f"Measured {result['date']} with deepep_rt {result['deepep_rt']}, commit {commit}. Times: {result['boundary']}."
        ),
        *(f"> **Note:** {markdown_text(warning)}" for warning in _warnings(result, used)),
        f"![{alt}]({picture_file})",
        markdown_text(_low_latency_caption(result) if is_low_latency else _throughput_caption(result, used)),
        "### All rows",
        *_table(report.low_latency_table(result) if is_low_latency else report.throughput_table(result)),
    ]
    if not is_low_latency and (compressed := report.compression_table(result)):
        parts += ["### Combine with compressed rows", *_table(compressed)]
    for reference in used:
        if table := (report.low_latency_comparison if is_low_latency else report.throughput_comparison)(result, reference):
            parts += [f"### Compared with {markdown_text(reference.name)}", *_table(table)]
    parts += [
        "### Machine and software",
        "\n".join(markdown_text(f"- {name}: {value}") for name, value in _facts(result).items()),
    ]
    return "\n\n".join(parts) + "\n"


def _table(table: report.ResultTable) -> tuple[str, str]:
    return markdown_table(table.heads, table.rows), markdown_text(table.caption)


def _warnings(result: Mapping[str, Any], references: Iterable[Reference]) -> list[str]:
    found = [] if on_gpu(result) else [HOST]
    if result["settings"].get("quick"):
        found.append("A quick run: too few calls for reliable figures.")
    names: dict[str, list[str]] = {}
    for reference in references:
        names.setdefault(difference_note(Sizes.of(result), reference), []).append(reference.name)
    return found + [f"{'; '.join(those)}: {text}" for text, those in names.items() if text]


def _throughput_caption(result: Mapping[str, Any], references: Sequence[Reference]) -> str:
    ceiling = "The dotted line is the copy ceiling: the bandwidth of plain copies from every rank to every other, by the fastest method. "
    expected = "For references, the bytes are the expected number for random routing with the sizes of their file. "
    text = (ceiling if on_gpu(result) else "") + (expected if references else "")
    return text + "Host us: time of the host in a call, without waiting for its end."


def _low_latency_caption(result: Mapping[str, Any]) -> str:
    ceiling = f"{result['copy_ceiling_gb_s']['used']:.4g} GB/s"
    graphs = (
        f"The dotted line is the time that the expected rows of random routing take at the copy ceiling, {ceiling}. "
        "Graph: mean of a call in a captured chain. Step: one replay of a graph of dispatch and combine, replayed back to back. "
        "Send, recv: the halves of a call with a hook. One by one: both calls without a graph. "
    )
    return (graphs if on_gpu(result) else "") + "Host: time of the host in a call."


def _facts(result: Mapping[str, Any]) -> dict[str, str]:
    return {
        "machine": f"{result['num_ranks']} x {result['machine']}",
        "MPI": str(result.get("mpi", "unknown")),
        **{name: str(value) for name, value in (result.get("drivers") or {}).items()},
        "settings": ", ".join(f"{name} {value}" for name, value in result["settings"].items()),
        "commit": str(result["commit"].get("id")),
        **{name: str(value) for name, value in (result.get("versions") or {}).items()},
    }
