"""`hone init`: write the smallest run file for one's own model, data and reward, and check it.

flags, or questions in a terminal --> run file --> settings, first row, reward and model folder checked --> written
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from jinja2 import Environment
from jinja2.meta import find_undeclared_variables

from hone.cli.errors import say
from hone.cli.flags import (
    FLAGS,
    PER_STEP,
    Flags,
    columns_of,
    first_row,
    guessed_columns,
    guessed_prompt,
    missing_flags,
    run_file,
    source_of,
    write_run_file,
)
from hone.cli.recipe import DEFAULT_KIND, KINDS, RUN_FILES, load_run
from hone.composition import Layer
from hone.config import ConfigError, build
from hone.data.columns import PromptReader, SampleReader
from hone.data.preference_readers import JudgedReader, PairReader
from hone.data.settings import DatasetConfig
from hone.data.sources.base import open_rows
from hone.engines.settings import EngineConfig
from hone.models.files.context import known_context
from hone.platforms.base import AUTO
from hone.registry import unknown
from hone.rewards.base import BadReward, load_reward

HELD_OUT = 64  # rows
SAMPLES = {"rl": 8, "distill": 1}  # answers to each prompt of a step
RESPONSE_TOKENS = 512
READERS = {"sft": SampleReader, "prefer": PairReader, "reward_model": PairReader}
ALSO_READ = ("messages", "images", "tools", "data_source", "margin")  # columns, in a run of some kind


def init(
    target: Annotated[Path, typer.Argument(help="the run file to write")],
    kind: Annotated[str, typer.Option(help=f"what to train: {', '.join(KINDS)}")] = "",
    model: Annotated[str, typer.Option(help="model folder or hub name")] = "",
    data: Annotated[str, typer.Option(help="file of training rows: .jsonl, .parquet, .json, .csv")] = "",
    column: Annotated[
        list[str] | None, typer.Option(help="hone's column=yours, such as ground_truth=answer; may be repeated")
    ] = None,
    reward: Annotated[str, typer.Option(help="rl: a registered reward, or file.py:function")] = "",
    teacher: Annotated[str, typer.Option(help="distill: the teacher's folder or hub name")] = "",
) -> None:
    """Write a run file for your own data, and check it. In a terminal, hone asks for what no flag gives."""
    if target.suffix not in RUN_FILES:
        raise ConfigError(f"{target}: the run file to write ends in {' or '.join(RUN_FILES)}; give data by --data FILE")
    if target.exists():
        raise ConfigError(f"{target} exists; choose another name, or delete it")
    asks = sys.stdin.isatty()
    kind = kind or (_ask_kind() if asks else DEFAULT_KIND)
    if kind not in KINDS:
        raise ConfigError(f"--kind: {unknown('kind', kind, list(KINDS))}")
    flags = Flags(model, data, reward, teacher, _columns(column or []))
    missing = missing_flags(kind, flags)
    if missing and not asks:
        named = " and ".join(missing)
        rewards = "; for --reward see hone list rewards, or give file.py:function" if "--reward" in missing else ""
        raise ConfigError(f"{named} {'is' if len(missing) == 1 else 'are'} missing: hone init --help{rewards}")
    if missing:
        flags = _asked(kind, flags)
    settings = run_file(kind, flags)
    settings["actor"] = _computation(settings.get("actor", {}))
    if kind != "distill":  # without a reward, its answers have no figure
        _hold_out(settings, flags.data)
    if kind in SAMPLES:
        settings["update"]["samples_per_prompt"] = SAMPLES[kind]
        context = known_context(flags.model)
        longest = min(RESPONSE_TOKENS, max(context // 2, 1)) if context else RESPONSE_TOKENS
        settings["rollout"] = {"sampling": {"max_response_tokens": longest}}
    loaded = load_run([Layer(FLAGS, settings)], str(target), kind)
    for fact in checked(loaded.config):
        say(fact)
    write_run_file(target, kind, settings)
    if kind in SAMPLES:
        if longest < RESPONSE_TOKENS:
            say(f"answers of at most {longest} tokens, half of the model's context of {context}: prompts need the rest")
        answers = f"{PER_STEP} prompts x {SAMPLES[kind]} answers of at most {longest} tokens"
        say(f"one step: {answers}; on a CPU, lower all three")
    say(f"to run it: {KINDS[kind].command} {target}")


def _computation(actor: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of training that are looked at first: learning rate and precision."""
    rate = actor.get("optimizer", {}).get("lr", EngineConfig().optimizer.lr)
    return {**actor, "optimizer": {"lr": rate}, "compute_dtype": AUTO}


