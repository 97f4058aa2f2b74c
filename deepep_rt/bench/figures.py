"""Draw a benchmark's results: bandwidth against SMs or tokens, latency against tokens, each with the copy ceiling and references."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from .references import Reference, low_latency_parts
from .results import Row, Sizes, fp8_or_bf16, has_one_number_of_sms, low_latency_rows, on_gpu, throughput_rows, title

WORKS = {
    "dispatch_bf16": "Dispatch, BF16",
    "dispatch_fp8": "Dispatch, FP8",
    "combine_bf16": "Combine, BF16",
    "dispatch_expert": "Dispatch by expert, BF16",
    "combine_expert": "Combine by expert, weighted",
    "combine_topk": "Combine, reduce='topk'",
    "combine_fp8": "Combine, rows as FP8",
    "combine_log10": "Combine, rows as 10-bit logarithms",
}
PANELS_IN_A_ROW = 3
ROUTINGS = {"known": "routing known", "unknown": "routing unknown", "worst": "fixed shapes"}

# Colours after Okabe and Ito, which colour-blind readers can distinguish. Dashes mark references, markers the routing.
OURS = {"known": "#0072B2", "unknown": "#A87000", "worst": "#00805C"}
THEIRS = ("#C24E00", "#B0558A", "#6B5B95", "#555555")
MARKERS = {"known": "o", "unknown": "s", "worst": "^"}
TEXT, CEILING, GRID, GROUND = "#1f2328", "#6e7781", "#d8dee4", "#ffffff"
PANEL_INCHES = (4.9, 3.3)
PANEL_POINTS = 0.78 * 72 * PANEL_INCHES[1]
"""Approximate height inside a panel's axes."""
STYLE = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor", "axes.titlecolor"), TEXT),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), GROUND),
    **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), GRID),
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "text.parse_math": False,
}


@dataclass
class Line:
    """A line, and the label at its right end."""

    points: Mapping[int, float]
    label: str
    colour: str
    marker: str = "o"
    dashes: str = "-"
    band: Mapping[int, float] = field(default_factory=dict)  # the upper edge at some points


def throughput(result: Mapping[str, Any], references: Iterable[Reference] = ()) -> Figure:
    """Draw bandwidth: a panel for each work and number of tokens against SMs, or for each work against tokens if SMs do not differ."""
    rows, others = throughput_rows(result), [other for other in references if other.throughput]
    tokens, works = sorted({row.tokens for row in rows}), [w for w in WORKS if any(row.work.startswith(w) for row in rows)]
    over = "tokens" if has_one_number_of_sms(result) and len(tokens) > 1 else "sms"
    parts = {f", {number} tokens a rank": [row for row in rows if row.tokens == number] for number in tokens}
    panels: list[list[tuple[str, list[Line]]]] = []
    for which, part in (parts if over == "sms" else {"": rows}).items():
        panels.append([])
        for work in works:
            if len(panels[-1]) == PANELS_IN_A_ROW:
                panels.append([])
            lines = _bandwidth(result, part, others, work, over)
            panels[-1].append((WORKS[work] + which, [line for line in lines if line.points]))
    is_alone = Sizes.of(result).num_ranks == 1
    xlabel, ylabel = (
        {"sms": "SMs of a call", "tokens": "tokens of a rank"}[over],
        f"GB/s{', own rank' if is_alone else ' from other ranks'}",
    )
    with rc_context(STYLE):
        figure, axes = _grid(result, len(panels), max(map(len, panels)), "Throughput")
        top = 1.12 * max(gb_s for row in panels for _, lines in row for line in lines for gb_s in line.points.values()) or 1.0
        for i, row in enumerate(panels):
            for j, (name, lines) in enumerate(row):
                is_last = all(j >= len(below) for below in panels[i + 1 :])
                draw_panel(axes[i][j], name, lines, xlabel=xlabel if is_last else "", ylabel="" if j else ylabel)
                axes[i][j].set_ylim(0, top)
                label_lines(axes[i][j], lines)
            for unused in axes[i][len(row) :]:
                unused.set_visible(False)
        return figure


