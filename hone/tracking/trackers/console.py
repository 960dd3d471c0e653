"""The live display of a run: progress, figures of training and of held-out sets, failures, and sample answers.

On a terminal the display stays at the bottom and messages scroll above it. Otherwise (a pipe, a log file, CI) it prints
one plain line per step, at most one every two seconds, but always for an evaluation and for the last step.
"""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict, deque
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
from hone.tracking.base import FINISHED, RolloutRecord, RunInfo, Tracker, printable
from hone.tracking.names import held_out_headlines, score_of, training_headlines
from hone.tracking.terminal import LastingConsole
from hone.types import FAILED

_BARS = "▁▂▃▄▅▆▇█"
_HISTORY = 400
_TEMPLATE_MARKS = re.compile(r"<\|im_start\|>\w*|<\|[^|>]*\|>")  # of chat templates; the same in every prompt
_STATUS = "rollout/status/"
OVERDUE_S = 10.0  # a step that takes longer than all that seemed left, by so much, is shown with its own time
_FRAME = 8  # columns of the frame, and between three columns of figures
_WIDEST = 40  # columns of a history
_PACE = 20  # recent steps whose mean duration predicts the rest


class ConsoleTracker(Tracker):
    """Shows headlines, progress, phase, remaining time and a sample answer."""

    own_thread = False

    def __init__(self, settings: Choice, run: RunInfo, console: Console | None = None) -> None:
        self._run = run
        self._score = score_of(run.config)
        self._console = console or LastingConsole()
        self._step = run.resumed_from or 0
        self._phase = ""
        self._values: dict[str, float] = {}
        self._history: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_HISTORY))  # metric -> values
        self._held_out: dict[str, tuple[str, int]] = {}  # title -> last value, and the step that it is of
        self._samples: dict[str, RolloutRecord] = {}  # label -> answer
        self._causes: dict[str, str] = {}  # status of failed answers since the last `log` -> what the first one said
        self._failure = ""  # how many answers of the last step failed, and why
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
        if step == 0:
            self._ends.clear()  # the time of the first evaluation says nothing about steps
        self._ends.append(time.monotonic())
        for headline in [*training_headlines(values), *held_out_headlines(values, self._score)]:
            if math.isfinite(values[headline.metric]):
                self._history[headline.metric].append(values[headline.metric])
        for headline in held_out_headlines(values, self._score):
            self._held_out[headline.title] = headline.show(values[headline.metric]), step
        self._failure = _failure(values, self._causes)
        self._causes = {}
        if self._live is None:
            self._print_line(values)

    def rollouts(self, step: int, records: Sequence[RolloutRecord]) -> None:
        scored = [record for record in records if record["reward"] is not None]
        for record in records:
            if record["reward"] is None and record.get("set") is None:
                self._causes.setdefault(record["status"], record["error"])
        if scored:
            one = scored[step % len(scored)]
            worst = min(scored, key=lambda record: record["reward"])
            self._samples = {"answer": one} if one is worst else {"answer": one, "worst answer": worst}

    def message(self, text: str) -> None:
        style = "red" if text.startswith("error:") else ""
        self._console.print(
            Text(text, style=style), soft_wrap=not self._console.is_terminal
        )  # a line of a log is whole

    def phase(self, name: str) -> None:
        self._phase = name

    def close(self, outcome: str = FINISHED) -> None:
        if self._live is not None:
            self._phase = ""
            self._live.stop()

    # ------------------------------------------------------------------------------------------------ rendering

    def render(self) -> Panel:
        """The current display."""
        figures = Table.grid(padding=(0, 2))
        figures.add_column(style="dim", no_wrap=True)
        figures.add_column(justify="right", style="bold", no_wrap=True)
        figures.add_column(style="cyan", no_wrap=True, overflow="crop")
        rows = [(one, one.show(self._values[one.metric])) for one in training_headlines(self._values)]
        for one in held_out_headlines(self._values, self._score):
            value, step = self._held_out[one.title]
            rows.append((one, f"{value} (step {step})"))
        texts = zip(*((one.title, value) for one, value in rows), strict=True)
        room = self._console.width - _FRAME - sum(max(map(cell_len, column)) for column in texts)  # for histories
        for one, value in rows:
            figures.add_row(Text(one.title), value, sparkline(self._history[one.metric], min(max(room, 1), _WIDEST)))
        parts: list[Table | Text] = [self._progress(), figures]
        if self._failure:
            parts.append(Text(self._failure, style="bold red"))
        parts += [_sample_text(label, record, self._console.width - 6) for label, record in self._samples.items()]
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
        left, waited = self.seconds_left(), time.monotonic() - (self._ends[-1] if self._ends else self._started)
        if left is not None and left == 0.0 and waited > OVERDUE_S:  # the pace of earlier steps says nothing any more
            return f"step {self._step + 1} for {_duration(waited)}"
        if left is None:
            return f"{_duration(time.monotonic() - self._started)} so far"
        return f"{_duration(left)} left"

    def seconds_left(self) -> float | None:
        """Estimate the remaining time from the last steps, with evaluations and checkpoints; None: unknown."""
        steps = len(self._ends) - 1
        if self._run.total_steps is None or steps < 1:
            return None
        since_last = time.monotonic() - self._ends[-1]
        pace = (self._ends[-1] - self._ends[0]) / steps
        return max((self._run.total_steps - self._step) * pace - since_last, 0.0)

    def _print_line(self, values: Mapping[str, float]) -> None:
        now = time.monotonic()
        last = self._step == self._run.total_steps
        evaluated = any(name.startswith("eval/") for name in values)
        if now - self._printed < 2.0 and not (last or evaluated or self._failure):
            return
        self._printed = now
        total = f"/{self._run.total_steps}" if self._run.total_steps else ""
        figures = [f"{one.title} {one.show(values[one.metric])}" for one in training_headlines(values)]
        held_out = [f"{title} {value} (step {step})" for title, (value, step) in self._held_out.items()]
        line = Text("  ".join([f"step {self._step}{total}", *figures, *held_out]))
        if self._failure:
            line.append(f"  {self._failure}", style="bold red")
        self._console.print(line.append(f"  {self._clock()}"), soft_wrap=True)


