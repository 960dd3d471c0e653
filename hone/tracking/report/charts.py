"""Choose the charts of a report: first those that people look for, then all other metrics by namespace."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hone.tracking.catalogue import describe_metric
from hone.tracking.metrics import WORK
from hone.tracking.names import POLICY_LOSS

NAMESPACES = {
    "reward": "Rewards",
    "eval": "Evaluations",
    "rollout": "Generation",
    "train": "Training",
    "critic": "Critic",
    "correction": "Rollout correction",
    "weights": "Weight sync",
    "schedule": "Asynchronous schedule",
    "perf": "Time and throughput",
}
HEADLINES_SECTION = "Headlines"
OTHER_SECTION = "Other"

_MOST_SERIES = 8
_OF_AGE = r"schedule/staleness_\d+"
_UTILISATION = {"perf/trainer_utilisation": "trainer", "perf/rollout_utilisation": "rollout"}


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart. `series`: metric name -> label. `kind`: line or stack."""

    section: str
    title: str
    series: dict[str, str]
    kind: str = "line"
    unit: str = ""

    def plain(self) -> dict[str, Any]:
        return {
            "section": self.section,
            "title": self.title,
            "series": [[name, label] for name, label in self.series.items()],
            "kind": self.kind,
            "unit": self.unit,
            "about": [explained(name) for name in self.series],
        }


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A chart that is shown if a metric matches; with `together` it shows all matches, else the first."""

    title: str
    patterns: tuple[str, ...]
    together: bool = False
    unit: str = ""
    found: list[str] = field(default_factory=list)


_WANTED = (
    _Wanted("Reward", (r"reward/mean",)),
    _Wanted("Exact match, held out", (r"eval/[^/]+/exact_match",), together=True),
    _Wanted("Accuracy, held out", (r"eval/[^/]+/accuracy",), together=True),
    _Wanted("Loss, held out", (r"eval/[^/]+/loss",), together=True),
    _Wanted("Loss", (r"train/loss",)),
    _Wanted("Response length", (r"rollout/response_length",), unit="tokens"),
    _Wanted(
        "KL to the reference",
        (r"train/reference_kl", r"(train|reward)/kl", r"(train|reward)/(?!approx).*kl"),
    ),
    _Wanted("Entropy", (r"train/entropy", r"train/entropy.*"), unit="nats"),
    _Wanted(
        "Rollout and trainer log-probs",
        (r"correction/mean_abs_difference", r"correction/kl", r"correction/k3", r"correction/.*(diff|gap).*"),
    ),
    _Wanted("Gradient norm", (r"train/grad_norm", r"train/.*grad_norm.*")),
    _Wanted("Trained tokens by age of their weights", (_OF_AGE,), together=True, unit="share"),
    _Wanted("Utilisation", tuple(_UTILISATION), together=True, unit="share of the time"),
    _Wanted("Learning rate", (r"train/lr", r"train/learning_rate")),
    _Wanted("Throughput", (r"perf/tokens_per_s",), unit="tokens/s"),
)

_NOT_IN_STEP = ("perf/step_s", "perf/driver_s", "perf/rollout_idle_s")  # the last is time of servers
_OUTSIDE_STEP = re.compile(r"perf/(evaluate|initialize|(save_)?checkpoint|export|report|.*_outside)_s")


def charts(names: Sequence[str]) -> list[Chart]:
    """Put every metric of a run in a chart: headlines, the step's phases, then one chart for each of the others."""
    left = sorted(names)
    found: list[Chart] = []
    for wanted in _WANTED:
        if wanted.title == "Loss" and POLICY_LOSS in names:  # says nothing about success: both are in Training
            continue
        matches = _matches(wanted, left)
        if matches:
            labels = {name: _label(name) for name in matches} if len(matches) > 1 else {matches[0]: ""}
            found.append(Chart(HEADLINES_SECTION, wanted.title, labels, unit=wanted.unit))
            left = [name for name in left if name not in matches]
    phases = step_phases(names)
    if phases:
        labels = {name: name.removeprefix("perf/").removesuffix("_s").replace("_", " ") for name in phases}
        found.append(Chart(HEADLINES_SECTION, "Time of a step by phase", labels, kind="stack", unit="s"))
        left = [name for name in left if name not in phases]
    return found + _by_namespace(left)


def explained(metric: str) -> str:
    """The meaning of a metric from the catalogue with its name and unit, for a tooltip."""
    known = describe_metric(metric)
    if known is None:
        return f"{metric}: recorded by code of this run, and not described in the catalogue of metrics"
    return f"{metric}: {known.meaning}{f' ({known.unit})' if known.unit else ''}"


def step_phases(names: Sequence[str]) -> list[str]:
    """The metrics of a step's phases, model work first; the rest of `perf/step_s` was not timed."""
    if "perf/step_s" not in names:
        return []
    work = [f"perf/{name}_s" for name in WORK if f"perf/{name}_s" in names]
    rest = [
        name
        for name in sorted(names)
        if re.fullmatch(r"perf/[^/]+_s", name)
        and not name.endswith("_per_s")
        and name not in (*work, *_NOT_IN_STEP)
        and not _OUTSIDE_STEP.fullmatch(name)
    ]
    return work + rest


def _matches(wanted: _Wanted, names: Sequence[str]) -> list[str]:
    found: list[str] = []
    for pattern in wanted.patterns:
        found += [name for name in names if re.fullmatch(pattern, name) and name not in found]
        if found and not wanted.together:
            return found[:1]
    return found[:_MOST_SERIES]


def _label(name: str) -> str:
    """The label of a series in its chart: the evaluation set, the age in updates, or who is utilised."""
    if name in _UTILISATION:
        return _UTILISATION[name]
    if re.fullmatch(_OF_AGE, name):
        return f"{name.rpartition('_')[2]} updates old"
    return "/".join(name.split("/")[1:-1])


def _by_namespace(names: Sequence[str]) -> list[Chart]:
    """One chart for evaluations of one kind, one for all statuses, and one for each other metric."""
    shared: dict[tuple[str, str], dict[str, str]] = {}
    for name in names:
        namespace, _, rest = name.partition("/")
        section = NAMESPACES.get(namespace, OTHER_SECTION)
        set_name, separator, kind = rest.partition("/")
        if namespace == "eval" and separator:
            shared.setdefault((section, kind), {})[name] = set_name
        elif separator:
            shared.setdefault((section, set_name), {})[name] = kind
        else:
            shared.setdefault((section, rest if section != OTHER_SECTION else name), {})[name] = ""
    order = [*NAMESPACES.values(), OTHER_SECTION]
    ranked = sorted(shared.items(), key=lambda item: (order.index(item[0][0]), item[0][1]))
    return [
        Chart(section, title.replace("_", " "), dict(list(series.items())[start : start + _MOST_SERIES]))
        for (section, title), series in ranked
        for start in range(0, len(series), _MOST_SERIES)
    ]
