"""From what doctor found out about the ranks to what that means: what all rules say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from .catalog import KINDS
from .facts import LEVELS, Finding, Situation
from .job_rules import RULES
from .rank_rules import RANK_RULES


def findings(situation: Situation) -> list[Finding]:
    """Everything that the rules say, the worst first, kind by kind; what they say of several ranks alike is said once."""
    said: list[Finding] = [finding for rule in RULES for finding in _judged(rule, situation)]
    ranks: dict[Finding, list[int]] = {}
    for report in situation.reports:
        for rule in RANK_RULES:
            for finding in _judged(rule, situation, report):
                ranks.setdefault(finding, []).append(report["rank"])
    for finding, at in ranks.items():
        everywhere = len(at) == len(situation.reports)
        said.append(finding if everywhere else Finding(finding.kind, finding.level, finding.what, tuple(at)))
    kinds = list(KINDS)
    return sorted(said, key=lambda finding: (LEVELS.index(finding.level), kinds.index(finding.kind.name)))


def _judged(rule: Callable[..., Iterator[Finding]], *about: Any) -> list[Finding]:
    """What a rule says; a rule that stumbles over facts which nobody thought of says that."""
    try:
        return list(rule(*about))
    except Exception as error:
        return [Finding.of("probe-failed", "warning", f"the rule {rule.__name__}: {type(error).__name__}: {error}")]
