"""The live display of a run: where it stands, its headline figures as they move, and one answer to look at.

On a terminal the display stays at the bottom and messages scroll above it. Where output is not a terminal (a pipe, a
log file, CI) it prints one plain line per step, at most one every two seconds, but always for an evaluation and for
the last step.
"""

from __future__ import annotations

import math
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import pairwise

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hone.config import Choice
from hone.tracking.base import RolloutRecord, RunInfo, Tracker
from hone.tracking.names import HEADLINES, headlines

_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 400
_TEMPLATE_MARKS = re.compile(r"<\|im_start\|>\w*|<\|[^|>]*\|>")  # of chat templates: the same in every prompt
_PACE = 20  # steps whose mean duration foretells the rest


class ConsoleTracker(Tracker):
    """Shows headlines, progress, phase, time left and a sample answer."""

    own_thread = False

    def __init__(self, settings: Choice, run: RunInfo, console: Console | None = None) -> None:
        self._run = run
        self._console = console or Console()
        self._step = run.resumed_from or 0
        self._phase = ""
        self._values: dict[str, float] = {}
        self._history: dict[str, deque[float]] = {headline.title: deque(maxlen=_HISTORY) for headline in HEADLINES}
        self._sample: RolloutRecord | None = None
        self._started = time.monotonic()
        self._ends: deque[float] = deque([self._started], maxlen=_PACE + 1)
        self._printed = 0.0
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(get_renderable=self.render, console=self._console, refresh_per_second=2)
            self._live.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._step = step
        self._values.update(values)
        self._ends.append(time.monotonic())
        for headline in HEADLINES:
            name = headline.find(self._values)
            if name is not None and name in values and math.isfinite(values[name]):
                self._history[headline.title].append(values[name])
        if self._live is None:
            self._print_line(values)

    def rollouts(self, step: int, records: Sequence[RolloutRecord]) -> None:
        scored = [record for record in records if record["reward"] is not None]
        if scored:
            self._sample = max(scored, key=lambda record: record["reward"])

    def message(self, text: str) -> None:
        self._console.print(Text(text))

    def phase(self, name: str) -> None:
        self._phase = name

    def close(self) -> None:
        if self._live is not None:
            self._phase = ""
            self._live.stop()

    # ------------------------------------------------------------------------------------------------ rendering

    def render(self) -> Panel:
        """The display as it stands."""
        figures = Table.grid(padding=(0, 2))
        figures.add_column(style="dim", no_wrap=True)
        figures.add_column(justify="right", style="bold", no_wrap=True)
        figures.add_column(style="cyan", no_wrap=True, overflow="crop")
        for title, shown in headlines(self._values).items():
            figures.add_row(title, shown, sparkline(self._history[title], width=40))
        parts: list[Table | Text] = [self._progress(), figures]
        if self._sample is not None:
            parts.append(_sample_text(self._sample, self._console.width - 6))
        name = Text(self._run.name, style="bold")
        return Panel(Group(*parts), title=name, title_align="left", border_style="dim", padding=(0, 1))

    def _progress(self) -> Table:
        row = Table.grid(expand=True, padding=(0, 2))
        total = self._run.total_steps
        row.add_column(no_wrap=True)
        row.add_column(ratio=1)
        row.add_column(justify="right", no_wrap=True)
        of = f" of {total}" if total else ""
        bar = ProgressBar(total=total or 1, completed=min(self._step, total) if total else 0, pulse=not total)
        row.add_row(f"step {self._step}{of}", bar, "  ".join(filter(None, (self._phase, self._clock()))))
        return row

    def _clock(self) -> str:
        left = self.seconds_left()
        if left is None:
            return f"{_duration(time.monotonic() - self._started)} so far"
        return f"{_duration(left)} left"

    def seconds_left(self) -> float | None:
        """Remaining steps at the pace of the last ones, evaluations and checkpoints included; None: unknown."""
        steps = len(self._ends) - 1
        if self._run.total_steps is None or steps < 1:
            return None
        since_last = time.monotonic() - self._ends[-1]
        pace = (self._ends[-1] - self._ends[0]) / steps
        return max((self._run.total_steps - self._step) * pace - since_last, 0.0)

    def _print_line(self, values: Mapping[str, float]) -> None:
        now = time.monotonic()
        last = self._step == self._run.total_steps
        if now - self._printed < 2.0 and not last and not any(name.startswith("eval/") for name in values):
            return
        self._printed = now
        total = f"/{self._run.total_steps}" if self._run.total_steps else ""
        figures = [f"{title} {text}" for title, text in headlines(values).items()]
        line = "  ".join([f"step {self._step}{total}", *figures, self._clock()])
        self._console.print(Text(line), soft_wrap=True)


def sparkline(values: Sequence[float], width: int) -> str:
    """Values as a row of at most `width` bars, scaled between their least and greatest; means where there are more.

    >>> sparkline([0, 1, 2, 3], width=4)
    '▁▃▆█'
    """
    numbers = list(values)
    if len(numbers) > width:
        cuts = [round(i * len(numbers) / width) for i in range(width + 1)]
        numbers = [sum(numbers[a:b]) / (b - a) for a, b in pairwise(cuts)]
    if len(numbers) < 2:
        return ""
    low, high = min(numbers), max(numbers)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((number - low) * scale)] for number in numbers)


def _sample_text(record: RolloutRecord, width: int) -> Text:
    text = Text()
    text.append("asked     ", style="dim")
    text.append(_one_line(record["prompt"], width - 10, end=True) + "\n")
    text.append("answered  ", style="dim")
    text.append(_one_line(record["response"], width - 24))
    text.append(f"  reward {record['reward']:.3g}", style="dim")
    return text


def _one_line(text: str, width: int, end: bool = False) -> str:
    """Text on one line of at most `width` cells; `end` keeps its end, where a prompt asks its question."""
    flat = " ".join(_TEMPLATE_MARKS.sub(" ", text).split())
    width = max(width, 10)
    if cell_len(flat) <= width:
        return flat
    if not end:
        return set_cell_size(flat, width - 1) + "…"
    while cell_len(flat) > width - 1:
        flat = flat[max(1, (len(flat) - width) // 2) :]
    return "…" + flat


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
