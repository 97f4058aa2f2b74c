"""Draw the chrome traces of all ranks that torch.profiler wrote, as profile_step.py does.

python examples/trace_picture.py traces timeline.png   # the file names end with the rank: traces/rank0.json, traces/rank1.json, ...

Each of the outermost ranges of `record_function` is a panel, or each `ProfilerStep`. Rows show the ranges within it on the host, and the
kernels of each stream.
"""

import argparse
import json
import re
import sys
from pathlib import Path

WIDTH = 12  # of the picture, in inches
KINDS = {  # kinds of kernels and of ranges on the host: colour, and what their names match
    "route": ("#b3d69b", r"route(_nodes)?"),
    "dispatch": ("#f7c873", r"dispatch(_nodes)?"),
    "rows by expert": ("#cdb0d6", r"expert_positions|expand_\w+|prepare_tiles|sum_expert_rows|list_choices"),
    "combine": ("#ef9a75", r"combine(_\w+)?"),
    "low latency": ("#8ccdc2", r"(ll|low_latency)_\w+"),
    "matrix products": (
        "#9cc3e6",
        r"attention|experts|shared expert|.*(gemm|gemv|nvjet|cutlass|group_?mm|grouped_(mm|product)).*",
    ),
    "other": ("#d0d0d0", r".*"),
}
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def kind_of(name):
    name = name.partition(":")[0]
    return next(kind for kind, (_, pattern) in KINDS.items() if re.fullmatch(pattern, name, re.IGNORECASE | re.DOTALL))


class Trace:
    """The events of a rank. An event is (begin, end, name), in nanoseconds of a clock that all ranks of a host share."""

    def __init__(self, file):
        content = json.loads(file.read_text())
        self._base = content.get("baseTimeNanoseconds", 0)
        self._events = [event for event in content["traceEvents"] if event.get("ph") == "X"]
        ranges = self._select("user_annotation")
        self.steps = outermost(ranges)
        self._parts = [part for part in ranges if part not in self.steps]
        self._streams = {}
        for event in self._events:
            if event.get("cat") in ON_GPU:
                self._streams.setdefault(event["args"]["stream"], []).append(self._times(event))

    def rows(self, begin, end):
        """Return the parts on the host and the kernels of each stream between two times, by the name of their row."""
        parts = outermost(within(self._parts, begin, end))
        rows = {"host": parts} if parts else {}
        for stream, kernels in sorted(self._streams.items()):
            if found := within(kernels, begin, end):
                rows[f"stream {stream}"] = found
        return rows

    def _select(self, category):
        return [self._times(event) for event in self._events if event.get("cat") == category]

    def _times(self, event):
        begin = self._base + round(1e3 * event["ts"])
        return begin, begin + round(1e3 * event["dur"]), event["name"]


def outermost(events):
    """Return the events that lie in no other one, in the order of time."""
    found = []
    for event in sorted(events, key=lambda event: (event[0], -event[1])):
        if not found or event[0] >= found[-1][1]:
            found.append(event)
    return found


def within(events, begin, end):
    return [event for event in events if event[0] < end and event[1] > begin]


def read(folder):
    """Return the traces of a folder, by rank."""
    files = {int(found[1]): file for file in folder.iterdir() if (found := re.search(r"(\d+)\.json$", file.name))}
    if not files:
        sys.exit(f"{folder} has no traces; expected files such as rank0.json. Run examples/profile_step.py --out {folder}")
    return {rank: Trace(files[rank]) for rank in sorted(files)}


def draw(traces, picture):
    """Draw a panel for each step, with the rows of all ranks."""
    try:
        from matplotlib import figure as figures
        from matplotlib import patches
    except ImportError:
        sys.exit(f"{sys.argv[0]} needs matplotlib: pip install matplotlib")
    counts = {rank: len(trace.steps) for rank, trace in traces.items()}
    if len(set(counts.values())) > 1 or not all(counts.values()):
        sys.exit(f"ranges by rank: {counts}; expected the same number of steps on all. Put record_function around each step.")
    panels = []
    for steps in zip(*(trace.steps for trace in traces.values()), strict=True):
        begin, end = min(step[0] for step in steps), max(step[1] for step in steps)
        panels.append((steps[0][2], begin, end, {rank: trace.rows(begin, end) for rank, trace in traces.items()}))
    heights = [sum(0.5 + len(rows) for rows in ranks.values()) for *_, ranks in panels]
    figure = figures.Figure(figsize=(WIDTH, 0.7 + 0.75 * len(panels) + 0.4 * sum(heights)), layout="constrained")
    seen = set()
    for axes, panel in zip(figure.subplots(len(panels), height_ratios=heights, squeeze=False)[:, 0], panels, strict=True):
        seen |= draw_panel(axes, *panel)
    legend = [patches.Patch(color=colour, label=kind) for kind, (colour, _) in KINDS.items() if kind in seen]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), frameon=False)
    figure.savefig(picture, dpi=150)


def draw_panel(axes, title, begin, end, ranks):
    """Draw the rows of all ranks. Return the kinds of what they show."""
    labels, seen, y = {}, set(), 0.0
    length, per_inch = (end - begin) / 1e3, (end - begin) / 1e3 / (0.88 * WIDTH)
    for rank, rows in ranks.items():
        for row, events in rows.items():
            labels[y] = f"rank {rank}, {row}"
            for event_begin, event_end, name in events:
                kind = kind_of(name)
                left, right = ((time - begin) / 1e3 for time in (max(event_begin, begin), min(event_end, end)))
                seen.add(kind)
                style = dict(height=0.6, alpha=0.55) if row == "host" else dict(height=0.9)
                axes.barh(y, right - left, left=left, color=KINDS[kind][0], edgecolor="white", linewidth=0.5, **style)
                text = name if row == "host" else {"matrix products": "GEMM", "other": ""}.get(kind, name)
                label(axes, (left + right) / 2, y, (right - left) / per_inch, text)
            y += 1
        y += 0.5  # between ranks
    axes.set_yticks(list(labels), labels.values())
    axes.set_ylim(y - 0.8, -0.7)  # the first row on top
    axes.set_xlim(0, length)
    axes.set_title(f"{title}: {length:,.0f} µs", loc="left", fontsize=11, parse_math=False)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("µs", loc="right", labelpad=-8)
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)
    return seen


def label(axes, x, y, inches, text):
    """Write the text, or its part before the colon, if there is room."""
    for words in (text, text.partition(":")[0]):
        if inches > 0.068 * len(words):
            axes.text(x, y, words, ha="center", va="center", fontsize=8, parse_math=False)
            return


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="traces, whose names end with the rank: rank0.json, ...")
    parser.add_argument("picture", type=Path, help="the file to write (.png, .svg, ...)")
    args = parser.parse_args()
    draw(read(args.folder), args.picture)


if __name__ == "__main__":
    main()
