"""`report.html`: one file that shows what a run did. It needs no network, server or other file.

    run.json, config.yaml, metrics.jsonl, rollouts.jsonl.gz --rundata--> RunData --charts--> which charts
                                                                         |
                                       page/ (HTML, CSS, JavaScript) + data as JSON --> report.html

Text from models and data sets is embedded as JSON and shown as plain text, and a content security policy in the page
stops it from loading anything.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from html import escape
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from hone import __version__
from hone.tracking.base import FINISHED, INTERRUPTED, TrackingError
from hone.tracking.names import Headline, held_out_headlines, training_headlines
from hone.tracking.report.answers import beside_section
from hone.tracking.report.charts import charts
from hone.tracking.report.rundata import RunData, curves, read_run, time_by_phase

REPORT_FILE = "report.html"
COMMANDS = {"rl": "train", "sft": "sft", "prefer": "prefer", "reward_model": "reward-model", "distill": "distill"}

_SCRIPTS = ("charts.js", "rollouts.js", "main.js")
_MOST_SETS = 4  # held-out sets that have a tile
_STALE_S = 600.0  # an unclosed run that has logged nothing for this long may be dead
_WANTED_SETTINGS = {
    "kind": "Kind",
    "model.path": "Model",
    "model.name": "Model",
    "algorithm.name": "Algorithm",
    "algorithm.advantage.name": "Advantages",
    "algorithm.loss.name": "Loss",
    "run.seed": "Seed",
    "update.prompts_per_step": "Prompts per step",
    "update.samples_per_prompt": "Samples per prompt",
}


def build_report(run_dir: Path | str) -> Path:
    """Write `report.html` into a run folder from the files that it has, and return its path.

    Works during a run. Raises ConfigError if the folder is not a run folder, TrackingError if the page cannot be
    written.
    """
    folder = Path(run_dir)
    page = render(read_run(folder), folder.resolve().name, beside_section(folder))
    path = folder / REPORT_FILE
    temporary = folder / f"{REPORT_FILE}.tmp"
    try:
        temporary.write_text(page, encoding="utf-8", errors="replace")
        os.replace(temporary, path)
    except OSError as error:
        raise TrackingError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def render(data: RunData, name: str, beside: str = "") -> str:
    """The page's HTML; `beside`: its section of answers before and after."""
    axes, series = curves(data)
    embedded = {
        "axes": axes,
        "series": series,
        "charts": [chart.plain() for chart in charts(data.names)],
        "phases": time_by_phase(data),
        "rollouts": data.rollouts,
    }
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    parts = {
        "TITLE": escape(f"{name} · hone"),
        "STYLE": _asset("page.css"),
        "NAME": escape(name),
        "BADGE": _badge(data),
        "TILES": "".join(_tiles(data)),
        "FAILURE": _failure(data),
        "NOTES": _notes(data),
        "BESIDE": beside,
        "FACTS": _facts(data),
        "CONFIG": _config(data),
        "FOOTER": escape(f"Written by hone {__version__} on {now}. The horizontal axis of every chart is the step."),
        "DATA": _json(embedded),
        "SCRIPT": "\n".join(_asset(script) for script in _SCRIPTS),
    }
    return re.sub(r"@@([A-Z]+)@@", lambda match: parts[match[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return files("hone.tracking.report").joinpath("page", name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """JSON that is safe inside a script element, whatever text it contains."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


# --------------------------------------------------------------------------------------------------- the page's head


def _badge(data: RunData) -> str:
    text, kind = _state(data)
    return f'<span class="badge {kind}">{escape(text)}</span>'


def _state(data: RunData) -> tuple[str, str]:
    """The state of the run, and the style of its badge."""
    outcome = data.facts.get("outcome")
    total = data.facts.get("total_steps")
    last = int(data.steps[-1]["step"]) if data.steps else 0
    if data.failure and not str(outcome).startswith("failed: "):  # it ended before it could write that down
        return "failed", "bad"
    if isinstance(outcome, str) and outcome:
        kind = {FINISHED: "good", INTERRUPTED: "warn"}.get(outcome, "bad")
        return outcome if len(outcome) < 60 else f"{outcome[:60]}…", kind
    if isinstance(total, int) and last >= total:
        return FINISHED, "good"
    if data.written is None or time.time() - data.written < _STALE_S:
        return "in progress", ""
    return "ended without closing", "warn"


def _failure(data: RunData) -> str:
    """Why a run failed, how to continue it, and the traceback."""
    outcome = str(data.facts.get("outcome") or "")
    last = next((line for line in reversed(data.failure.splitlines()) if line.strip()), "")
    cause = outcome.removeprefix("failed: ") if outcome.startswith("failed: ") else last
    if not cause:
        return ""
    settings = _settings(data.config)
    command = f"hone {COMMANDS.get(str(settings.get('kind')), 'train')} {settings.get('run.dir', '.')}/config.yaml"
    trace = f"<details><summary>Traceback</summary><pre>{escape(data.failure)}</pre></details>" if data.failure else ""
    return (
        f'<section class="failure"><h2>The run failed</h2><p>{escape(cause)}</p><p>When the cause is removed, this '
        f"continues from the last checkpoint: <code>{escape(command)}</code></p>{trace}</section>"
    )


def _tiles(data: RunData) -> list[str]:
    tiles = [_tile("Steps", *_progress(data))]
    score = str(_settings(data.config).get("evaluation.score") or "")
    shown = [one for one in training_headlines(data.names) if not one.metric.startswith("perf/")]
    tiles += [_headline_tile(data, one) for one in (*held_out_headlines(data.names, score)[:_MOST_SETS], *shown)]
    seconds = sum(_sum(data, name) for name in ("perf/step_s", "perf/evaluate_s", "perf/save_checkpoint_s"))
    if seconds > 0:
        tiles.append(_tile("Time", _duration(seconds), "with evaluations"))
    rates = [step["perf/tokens_per_s"] for step in data.steps if "perf/tokens_per_s" in step]
    if rates:
        whole = _sum(data, "perf/step_s")
        overhead = f"driver overhead {100 * _sum(data, 'perf/driver_s') / whole:.1f} %" if whole > 0 else ""
        tiles.append(_tile("Tokens per second", f"{median(rates):,.0f}", escape(overhead)))
    return tiles


def _tile(title: str, value: str, more: str) -> str:
    """One tile of the page's header; `more` is HTML."""
    return (
        f'<div class="tile"><div class="what" title="{escape(title)}">{escape(title)}</div>'
        f'<div class="value">{escape(value)}</div><div class="more">{more or "&nbsp;"}</div></div>'
    )


def _progress(data: RunData) -> tuple[str, str]:
    done = int(data.steps[-1]["step"]) if data.steps else 0
    total = data.facts.get("total_steps")
    more = f"of {total:,}" if isinstance(total, int) else "logged"
    return f"{done:,}", escape(more)


def _headline_tile(data: RunData, headline: Headline) -> str:
    """The last value of a headline, the step that it is of, and the change since its first."""
    title = headline.title[0].upper() + headline.title[1:]
    points = [(step["step"], step[headline.metric]) for step in data.steps if headline.metric in step]
    points = [(step, value) for step, value in points if math.isfinite(value)]
    if not points:
        return _tile(title, "not finite", "")
    (_, first), (step, last) = points[0], points[-1]
    of = f" at step {step:,.0f}" if headline.metric.startswith("eval/") else ""
    return _tile(title, headline.show(last), _change(headline, last - first, first) + of if len(points) > 1 else of)


def _change(headline: Headline, change: float, first: float) -> str:
    """The change as HTML: bold and in a colour only if one direction is an improvement."""
    sign = "+" if change >= 0 else "−"
    form = escape(f"{sign}{headline.show(abs(change))}")
    if headline.better:
        worse = change < 0 if headline.better == "higher" else change > 0
        form = f'<b class="down">{form}</b>' if worse else f"<b>{form}</b>"
    return f"{form} from {escape(headline.show(first))}"


def _sum(data: RunData, name: str) -> float:
    return sum(step[name] for step in data.steps if math.isfinite(step.get(name, math.nan)))


def _duration(seconds: float) -> str:
    whole = timedelta(seconds=round(seconds))
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{whole.seconds // 60} min {whole.seconds % 60:02d} s"
    return f"{whole.days * 24 + whole.seconds // 3600} h {whole.seconds % 3600 // 60:02d} min"


def _notes(data: RunData) -> str:
    if not data.notes:
        return ""
    return '<ul class="notes">' + "".join(f"<li>{escape(note)}</li>" for note in data.notes) + "</ul>"


# --------------------------------------------------------------------------------------------------- the page's end


def _facts(data: RunData) -> str:
    shown: dict[str, str] = {"State": str(data.facts.get("outcome") or _state(data)[0])}
    for key, title in (("started", "Started"), ("ended", "Ended"), ("platform", "Machine")):
        if data.facts.get(key):
            shown[title] = str(data.facts[key])
    if data.facts.get("resumed_from") is not None:
        shown["Resumed from"] = f"step {data.facts['resumed_from']}"
    settings = _settings(data.config)
    for key, title in _WANTED_SETTINGS.items():
        if settings.get(key) is not None:
            shown.setdefault(title, str(settings[key]))
    trackers = data.facts.get("trackers")
    if isinstance(trackers, Mapping):
        shown |= {f"Tracker {name}": str(where) for name, where in trackers.items()}
    return "".join(f"<dt>{escape(title)}</dt><dd>{escape(text)}</dd>" for title, text in shown.items())


def _settings(text: str, prefix: str = "") -> dict[str, Any]:
    """The settings of a `config.yaml` by dotted key; none if it is not valid YAML (the page still shows its text)."""
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    flat: dict[str, Any] = {}
    waiting: list[tuple[str, Any]] = [(prefix, tree)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += [(f"{path}.{key}" if path else str(key), inner) for key, inner in value.items()]
        else:
            flat[path] = value
    return flat


def _config(data: RunData) -> str:
    if not data.config:
        return ""
    lines = data.config.count("\n")
    return (
        f'<details><summary><h2>Settings</h2><span class="count">config.yaml, {lines} lines</span></summary>'
        f"<pre>{escape(data.config)}</pre></details>"
    )
