"""Runs without a run file: the flags of a training command become one.

    hone sft --model PATH --data FILE      --> {kind: sft, run: ..., model: ..., data: ...} --> checked --> run
    hone train ... --write run.yaml        the same, and the run file is kept

Each flag stands for a key, and every other key is a flag too: `--run.seed 3` is `run.seed=3`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from hone.cli.errors import say
from hone.cli.recipe import KINDS, load_run
from hone.composition import COMMAND_LINE, ConfigError, Layer, read_layers, read_overrides, to_yaml
from hone.config import Loaded, build, walk
from hone.data.settings import DatasetConfig
from hone.data.sources.base import SUFFIXES, open_rows, suffix_of

RecipeAndKeys = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[RECIPE] [KEY=VALUE]...",
        help="run file (YAML), not needed with --model and --data; then settings, such as run.steps=10",
    ),
]
Model = Annotated[str, typer.Option(help="model folder or hub name (model.path)")]
Data = Annotated[str, typer.Option(help="file of training rows: .jsonl, .parquet (data.train.path)")]
Reward = Annotated[str, typer.Option(help="registered reward, or file.py:function (reward.components)")]
Teacher = Annotated[str, typer.Option(help="teacher's folder or hub name (distillation.teachers.teacher.model.path)")]
Threads = Annotated[int, typer.Option(min=0, help="CPU threads; 0: as OMP_NUM_THREADS says, else all cores")]
Write = Annotated[Path | None, typer.Option(help="also write the run file that these flags stand for")]

FLAGS = "the flags"  # source of their keys
OTHER_NAMES = {  # column of hone -> what data sets often call it
    "prompt": ("question", "problem", "instruction", "query", "input"),
    "ground_truth": ("answer", "solution", "final_answer", "target", "label"),
    "completion": ("response", "answer", "output", "solution", "target"),
    "chosen": ("accepted", "preferred"),
    "rejected": ("refused", "dispreferred"),
}
PER_STEP = 32  # samples, pairs or prompts
INPUTS = ("input", "context")  # with `instruction` they are the prompt; in many rows they are empty
INSTRUCTION_PROMPT = "{{ instruction }}{% if INPUT is defined and INPUT %}\n\n{{ INPUT }}{% endif %}"
KTO = ("prompt", "completion", "label")  # columns of single answers, good or bad
SHAREGPT = "conversations"  # its column of messages
VERL = "reward_model.ground_truth"  # the ground truth of verl's files


@dataclass(frozen=True, slots=True)
class Flags:
    """Flags of a training command that are not keys of the run file."""

    model: str = ""
    data: str = ""
    reward: str = ""
    teacher: str = ""
    columns: Mapping[str, str] = field(default_factory=dict)
    write: Path | None = None


def load_command(kind: str, recipe: Path | None, overrides: Sequence[str] | None, flags: Flags) -> Loaded[Any]:
    """The settings of a training command: of its run file, with flags as overrides, or of its flags alone."""
    keys = list(overrides or [])
    if recipe is not None and "=" in str(recipe) and not recipe.exists():  # a key: there is no run file
        keys, recipe = [str(recipe), *keys], None
    if recipe is not None:
        if flags.write is not None:
            raise ConfigError(f"--write keeps the flags of a command without a run file; copy {recipe} instead")
        above = [Layer(COMMAND_LINE, read_overrides(keys))] if keys else []
        loaded = load_run([*_replaced(read_layers(recipe), flags), *above], str(recipe), kind)
        _require_data_here(loaded)
        return loaded
    command = KINDS[kind].command
    missing = missing_flags(kind, flags)
    if missing:
        raise ConfigError(f"{command} needs a run file, or {' and '.join(missing)}: {_usage(kind)}")
    given = read_overrides(keys)
    settings = run_file(kind, flags, steps="steps" in _section(given, "run"))
    loaded = load_run([Layer(FLAGS, settings), Layer(COMMAND_LINE, given)], command, kind)
    if flags.write is not None and _is_first():
        write_run_file(flags.write, kind, _merged(settings, given))
    return loaded


def missing_flags(kind: str, flags: Flags) -> list[str]:
    """The flags that a run of this kind needs and that were not given."""
    return [name for name in ("--model", "--data", *KINDS[kind].needs) if not getattr(flags, name.removeprefix("--"))]


def run_file(kind: str, flags: Flags, steps: bool = False) -> dict[str, Any]:
    """The smallest run file for these flags; `steps`: its length is set elsewhere, otherwise it is one epoch."""
    name = re.sub(r"[^\w.-]+", "-", Path(flags.model).name).strip("-") or "model"
    train, loss = _training_set(kind, flags)
    settings: dict[str, Any] = {
        "kind": kind,
        "run": {"dir": f"runs/{KINDS[kind].command.removeprefix('hone ')}-{name}", **({} if steps else {"epochs": 1})},
        "model": {"path": flags.model},
        "data": {"train": train},
        **loss,
    }
    section, _, key = KINDS[kind].per_step.rpartition(".")
    (settings.setdefault(section, {}) if section else settings)[key] = PER_STEP
    if flags.teacher:
        settings["distillation"] = {"teachers": {"teacher": {"model": {"path": flags.teacher}}}}
    if flags.reward:
        settings["reward"] = {"components": {_component(flags.reward): {"reward": flags.reward}}}
    if KINDS[kind].peak_rate is not None:
        settings["actor"] = {"optimizer": {"lr": KINDS[kind].peak_rate}}
    return settings


def guessed_columns(kind: str, row: Mapping[str, Any]) -> dict[str, str]:
    """The columns of a data set that stand for hone's under another name, such as {prompt: question}, by its first row.

    Columns that are a prompt only together have none here: `guessed_prompt`.
    """
    found: dict[str, str] = {}
    if SHAREGPT in row and not row.keys() & {"messages", "prompt"} and kind not in ("prefer", "reward_model"):
        found["messages"] = SHAREGPT
    graded = row.get("reward_model")
    is_verl = isinstance(graded, Mapping) and "ground_truth" in graded
    for meaning in columns_of(kind, row):
        if meaning in row or (meaning in ("prompt", "completion") and "messages" in {*row, *found}):
            continue
        if meaning == "ground_truth" and is_verl:
            found[meaning] = VERL
            continue
        if meaning == "prompt" and guessed_prompt(row):
            continue
        free = [name for name in OTHER_NAMES[meaning] if name in row and name not in found.values()]
        if free:
            found[meaning] = free[0]
    return found


def guessed_prompt(row: Mapping[str, Any]) -> str:
    """The template of a prompt that several columns are together; empty if one column is the prompt."""
    also = [name for name in INPUTS if name in row]
    if not also or "instruction" not in row or row.keys() & {"prompt", "messages"}:
        return ""
    return INSTRUCTION_PROMPT.replace("INPUT", also[0])


def columns_of(kind: str, columns: Collection[str]) -> tuple[str, ...]:
    """The columns that a run of this kind reads, for a data set with these: pairs, or (KTO) answers with a label."""
    paired = {"chosen", "rejected", *OTHER_NAMES["chosen"], *OTHER_NAMES["rejected"]}
    judged = kind == "prefer" and "label" in columns and not paired & {*columns}
    return KTO if judged else KINDS[kind].columns


def first_row(data: str) -> Mapping[str, Any]:
    """A data set's first row. Raises DataError for a data set that cannot be read."""
    return open_rows(build(DatasetConfig, source_of(data), "--data"), "--data")[0]


