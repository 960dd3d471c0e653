"""The rules of `hone diagnose` during a run: one line when a rule begins to hold, and a mark on the charts.

    each step's metrics --> columns of the last steps --a look--> rules --what is new--> one line to the user
                                                                                    '--> findings.jsonl

A look reads all steps that are kept. There is one after each of the first 40 steps, and then whenever their number has
grown by 5 %, so all looks together take time in proportion to the steps: docs/diagnosis.md has the figure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from hone.composition import ConfigError
from hone.diagnosis.evidence import Evidence, Finding, read_evidence, read_settings
from hone.diagnosis.machine import out_of_memory
from hone.diagnosis.rules import RULES, sorted_by_weight
from hone.tracking.findings import add_finding, read_findings, replace_findings
from hone.tracking.report.columns import Column, MetricsFile
from hone.tracking.trackers.jsonl import METRICS_FILE

T = TypeVar("T")

LONGEST = 10_000  # steps that rules look at, at least; up to twice as many are kept
SHARE = 20  # a look is due when the kept steps have grown by one part of so many
PAUSE = 10  # a finding that was absent for fewer looks has not ended: near a limit it comes and goes


class LiveRules:
    """Looks at each step's metrics. Nothing is read or written before the first step."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        """`folder` is the run folder; `say` gets the lines."""
        self._folder = folder
        self._say = say
        self._rules = list(RULES)
        self._columns: dict[str, Column] = {}
        self._evidence: Evidence | None = None  # of the first look; later ones have its settings
        self._absent: dict[tuple[str, tuple[str, ...]], int] = {}  # findings -> looks since they held
        self._waited = 0  # steps since the last look
        self._steps = 0
        self._can_write = True

    def look(self, values: Mapping[str, float]) -> None:
        """Look at the metrics of a step that was logged; `step` is among them."""
        step = int(values["step"])
        if self._evidence is None:
            self._evidence = self._begin(step)
        if step > self._evidence.last_step or not self._steps:
            self._add(step, values)
        self._waited += 1
        if self._waited >= max(1, self._steps // SHARE):
            self._waited = 0
            evidence = Evidence(self._folder, self._columns, self._evidence.settings, "", self._steps, step)
            self._judge(step, evidence)

    def _begin(self, step: int) -> Evidence:
        """Read the metrics of the launches before this one, and their findings before this step."""
        metrics = MetricsFile(self._folder / METRICS_FILE)
        no_findings: list[dict[str, Any]] = []
        no_settings: dict[str, Any] = {}
        if (self._folder / METRICS_FILE).is_file():
            while self._try(metrics.read, False, f"the steps before {step}"):
                pass
        before = self._try(lambda: read_findings(self._folder), no_findings, "what was found before")
        settings = self._try(lambda: read_settings(self._folder), no_settings, "the settings")
        self._columns, self._steps = dict(metrics.columns), metrics.columns.lines
        kept = [one for one in before if one["step"] < step]
        if len(kept) < len(before):
            self._write(lambda: replace_findings(self._folder, kept))
        self._absent = {(str(one.get("title")), tuple(one["metrics"])): 0 for one in kept}
        return Evidence(self._folder, {}, settings, last_step=metrics.columns.last_step)

    def _try(self, read: Callable[[], T], default: T, what: str) -> T:
        try:
            return read()
        except (OSError, ConfigError) as error:  # a run does not end because of a hint
            self._say(f"warning: the rules do not see {what}: {error}")
            return default

    def _add(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            if name != "step":
                column = self._columns.setdefault(name, Column())
                column.steps.append(step)
                column.values.append(value)
        self._steps += 1
        if self._steps >= 2 * LONGEST:
            self._steps -= LONGEST
            for column in self._columns.values():
                cut = bisect_left(column.steps, step - LONGEST)
                del column.steps[:cut], column.values[:cut]

    def _judge(self, step: int, evidence: Evidence) -> None:
        found = {(one.title, one.metrics): one for one in self._found(evidence)}
        self._absent = {key: looks + 1 for key, looks in self._absent.items() if looks < PAUSE}
        for key, one in found.items():
            if key not in self._absent:
                self._tell(step, one)
            self._absent[key] = 0

    def _found(self, evidence: Evidence) -> list[Finding]:
        found: list[Finding] = []
        for rule in list(self._rules):
            try:
                found += rule(evidence)
            except Exception as error:  # noqa: BLE001  a run does not end because of a hint
                self._rules.remove(rule)
                self._say(
                    f"warning: the rule {rule.__name__} failed, and looks no more: {type(error).__name__}: {error}"
                )
        return sorted_by_weight(found)

    def _tell(self, step: int, one: Finding) -> None:
        remedy = f"; try {one.tries[0]}" if one.tries else ""
        self._say(f"finding in step {step}: {one.title}: {one.seen}{remedy}. More: hone diagnose {self._folder}")
        self._write(lambda: add_finding(self._folder, {"step": step, **asdict(one)}))

    def _write(self, work: Callable[[], None]) -> None:
        try:
            if self._can_write:
                work()
        except OSError as error:
            self._can_write = False
            self._say(f"warning: findings.jsonl cannot be written ({error.strerror or error}): charts lack their marks")


def tell_of_memory(folder: Path, say: Callable[[str], None]) -> None:
    """Say what to change, and mark the charts, if memory ended the run of this folder. Raises ConfigError, OSError."""
    run = read_evidence(folder)
    for one in out_of_memory(run):
        say(f"{one.title}: try {', or '.join(one.tries)}")
        add_finding(folder, {"step": max(run.last_step, 0), **asdict(one)})
