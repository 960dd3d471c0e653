"""Check a command of hone that a page shows: its arguments, and the settings that they name."""

import re
import shlex
from pathlib import Path

import pytest
import typer

from hone.cli.keys import keys_of
from hone.cli.main import COMMANDS, TAKES_KEYS
from hone.cli.recipe import load_recipe
from hone.config import ConfigError
from hone.registry import resolve
from tests.docs.blocks import Block

RECIPES = {  # stands for the run file that the reader has
    "train": "recipes/quickstart/grpo.yaml",
    "eval": "recipes/quickstart/grpo.yaml",
    "check": "recipes/quickstart/grpo.yaml",
    "plan": "recipes/quickstart/grpo.yaml",
    "check-loss": "recipes/quickstart/grpo.yaml",
    "sft": "recipes/sft/chat.yaml",
    "prefer": "recipes/preference/dpo.yaml",
    "distill": "recipes/distill/on_policy.yaml",
    "reward-model": "recipes/reward_model/bradley_terry.yaml",
}
HONE = re.compile(r"(?:[A-Z_]+=\S+ )*(?:(?:\.venv/bin/)?hone|torchrun .*?-m hone) (?=[a-z])")


def check_hone(line: str, block: Block) -> None:
    """Parse a command of hone with its own parser, and load the settings that it names."""
    name, *arguments = shlex.split(line.partition(" | ")[0].partition(" > ")[0])
    assert name in COMMANDS, line
    app = typer.Typer(add_completion=False)
    app.command(name)(resolve(COMMANDS[name].target))
    arguments = keys_of(arguments) if name in TAKES_KEYS else arguments
    context = typer.main.get_command(app).make_context(name, arguments)  # raises for an unknown option
    words = context.params.get("given") or [
        context.params.get("recipe") or "",
        *(context.params.get("overrides") or []),
    ]
    recipe, *given = map(str, words)
    if not recipe or name == "env":
        return
    if not Path(recipe).is_file():
        assert not recipe.startswith("recipes/"), f"no file {recipe}"
        recipe = RECIPES[name]
    wrong = re.search(r"^error: (command line: .*?)(?:\.\.\.|$)", block.text, re.MULTILINE)
    if wrong and name in ("train", "config"):
        with pytest.raises(ConfigError, match=f"^{re.escape(wrong[1])}"):
            load_recipe(Path(recipe), given)
    else:
        load_recipe(Path(recipe), given)
