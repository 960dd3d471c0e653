"""All rules, and their findings in the order of weight."""

from __future__ import annotations

from hone.diagnosis import learning, machine, rollouts
from hone.diagnosis.evidence import Evidence, Finding

RULES = (*machine.RULES, *rollouts.RULES, *learning.RULES)
ORDER = ("stops", "hurts", "note")


def findings(run: Evidence) -> list[Finding]:
    """Return what every rule finds, the heaviest first."""
    found = [finding for rule in RULES for finding in rule(run)]
    return sorted(found, key=lambda one: ORDER.index(one.weight))
