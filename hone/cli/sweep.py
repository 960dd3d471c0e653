"""`hone train RUN.yaml --sweep key=a,b,c`: one run for each combination of values, then one table and one chart.

    combinations --all settings checked--> runs in processes of their own, `--at-once` at a time --> sweep.html

The runs are in `<run.dir>-sweep/`. The same command continues runs that have not ended. A run that fails does not end
the others. On a Ray cluster several at once share its devices: each waits until enough of them are free.
"""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape as markup
from rich.table import Table

from hone.cli.errors import EXIT_FAILED, say, sigterm_as_ctrl_c
from hone.cli.recipe import KINDS, load_recipe
from hone.composition import ConfigError
from hone.runtime.settings import RaySettings
from hone.tracking.names import Headline, held_out_headlines, training_headlines
from hone.tracking.trackers.jsonl import METRICS_FILE, read_metrics

LOOK_S = 0.2  # between two looks at the processes
QUEUE_S = 14 * 86400.0  # for devices that the sweep's other runs use
END_S = 600.0  # for runs that are interrupted to end their step and save it
COLOURS = ("#0969da", "#bc4c00", "#1a7f37", "#8250df", "#bf3989", "#9a6700", "#0a7ea4", "#57606a")
STYLE = """
:root { color-scheme: light dark } body { font: 15px/1.5 system-ui; margin: 2rem }
table { border-collapse: collapse } td, th { border: 1px solid #8886; padding: .3rem .7rem }
"""
LONGEST = 40  # characters of a value in a folder's name
WIDTH, HEIGHT, LEFT, BELOW = 860, 380, 70, 40  # of the chart, in pixels


