"""The metrics of a run as a table: a list of its steps, with the columns by name."""

from __future__ import annotations

import difflib
import math
from typing import Any

from hone.registry import resolve


class MetricsTable(list[dict[str, float]]):
    """One dict for each step, in order, with the key `step`.

    >>> table = MetricsTable([{"step": 0.0, "eval/test/loss": 2.5}, {"step": 1.0, "train/loss": 2.0}])
    >>> table.column("train/loss")
    [nan, 2.0]
    >>> table[-1]["train/loss"]
    2.0
    """

    @property
    def names(self) -> list[str]:
        """The names of all metrics, in the order in which they first occur."""
        return list(dict.fromkeys(name for step in self for name in step))

    def column(self, name: str) -> list[float]:
        """The values of one metric, one for each step; NaN where a step does not have it.

        Raises KeyError for a metric that no step has; the message names the nearest one.
        """
        if not any(name in step for step in self):
            near = difflib.get_close_matches(name, self.names, 1)
            hint = f"; did you mean {near[0]!r}?" if near else "; `names` lists those that it has"
            raise KeyError(f"the run has no metric {name!r}{hint}")
        return [step.get(name, math.nan) for step in self]

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with one row for each step, and `step` as its index. Needs pandas."""
        return resolve("pandas:DataFrame")(list(self), columns=self.names or ["step"]).set_index("step")

    def __repr__(self) -> str:
        if not self:
            return "<metrics of no steps>"
        first, last = (int(self[index].get("step", index % len(self))) for index in (0, -1))
        return f"<metrics of {len(self)} steps, {first} to {last}: {len(self.names)} names, such as {self.names[-1]!r}>"