def _bandwidth(
    result: Mapping[str, Any], rows: Sequence[Row], references: Sequence[Reference], work: str, over: str
) -> list[Line]:
    """Make the lines of a panel of throughput. `rows` are those of this panel, of all works. `work` is without the routing.

    `over` is what differs between the points of a line: "sms" or "tokens".
    """
    sizes = Sizes.of(result)
    alone = sizes.num_ranks == 1  # no bytes cross a link
    here = [row for row in rows if row.work.startswith(work)]
    lines = [Line(_ceilings(result, rows, over), "copy ceiling", CEILING, "", ":")] if on_gpu(result) else []
    for routing, colour in OURS.items():
        mine = [row for row in here if row.work in (f"{work}_{routing}", work if routing == "known" else None)]
        points = {getattr(row, over): _gb_s(row, alone) for row in mine}
        label = "this run" if work.startswith("combine") else ROUTINGS[routing]
        lines.append(Line(points, label, colour, MARKERS[routing]))
    for reference, colour in zip(references, itertools.cycle(THEIRS), strict=False):
        lines += _their_bandwidth(reference, sizes, work, rows, over, colour)
    if work == "dispatch_expert":
        lines += _in_two_steps(rows, over, alone)
    return lines + _in_the_time_of_plain(here, over, alone)


def _gb_s(row: Row, alone: bool) -> float:
    return row.gb_s if alone else row.remote_gb_s


def _ceilings(result: Mapping[str, Any], rows: Iterable[Row], over: str) -> dict[int, float]:
    """Return the copy ceiling at the points of a panel."""
    found = result["copy_ceiling_gb_s"]
    # The largest method has no number of SMs. Older results have only the kernel's figures.
    by_sms = {int(sms): found["used"] if "by_method" in found else gb_s for sms, gb_s in found["by_sms"].items()}
    return by_sms if over == "sms" else {row.tokens: by_sms.get(row.sms, found["used"]) for row in rows}


def _in_the_time_of_plain(rows: Iterable[Row], over: str, alone: bool) -> list[Line]:
    """Return the bandwidth that compressed combines would have if they took as long as plain ones."""
    points = {
        getattr(row, over): _gb_s(row, alone) * row.percent_of_combine / 100 for row in rows if row.percent_of_combine is not None
    }
    return [Line(points, "in the time of\na plain combine", THEIRS[0], "D", "--")]


def _in_two_steps(rows: Iterable[Row], over: str, alone: bool) -> list[Line]:
    """Return the bandwidth of plain dispatch, and then a copy of the rows by expert."""
    of = {(row.work, getattr(row, over)): row for row in rows}
    lines = []
    for step, colour in (("copy", THEIRS[0]), ("permute", THEIRS[1])):
        points = {}
        for (work, at), plain in of.items():
            if work == "dispatch_bf16_known" and (then := of.get((f"{step}_expert", at))):
                points[at] = _gb_s(plain, alone) * plain.us / (plain.us + then.us)
        lines.append(Line(points, f"dispatch, then {step}", colour, "D", "--"))
    return lines


