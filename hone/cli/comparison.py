"""`hone plan --grid`: predict speed and staleness of a run for every combination of some settings."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from hone.config import ConfigError
from hone.planner.costs import Costs, fitted
from hone.planner.grid import Base, Cell, cells
from hone.planner.lengths import Lengths, parse_lengths, recorded
from hone.planner.simulation import Outcome, Setting, simulate
from hone.registry import unknown
from hone.rollout.servers.shape import shape_of
from hone.schedule.settings import AsynchronyConfig
from hone.tracking.trackers.jsonl import ROLLOUTS_FILE
from hone.trainers.policy.settings import PolicyRunConfig

COSTS = [one.name for one in fields(Costs)]
PLAIN_WIDTH = 120  # of a table that goes into a file
TITLES = ("trainer", "servers", "s / step", "tokens / s", "mean age", "largest", "trainer busy", "servers busy")


def compare(
    config: PolicyRunConfig, costs: Sequence[str], source: Path | None, grid: Sequence[str], as_json: bool = False
) -> None:
    """Print speed, staleness and use of every combination of the grid's values.

    Costs come from the user (`--cost`), from a finished run (`--from`), or both. Raises ConfigError.
    """
    values = _pairs("--grid", grid or ["staleness=0,1,2"])
    found = cells(_base(config, _pairs("--cost", costs), source), {k: v.split(",") for k, v in values.items()})
    outcomes = [simulate(cell.setting) for cell in found]
    if as_json:
        together = [{"setting": a.plain(), "outcome": asdict(b)} for a, b in zip(found, outcomes, strict=True)]
        typer.echo(json.dumps(together, indent=2))
    else:
        console = Console()
        if not console.is_terminal:
            console.width = PLAIN_WIDTH
        console.print(table(found, outcomes))


def _base(config: PolicyRunConfig, given: Mapping[str, str], source: Path | None) -> Base:
    asynchrony = config.asynchrony or AsynchronyConfig()
    longest = config.rollout.sampling.max_response_tokens
    costs, prompt_tokens, lengths = Costs(0.0), 0, None
    if source is not None:
        fit = fitted(source, config.rollout.replicas)
        costs, prompt_tokens = fit.costs, fit.prompt_tokens
        lengths = recorded(source, longest, fit.response_tokens) if (source / ROLLOUTS_FILE).is_file() else None
    costs = replace(costs, **{name: _seconds(name, text) for name, text in given.items()})
    if not costs.decode_s + costs.decode_row_s:
        raise ConfigError("nothing says what generation costs: add --cost decode_s=SECONDS, or --from RUN")
    setting = Setting(
        costs=costs,
        lengths=lengths or _longest(longest),
        prompts_per_step=config.update.prompts_per_step,
        samples_per_prompt=config.update.samples_per_prompt,
        staleness=asynchrony.staleness,
        new_weights=asynchrony.new_weights,
        replicas=config.rollout.replicas,
        seats=config.rollout.requests_per_replica,
        prompt_tokens=prompt_tokens,
        seed=config.run.seed,
    )
    server = shape_of(config.rollout)
    return Base(setting, lengths is not None, longest, server.ranks, str(server))


def _longest(tokens: int) -> Lengths:
    return parse_lengths(f"constant:{tokens}", tokens)


def _pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    for text, (name, sign, value) in zip(texts, pairs, strict=True):
        if not (name and sign and value):
            raise ConfigError(f"{option} {text}: expected NAME=VALUE")
    return {name: value for name, _, value in pairs}


def _seconds(name: str, text: str) -> float:
    if name not in COSTS:
        raise ConfigError(unknown("--cost", name, COSTS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"--cost {name}={text}: expected seconds, 0 or more")
    return seconds


def table(found: Sequence[Cell], outcomes: Sequence[Outcome]) -> Table:
    """One row for each combination; what does not vary is the title."""
    names = [name for name in found[0].names if len({cell.names[name] for cell in found}) > 1]
    fixed = [f"{name}={value}" for name, value in found[0].names.items() if name not in names]
    shown = Table(title=", ".join(fixed) or None, title_justify="left", title_style="")
    for name in names:
        shown.add_column(name.replace("_", " "))
    for title in TITLES:
        shown.add_column(title, justify="right")
    for cell, outcome in zip(found, outcomes, strict=True):
        shown.add_row(*(cell.names[name] for name in names), *_row(cell, outcome))
    return shown


def _row(cell: Cell, outcome: Outcome) -> list[Any]:
    return [
        f"{cell.setting.trainer_devices:g}",
        str(cell.setting.replicas),
        f"{1 / outcome.steps_per_s:.4g}",
        f"{outcome.tokens_per_s:,.0f}",
        f"{outcome.staleness:.2f}",
        str(outcome.staleness_max),
        f"{outcome.trainer_utilisation:.0%}",
        f"{outcome.rollout_utilisation:.0%}",
    ]


__all__ = ["COSTS", "compare", "table"]