def source_of(data: str) -> dict[str, Any]:
    """The keys of `data.train` for a file, a folder, or a name on the Hugging Face hub."""
    on_hub = not Path(data).exists() and suffix_of(data) not in SUFFIXES and re.fullmatch(r"[\w.-]+/[\w.-]+", data)
    return {"path": data, "source": "hf"} if on_hub else {"path": data}


def write_run_file(path: Path, kind: str, settings: Mapping[str, Any]) -> None:
    """Write a run file. Raises ConfigError if there is one."""
    if path.exists():
        raise ConfigError(f"{path} exists; run it with `{KINDS[kind].command} {path}`, or choose another name")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.parent}")
    path.write_text(f"# {KINDS[kind].command} {path}\n{to_yaml(dict(settings))}", encoding="utf-8")
    say(f"the run file is {path}")


def _training_set(kind: str, flags: Flags) -> tuple[dict[str, Any], dict[str, Any]]:
    """The keys of `data.train`, and the loss where the rows decide it."""
    columns, row = dict(flags.columns), first_row(flags.data)
    template = "" if "prompt" in columns else guessed_prompt(row)
    loss = {"loss": {"name": "kto"}} if columns_of(kind, {*row, *columns}) == KTO else {}
    if not columns:
        columns = guessed_columns(kind, row)
        known = {*row, *columns, *(["prompt"] if template else [])}
        if kind == "sft" and "text" in row and not known & {"prompt", "messages", "completion"}:
            raise ConfigError(
                f"{flags.data} has the column 'text', which does not say where an answer begins, and no column of "
                f"answers (columns: {', '.join(row)}): hone trains on answers. Give the rows the columns prompt and "
                "completion, or messages"
            )
        facts = [f"{meaning} is {own!r}" for meaning, own in columns.items()]
        facts += [f"prompt is 'instruction' and, where there is one, {name!r}" for name in INPUTS if name in template]
        if facts and _is_first():
            say("columns: " + ", ".join(facts))
    how = {"columns": columns} if columns else {}
    return {**source_of(flags.data), **how, **({"prompt_template": template} if template else {})}, loss


