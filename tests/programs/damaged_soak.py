"""Run `python -m deepep_rt soak` on a backend whose results this program damages on the last rank.

`damaged_soak.py FOLDER OPTIONS... -- DAMAGE...` runs once for each damage, repeats the failed round with the printed command, and writes
DAMAGE.json and DAMAGE_again.json.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

from deepep_rt.arrays.view import host_bytes
from deepep_rt.backends.host import throughput
from deepep_rt.backends.host.backend import HostBackend
from deepep_rt.cli import app as cli

COMM = MPI.COMM_WORLD
IS_LAST = COMM.Get_rank() == COMM.Get_size() - 1
calls = []  # results, or one entry for each call


def flip(view, byte=-1):
    """Flip a bit of a byte of an array."""
    if view is not None and view.nbytes and IS_LAST:
        host_bytes(view).reshape(-1)[byte] ^= 0x10


def change(name, byte=-1):
    return lambda result: flip(result.views[name], byte)


def skip_writing(result):
    """Restore the old contents of a sum's memory."""
    if IS_LAST:
        host_bytes(result.views["x"])[...] = 0xA5


def overwrite_later(result):
    """Write into a result three dispatches after it was returned."""
    calls.append(result)
    if len(calls) > 3:
        flip(calls.pop(0).views["x"])


def swap_rows(result):
    rows = result.views["x"].owner
    if IS_LAST and len(rows) > 1:
        rows[[0, -1]] = rows[[-1, 0]]


def count_one_more(result):
    if IS_LAST:
        host_bytes(result.views["num_recv_per_expert"]).view(np.int32).reshape(-1)[0] += 1


@contextlib.contextmanager
def without_rounding():
    """Do not round the sums of other nodes."""
    original = throughput._add_node
    throughput._add_node = lambda *given: original(*given[:3]) if IS_LAST else original(*given)
    try:
        yield
    finally:
        throughput._add_node = original


@contextlib.contextmanager
def with_a_wrong_bit():
    """Change a bit of a compressed row that arrived."""
    original = throughput.expand

    def damaged(*arguments):
        bits = original(*arguments).view(np.uint32)
        bits[-1:, -1] ^= (1 << 22) * IS_LAST
        return bits.view(np.float32)

    throughput.expand = damaged
    try:
        yield
    finally:
        throughput.expand = original


CONTEXTS = {"roundings": without_rounding, "compression": with_a_wrong_bit}
"""The damages of parts of calls."""


def fifth(action):
    def act(result):
        calls.append(None)
        if IS_LAST and len(calls) == 5:
            action()

    return act


def fail():
    raise RuntimeError("the experts of this rank caught fire")


DAMAGES = {
    "dispatch": ("dispatch", change("x")),
    "scales": ("dispatch", change("scales")),
    "experts": ("dispatch", change("topk_idx")),
    "swapped": ("dispatch", swap_rows),
    "later": ("dispatch", overwrite_later),
    "combine": ("combine", change("x")),
    "weights": ("combine", change("topk_weights")),
    "unwritten": ("combine", skip_writing),
    "counts": ("low_latency_dispatch", count_one_more),
    "rows": ("low_latency_dispatch", change("x", 0)),
    "sums": ("low_latency_combine", change("x")),
    **dict.fromkeys(CONTEXTS, ("combine", lambda result: None)),
    "sleep": ("combine", fifth(lambda: time.sleep(1000))),
    "raise": ("combine", fifth(fail)),
    "silent": ("low_latency_dispatch", fifth(lambda: time.sleep(1000))),
}


def run(damage, options):
    """Run the command with a damage. Return the exit status."""
    method, act = DAMAGES[damage]
    original = getattr(HostBackend, method)

    def damaged(self, *arguments):
        result = original(self, *arguments)
        act(result)
        return result

    calls.clear()
    setattr(HostBackend, method, damaged)
    try:
        with CONTEXTS.get(damage, contextlib.nullcontext)():
            cli.run(["soak", *options])
    except SystemExit as end:
        return end.code
    finally:
        setattr(HostBackend, method, original)


def main():
    folder, words = Path(sys.argv[1]), sys.argv[2:]
    at = words.index("--")
    for damage in words[at + 1 :]:
        report = folder / f"{damage}.json"
        run(damage, [*words[:at], "--json", str(report)])
        found = COMM.bcast(report.exists() and json.loads(report.read_text()))
        if found and found["mismatches"]:
            again = shlex.split(found["mismatches"][0]["command"])
            run(damage, [*again[again.index("soak") + 1 :], "--json", str(folder / f"{damage}_again.json")])


if __name__ == "__main__":
    main()
