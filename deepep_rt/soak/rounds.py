"""Run a round of any kind."""

from __future__ import annotations

from . import graph, low_latency, throughput
from .plan import RoundPlan
from .session import Session

_RUN = {
    "throughput": throughput.run_round,
    "expert_rows": throughput.run_round,
    "low_latency": low_latency.run_round,
    "graph": graph.run_round,
}


def run_round(session: Session, plan: RoundPlan) -> None:
    """Make the calls of a round, and check all results."""
    _RUN[plan.kind](session, plan)
