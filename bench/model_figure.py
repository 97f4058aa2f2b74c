"""Draw what the model says: bandwidth and latency against nodes, with the published figures of DeepEP V1."""

from __future__ import annotations

from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from deepep_rt.bench.figures import CEILING, OURS, PANEL_INCHES, STYLE, THEIRS, Line, draw_panel, label_lines, png

__all__ = ["draw", "png"]

_RANKS_OF_A_NODE = 8  # of the published figures
_PATHS = {"hierarchical": (OURS["known"], "o"), "direct": (OURS["unknown"], "s")}


def draw(found: dict[str, Any]) -> Figure:
    """Draw a document of `predict.predict`: a panel for each mode and call."""
    with rc_context(STYLE):
        figure = Figure(figsize=(2 * PANEL_INCHES[0], 0.6 + 2 * PANEL_INCHES[1]), layout="constrained")
        figure.suptitle(f"Model, not measured. {found['machine']['where']}", fontsize=11)
        panels = figure.subplots(2, 2, squeeze=False, sharey="row")
        for i, (mode, ylabel) in enumerate((("throughput", "GB/s"), ("low-latency", "µs"))):
            each = [_lines(found, mode, call) for call in ("dispatch", "combine")]
            top = 1.12 * max(value for lines in each for line in lines for value in line.points.values())
            for j, (call, lines) in enumerate(zip(("dispatch, FP8", "combine, BF16"), each, strict=True)):
                title = f"{'Throughput' if i == 0 else 'Low latency'}: {call}"
                draw_panel(panels[i][j], title, lines, xlabel="nodes" if i else "", ylabel="" if j else ylabel)
                panels[i][j].set_ylim(0, top)
                label_lines(panels[i][j], lines)
        return figure


def _lines(found: dict[str, Any], mode: str, call: str) -> list[Line]:
    """Make the lines of a panel. One node has no network, and its bandwidth would dwarf the others'."""
    field = "gb_s" if mode == "throughput" else "us"
    lines = []
    for path, (colour, marker) in _PATHS.items():
        rows = [r for r in found["rows"] if (r["mode"], r["call"]) == (mode, call) and r["path"] in (path, "near")]
        points = {row["nodes"]: row[field] for row in rows if mode != "throughput" or row["nodes"] > 1}
        if any(row["path"] == path for row in rows):
            lines.append(Line(points, f"model,\n{path}" if mode == "throughput" else "model", colour, marker))
    theirs = {r["num_ranks"] // _RANKS_OF_A_NODE: r for r in found["published"] if (r["mode"], r["call"]) == (mode, call)}
    values = {nodes: row["value"] for nodes, row in theirs.items()}
    fitted = {nodes: row["model"] for nodes, row in theirs.items()}
    lines.append(Line(values, "DeepEP V1, H800,\npublished", THEIRS[0], "D", "--"))
    lines.append(Line(fitted, "DeepEP V1,\nfitted", CEILING, "", ":"))
    if mode == "throughput":
        best = [row for row in found["rows"] if (row["mode"], row["call"], row["path"]) == (mode, call, "hierarchical")]
        lines.append(
            Line({row["nodes"]: row["gb_s"] / row["efficiency"] for row in best}, "100 % of\nthe links", THEIRS[2], "", ":")
        )
    return [line for line in lines if line.points]