def _require_data_here(loaded: Loaded[Any]) -> None:
    """Raise ConfigError for data that lie beside the run file that names them, and not in the current folder."""
    for key, value in walk(loaded.config):
        source = Path(loaded.provenance[key])
        if key.startswith(("data.", "evaluation.sets.")) and key.endswith(".path") and source.is_file():
            beside = os.path.normpath(source.parent / value)
            if not Path(value).exists() and Path(beside).exists():
                raise ConfigError(
                    f"{source}: {key}: no file {value} (current folder: {Path.cwd()}), where paths of data start; "
                    f"there is one beside the run file: {key}={beside}"
                )


def _component(reward: str) -> str:
    """The name of a reward's component: the function's."""
    return reward.rpartition(":")[2]


def _replaced(layers: list[Layer], flags: Flags) -> list[Layer]:
    """The layers of a run file, with the flags in place of its own model, data and reward."""
    cleared: dict[str, Any] = {}
    chosen: dict[str, Any] = {}
    if flags.model:
        cleared["model"] = {"build": None} if any("build" in _section(one.data, "model") for one in layers) else {}
        chosen["model"] = {"path": flags.model}
    if flags.data:
        chosen["data"] = {"train": {"source": None, **source_of(flags.data)}}
    if flags.reward:
        cleared["reward"] = {"components": None}
        chosen["reward"] = {"components": {_component(flags.reward): {"reward": flags.reward}}}
    if flags.teacher:
        cleared["distillation"] = {"teachers": None}
        chosen["distillation"] = {"teachers": {"teacher": {"model": {"path": flags.teacher}}}}
    return [*layers, *([Layer(FLAGS, cleared)] if cleared else []), *([Layer(FLAGS, chosen)] if chosen else [])]


def _section(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = data.get(name)
    return found if isinstance(found, Mapping) else {}


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(below)
    for key, value in above.items():
        both = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
        found[key] = _merged(found[key], value) if both else value
    return found


def _usage(kind: str) -> str:
    takes = {"--model": "PATH", "--data": "FILE", "--reward": "FILE.py:FUNCTION", "--teacher": "PATH"}
    needed = ("--model", "--data", *KINDS[kind].needs)
    return " ".join([KINDS[kind].command, *(f"{name} {takes[name]}" for name in needed)])


def _is_first() -> bool:
    """Return whether this is torchrun's first rank, which prints; `hone.runtime.ranks` would import torch here."""
    return os.environ.get("RANK", "0") == "0"
