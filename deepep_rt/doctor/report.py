"""Examine a machine, and report the findings as text or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .examine import examine
from .facts import Finding, JobReport, differences
from .findings import findings, is_broken
from .screen import show

__all__ = ["as_json", "examine", "findings", "is_broken", "show"]


def as_json(job: JobReport, found: Sequence[Finding]) -> dict[str, Any]:
    """Make the document for programs: `status` ("ok" or "broken"), `findings`, `size_hint`, `differences`,
    `network` (what was measured, or None), `ranks` (the reports).
    """
    return {
        "status": "broken" if is_broken(found) else "ok",
        "findings": [
            {
                "kind": finding.type.name,
                "level": finding.level,
                "what": finding.what,
                "ranks": list(finding.ranks) or [report["rank"] for report in job.reports],
                "meaning": finding.type.meaning,
                "remedy": finding.type.remedy,
            }
            for finding in found
        ],
        "size_hint": job.size_hint(),
        "differences": differences(job.reports),
        "network": job.network,
        "ranks": list(job.reports),
    }
