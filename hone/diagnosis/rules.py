"""All rules, and their findings in the order of weight."""

from __future__ import annotations

from collections.abc import Iterable

from hone.diagnosis import learning, machine, rollouts
from hone.diagnosis.evidence import Evidence, Finding

RULES = (*machine.RULES, *rollouts.RULES, *learning.RULES)
ORDER = ("stops", "hurts", "note")


def findings(run: Evidence) -> list[Finding]:
    """Return what every rule finds, the heaviest first."""
    return sorted_by_weight(finding for rule in RULES for finding in rule(run))


def sorted_by_weight(found: Iterable[Finding]) -> list[Finding]:
    """Findings with the heaviest first, otherwise in their order."""
    return sorted(found, key=lambda one: ORDER.index(one.weight))
