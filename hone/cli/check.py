"""`hone check RUN.yaml`: try a run file's settings, data, rewards and model without training.

run file --> settings --> rows as prompts --> rewards of three rows --> size of the model, memory --> facts
                              with --baseline: answers of the model as it is --> figures --> a verdict
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, TypeVar

import typer

from hone.cli.baseline import judged
from hone.cli.env import Subject, findings, played
from hone.cli.errors import EXIT_FAILED
from hone.cli.recipe import load_recipe
from hone.cli.score import outcomes_of
from hone.composition import ConfigError
from hone.config import sections
from hone.data.columns import PromptReader
from hone.data.messages import RenderingError
from hone.data.packing import Sample
from hone.data.rendering import Renderer
from hone.data.stream import Maker, PromptMaker, PromptStream, SampleMaker, TooLong, make_renderer
from hone.envs import ENVS
from hone.envs.base import Start
from hone.envs.runners import make_runner
from hone.models.settings import ModelConfig
from hone.models.source import check_source
from hone.models.tokenizer import load_tokenizer
from hone.models.vision.image_processor import load_image_processor
from hone.planner.anatomy import Anatomy, examine
from hone.planner.devices import GIB, known_devices, this_machine
from hone.planner.memory import peak, phases
from hone.platforms.base import current_platform
from hone.rewards.pool import Outcome
from hone.rewards.settings import RewardConfig, RewardModelConfig
from hone.tracking.base import printable
from hone.trainers.forecast.forecast import Given, checked_setup
from hone.trainers.forecast.setup import placement_of
from hone.trainers.forecast.sizes import POLICY, Sizes, measured_lengths
from hone.trainers.policy.checks import check_room, check_settings, narrow_room
from hone.trainers.policy.evaluate_model import baseline_answers
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.run_model import FOLDER, local_model
from hone.trainers.supervised.assembly import maker_of

T = TypeVar("T")
ROWS = 3  # that rewards score
RENDERED = 200  # rows whose length is measured
CALL_S = 30.0  # deadline of one call of an environment, in seconds
SHOWN = 1000  # last characters of the first prompt


def check(
    recipe: Annotated[Path, typer.Argument(help="run file (YAML)")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value settings")] = None,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="rl: also let the model answer, and say whether the task fits it")
    ] = False,
    prompts: Annotated[int, typer.Option(min=1, help="with --baseline: how many prompts are answered")] = 32,
) -> None:
    """Try a run file without training: settings, data, template, rewards on three rows, model and memory.

    Nothing is written. An environment plays one prompt without a model. The exit code is 2 for a mistake in the run
    file, and 1 if no reward can score or the environment has a problem.
    """
    config = load_recipe(recipe, overrides or []).config
    if baseline and not isinstance(config, PolicyRunConfig):
        raise ConfigError(f"--baseline answers prompts, and a run file of kind {config.kind} has none; leave it out")
    with TemporaryDirectory(prefix="hone-check-") as folder:
        model = local_model(config.model, Path(folder) / FOLDER)
        failed, anatomy = False, examine(model)
        renderer = make_renderer(config.data, load_tokenizer(model), load_image_processor(model))
        if isinstance(config, PolicyRunConfig):
            check_settings(config)
            check_room(config, model)
            rows, shown = _prompts(config, renderer, anatomy.context)
            lines, failed, start = _environment(config, renderer)
            if start is not None:  # it may have tools, and need not be the row's prompt
                try:
                    ids = start.token_ids or renderer.render_prompt(start.messages, start.tools)
                    shown = renderer.decode(ids, keep_special=True)
                except RenderingError as error:
                    shown, failed = "", True
                    lines.append(f"environment: problem: its first prompt cannot be rendered: {error}")
            prompt = [f"first prompt, as the model reads it: {shown[-SHOWN:]!r}"] if shown else []
            _say([rows, *prompt, *lines])
            tried = list(_rewards(config))
            failed |= bool(tried) and all("failed" in line for line in tried)
            _say(tried)
        else:
            _say(_samples(config, renderer, anatomy.context))
        _say(_others(config, renderer))
        _say(_memory(config, model, anatomy))
        if baseline:
            greedy, sampled = baseline_answers(config, model, prompts)
            _say(judged(greedy, sampled, config))
    if failed:
        raise typer.Exit(EXIT_FAILED)


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        typer.echo(printable(line))


def _prompts(config: PolicyRunConfig, renderer: Renderer, context: int) -> tuple[str, str]:
    """Return a line about the rows, and the first prompt as text."""
    prompts, rows, more = _made(PromptMaker("train", config.data.train, renderer, "data.train"))
    if not prompts:
        return f"{rows}{more}: see data.train.max_prompt_tokens", ""
    lengths = [len(one.token_ids) for one in prompts]
    narrow = narrow_room(config, context, max(lengths))
    more += f"; {narrow}" if narrow else ""
    shown = renderer.decode(prompts[0].token_ids, keep_special=True)
    return f"{rows}; prompts of {min(lengths)} to {max(lengths)} tokens{more}", shown


def _made(maker: Maker[T]) -> tuple[list[T], str, str]:
    """Make the items of the first rows; also return a text about the rows, and one about those that are too long."""
    reader = maker.reader
    tried = range(reader.first, min(reader.last, reader.first + RENDERED))
    found: list[T] = []
    for index in tried:
        with suppress(TooLong):
            found.append(maker.make(index))
    dropped = len(tried) - len(found)
    more = f", {dropped} of the first {len(tried)} rows are too long" if dropped else ""
    return found, f"data: {len(reader)} rows", more


def _samples(config: Any, renderer: Renderer, context: int) -> Iterator[str]:
    """Render rows as a supervised trainer does, and show the first sequence."""
    items, rows, more = _made(maker_of(config)("train", config.data.train, renderer, "data.train"))
    parts = [[item, *(getattr(item, one.name) for one in fields(item))] for item in items]  # of a pair both answers
    found = [one for each in parts for one in each if isinstance(one, Sample)]
    if not found:
        yield f"{rows}{more}: see data.train.max_sample_tokens" if more else rows
        return
    lengths, trained = [one.tokens for one in found], [sum(one.loss_mask) for one in found]
    over = sum(length > context for length in lengths)
    if context and over:
        more += (
            f"; {over} of {len(lengths)} sequences are longer than the model's context of {context}: set "
            f"data.train.max_sample_tokens={context}"
        )
    losses = f"{min(trained)} to {max(trained)} of them with a loss"
    yield f"{rows}; sequences of {min(lengths)} to {max(lengths)} tokens, {losses}{more}"
    first = found[0]
    learnt = [token for token, is_trained in zip(first.token_ids, first.loss_mask, strict=True) if is_trained]
    for what, ids in (("first sequence, as the model reads it", first.token_ids), ("of it with a loss", learnt)):
        yield f"{what}: {renderer.decode(ids, keep_special=True)[-SHOWN:]!r}"


def _others(config: Any, renderer: Renderer) -> Iterator[str]:
    """Look up every other model and set of rows that the run file names, and make an item of each set's first rows.

    Raises ConfigError or ModelError for one that is not there, or has other columns.
    """
    for section in sections(config):
        key, one = section.prefix.removesuffix("."), section.config
        if isinstance(one, ModelConfig | RewardModelConfig) and one.path and key != "model":
            trusted, revision = getattr(one, "trust_remote_code", False), getattr(one, "revision", None)
            check_source(one.path, f"{key}.path", "config.json", trusted, revision)
            yield f"{key}: {one.path} is there"
    makers = PromptMaker if isinstance(config, PolicyRunConfig) else maker_of(config)
    sets = [(f"evaluation.sets.{name}", one, makers) for name, one in config.evaluation.sets.items()]
    sets += [(f"data.mix.{name}", one, makers) for name, one in config.data.mix.items()]
    if (warm := getattr(config, "warm_start", None)) is not None:
        sets.append(("warm_start.data.train", warm.data.train, SampleMaker))
        sets += [(f"warm_start.data.mix.{name}", one, SampleMaker) for name, one in warm.data.mix.items()]
    for key, one, maker in sets:
        _, rows, more = _made(maker(key.rpartition(".")[2], one, renderer, key))
        yield f"{key}: {rows.removeprefix('data: ')}{more}"


def _environment(config: PolicyRunConfig, renderer: Renderer) -> tuple[list[str], bool, Start | None]:
    """Make the environments as a run does before its first step, and play one prompt with policies without a model.

    Returns lines, whether there is a problem, and how the first episode begins if the environment decides that.
    Raises ConfigError for an environment that cannot be used.
    """
    asyncio.run(make_runner(config.episode, renderer).close())
    name = config.episode.env.name
    if name == "chat":
        return [], False, None
    if name not in ENVS:
        return [f"environment: {name} can be made; it leads its episodes itself, so only a run plays it"], False, None
    drawn = PromptStream(config.data, renderer, config.run.seed).take(1)
    found = played(Subject(config.episode, drawn, renderer), CALL_S)
    lines = [f"{name}: {found.episodes} episodes of one prompt, {found.turns} turns", *findings(found)]
    return [f"environment: {line}" for line in lines], found.problems > 0, found.start


def _rewards(config: PolicyRunConfig) -> Iterator[str]:
    """Score the ground truth and an empty answer of the first rows with each component."""
    reader = PromptReader("train", config.data.train, "data.train")
    rows = [reader.row(index) for index in range(reader.first, min(reader.last, reader.first + ROWS))]
    truths = [reader.ground_truth(row, reader.first + number) for number, row in enumerate(rows)]
    for name, component in config.reward.components.items():
        if component.model is not None:
            yield f"reward {name}: a reward model, whose scores are not tried here"
            continue
        cases = [
            {"prompt_id": str(number), **row, "response": response, "ground_truth": truth}
            for ideal in (True, False)
            for number, (row, truth) in enumerate(zip(rows, truths, strict=True))
            for response in [str(truth) if ideal and truth is not None else ""]
        ]
        scored = RewardConfig(components={name: component}, workers=1)
        found = [_shown(outcome) for outcome in outcomes_of(scored, cases, show=False)]
        right, empty = ", ".join(found[: len(rows)]), ", ".join(found[len(rows) :])
        yield f"reward {name}: {right} for the ground truth as the answer, {empty} for an empty answer"


def _shown(outcome: Outcome) -> str:
    return f"failed ({outcome.error})" if outcome.error else f"{outcome.value:.3g}"


def _memory(config: Any, model: ModelConfig, anatomy: Anatomy) -> Iterator[str]:
    """The size of the model, and the forecast of memory that `hone plan` makes, for this machine."""
    platform = current_platform()
    facts = platform.memory()
    yield f"model: {anatomy.family}, {anatomy.parameters / 1e6:,.1f} M parameters, context {anatomy.context:,} tokens"
    if anatomy.files.left_out:
        yield f"not read of the model's files: {anatomy.files.unread()}"
    if not config.actor.backend.computes_here:
        name = config.runtime.backend.name
        yield f"memory: runtime.backend={name} needs none here; other models, such as teachers, are not counted"
        return
    sizes = Sizes({POLICY: anatomy}, measured_lengths(config, model))
    try:
        machine = this_machine(known_devices())
        most = peak(phases(checked_setup(config, sizes, placement_of(config, machine), Given())))
    except ConfigError as error:  # a device without facts, or a run file for more devices than there are here
        yield f"memory: not computed for this machine: {error}; hone plan --devices computes it for another"
        return
    fits = "" if most.total < facts.free else ": too much, see hone plan"
    yield (
        f"memory: about {most.total / GIB:.1f} GiB at the most, in {most.name}; {facts.free / GIB:.1f} of "
        f"{facts.total / GIB:.1f} GiB are free on {platform.device_name()}{fits}"
    )
