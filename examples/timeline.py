"""Time the parts of a step and draw them, for `overlap_micro_batches.py`."""

import time

from common import comm, need
from mpi4py import MPI

STEPS = 11
WIDTH = 12  # of the picture, in inches
KINDS = {  # kinds of parts, with their colour
    "matrix products": ("#9cc3e6", "attention", "experts"),
    "sending part": ("#f7c873", "send", "send back"),
    "receiving part (hook)": ("#ef9a75", "receive", "get back"),
    "both parts in one call": ("#cdb0d6", "dispatch", "combine"),
}
COLOURS = {piece: colour for colour, *pieces in KINDS.values() for piece in pieces}


class Timeline:
    """Record when the parts of a step end. On one stream, a part begins when the one before it ends. Pass `cupy=None` without a GPU."""

    def __init__(self, cupy):
        self.on_gpu, self.pieces, self._cupy, self._marks = cupy is not None, [], cupy, []
        self._mark()

    def done(self, batch, piece, result):
        """Record that the program has launched a part (without a GPU: finished it), and return its result."""
        self.pieces.append((batch, piece))
        self._mark()
        return result

    def microseconds(self):
        """Return the times of the beginning and of all ends."""
        first, last = self._marks[0], self._marks[-1]
        if not self.on_gpu:
            return [1e6 * (mark - first) for mark in self._marks]
        last.synchronize()
        return [1e3 * self._cupy.cuda.get_elapsed_time(first, mark) for mark in self._marks]

    def total(self):
        return self.microseconds()[-1]

    def _mark(self):
        if self.on_gpu:
            self._marks.append(self._cupy.cuda.Event())
            self._marks[-1].record()  # on the current stream, like the work
        else:
            self._marks.append(time.perf_counter())


def measure(step, work, cupy, busy):
    """Return the results of a step, and the timeline of a typical one on this rank. Its `slowest` is the time of the slowest rank.

    `busy` occupies the GPU until the host has launched all steps, so that they never wait for the host.
    """
    for _ in range(2):  # compile, and allocate the memory that the Buffer keeps
        outs = step(*work, Timeline(cupy).done)
    work[0].synchronize()
    comm.Barrier()
    for _ in range(100 if cupy else 0):
        busy()
    timelines = []
    for _ in range(STEPS):
        timelines.append(Timeline(cupy))
        outs = step(*work, timelines[-1].done)
    typical = sorted(timelines, key=Timeline.total)[STEPS // 2]
    typical.slowest = comm.allreduce(typical.total(), MPI.MAX)
    return outs, typical


def draw(file, title, timelines):
    """Write a picture with a panel for each of `timelines` (a dict by title), and a row for each micro-batch."""
    figures, patches = need("matplotlib.figure"), need("matplotlib.patches")
    figure = figures.Figure(figsize=(WIDTH, 1.3 + 2.1 * len(timelines)), layout="constrained")
    panels = figure.subplots(len(timelines), sharex=True, squeeze=False)[:, 0]
    longest = max(timeline.total() for timeline in timelines.values())
    travel = dict(facecolor="none", edgecolor="#999999", hatch="////", linewidth=0.8)
    legend = [patches.Patch(color=colour, label=kind) for kind, (colour, *_) in KINDS.items()]
    for axes, (name, timeline) in zip(panels, timelines.items(), strict=True):
        at, sent = timeline.microseconds(), {}
        for (batch, piece), start, end in zip(timeline.pieces, at[:-1], at[1:], strict=True):
            row = f"micro-batch {batch}"
            axes.barh(row, end - start, left=start, color=COLOURS[piece], edgecolor="white", linewidth=0.8)
            inches = 0.9 * WIDTH * (end - start) / longest
            if inches > 0.14:  # enough room for a label, horizontal or vertical; smaller parts have only their colour
                rotation = 0 if inches > 0.09 * len(piece) else 90
                axes.text((start + end) / 2, row, piece, ha="center", va="center", fontsize=9, rotation=rotation)
            if timeline.on_gpu and piece in KINDS["receiving part (hook)"]:
                axes.barh(row, start - sent[batch], left=sent[batch], height=0.3, **travel)
            sent[batch] = end
        axes.set_title(f"{name}: {at[-1]:,.0f} µs", loc="left", fontsize=11)
        axes.invert_yaxis()  # A first
        axes.margins(y=0.08)
        axes.tick_params(left=False)
        axes.spines[["top", "right", "left"]].set_visible(False)
    if any(timeline.on_gpu for timeline in timelines.values()):
        legend.append(patches.Patch(**travel, label="under way, holding no SM"))
    panels[-1].set_xlim(0, longest)
    panels[-1].xaxis.set_major_formatter("{x:,.0f}")
    panels[-1].set_xlabel("µs")
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), frameon=False)
    figure.suptitle(title, fontsize=12)
    figure.savefig(file, dpi=150)
