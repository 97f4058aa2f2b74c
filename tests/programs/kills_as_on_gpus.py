"""Run `soak --kill` with the rounds for GPUs, with graphs and streams, on the host backend: `kills_as_on_gpus.py OPTIONS...`.

NumPy replaces CuPy. The program starts itself for each rank.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import numpy as np
from soak_as_on_gpus import HearsLater, counted, graphs, make_cupy, wrap_arrays

from deepep_rt import Buffer, EPInputError
from deepep_rt.cli import app as cli
from deepep_rt.soak import kill, member, processes
from deepep_rt.soak.graph import Graph, OldRouting

make_graph, make_old, warm_up = Graph.__init__, OldRouting.__init__, Graph.warm_up
counted |= {"old": 0}


class OnHost(HearsLater):
    """A Buffer on the host backend whose `check` tells of replays along a routing of before."""

    report: str = ""

    def __init__(self, comm, backend, **settings):
        assert backend == "cuda"
        super().__init__(comm, backend="host", **settings)

    @staticmethod
    def join(rendezvous, *, slot, **settings):
        made = Buffer.join(rendezvous, slot=slot, **{**settings, "backend": "host"})
        made.__class__ = OnHost
        return made

    def check(self):
        report, self.report = self.report, ""
        if report:
            raise EPInputError(report)
        super().check()


def graph(self, session):
    make_graph(self, session)
    graphs.append(self)


def warm_up_as_a_new_member(self):
    """Make the calls as often as a member that captures its graph now: here the calls of a capture run."""
    warm_up(self)
    if self in graphs:
        warm_up(self)


def old_routing(self, session):
    make_old(self, session)

    def launch():
        self.sums.view(np.uint8)[...] = 0xFF  # NaN
        session.buffer.report = "a handle of an older generation"
        counted["old"] += 1

    self.graph = SimpleNamespace(launch=launch)


def rank(given):
    sys.modules["cupy"] = make_cupy()
    wrap_arrays()
    member.Buffer, member._has_fp8 = OnHost, lambda: True
    Graph.__init__, Graph.warm_up, OldRouting.__init__ = graph, warm_up_as_a_new_member, old_routing
    status = member.main([given])
    assert status or json.loads(given)["rank"] < 0 or counted["old"], "a rank of the start that is awake has seen a change"
    sys.exit(status)


if __name__ == "__main__":
    if sys.argv[1].startswith("{"):
        rank(sys.argv[1])
    kill.Kills.choose_backend = lambda self: "cuda"
    processes.COMMAND = [sys.executable, __file__]
    cli.run(["soak", "--kill", *sys.argv[1:]])
