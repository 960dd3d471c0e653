"""The training commands, one for each kind of run: `hone train`, `sft`, `prefer`, `reward-model`, `distill`.

    run file or flags --> settings, checked --> (torch and the models are imported only now) --> run

They differ in the table of kinds (`hone.cli.recipe`) and in the options below.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

import typer

from hone.cli.flags import Data, Flags, Model, RecipeAndKeys, Reward, Teacher, Write, load_command
from hone.cli.recipe import KINDS
from hone.config import ConfigError, Loaded
from hone.registry import resolve

Restart = Annotated[bool, typer.Option("--restart", help="rename an earlier run's folder, and begin again")]
Sweep = Annotated[
    list[str] | None,
    typer.Option(help="key=a,b,c: a run for each value, in turn; may be repeated, for all combinations"),
]
AtOnce = Annotated[int, typer.Option(min=1, help="with --sweep: how many runs at a time")]
Replay = Annotated[Path | None, typer.Option(help="repeat an asynchronous run bit for bit: its schedule.jsonl")]

OPTIONS: dict[str, tuple[Any, Any]] = {  # name -> type, default
    "given": (RecipeAndKeys, None),
    "model": (Model, ""),
    "data": (Data, ""),
    "reward": (Reward, ""),
    "teacher": (Teacher, ""),
    "write": (Write, None),
    "restart": (Restart, False),
    "sweep": (Sweep, None),
    "at_once": (AtOnce, 1),
    "replay": (Replay, None),
}


def start(kind: str, loaded: Loaded[Any], restart: bool, **control: Any) -> None:
    """Run a run of this kind, and print where its results are; `control` as for `RunControl`.

    The imports are here, so that an error in a run file is shown without waiting for them.
    """
    run = resolve(KINDS[kind].run)
    settings = resolve("hone.trainers.run.context:RunControl")(**control)
    resolve("hone.cli.running:report_run")(Path(loaded.config.run.dir), lambda: run(loaded, settings), restart)


def training_command(kind: str, without: tuple[str, ...], example: str = "run.steps 10") -> Callable[..., None]:
    """The command of a kind of run, with all `OPTIONS` but some. `example` is a key and its value, for the help."""

    def command(
        given: list[str] | None = None,
        write: Path | None = None,
        restart: bool = False,
        replay: Path | None = None,
        sweep: list[str] | None = None,
        at_once: int = 1,
        **flags: Any,
    ) -> None:
        recipe, *keys = given or [""]
        if sweep:
            if not recipe or restart or replay or write or any(flags.values()):
                raise ConfigError(
                    f"--sweep takes a run file and settings only: {KINDS[kind].command} RUN.yaml --sweep ..."
                )
            resolve("hone.cli.sweep:run_sweep")(kind, Path(recipe), keys, sweep, at_once)
            return
        loaded = _load(kind, Path(recipe) if recipe else None, keys, Flags(**flags, write=write), replay)
        start(kind, loaded, restart, replay=replay)

    options = {name: option for name, option in OPTIONS.items() if name not in without}
    needed = ["--model", "--data", *KINDS[kind].needs]
    command.__doc__ = (
        f"{KINDS[kind].summary} With the run.dir of an earlier run, continue that run.\n\n"
        f"Give a run file, or {', '.join(needed[:-1])} and {needed[-1]}. Every key of a run file is a flag too: "
        f"--{example}."
    )
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [Parameter(n, Parameter.KEYWORD_ONLY, default=default, annotation=t) for n, (t, default) in options.items()]
    )
    command.__annotations__ = {name: of for name, (of, _) in options.items()}
    return command


def _load(kind: str, recipe: Path | None, keys: list[str], flags: Flags, replay: Path | None) -> Loaded[Any]:
    """The settings of the run. A replay of the run in a folder is written to `<folder>-replay`, next to it."""
    path = recipe / "config.yaml" if replay is not None and recipe is not None and recipe.is_dir() else recipe
    loaded = load_command(kind, path, keys, flags)
    if replay is None:
        return loaded
    folder = Path(loaded.config.run.dir)
    if folder.resolve() == replay.parent.resolve():
        other = f"run.dir={folder.with_name(f'{folder.name}-replay')}"
        return load_command(kind, path, [*keys, other], replace(flags, write=None))
    return loaded


train = training_command("rl", without=("teacher",))
distill = training_command("distill", without=("reward", "replay"))
sft = training_command("sft", without=("reward", "teacher", "replay"))
prefer = training_command("prefer", without=("reward", "teacher", "replay"), example="loss.name simpo")
reward_model = training_command("reward_model", without=("reward", "teacher", "replay"))