@dataclass(frozen=True, slots=True)
class SweptRun:
    """One run of a sweep."""

    values: tuple[tuple[str, str], ...]  # key and value
    folder: Path
    score: str = ""  # evaluation.score

    @property
    def name(self) -> str:
        """Keys and values, as the folder is named."""
        return _name_of(self.values)

    @property
    def log(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.log")

    def curve(self) -> tuple[Headline | None, list[tuple[float, float]]]:
        """The metric that compares the runs, and its points (step, value); None: the run has measured nothing."""
        lines = read_metrics(self.folder) if (self.folder / METRICS_FILE).is_file() else []
        names = {name for line in lines for name in line}
        shown = next(iter([*held_out_headlines(names, self.score), *training_headlines(names)]), None)
        if shown is None:
            return None, []
        key = shown.metric
        return shown, [(line["step"], line[key]) for line in lines if key in line and math.isfinite(line[key])]


@sigterm_as_ctrl_c()  # the runs end with this process
def run_sweep(kind: str, recipe: Path, keys: Sequence[str], sweeps: Sequence[str], at_once: int) -> None:
    """Run all combinations, print the table, and write the chart. Raises ConfigError before any run begins."""
    config = load_recipe(recipe, keys, kind).config
    base, score = Path(config.run.dir), getattr(config.evaluation, "score", "")
    folder = base.with_name(f"{base.name}-sweep")
    runs = [SweptRun(values, folder / _name_of(values), score) for values in _combinations(sweeps)]
    for run in runs:
        load_recipe(recipe, [*keys, *_settings(run)], kind)
    for run, other in itertools.combinations(runs, 2):
        if run.folder == other.folder:
            raise ConfigError(f"--sweep: {run.values} and {other.values} would share the folder {run.folder}")
    keys = [*keys, *_shared_cluster(config.runtime.backend, at_once)]
    folder.mkdir(parents=True, exist_ok=True)
    command = KINDS[kind].command.removeprefix("hone ")
    say(f"{len(runs)} runs in {folder}, {at_once} at a time")
    failed = _run_all([sys.executable, "-m", "hone", command, str(recipe), *keys], runs, at_once)
    page = folder / "sweep.html"
    page.write_text(_page(runs), encoding="utf-8")
    _show(runs)
    typer.echo(f"chart: {page}")
    if failed:
        for run in failed:
            say(f"error: the run {run.name} failed; its output is in {run.log}")
        raise typer.Exit(EXIT_FAILED)


def _shared_cluster(backend: Any, at_once: int) -> list[str]:
    """The overrides with which runs share a Ray cluster. Raises ConfigError if each would start one of its own."""
    if not isinstance(backend, RaySettings) or at_once == 1:
        return []
    if backend.nodes == 1 and backend.address in ("", "local"):
        raise ConfigError(
            f"--at-once {at_once}: without runtime.backend.address each run starts a cluster of its own, and all would "
            "use the same devices; run `ray start --head` first, and set runtime.backend.address=auto"
        )
    return [] if backend.queue_timeout_s is not None else [f"runtime.backend.queue_timeout_s={QUEUE_S:.0f}"]


def _combinations(sweeps: Sequence[str]) -> Iterator[tuple[tuple[str, str], ...]]:
    """Every choice of one value for each key. Raises ConfigError for a sweep that is none."""
    axes = []
    for sweep in sweeps:
        key, separator, values = sweep.partition("=")
        found = [value.strip() for value in _values(values)]
        if not (separator and key and len(found) > 1 and all(found)):
            raise ConfigError(f"--sweep {sweep!r} should be key=a,b,c with two values or more; null is a value, too")
        if key == "run.dir":
            raise ConfigError("--sweep run.dir: each run gets a folder of its own in <run.dir>-sweep/")
        axes.append([(key, value) for value in found])
    if len({axis[0][0] for axis in axes}) < len(axes):
        raise ConfigError("--sweep names a key twice; give all its values in one")
    return itertools.product(*axes)


def _values(text: str) -> Iterator[str]:
    """The parts of a text between commas that are in no brackets and no quotes."""
    depth, quote, begin = 0, "", 0
    for at, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in "[{(":
            depth += 1
        elif character in "]})":
            depth -= 1
        elif character == "," and depth == 0:
            yield text[begin:at]
            begin = at + 1
    yield text[begin:]


def _name_of(values: Sequence[tuple[str, str]]) -> str:
    """A folder name: whole keys, and of a value what a folder may be called; of a long one its end."""
    return ",".join(f"{key}={re.sub(r'[^0-9A-Za-z.+-]+', '_', value)[-LONGEST:]}" for key, value in values)


def _settings(run: SweptRun) -> list[str]:
    return [*(f"{key}={value}" for key, value in run.values), f"run.dir={run.folder}"]


def _run_all(command: Sequence[str], runs: Sequence[SweptRun], at_once: int) -> list[SweptRun]:
    """Run them, `at_once` at a time; returns those that failed. An interrupt lets every run save its step first."""
    waiting, running, failed = list(runs), dict[SweptRun, subprocess.Popen[bytes]](), list[SweptRun]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                run = waiting.pop(0)
                with run.log.open("ab") as log:
                    running[run] = subprocess.Popen(
                        [*command, *_settings(run)],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # Ctrl-C comes from here, once
                    )
                say(f"{'continues' if (run.folder / METRICS_FILE).is_file() else 'begins'}: {run.name}")
            time.sleep(LOOK_S)
            for run in [run for run, process in running.items() if process.poll() is not None]:
                code = running.pop(run).returncode
                failed += [run] if code else []
                say(f"{'failed' if code else 'done'}: {run.name} ({len(waiting) + len(running)} left)")
    except BaseException:
        say("stopping: every run ends its step and saves it")
        for process in running.values():
            process.terminate()
        deadline = time.monotonic() + END_S
        for process in running.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        raise
    return failed


def _rows(runs: Sequence[SweptRun]) -> list[tuple[str, ...]]:
    rows = []
    for run in runs:
        shown, points = run.curve()
        better = min if shown is not None and shown.better == "lower" else max
        best = better((value for _, value in points), default=math.nan)
        name = "" if shown is None else shown.metric
        last = points[-1] if points else (math.nan, math.nan)
        rows.append((*(value for _, value in run.values), name, f"{last[1]:.4f}", f"{best:.4f}", f"{last[0]:g}"))
    return rows


def _columns(runs: Sequence[SweptRun]) -> list[str]:
    return [*(key for key, _ in runs[0].values), "score", "last", "best", "step"]


def _show(runs: Sequence[SweptRun]) -> None:
    table = Table(*map(markup, _columns(runs)))
    for row in _rows(runs):
        table.add_row(*map(markup, row))
    Console().print(table)


def _page(runs: Sequence[SweptRun]) -> str:
    head = "".join(f"<th>{escape(one)}</th>" for one in _columns(runs))
    body = "".join(f"<tr>{''.join(f'<td>{escape(one)}</td>' for one in row)}</tr>" for row in _rows(runs))
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>sweep</title><style>{STYLE}"
        f"</style><h1>{len(runs)} runs</h1>{_chart(runs)}<table><tr>{head}</tr>{body}</table></html>\n"
    )


def _chart(runs: Sequence[SweptRun]) -> str:
    """The scores of all runs by step, as SVG."""
    titles = [shown.title for run in runs if (shown := run.curve()[0]) is not None]
    curves = [(run.name, run.curve()[1]) for run in runs]
    every = [point for _, points in curves for point in points]
    if not every:
        return "<p>No run has measured anything.</p>"
    last = max(step for step, _ in every) or 1.0
    low, high = min(value for _, value in every), max(value for _, value in every)
    span = (high - low) or 1.0

    def place(step: float, value: float) -> str:
        return f"{LEFT + step / last * WIDTH:.1f},{10 + (high - value) / span * HEIGHT:.1f}"

    parts = []
    for number in range(5):
        value = low + span * number / 4
        y = 10 + (high - value) / span * HEIGHT
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8884"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
        step = last * number / 4
        parts.append(
            f'<text x="{LEFT + step / last * WIDTH:.1f}" y="{HEIGHT + 30}" text-anchor="middle">{step:g}</text>'
        )
    for number, (name, points) in enumerate(curves):
        colour, y = COLOURS[number % len(COLOURS)], 20 + 20 * number
        line = " ".join(place(*point) for point in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{LEFT + WIDTH + 15}" y="{y}" fill="{colour}">{escape(name)}</text>')
    height = max(HEIGHT + BELOW, 20 * len(curves) + 20)
    return (
        f"<h2>{escape(titles[0])} by step</h2>"
        f'<svg width="{LEFT + WIDTH + 300}" height="{height}" font-size="13" fill="currentColor">{"".join(parts)}</svg>'
    )
