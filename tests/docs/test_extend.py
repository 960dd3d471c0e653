"""docs/extend.md: its plug-in is installed as the page says, passes its tests, and is used by hone's commands."""

import os
import shlex
import subprocess
import sys

import pytest

from tests.docs.blocks import ROOT, read_blocks

FILES = {  # language and beginning of a block -> the file that it is
    ("toml", "[build-system]"): "pyproject.toml",
    ("python", '"""Adds'): "hone_guess/__init__.py",
    ("python", '"""An environment'): "hone_guess/game.py",
    ("python", '"""A reward'): "hone_guess/rewards.py",
    ("python", "from hone.testing"): "tests/test_contract.py",
    ("yaml", "episode"): "run.yaml",
}
BLOCKS = read_blocks("docs/extend.md")


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """The folder of the plug-in's files, and the environment of a process that has it installed."""
    folder = tmp_path_factory.mktemp("plugin")
    for block in BLOCKS:
        for (language, begins), name in FILES.items():
            if block.language == language and block.text.startswith(begins):
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text(block.text, encoding="utf-8")
    assert all((folder / name).is_file() for name in FILES.values())
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    run([*install, "--target", str(folder / "site"), "."], folder, variables)
    return folder, {**variables, "PYTHONPATH": os.pathsep.join([str(folder / "site"), str(ROOT)])}


def run(command, folder, variables):
    """The output of a command that has to succeed."""
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def command_of(program):
    """The command of the page that begins with these words, and what the page says that it prints."""
    ((command, block),) = [
        (line, block) for block in BLOCKS for line in block.commands if line.startswith(f"{program} ")
    ]
    return shlex.split(command), block.text.split("\n", 1)[1]


def test_the_plug_in_of_the_page_passes_its_contracts(plugin):
    folder, variables = plugin
    (_, *arguments), _ = command_of("python")
    told = run([sys.executable, *arguments, "-p", "no:cacheprovider"], folder, variables)
    assert "8 passed" in told, told


def test_a_reward_that_raises_is_reported_as_the_page_says(plugin, tmp_path):
    folder, variables = plugin
    (said,) = [block.text.strip() for block in BLOCKS if block.text.startswith("hone.testing.contract.Broken")]
    source = (folder / "hone_guess/rewards.py").read_text(encoding="utf-8")
    (tmp_path / "raising.py").write_text(source.replace("ValueError", "KeyError"), encoding="utf-8")
    test = (folder / "tests/test_contract.py").read_text(encoding="utf-8")
    (tmp_path / "test_raising.py").write_text(
        test.replace('"near"', f'"{tmp_path / "raising.py"}:near"'), encoding="utf-8"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "odd", "test_raising.py"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout
    assert said in done.stdout


def test_hone_plays_it_and_takes_its_settings(plugin):
    folder, variables = plugin
    (_, *arguments), printed = command_of("hone env check")
    assert run([sys.executable, "-m", "hone", *arguments], folder, variables) == printed
    recipe = (ROOT / "recipes/quickstart/grpo.yaml").read_text(encoding="utf-8")
    lines = (folder / "run.yaml").read_text(encoding="utf-8").splitlines()
    keys = ["=".join(line.split(": ", 1)) for line in lines]
    (folder / "base.yaml").write_text(recipe, encoding="utf-8")
    shown = run([sys.executable, "-m", "hone", "config", "base.yaml", *keys], folder, variables)
    assert "attempts: 6" in shown
    assert "reward: near" in shown
