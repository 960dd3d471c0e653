"""The parts of a page that are HTML: the run's state, tiles, failure, notes, facts and settings.

They are made here for the report and for the live page, whose browser puts the newest ones in place.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from html import escape
from statistics import median
from typing import Any

import yaml

from hone.tracking.base import FINISHED, INTERRUPTED
from hone.tracking.names import POLICY_LOSS, Headline, held_out_headlines, training_headlines
from hone.tracking.report.charts import explained
from hone.tracking.report.prediction import prediction_section
from hone.tracking.report.rundata import RunData, cause_of

LONGEST_S = 1e9  # that is shown: thirty years
COMMANDS = {"rl": "train", "sft": "sft", "prefer": "prefer", "reward_model": "reward-model", "distill": "distill"}

_MOST_SETS = 4  # held-out sets that have a tile
_STALE_S = 600.0  # an unclosed run that has logged nothing for this long may be dead
_WANTED_SETTINGS = {
    "kind": "Kind",
    "model.path": "Model",
    "model.name": "Model",
    "data.train.path": "Data",
    "data.train.source.function": "Data",
    "data.train.source.path": "Data",
    "data.train.source.dataset": "Data",
    "data.train.source.name": "Data",
    "algorithm.name": "Algorithm",
    "algorithm.advantage.name": "Advantages",
    "algorithm.loss.name": "Loss",
    "loss.name": "Loss",
    "actor.optimizer.lr": "Learning rate",
    "update.prompts_per_step": "Prompts per step",
    "update.samples_per_prompt": "Samples per prompt",
    "samples_per_step": "Samples per step",
    "run.seed": "Seed",
}
_RUN_FACTS = {
    "started": "Started",
    "ended": "Ended",
    "hardware": "Hardware",
    "platform": "System",
    "commit": "Commit",
}
_MEANINGS = {  # of every fact by its title, for its tooltip
    "State": "in progress, finished, interrupted, or why the run failed",
    "Started": "when the first launch of this run began",
    "Ended": "when the last launch of this run ended",
    "Hardware": "accelerators, cores and memory of the machine that started the run; without a cluster's others",
    "System": "operating system of the driver of the run",
    "Commit": "git commit of the folder that the run was launched in; + : files had changed since",
    "Resumed from": "the last step of the checkpoint that the last launch continued from",
    "Kind": "what trains: rl, sft, prefer, reward_model or distill",
    "Model": "the model that training began with",
    "Data": "the rows that the run trained on: a file, a data set or a function",
    "Algorithm": "the preset that sets advantages and loss",
    "Advantages": "how rewards become the advantage of each token",
    "Loss": "the function that training minimises",
    "Learning rate": "the step size of the optimizer at its highest; the schedule changes it",
    "Prompts per step": "prompts of one training step",
    "Samples per prompt": "answers to each prompt, which are compared with each other",
    "Samples per step": "rows of one training step",
    "Seed": "the number that every random choice of the run follows from",
}


def page_parts(data: RunData) -> dict[str, str]:
    """Placeholder of the page -> HTML."""
    return {
        "BADGE": _badge(data),
        "TILES": "".join(_tiles(data)),
        "FAILURE": _failure(data),
        "NOTES": _notes(data),
        "FINDINGS": _findings(data),
        "FACTS": _facts(data),
        "PREDICTION": prediction_section(data.prediction),
        "CONFIG": _config(data),
    }


def state_of(data: RunData) -> tuple[str, str]:
    """The state of the run, and the style of its badge."""
    outcome = data.facts.get("outcome")
    total = data.facts.get("total_steps")
    if data.failure and not str(outcome).startswith("failed: "):  # it ended before it could write that down
        return "failed", "bad"
    if isinstance(outcome, str) and outcome:
        kind = {FINISHED: "good", INTERRUPTED: "warn"}.get(outcome, "bad")
        return outcome if len(outcome) < 60 else f"{outcome[:60]}…", kind
    if isinstance(total, int) and data.columns.last_step >= total:
        return FINISHED, "good"
    if data.written is None or time.time() - data.written < _STALE_S:
        return "in progress", ""
    return "ended without closing", "warn"


def shown_headlines(data: RunData) -> list[Headline]:
    """The headlines of a page: held-out figures first. The policy loss is none: it is no measure of success."""
    score = str(settings_of(data.config).get("evaluation.score") or "")
    of_training = [
        one
        for one in training_headlines(data.names)
        if one.metric != POLICY_LOSS and not one.metric.startswith("perf/")
    ]
    return [*held_out_headlines(data.names, score)[:_MOST_SETS], *of_training]


def settings_of(text: str) -> dict[str, Any]:
    """The settings of a `config.yaml` by dotted key; none if it is not valid YAML (the page still shows its text)."""
    try:
        tree = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):  # the second: a date such as 2024-13-45
        return {}
    flat: dict[str, Any] = {}
    waiting: list[tuple[str, Any]] = [("", tree)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting += [(f"{path}.{key}" if path else str(key), inner) for key, inner in value.items()]
        else:
            flat[path] = value
    return flat


def seconds_of(data: RunData) -> float:
    """The time of a run with its evaluations and checkpoints, as far as its metrics have it."""
    return sum(data.columns.total(name) for name in ("perf/step_s", "perf/evaluate_s", "perf/save_checkpoint_s"))


def duration(seconds: float) -> str:
    """A time for people: `34 s`, `5 min 02 s`, `1:02:03`."""
    whole = timedelta(seconds=round(min(seconds, LONGEST_S)))
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{whole.seconds // 60} min {whole.seconds % 60:02d} s"
    return str(whole)


# --------------------------------------------------------------------------------------------------- the page's head


def _badge(data: RunData) -> str:
    text, kind = state_of(data)
    return f'<span title="{escape(_MEANINGS["State"])}" class="badge {kind}">{escape(text)}</span>'


def _failure(data: RunData) -> str:
    """Why a run failed, how to continue it, and the traceback."""
    outcome = str(data.facts.get("outcome") or "")
    cause = outcome.removeprefix("failed: ") if outcome.startswith("failed: ") else cause_of(data.failure)
    if not cause:
        return ""
    settings = settings_of(data.config)
    command = f"hone {COMMANDS.get(str(settings.get('kind')), 'train')} {settings.get('run.dir', '.')}/config.yaml"
    trace = f"<details><summary>Traceback</summary><pre>{escape(data.failure)}</pre></details>" if data.failure else ""
    return (
        f'<section class="failure"><h2>The run failed</h2><p>{escape(cause)}</p><p>When the cause is removed, this '
        f"continues from the last checkpoint: <code>{escape(command)}</code></p>{trace}</section>"
    )


def _tiles(data: RunData) -> list[str]:
    tiles = [_tile("Steps", *_progress(data), "training steps that have ended; each is a line of metrics.jsonl")]
    tiles += [_headline_tile(data, one) for one in shown_headlines(data)]
    seconds = seconds_of(data)
    if seconds > 0:
        tiles.append(_tile("Time", duration(seconds), "with evaluations", "the sum of all steps, without start-up"))
    rates = data.columns.get("perf/tokens_per_s")
    if rates is not None:
        whole = data.columns.total("perf/step_s")
        overhead = f"driver overhead {100 * data.columns.total('perf/driver_s') / whole:.1f} %" if whole > 0 else ""
        meaning = f"median; {explained('perf/tokens_per_s')}. Driver overhead: {explained('perf/driver_fraction')}"
        tiles.append(_tile("Tokens per second", f"{median(rates.values):,.0f}", escape(overhead), meaning))
    return tiles


def _tile(title: str, value: str, more: str, meaning: str) -> str:
    """One tile of the page's header; `more` is HTML."""
    return (
        f'<div class="tile"><div class="what" title="{escape(meaning)}">{escape(title)}</div>'
        f'<div class="value">{escape(value)}</div><div class="more">{more or "&nbsp;"}</div></div>'
    )