def _failure(values: Mapping[str, float], causes: Mapping[str, str]) -> str:
    """Return the number of failed answers of a step with the most frequent cause; empty: none failed."""
    counts = {status: int(values.get(f"{_STATUS}{status}", 0)) for status in FAILED}
    failed = sum(counts.values())
    if not failed:
        return ""
    every = sum(int(value) for name, value in values.items() if name.startswith(_STATUS))
    status = max(counts, key=lambda one: counts[one])
    cause = _one_line(causes.get(status, ""), 120)
    late = int(values.get("reward/timeouts", 0))
    timed_out = f", {late} calls of rewards timed out" if late else ""
    return f"{failed} of {every} answers failed{timed_out} ({status}{': ' if cause else ''}{cause})"


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw values as at most `width` bars, scaled from minimum to maximum; more values are averaged into bars.

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


def _sample_text(label: str, record: RolloutRecord, width: int) -> Text:
    text = Text()
    text.append(f"{'prompt':<14}", style="dim")
    text.append(_one_line(record["prompt"], width - 14, end=True) + "\n")
    text.append(f"{label:<14}", style="dim")
    text.append(_one_line(record["response"], width - 28))
    text.append(f"  reward {record['reward']:.3g}", style="dim")
    return text


def _one_line(text: str, width: int, end: bool = False) -> str:
    """Shorten text to one line of at most `width` cells; `end` keeps the end, where a prompt has its question."""
    flat = " ".join(_TEMPLATE_MARKS.sub(" ", printable(text)).split())
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