def low_latency(result: Mapping[str, Any], references: Iterable[Reference] = ()) -> Figure:
    """Draw latency against the number of tokens: a panel each for dispatch, combine, and both."""
    rows, kind, sizes, gpu = low_latency_rows(result), fp8_or_bf16(result), Sizes.of(result), on_gpu(result)
    parts = {f"dispatch_{kind}": f"Dispatch, {kind.upper()}", "combine": "Combine, BF16", f"both_{kind}": "Dispatch and combine"}
    mine, others = low_latency_parts(result), [other for other in references if other.low_latency]
    works = {f"dispatch_{kind}": [f"dispatch_{kind}"], "combine": ["combine_bf16"]}
    works[f"both_{kind}"] = [f"dispatch_{kind}", "combine_bf16"]
    panels = []
    for part, name in parts.items():
        lines = [Line(_filled(mine[part]), "in a graph" if gpu else "a call", OURS["known"])]
        if part.startswith("both") and gpu:
            step = _filled({row.tokens: row.step_p50_us for row in rows})
            p99 = _filled({row.tokens: row.step_p99_us for row in rows})
            lines.append(Line(step, "a step alone,\np50 to p99", OURS["worst"], "^", band=p99))
            lines.append(Line({row.tokens: row.call_us for row in rows}, "no graph", OURS["unknown"], "s"))
        for reference, colour in zip(others, itertools.cycle(THEIRS), strict=False):
            theirs = {tokens: us for (what, tokens), us in reference.low_latency.items() if what == part}
            lines.append(Line(theirs, _name(reference, sizes), colour, "D", "--"))
        lines = [line for line in lines if line.points]
        gb_s = result["copy_ceiling_gb_s"]["used"]
        if sizes.num_ranks > 1 and gpu and gb_s:
            at = {row.tokens: sum(sizes.remote_bytes(work, row.tokens) for work in works[part]) / gb_s / 1e3 for row in rows}
            lines.append(Line(at, "rows at the\ncopy ceiling", CEILING, "", ":"))
        panels.append((name, lines))
    measured = [us for _, lines in panels for line in lines if line.marker for us in (*line.points.values(), *line.band.values())]
    with rc_context(STYLE):
        figure, axes = _grid(result, 1, len(panels), "Low latency")
        for j, (name, lines) in enumerate(panels):
            draw_panel(axes[0][j], name, lines, xlabel="tokens of a rank", ylabel="" if j else "µs")
            axes[0][j].set_yscale("log")
            axes[0][j].set_ylim(0.6 * min(measured), 1.4 * max(measured))
            axes[0][j].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes[0][j].yaxis.set_major_formatter(FuncFormatter(lambda us, _: f"{us:,.10g}"))
            axes[0][j].yaxis.set_minor_formatter(NullFormatter())
            label_lines(axes[0][j], lines)
        return figure