def _hold_out(settings: dict[str, Any], data: str) -> None:
    """Keep the last tenth of the rows, at most `HELD_OUT`, for evaluation; none of a few rows."""
    train = settings["data"]["train"]
    size = len(open_rows(build(DatasetConfig, source_of(data), "--data"), "--data"))
    held_out = min(HELD_OUT, size // 10)
    if held_out < 2:
        say(f"no held-out set, because {data} has {size} rows: set evaluation.sets")
        return
    settings["evaluation"] = {"every_steps": 10, "sets": {"held_out": {**train, "skip_rows": size - held_out}}}
    train["max_rows"] = size - held_out


def checked(config: Any) -> list[str]:
    """Describe the first row, the reward and the model of a run file. Raises ConfigError if they do not fit."""
    judged = config.kind == "prefer" and config.loss.name == "kto"
    read_by = JudgedReader if judged else READERS.get(config.kind, PromptReader)
    reader = read_by("train", config.data.train, "data.train")
    row = reader.row(reader.first)
    facts = [f"data: {len(reader)} rows; {_shown(reader, row)}"]
    if isinstance(reader, PromptReader):
        _check_asks(reader, row, config.kind)
    if unread := _unread(config, row):
        by_reward = " (a reward gets them in `row`)" if config.kind == "rl" else ""
        facts.append(f"not read: {', '.join(unread)}{by_reward}")
    model = Path(config.model.path)
    if model.is_dir() and not (model / "config.json").is_file():
        raise ConfigError(f"model.path: {model} has no config.json, so it is not a Hugging Face model folder")
    facts.append(f"model: {config.model.path}{'' if model.exists() else ' (not looked up here)'}")
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


def _check_asks(reader: PromptReader, row: Mapping[str, Any], kind: str) -> None:
    """Raise ConfigError if the prompt of the first row ends with an answer, which leaves nothing to answer."""
    messages = reader.messages(row, reader.first)
    if messages[-1]["role"] != "assistant":
        return
    column = reader.column("messages") if reader.column("messages") in row else reader.column("prompt")
    asked = next((number for number, one in enumerate(messages) if one["role"] == "user"), 0)
    field = "value" if isinstance(row[column], list) and "value" in row[column][asked] else "content"
    flags = " ".join(f"{name} ..." for name in ("--model", "--data", *KINDS[kind].needs))
    raise ConfigError(
        f"{reader.rows.where(reader.first)}: the last message of {column!r} is the assistant's, so there is nothing to "
        "answer: remove it from every row; or, to take a question alone as the prompt, write the run file with `"
        f"{KINDS[kind].command} {flags} --data.train.prompt_template '{{{{ {column}[{asked}].{field} }}}}' --write ...`"
    )


def _unread(config: Any, row: Mapping[str, Any]) -> list[str]:
    """The columns of text that are in no prompt or answer."""
    train = config.data.train
    meanings = {*columns_of(config.kind, {*row, *train.columns}), *ALSO_READ}
    read = {train.columns.get(one, one) for one in meanings}
    for template in (train.prompt_template, train.ground_truth_template, train.answer_template):
        read |= find_undeclared_variables(Environment().parse(template))
    return [name for name, value in row.items() if isinstance(value, str) and name not in read]


def _shown(reader: Any, row: Mapping[str, Any]) -> str:
    """The first row as the run will read it. Raises DataError."""
    index = reader.first
    if isinstance(reader, PairReader):
        return f"the first prefers {_short(reader.conversations(row, index)[0][-1].get('content'))}"
    if isinstance(reader, JudgedReader):
        verdict = "good" if reader.good(row, index) else "bad"
        return f"the first answer, which is {verdict}, is {_short(reader.judged(row, index)[-1].get('content'))}"
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
    data, row = (flags.data, first_row(flags.data)) if flags.data else _ask_data()
    columns = dict(flags.columns)
    typer.echo(f"its columns: {', '.join(row)}")
    guessed = guessed_columns(kind, row)
    known = {*row, "prompt"} if guessed_prompt(row) else {*row}
    for meaning in [one for one in columns_of(kind, row) if one not in known and "messages" not in {*known, *guessed}]:
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


def _ask_data() -> tuple[str, Mapping[str, Any]]:
    """Ask for the data until they can be read; returns them with their first row."""
    while True:
        data = _ask("file of training rows (.jsonl, .parquet)")
        try:
            return data, first_row(data)
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
