"""`hone env check TARGET`: play an environment with policies that need no model, and say what is wrong with it.

run file, file.py:NAME or name --> environment, prompts, tokenizer (of a run file) --> episodes --> findings
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from hone.cli.errors import EXIT_FAILED
from hone.cli.recipe import RUN_FILES, load_recipe
from hone.composition import COMMAND_LINE, Layer, read_overrides
from hone.config import ConfigError, load_layers
from hone.data.rendering import Renderer
from hone.data.stream import PromptStream, make_renderer
from hone.envs import ENVS, EPISODES
from hone.envs.checking.check import Checker, Checkup, watched
from hone.envs.gym_class import is_gym_class
from hone.envs.runners import environments
from hone.envs.settings import EnvCheckConfig, EpisodeConfig, ToolCallSettings
from hone.envs.tool_calls import parser_of
from hone.models.tokenizer import load_tokenizer
from hone.models.vision.image_processor import load_image_processor
from hone.registry import resolve, unknown
from hone.types import Prompt


@dataclass(frozen=True, slots=True)
class Subject:
    """Subject of a check: the episodes' settings, prompts to play, and the language of the run's model."""

    episode: EpisodeConfig
    prompts: Sequence[Prompt]
    renderer: Renderer | None = None


def env(
    verb: Annotated[Literal["check"], typer.Argument(help="check: play it and report what is wrong")],
    target: Annotated[str, typer.Argument(help="a run file, a registered environment, or file.py:NAME")],
    keys: Annotated[list[str] | None, typer.Argument(help="key=value settings, such as episode.max_turns=4")] = None,
    row: Annotated[
        str, typer.Option(help="without a run file: the row as JSON, with prompt, ground_truth and other columns")
    ] = '{"prompt": "?"}',
    prompts: Annotated[int, typer.Option(min=1, help="with a run file: how many prompts are played")] = 4,
    timeout_s: Annotated[float, typer.Option(min=0.1, help="deadline of one call, in seconds")] = 30.0,
) -> None:
    """Play an environment with a random and a scripted policy, and report what is wrong with it.

    Each policy plays each prompt twice. No model is loaded. The exit code is 1 if there is a problem.
    """
    if target.endswith(RUN_FILES):
        subject = _of_run_file(target, keys or (), prompts)
    else:
        subject = _of_name(target, keys or (), row)
    found = played(subject, timeout_s)
    for line in (*_summary(target, found), *findings(found)):
        typer.echo(line)
    if found.problems:
        raise typer.Exit(EXIT_FAILED)


def played(subject: Subject, timeout_s: float) -> Checkup:
    """Play each prompt twice with each policy. `timeout_s` is the deadline of one call."""
    try:
        if subject.renderer is not None and isinstance(subject.episode.env, ToolCallSettings):
            parser_of(subject.episode.env.parser, subject.renderer.template)
        make_env, shared = environments(subject.episode)
        checker = Checker(make_env, subject.episode, subject.renderer, timeout_s)
    except ConfigError as error:
        found = Checkup()
        found.note("problem", str(error))
        return found
    return watched(checker, subject.prompts, shared, timeout_s)


def findings(found: Checkup) -> Iterator[str]:
    """A line for each finding, problems first."""
    for one in sorted(found.findings, key=lambda finding: finding.kind):
        yield f"{one.kind}: {one.text}"
    if not found.problems:
        yield "no problem found"


def _of_run_file(target: str, keys: Sequence[str], prompts: int) -> Subject:
    config: Any = load_recipe(Path(target), keys).config
    if getattr(config, "episode", None) is None:
        raise ConfigError(f"{target} has kind: {config.kind}, which has no environment; expected kind: rl or distill")
    if config.episode.env.name not in ENVS:
        _refuse(config.episode.env.name)
    renderer = make_renderer(config.data, load_tokenizer(config.model), load_image_processor(config.model))
    drawn = PromptStream(config.data, renderer, config.run.seed).take(prompts)
    return Subject(config.episode, drawn, renderer)


def _of_name(target: str, keys: Sequence[str], row: str) -> Subject:
    chosen: dict[str, Any] = {"name": target}
    if target.partition(":")[0].endswith(".py"):
        chosen = {"name": target} if _is_environment(target) else {"name": "tools", "tools": target}
    elif target not in ENVS:
        _refuse(target)
    layers = [Layer(target, {"episode": {"env": chosen}}), Layer(COMMAND_LINE, read_overrides(keys))]
    episode = load_layers(EnvCheckConfig, layers).config.episode
    return Subject(episode, [_prompt(row)])


def _refuse(name: str) -> NoReturn:
    if name in EPISODES:
        raise ConfigError(
            f"{name} leads its episodes itself, so no policy of hone can play it; try hone train RUN.yaml run.steps=1"
        )
    raise ConfigError(f"{unknown('environment', name, list(ENVS))}, or a run file, or file.py:NAME")


def _is_environment(reference: str) -> bool:
    """Return whether it names a class with the methods of an environment, rather than tools."""
    try:
        found = resolve(reference)
    except Exception:  # noqa: BLE001  loading it as tools reports why
        return False
    return is_gym_class(found) or all(callable(getattr(found, method, None)) for method in ("start", "step", "close"))


def _prompt(row: str) -> Prompt:
    try:
        columns = json.loads(row)
    except ValueError as error:
        raise ConfigError(f"--row is not JSON: {error}") from error
    if not isinstance(columns, dict) or not isinstance(columns.get("prompt"), str):
        raise ConfigError(f'--row should be a JSON object with a text "prompt", found {row[:100]!r}')
    messages = ({"role": "user", "content": columns["prompt"]},)
    ids = tuple(columns["prompt"].encode())
    return Prompt("check/0", ids, messages, columns.get("ground_truth"), "check", columns)  # type: ignore[arg-type]


def _summary(target: str, found: Checkup) -> Iterator[str]:
    tools = f"tools: {', '.join(found.tools)}; " if found.tools else ""
    yield f"{target}: {tools}{found.episodes} episodes, {found.turns} turns, longest text {found.longest:,} characters"
    for policy, endings in found.endings.items():
        yield f"{policy} policy: {', '.join(f'{count} {ending}' for ending, count in sorted(endings.items()))}"