def png(figure: Figure) -> bytes:
    """Encode a picture as a file."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=150)
    return file.getvalue()


def _filled(points: Mapping[int, float | None]) -> dict[int, float]:
    return {x: y for x, y in points.items() if y is not None}


def _name(reference: Reference, sizes: Sizes) -> str:
    """Shorten the name for a label. Add the number of ranks if it differs."""
    name, theirs = reference.name.partition(" (")[0], reference.sizes.num_ranks
    return name if theirs == sizes.num_ranks else f"{name}, {theirs} ranks"


def _their_bandwidth(reference: Reference, sizes: Sizes, work: str, rows: Sequence[Row], over: str, colour: str) -> list[Line]:
    tokens, sms = {row.tokens for row in rows}, {row.sms for row in rows}
    lines = []
    for routing in ROUTINGS:
        names = (f"{work}_{routing}", work if routing == "known" else None)
        points = {
            (at_sms if over == "sms" else at_tokens): point.remote_gb_s
            for (what, at_tokens, at_sms), point in reference.throughput.items()
            if what in names and at_tokens in tokens and (over == "sms" or at_sms in sms)
        }
        label = _name(reference, sizes) + ("" if work.startswith("combine") else f",\n{ROUTINGS[routing]}")
        lines.append(Line(points, label, colour, MARKERS[routing], "--"))
    return lines


# --- drawing -----------------------------------------------------------------------------------------------------------------------


def _grid(result: Mapping[str, Any], num_rows: int, num_columns: int, what: str) -> tuple[Figure, Any]:
    """Make a figure, and its panels by row and column."""
    size = PANEL_INCHES[0] * num_columns, 0.6 + PANEL_INCHES[1] * num_rows
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(f"{what}: {title(result)}\n{result['date']}", fontsize=11)
    return figure, figure.subplots(num_rows, num_columns, squeeze=False, sharey=True)


def draw_panel(axes: Axes, title: str, lines: Sequence[Line], *, xlabel: str, ylabel: str) -> None:
    if not lines:  # no measurement
        axes.set_visible(False)
        return
    for line in lines:
        x = sorted(line.points)
        y = [line.points[at] for at in x]
        marker, size = (line.marker, 4.5) if line.marker or len(x) > 1 else ("_", 25)  # a line of one point has no length
        axes.plot(x, y, line.dashes, color=line.colour, marker=marker, markersize=size, linewidth=1.6)
        if line.band:
            axes.fill_between(x, y, [line.band.get(at, low) for at, low in zip(x, y, strict=True)], color=line.colour, alpha=0.25)
    ticks = sorted({x for line in lines for x in line.points})
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    room = 2.2 if len(ticks) == 1 else (ticks[-1] / ticks[0]) ** 0.5  # for the labels
    axes.set_xlim(ticks[0] / (1.5 if len(ticks) == 1 else (ticks[-1] / ticks[0]) ** 0.04), ticks[-1] * room)
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(axis="y", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=3)


def label_lines(axes: Axes, lines: Sequence[Line]) -> None:
    """Label each line at its right end in its colour.

    Labels that would overlap are moved, and a thin line connects each with its line.
    """
    if not lines:
        return
    shares = axes.transScale + axes.transLimits  # from data to shares of the panel
    ends = [(max(line.points), line.points[max(line.points)]) for line in lines]
    shown = [i for i, end in enumerate(ends) if 0 <= shares.transform(end)[1] <= 1]
    order = sorted(shown, key=lambda i: shares.transform(ends[i])[1])
    heights = [(10.5 * (1 + lines[i].label.count("\n")) + 2) / PANEL_POINTS for i in order]
    places = place_labels([shares.transform(ends[i])[1] for i in order], heights)
    left = shares.transform((max(x for x, _ in ends), ends[0][1]))[0] + 0.05
    for i, place in zip(order, places, strict=True):
        axes.annotate(
            lines[i].label,
            xy=ends[i],
            xytext=(left, place),
            textcoords="axes fraction",
            color=lines[i].colour,
            fontsize=8.5,
            va="center",
            linespacing=0.95,
            bbox={"facecolor": GROUND, "edgecolor": "none", "pad": 0.5},
            arrowprops={
                "arrowstyle": "-",
                "color": lines[i].colour,
                "linewidth": 0.6,
                "alpha": 0.6,
                "shrinkA": 1,
                "shrinkB": 3,
                "relpos": (0, 0.5),
            },
        )


def place_labels(wanted: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Compute the centres of labels, as near to `wanted` (ascending, 0 to 1) as possible and without overlap.

    Labels that would overlap become a block. Its centre is the mean of the wanted centres.
    """
    blocks: list[list[int]] = []
    for i in range(len(wanted)):
        blocks.append([i])
        while len(blocks) > 1 and _bottom(blocks[-1], wanted, heights) < _top(blocks[-2], wanted, heights):
            last = blocks.pop()
            blocks[-1] += last
    places = []
    for block in blocks:
        at = _bottom(block, wanted, heights)
        for i in block:
            places.append(at + heights[i] / 2)
            at += heights[i]
    return places


def _bottom(block: Sequence[int], wanted: Sequence[float], heights: Sequence[float]) -> float:
    height = sum(heights[i] for i in block)
    return max(0.0, min(sum(wanted[i] for i in block) / len(block), 1.0 - height / 2) - height / 2)


def _top(block: Sequence[int], wanted: Sequence[float], heights: Sequence[float]) -> float:
    return _bottom(block, wanted, heights) + sum(heights[i] for i in block)
