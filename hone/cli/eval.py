"""`hone eval`: evaluate any model on the evaluation sets of a run file, alone or beside another model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hone.cli.answer_file import AnswerFile, Count
from hone.cli.eval_page import question, write_page
from hone.cli.flags import Threads
from hone.cli.grouping import grouped
from hone.cli.recipe import load_recipe, run_file_of
from hone.config import ConfigError
from hone.models.settings import ModelConfig
from hone.trainers.answering.model import finished_model, name_of
from hone.trainers.policy.evaluate_model import evaluate_model
from hone.trainers.policy.settings import EvaluationSamplingConfig, PolicyRunConfig
from hone.types import TrajectoryGroup


@dataclass(frozen=True, slots=True)
class Results:
    """Files of results."""

    output: Annotated[Path | None, typer.Option(help="also write the figures to this file, as JSON")] = None
    answers: Annotated[
        Path | None, typer.Option(help="file to write (.jsonl): a row per answer with its reward, as it comes")
    ] = None
    page: Annotated[
        Path | None, typer.Option(help="with --beside, file to write (.html): both answers, changed ones first")
    ] = None


@grouped
def eval(
    recipe: Annotated[Path, typer.Argument(help="run folder, or run file (YAML) with evaluation.sets")],
    results: Results,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value, such as evaluation.sampling.temperature=0.7")
    ] = None,
    model: Annotated[str, typer.Option(help="model folder or hub name; default: the run's export")] = "",
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="name=folder of a LoRA adapter to evaluate too; may be repeated"),
    ] = None,
    beside: Annotated[
        str, typer.Option(help="another model, such as the one before training: both answer greedily, and are compared")
    ] = "",
    threads: Threads = 0,
) -> None:
    """Evaluate a model on the held-out sets of a run, or of a run file.

    The answers of --answers are written as they come, so a command that is killed leaves those it has.
    """
    keys = [*(overrides or []), *([f"runtime.threads={threads}"] if threads else [])]
    config = load_recipe(*run_file_of(recipe, keys)).config
    if not isinstance(config, PolicyRunConfig):
        raise ConfigError(
            f"{recipe} has kind: {config.kind}, which has no evaluation sets; give a run file of kind rl or distill"
        )
    if not config.evaluation.sets:
        raise ConfigError(f"{recipe}: evaluation.sets is empty; add at least one set")
    if results.page is not None and not beside:
        raise ConfigError(f"--page {results.page} compares two models: name the other one with --beside")
    if beside and adapter:
        raise ConfigError("--beside compares two whole models; leave out --adapter")
    adapters = _adapters(adapter or [])
    chosen = _model(config, model)
    compared = {name_of(chosen): chosen}
    if beside:
        config = _greedy(config)
        other = str(finished_model(beside).path)
        compared[name_of(config.model.at(other), *compared)] = config.model.at(other)
    with AnswerFile(results.answers, "--answers") as kept:
        asked = [_Asked(name, number, kept) for number, name in enumerate(compared)]
        found = [one.measured(config, path, adapters) for one, path in zip(asked, compared.values(), strict=True)]
    _show(list(compared), found)
    if results.output is not None:
        told = dict(zip(compared, found, strict=True)) if beside else found[0]
        results.output.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    if results.page is not None:
        first, second = asked
        write_page(results.page, (first.name, second.name), (first.groups, second.groups))
        typer.echo(f"page: {results.page}")


@dataclass(slots=True)
class _Asked:
    """One model, and the answers that it gave."""

    name: str
    number: int
    kept: AnswerFile
    groups: list[TrajectoryGroup] = field(default_factory=list)

    def measured(self, config: PolicyRunConfig, model: ModelConfig, adapters: Mapping[str, str]) -> dict[str, float]:
        count = Count("prompts answered")

        def on_group(group: TrajectoryGroup) -> None:
            self._keep(group)
            count.one()

        try:
            return evaluate_model(config, model, adapters, on_group)
        finally:
            count.end()

    def _keep(self, group: TrajectoryGroup) -> None:
        self.groups.append(group)
        for one in group.trajectories:
            row: dict[str, Any] = {
                "model": self.name,
                "prompt_id": group.prompt.prompt_id,
                "sample": one.sample,
                "prompt": question(group),
                "ground_truth": group.prompt.ground_truth,
                "response": one.response,
                "reward": one.reward if one.status.trainable else None,
                "components": dict(one.components),
                "status": str(one.status),
                "response_length": one.response_length,
            }
            self.kept.add((self.number, *_place(group.prompt.prompt_id), one.sample), row)


def _place(prompt_id: str) -> tuple[str, int]:
    """Set and row of a prompt, for the order of the file."""
    name, _, row = prompt_id.rpartition("/")
    return name, int(row) if row.isdigit() else 0


def _show(names: list[str], found: list[dict[str, float]]) -> None:
    headings = names if len(names) > 1 else ["value"]
    table = Table("figure", *map(escape, headings))
    for name in found[0]:
        table.add_row(Text(name.removeprefix("eval/")), *(f"{one[name]:.4f}" if name in one else "" for one in found))
    Console().print(table)


def _greedy(config: PolicyRunConfig) -> PolicyRunConfig:
    """The settings with one greedy answer to each prompt."""
    given = config.evaluation.sampling
    longest = None if given is None else given.max_response_tokens
    sampling = EvaluationSamplingConfig(temperature=0.0, max_response_tokens=longest)
    changed = config.evaluation.model_copy(update={"samples": 1, "sampling": sampling})
    return config.model_copy(update={"evaluation": changed})


def _adapters(given: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in given:
        name, separator, folder = one.partition("=")
        if not (separator and name and folder) or name in found:
            raise ConfigError(f"--adapter {one!r} should be name=folder, with a different name for each")
        found[name] = folder
    return found


def _model(config: PolicyRunConfig, model: str) -> ModelConfig:
    if model:
        return config.model.at(str(finished_model(model).path))
    export = Path(config.run.dir) / "export"
    if (export / "config.json").is_file():
        return config.model.at(export)
    if not config.actor.backend.computes_here:
        merge = "" if config.actor.lora is None else "--merge "
        raise ConfigError(
            f"a service holds the model of {config.run.dir}, and hone evaluates a model of this machine: write it with "
            f"`hone export {merge}{config.run.dir} FOLDER`, and add --model FOLDER"
        )
    if config.model.build is not None:
        raise ConfigError(f"run.dir {config.run.dir} has no export yet: train first, or give a model with --model")
    return config.model
