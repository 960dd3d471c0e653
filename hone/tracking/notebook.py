"""A chart that follows a run inside a notebook: the held-out figure, or the first of training, over the steps."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from hone.tracking.names import Headline, held_out_headlines, training_headlines
from hone.tracking.trackers.jsonl import read_metrics

OnStep = Callable[[int, Mapping[str, float]], None]
WIDTH, HEIGHT, MARGIN = 480, 180, 44
_MOST = 2  # charts, one below the other


class LiveChart:
    """Collects metrics on the thread that trains, and draws on the thread of the cell, whose output it belongs to."""

    def __init__(self, run_dir: Path, show: Callable[[str], None]) -> None:
        known = read_metrics(run_dir) if (run_dir / "metrics.jsonl").is_file() else []
        self._steps: list[Mapping[str, float]] = list(known)  # of the run that this one continues
        self._show = show
        self._drawn = -1

    def following(self, on_step: OnStep | None) -> OnStep:
        """`on_step` that also gives the metrics to this chart."""

        def follow(step: int, metrics: Mapping[str, float]) -> None:
            kept = [one for one in self._steps if one["step"] < step]  # a run from its start has none
            self._steps = [*kept, {**metrics, "step": step}]
            if on_step is not None:
                on_step(step, metrics)

        return follow

    def draw(self) -> None:
        """Show the metrics so far, if a step has ended since the last call."""
        steps = self._steps
        if steps and steps[-1]["step"] != self._drawn:
            self._drawn = int(steps[-1]["step"])
            self._show(svg_of(steps))


def live_chart(run_dir: Path) -> LiveChart | None:
    """The chart of a run, or None outside a notebook. IPython is loaded there, and never imported for this."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is None:
        return None
    display: Any = sys.modules["IPython"].display
    handle = display.DisplayHandle()
    started = False

    def show(svg: str) -> None:
        nonlocal started
        (handle.update if started else handle.display)(display.HTML(svg))
        started = True

    return LiveChart(run_dir, show)


def svg_of(steps: Sequence[Mapping[str, float]]) -> str:
    """One chart for each of the first headlines of a run, in the text colour of the page: dark or light."""
    names = {name for one in steps for name in one}
    headlines = [*held_out_headlines(names)[:1], *training_headlines(names)][:_MOST]
    curves = [(one, [(step["step"], step[one.metric]) for step in steps if one.metric in step]) for one in headlines]
    finite = [(one, [point for point in points if math.isfinite(point[1])]) for one, points in curves]
    return "\n".join(_chart(one, points) for one, points in finite if points)


def _chart(headline: Headline, points: Sequence[tuple[float, float]]) -> str:
    left, right = points[0][0], max(points[-1][0], points[0][0] + 1)
    values = [value for _, value in points]
    low, high = min(values), max(values)
    span = (high - low) or 1.0

    def place(step: float, value: float) -> str:
        x = MARGIN + (step - left) / (right - left) * (WIDTH - 2 * MARGIN)
        y = HEIGHT - MARGIN - (value - low) / span * (HEIGHT - 2 * MARGIN)
        return f"{x:.1f},{y:.1f}"

    line = " ".join(place(*point) for point in points)
    x, y = place(*points[-1]).split(",")
    title = f"{headline.title} {headline.show(values[-1])} (step {points[-1][0]:.0f})"
    bottom = HEIGHT - MARGIN
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" style="width:100%;max-width:{WIDTH}px" role="img" fill="currentColor" '
        f'font-family="sans-serif" font-size="12"><text x="{MARGIN}" y="20">{escape(title)}</text>'
        f'<path d="M{MARGIN} {MARGIN}V{bottom}H{WIDTH - MARGIN}" fill="none" stroke="currentColor" opacity="0.4"/>'
        f'<text x="{MARGIN - 4}" y="{MARGIN + 4}" text-anchor="end">{escape(headline.show(high))}</text>'
        f'<text x="{MARGIN - 4}" y="{bottom}" text-anchor="end">{escape(headline.show(low))}</text>'
        f'<text x="{MARGIN}" y="{bottom + 16}">{left:.0f}</text>'
        f'<text x="{WIDTH - MARGIN}" y="{bottom + 16}" text-anchor="end">step {right:.0f}</text>'
        f'<polyline points="{line}" fill="none" stroke="#3b82f6" stroke-width="2"/>'
        f'<circle cx="{x}" cy="{y}" r="3" fill="#3b82f6"/></svg>'
    )
