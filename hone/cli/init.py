"""`hone init`: write the smallest run file for one's own model, data and reward, and check it.

flags, or questions in a terminal --> run file --> settings, first row, reward and model folder checked --> written
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hone.cli.errors import say
from hone.cli.flags import (
    FLAGS,
    Flags,
    first_columns,
    guessed_columns,
    missing_flags,
    run_file,
    write_run_file,
)
from hone.cli.recipe import DEFAULT_KIND, KINDS, load_run
from hone.composition import Layer
from hone.config import ConfigError
from hone.data.columns import PromptReader, SampleReader
from hone.data.preference_readers import PairReader
from hone.registry import unknown
from hone.rewards.base import BadReward, load_reward

READERS = {"sft": SampleReader, "prefer": PairReader, "reward_model": PairReader}


def init(
    target: Annotated[Path, typer.Argument(help="the run file to write")],
    kind: Annotated[str, typer.Option(help=f"what to train: {', '.join(KINDS)}")] = "",
    model: Annotated[str, typer.Option(help="model folder or hub name")] = "",
    data: Annotated[str, typer.Option(help="file of training rows: .jsonl, .parquet")] = "",
    column: Annotated[
        list[str] | None, typer.Option(help="hone's column=yours, such as ground_truth=answer; may be repeated")
    ] = None,
    reward: Annotated[str, typer.Option(help="rl: a registered reward, or file.py:function")] = "",
    teacher: Annotated[str, typer.Option(help="distill: the teacher's folder or hub name")] = "",
) -> None:
    """Write a run file for your own data, and check it. In a terminal, hone asks for what no flag gives."""
    if target.exists():
        raise ConfigError(f"{target} exists; choose another name, or delete it")
    asks = sys.stdin.isatty()
    kind = kind or (_ask_kind() if asks else DEFAULT_KIND)
    if kind not in KINDS:
        raise ConfigError(f"--kind: {unknown('kind', kind, list(KINDS))}")
    flags = Flags(model, data, reward, teacher, _columns(column or []))
    missing = missing_flags(kind, flags)
    if missing and not asks:
        raise ConfigError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing: hone init --help")
    if missing:
        flags = _asked(kind, flags)
    settings = run_file(kind, flags)
    loaded = load_run([Layer(FLAGS, settings)], str(target), kind)
    for fact in checked(loaded.config):
        say(fact)
    write_run_file(target, kind, settings)
    say(f"to run it: {KINDS[kind].command} {target}")


def checked(config: Any) -> list[str]:
    """Describe the first row, the reward and the model of a run file. Raises ConfigError if they do not fit."""
    reader = READERS.get(config.kind, PromptReader)("train", config.data.train, "data.train")
    row = reader.row(reader.first)
    facts = [f"data: {len(reader)} rows; {_shown(reader, row)}"]
    model = Path(config.model.path)
    if model.is_dir() and not (model / "config.json").is_file():
        raise ConfigError(f"model.path: {model} has no config.json, so it is not a Hugging Face model folder")
    facts.append(f"model: {config.model.path}{'' if model.is_dir() else ' (on the hub: not looked up here)'}")
    for name, component in (config.reward.components if hasattr(config, "reward") else {}).items():
        try:
            loaded = load_reward(name, component.reward, component.options)
        except BadReward as error:
            raise ConfigError(str(error)) from error
        assert isinstance(reader, PromptReader)
        if loaded.binding.needs_ground_truth and reader.ground_truth(row, reader.first) is None:
            raise ConfigError(
                f"reward {component.reward} needs ground_truth, and the first row has none; give --column "
                f"ground_truth=NAME (columns: {', '.join(row)})"
            )
        facts.append(f"reward: {component.reward}")
    return facts


def _shown(reader: Any, row: Mapping[str, Any]) -> str:
    """The first row as the run will read it. Raises DataError."""
    index = reader.first
    if isinstance(reader, PairReader):
        return f"the first prefers {_short(reader.conversations(row, index)[0][-1].get('content'))}"
    if isinstance(reader, SampleReader):
        return f"the first answer is {_short(reader.conversation(row, index)[-1].get('content'))}"
    truth = reader.ground_truth(row, index)
    return f"the first prompt is {_short(reader.messages(row, index)[-1].get('content'))}, ground truth {_short(truth)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _asked(kind: str, flags: Flags) -> Flags:
    """The flags with the answers to what they do not say."""
    model = flags.model or _ask("model folder or hub name")
    data, known = (flags.data, first_columns(flags.data)) if flags.data else _ask_data()
    columns = dict(flags.columns)
    typer.echo(f"its columns: {', '.join(known)}")
    guessed = guessed_columns(kind, known)
    for meaning in [one for one in KINDS[kind].columns if one not in known and "messages" not in known]:
        columns[meaning] = columns.get(meaning) or _ask(f"column of the {meaning}", guessed.get(meaning))
    reward, teacher = flags.reward, flags.teacher
    if "--reward" in KINDS[kind].needs:
        reward = reward or _ask("reward: a registered name (hone list rewards), or file.py:function", "exact_match")
    if "--teacher" in KINDS[kind].needs:
        teacher = teacher or _ask("teacher: a model folder or hub name")
    return Flags(model, data, reward, teacher, columns)


def _ask(question: str, default: str | None = None) -> str:
    answer: str = typer.prompt(question, default=default)
    return answer.strip()


def _ask_data() -> tuple[str, list[str]]:
    """Ask for the data until they can be read; returns them with their columns."""
    while True:
        data = _ask("file of training rows (.jsonl, .parquet)")
        try:
            return data, first_columns(data)
        except ConfigError as error:
            say(str(error))


def _ask_kind() -> str:
    """Ask what to train until the answer is a kind."""
    while (kind := _ask(f"what to train ({', '.join(KINDS)})", DEFAULT_KIND)) not in KINDS:
        say(unknown("kind", kind, list(KINDS)))
    return kind


def _columns(given: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in given:
        meaning, separator, name = one.partition("=")
        if not (separator and meaning and name):
            raise ConfigError(f"--column {one!r} should be hone's column=yours, such as ground_truth=answer")
        found[meaning] = name
    return found