def _progress(data: RunData) -> tuple[str, str]:
    total = data.facts.get("total_steps")
    more = f"of {total:,}" if isinstance(total, int) else "logged"
    return f"{data.columns.last_step:,}", escape(more)


def _headline_tile(data: RunData, headline: Headline) -> str:
    """The last value of a headline, the step that it is of, and the change since its first."""
    title, meaning = headline.title[0].upper() + headline.title[1:], explained(headline.metric)
    points = data.columns[headline.metric].finite()
    if not points:
        return _tile(title, "not finite", "", meaning)
    (_, first), (step, last) = points[0], points[-1]
    of = f" at step {step:,.0f}" if headline.metric.startswith("eval/") else ""
    change = _change(headline, last - first, first) + of if len(points) > 1 else of
    return _tile(title, headline.show(last), change, meaning)


def _change(headline: Headline, change: float, first: float) -> str:
    """The change as HTML: bold and in a colour only if one direction is an improvement."""
    sign = "+" if change >= 0 else "−"
    form = escape(f"{sign}{headline.show(abs(change))}")
    if headline.better:
        worse = change < 0 if headline.better == "higher" else change > 0
        form = f'<b class="down">{form}</b>' if worse else f"<b>{form}</b>"
    return f"{form} from {escape(headline.show(first))}"


