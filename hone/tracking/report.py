"""`report.html`: one file that shows what a run did, without network, server or anything else beside it.

    run.json, config.yaml, metrics.jsonl, rollouts.jsonl --rundata--> RunData --charts--> which curves
                                                                         |
                                       page/ (HTML, CSS, JavaScript) + data as JSON --> report.html

Everything that a model or a data set wrote reaches the page as JSON and is shown as text; a content security policy in
the page forbids it to load anything.
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
from hone.tracking.base import TrackingError
from hone.tracking.charts import charts
from hone.tracking.names import HEADLINES, Headline
from hone.tracking.rundata import RunData, curves, read_run

REPORT_FILE = "report.html"

_SCRIPTS = ("charts.js", "rollouts.js", "main.js")
_STALE_S = 600.0  # a run that has logged nothing for so long, and was not closed, may be dead
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
    """Write `report.html` into a run folder from whatever is there, and return its path.

    Works while the run goes on. Raises ConfigError if the folder is not that of a run, TrackingError if it cannot be
    written.
    """
    folder = Path(run_dir)
    page = render(read_run(folder), folder.resolve().name)
    path = folder / REPORT_FILE
    temporary = folder / f"{REPORT_FILE}.tmp"
    try:
        temporary.write_text(page, encoding="utf-8", errors="replace")
        os.replace(temporary, path)
    except OSError as error:
        raise TrackingError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def render(data: RunData, name: str) -> str:
    """The page as text."""
    axes, series = curves(data)
    embedded = {
        "axes": axes,
        "series": series,
        "charts": [chart.plain() for chart in charts(data.names)],
        "rollouts": data.rollouts,
    }
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    parts = {
        "TITLE": escape(f"{name} · hone"),
        "STYLE": _asset("page.css"),
        "NAME": escape(name),
        "BADGE": _badge(data),
        "TILES": "".join(_tiles(data)),
        "NOTES": _notes(data),
        "FACTS": _facts(data),
        "CONFIG": _config(data),
        "FOOTER": escape(f"Written by hone {__version__} on {now}. Steps are on the horizontal axes."),
        "DATA": _json(embedded),
        "SCRIPT": "\n".join(_asset(script) for script in _SCRIPTS),
    }
    return re.sub(r"@@([A-Z]+)@@", lambda match: parts[match[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return files("hone.tracking").joinpath("page", name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """JSON that can stand inside a script element, whatever text is in it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


# --------------------------------------------------------------------------------------------------- the page's head


def _badge(data: RunData) -> str:
    text, kind = _state(data)
    return f'<span class="badge {kind}">{escape(text)}</span>'


def _state(data: RunData) -> tuple[str, str]:
    """What became of the run, and how good that is."""
    outcome = data.facts.get("outcome")
    total = data.facts.get("total_steps")
    last = int(data.steps[-1]["step"]) if data.steps else 0
    if isinstance(outcome, str) and outcome:
        kind = {"finished": "good", "interrupted": "warn"}.get(outcome, "bad")
        return outcome if len(outcome) < 60 else f"{outcome[:60]}…", kind
    if isinstance(total, int) and last >= total:
        return "finished", "good"
    if data.written is None or time.time() - data.written < _STALE_S:
        return "in progress", ""
    return "stopped without being closed", "warn"


def _tiles(data: RunData) -> list[str]:
    tiles = [_tile("Steps", *_progress(data))]
    for headline in HEADLINES:
        if headline.title not in ("tokens/s", "step time"):
            tiles += [_headline_tile(headline, name, values) for name, values in _found(data, headline)]
    seconds = sum(_sum(data, name) for name in ("perf/step_s", "perf/evaluate_s", "perf/save_checkpoint_s"))
    if seconds > 0:
        tiles.append(_tile("Time", _duration(seconds), "evaluations included"))
    rates = [step["perf/tokens_per_s"] for step in data.steps if "perf/tokens_per_s" in step]
    if rates:
        whole = _sum(data, "perf/step_s")
        overhead = f"driver overhead {100 * _sum(data, 'perf/driver_s') / whole:.1f} %" if whole > 0 else ""
        tiles.append(_tile("Tokens per second", f"{median(rates):,.0f}", escape(overhead)))
    return tiles


def _tile(title: str, value: str, more: str) -> str:
    """One tile; `more` is HTML."""
    return (
        f'<div class="tile"><div class="what" title="{escape(title)}">{escape(title)}</div>'
        f'<div class="value">{escape(value)}</div><div class="more">{more or "&nbsp;"}</div></div>'
    )


def _progress(data: RunData) -> tuple[str, str]:
    done = int(data.steps[-1]["step"]) if data.steps else 0
    total = data.facts.get("total_steps")
    more = f"of {total:,}" if isinstance(total, int) else "logged"
    return f"{done:,}", escape(more)


def _found(data: RunData, headline: Headline) -> list[tuple[str, list[float]]]:
    """The metric that answers for a headline, or that of each evaluation set, with its finite values."""
    first = headline.find(data.names)
    if first is None:
        return []
    kind = first.split("/")[-1]
    of_sets = [name for name in data.names if re.fullmatch(rf"eval/[^/]+/{re.escape(kind)}", name)]
    names = of_sets[:3] if first in of_sets else [first]
    curves_of = {name: [step[name] for step in data.steps if name in step] for name in names}
    finite = {name: [value for value in values if math.isfinite(value)] for name, values in curves_of.items()}
    return [(name, values) for name, values in finite.items() if values]


def _headline_tile(headline: Headline, name: str, values: list[float]) -> str:
    title = headline.title[0].upper() + headline.title[1:]
    shown = f"{title}, {name.split('/')[1]}" if name.startswith("eval/") else title
    return _tile(shown, headline.show(values[-1]), _change(headline, values))


def _change(headline: Headline, values: list[float]) -> str:
    if len(values) < 2:
        return ""
    change = values[-1] - values[0]
    form = f"{change:+.3f}" if headline.title != "response length" else f"{change:+.1f}"
    better = change if headline.title != "loss" else -change
    mark = "b" if headline.title != "response length" else "span"
    kind = ' class="down"' if better < 0 and mark == "b" else ""
    return f"<{mark}{kind}>{escape(form)}</{mark}> from {escape(headline.show(values[0]))}"


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
        shown["Continued from"] = f"step {data.facts['resumed_from']}"
    settings = _settings(data.config)
    for key, title in _WANTED_SETTINGS.items():
        if settings.get(key) is not None:
            shown.setdefault(title, str(settings[key]))
    trackers = data.facts.get("trackers")
    if isinstance(trackers, Mapping):
        shown |= {f"Tracker {name}": str(where) for name, where in trackers.items()}
    return "".join(f"<dt>{escape(title)}</dt><dd>{escape(text)}</dd>" for title, text in shown.items())


def _settings(text: str, prefix: str = "") -> dict[str, Any]:
    """Dotted settings of a `config.yaml`; none if it is not one (the page shows its text all the same)."""
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
