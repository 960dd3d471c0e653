"""Headlines: the metrics that the console and the report show first.

Each has one meaning. Figures of training and figures of held-out sets are never shown under one name: a held-out figure
is named by its set, and stands with the step that it was measured at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Better = Literal["higher", "lower", ""]
"""Which direction of a metric is an improvement; empty: neither, as with a policy loss."""


@dataclass(frozen=True, slots=True)
class Headline:
    """A metric that is shown first, under a title of its own."""

    title: str
    metric: str
    form: str = "{:.3f}"
    better: Better = ""

    def show(self, value: float) -> str:
        return self.form.format(value)


POLICY_LOSS = "train/policy_loss"

HEADLINES = (
    Headline("teacher KL", "train/teacher_kl", "{:.4f}", "lower"),
    Headline("reward", "reward/mean", better="higher"),
    Headline("policy loss", POLICY_LOSS, "{:.4f}"),
    Headline("loss", "train/loss", "{:.4f}", "lower"),
    Headline("pair accuracy", "train/preference_accuracy", better="higher"),
    Headline("response length", "rollout/response_length", "{:.1f}"),
    Headline("tokens/s", "perf/tokens_per_s", "{:,.0f}"),
    Headline("step time", "perf/step_s", "{:.2f} s"),
)
"""Headlines of training."""

_OF_SETS = (  # the last part of `eval/<set>/<figure>`; a set shows the first that it has
    Headline("exact match", "exact_match", better="higher"),
    Headline("accuracy", "accuracy", better="higher"),
    Headline("loss", "loss", "{:.4f}", "lower"),
    Headline("reward", "reward", better="higher"),
)
_OF_ROLE = re.compile(r"eval/([^/]+/[^/]+)/reward")  # a set and a role, in runs with several roles


def training_headlines(metrics: Iterable[str]) -> list[Headline]:
    """The headlines of training that a run has. A policy's run shows its policy loss, not the sum with other losses."""
    names = set(metrics)
    hidden = {"train/loss"} if POLICY_LOSS in names else set()
    return [headline for headline in HEADLINES if headline.metric in names - hidden]


def held_out_headlines(metrics: Iterable[str], score: str = "") -> list[Headline]:
    """One headline for each held-out set of a run, or for each role in it.

    A set shows the metric that `evaluation.score` names, if it is one of its own; else the first of the usual ones.

    >>> [one.title for one in held_out_headlines(["eval/test/reward", "eval/test/exact_match"])]
    ['test exact match']
    >>> [one.title for one in held_out_headlines(["eval/test/reward", "eval/test/solved"], "eval/test/solved")]
    ['test solved']
    """
    names = set(metrics)
    sets = sorted({name.split("/")[1] for name in names if name.startswith("eval/") and name.count("/") >= 2})
    roles = sorted(match[1] for name in names if (match := _OF_ROLE.fullmatch(name)))
    found: list[Headline] = []
    for one in (*sets, *roles):
        own = score.removeprefix(f"eval/{one}/")
        elsewhere = (
            own == score or f"{one}/{own.partition('/')[0]}" in roles
        )  # of another set, or of a role in this one
        usual = _OF_SETS if elsewhere else (*(figure for figure in _OF_SETS if figure.metric == own), _named(own))
        figure = next((figure for figure in (*usual, *_OF_SETS) if f"eval/{one}/{figure.metric}" in names), None)
        if figure is not None:
            name = f"eval/{one}/{figure.metric}"
            found.append(Headline(f"{one.replace('/', ' ')} {figure.title}", name, figure.form, figure.better))
    return found


def score_of(config: Mapping[str, Any]) -> str:
    """`evaluation.score` of a run's settings as plain data; empty if it is not set."""
    evaluation = config.get("evaluation")
    return str(evaluation.get("score") or "") if isinstance(evaluation, Mapping) else ""


def _named(metric: str) -> Headline:
    return Headline(metric.replace("_", " "), metric, better="higher")


def headlines(values: Mapping[str, float]) -> dict[str, str]:
    """Title -> formatted value of every headline of training in `values`.

    >>> headlines({"reward/mean": 0.25, "perf/tokens_per_s": 1234.5})
    {'reward': '0.250', 'tokens/s': '1,234'}
    """
    return {one.title: one.show(values[one.metric]) for one in training_headlines(values)}
