"""Which metrics are a run's headlines: the first of each list that a run has is what people are shown.

Metrics are free to have any name in the namespaces; these are the ones the console and the report know by meaning.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Headline:
    """A figure that people ask for, and the metric names it goes by (regular expressions, best first)."""

    title: str
    names: tuple[str, ...]
    form: str = "{:.3f}"

    def find(self, metrics: Iterable[str]) -> str | None:
        """The metric that answers for this headline among `metrics`, or None."""
        names = sorted(metrics)
        for pattern in self.names:
            for name in names:
                if re.fullmatch(pattern, name):
                    return name
        return None

    def show(self, value: float) -> str:
        return self.form.format(value)


HEADLINES = (
    Headline("reward", ("reward/mean",)),
    Headline("exact match", (r"eval/.+/exact_match", "reward/exact_match", r"eval/[^/]+/(accuracy|gsm8k|math|reward)")),
    Headline("loss", (r"eval/[^/]+/loss", "train/loss"), "{:.4f}"),
    Headline("response length", ("rollout/response_length",), "{:.1f}"),
    Headline("tokens/s", ("perf/tokens_per_s",), "{:,.0f}"),
    Headline("step time", ("perf/step_s",), "{:.2f} s"),
)


def headlines(values: Mapping[str, float]) -> dict[str, str]:
    """Title -> text of every headline that `values` has.

    >>> headlines({"reward/mean": 0.25, "perf/tokens_per_s": 1234.5})
    {'reward': '0.250', 'tokens/s': '1,234'}
    """
    found = ((headline, headline.find(values)) for headline in HEADLINES)
    return {headline.title: headline.show(values[name]) for headline, name in found if name is not None}
