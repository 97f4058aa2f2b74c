"""Apply all rules to the reports of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .catalog import FINDING_TYPES
from .facts import LEVELS, Finding, JobReport
from .job_rules import RULES
from .network_rules import NETWORK_RULES
from .rank_rules import RANK_RULES


def findings(job: JobReport) -> list[Finding]:
    """Apply every rule. Return the findings by level and type, the worst first.

    Equal findings about several ranks become one.
    """
    made = [finding for rule in (*RULES, *NETWORK_RULES) for finding in _apply(rule, job)]
    ranks: dict[Finding, list[int]] = {}
    for report in job.reports:
        for rule in RANK_RULES:
            for finding in _apply(rule, job, report):
                ranks.setdefault(finding, []).append(report["rank"])
    for finding, at in ranks.items():
        is_everywhere = len(at) == len(job.reports)
        made.append(finding if is_everywhere else Finding(finding.type, finding.level, finding.what, tuple(at)))
    names = list(FINDING_TYPES)
    return sorted(made, key=lambda finding: (LEVELS.index(finding.level), names.index(finding.type.name)))


def is_broken(found: Iterable[Finding]) -> bool:
    """Tell whether a Buffer cannot be made as asked for."""
    return any(finding.level == "error" for finding in found)


def _apply(rule: Callable[..., Iterator[Finding]], *arguments: Any) -> list[Finding]:
    """Apply a rule. If unexpected facts make it raise, the error is the finding."""
    try:
        return list(rule(*arguments))
    except Exception as error:
        return [Finding.of("probe-failed", "warning", f"the rule {rule.__name__}: {type(error).__name__}: {error}")]