def _notes(data: RunData) -> str:
    lines = [f"<li>{escape(note)}</li>" for note in data.notes]
    return f'<ul class="notes">{"".join(lines)}</ul>' if lines else ""


def _findings(data: RunData) -> str:
    """Findings of the rules during the run, the newest first; the charts have a mark at each."""
    if not data.marks:
        return ""
    lines = []
    for mark in reversed(data.marks):
        remedy = f" Try {'; '.join(mark['tries'])}." if mark["tries"] else ""
        lines.append(
            f'<li class="{escape(mark["weight"])}"><b>step {mark["step"]:,}: {escape(mark["title"])}</b> '
            f"{escape(mark['seen'])}. {escape(mark['meaning'])}{escape(remedy)}</li>"
        )
    count = f'<span class="count">{len(lines)}, each with a mark on its charts</span>'
    return (
        f'<details class="findings" open><summary><h2>Findings</h2>{count}</summary><ul>{"".join(lines)}</ul></details>'
    )


# --------------------------------------------------------------------------------------------------- the page's end


def _facts(data: RunData) -> str:
    shown: dict[str, str] = {"State": str(data.facts.get("outcome") or state_of(data)[0])}
    for key, title in _RUN_FACTS.items():
        if data.facts.get(key):
            shown[title] = str(data.facts[key])
    if data.facts.get("commit") == "":
        shown["Commit"] = "none: the run was launched outside of git"
    if data.facts.get("resumed_from") is not None:
        shown["Resumed from"] = f"step {data.facts['resumed_from']}"
    settings = settings_of(data.config)
    for key, title in _WANTED_SETTINGS.items():
        if settings.get(key) is not None:
            shown.setdefault(title, str(settings[key]))
    trackers = data.facts.get("trackers")
    if isinstance(trackers, Mapping):
        shown |= {f"Tracker {name}": str(where) for name, where in trackers.items()}
    return "".join(
        f'<dt title="{escape(_MEANINGS.get(title, "where this tracker wrote the run"))}">{escape(title)}</dt>'
        f"<dd>{escape(text)}</dd>"
        for title, text in shown.items()
    )


def _config(data: RunData) -> str:
    if not data.config:
        return ""
    lines = data.config.count("\n")
    return (
        f'<details><summary><h2>Settings</h2><span class="count">config.yaml, {lines} lines</span></summary>'
        f"<pre>{escape(data.config)}</pre></details>"
    )
