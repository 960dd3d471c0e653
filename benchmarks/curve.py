"""Draws one metric of finished runs as an SVG file of a few kB: what a README shows of the curves that were reached.

    python benchmarks/curve.py recipes/presets/curves.svg runs/presets/dapo runs/presets/vapo
    python benchmarks/curve.py --metric reward/mean reward.svg runs/quickstart

A line for each run folder, named after the folder. Points are thinned as in the run's own report.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from hone.tracking.report.rundata import curves, read_run

WIDTH, HEIGHT = 640, 280
LEFT, RIGHT, TOP, BOTTOM = 44, 110, 14, 30
COLOURS = (
    "#2563eb",
    "#dc2626",
    "#059669",
    "#d97706",
    "#7c3aed",
    "#0891b2",
    "#be185d",
    "#4d7c0f",
)  # legible on both themes

Curve = tuple[Sequence[int], Sequence[float]]


def curve(run: Path, metric: str) -> Curve:
    """Steps and values of a metric. Ends the program if the run has not measured it."""
    axes, series = curves(read_run(run))
    if metric not in series:
        raise SystemExit(f"{run} has no {metric} (there is: {', '.join(series)})")
    return axes[series[metric]["axis"]], [float(value) for value in series[metric]["values"]]


def ticks(end: int, wanted: int = 6) -> list[int]:
    """Round steps from 0 to `end`, about as many as wanted."""
    for size in (1, 2, 5, 10, 20, 25, 50, 100, 200, 500, 1000, 2000, 5000, 10_000):
        if end / size <= wanted:
            break
    return list(range(0, end + 1, size))


def draw(metric: str, found: Mapping[str, Curve]) -> str:
    """The picture as text. The vertical axis reaches from 0 to 1, or to the largest value."""
    last = max(max(steps) for steps, _ in found.values())
    highest = max(1.0, *(value for _, values in found.values() for value in values))
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x(step: float) -> float:
        return round(LEFT + wide * step / max(last, 1), 1)

    def y(value: float) -> float:
        return round(TOP + high * (1 - value / highest), 1)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif"'
        ' font-size="11">',
        f"<title>{escape(metric)}</title>",
    ]
    for part in range(5):
        value = highest * part / 4
        lines.append(f'<path d="M{LEFT} {y(value)}h{wide}" stroke="#8888" stroke-width=".5"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y(value) + 4}" text-anchor="end" fill="#888">{value:g}</text>')
    at = f'y="{HEIGHT - 12}" text-anchor="middle" fill="#888"'
    lines += [f'<text x="{x(step)}" {at}>{step}</text>' for step in ticks(last)]
    ends = spaced({name: y(values[-1]) for name, (_, values) in found.items()})
    for colour, (name, (steps, values)) in zip(COLOURS, found.items(), strict=False):
        path = " ".join(f"{x(step)},{y(value)}" for step, value in zip(steps, values, strict=True))
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        lines.append(f'<text x="{LEFT + wide + 6}" y="{ends[name] + 4}" fill="{colour}">{escape(name)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def spaced(heights: Mapping[str, float], apart: float = 13.0) -> dict[str, float]:
    """The labels' heights, moved so that none covers another and none leaves the picture."""
    names = sorted(heights, key=lambda name: heights[name])
    placed: dict[str, float] = {}
    free = float(TOP)
    for name in names:
        placed[name] = max(heights[name], free)
        free = placed[name] + apart
    free = float(HEIGHT - BOTTOM)
    for name in reversed(names):
        placed[name] = min(placed[name], free)
        free = placed[name] - apart
    return placed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--metric", default="eval/held_out/exact_match")
    parser.add_argument("picture", type=Path, help="the SVG file to write")
    parser.add_argument("runs", type=Path, nargs="+", help=f"at most {len(COLOURS)} run folders")
    given = parser.parse_args()
    if len(given.runs) > len(COLOURS):
        parser.error(f"{len(given.runs)} runs are more than the {len(COLOURS)} colours there are")
    found = {run.resolve().name: curve(run, given.metric) for run in given.runs}
    given.picture.write_text(draw(given.metric, found), encoding="utf-8")
    for name, (steps, values) in found.items():
        print(f"{name:12}", "  ".join(f"{step}: {value:.2f}" for step, value in zip(steps, values, strict=True)))


if __name__ == "__main__":
    main()
