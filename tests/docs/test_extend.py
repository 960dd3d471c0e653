"""docs/extend.md: its plug-in is installed as the page says, passes its tests, and is used by hone's commands."""

import os
import shlex
import subprocess
import sys
import time

import pytest

from hone.tracking.trackers.jsonl import read_metrics
from tests.docs.blocks import ROOT, read_blocks
from tests.installing import install

FILES = {  # language and beginning of a block -> the file that it is
    ("toml", "[build-system]"): "pyproject.toml",
    ("python", '"""Adds'): "hone_guess/__init__.py",
    ("python", '"""An environment'): "hone_guess/game.py",
    ("python", '"""A reward'): "hone_guess/rewards.py",
    ("python", '"""A data source'): "hone_guess/numbers.py",
    ("python", '"""A tracker'): "hone_guess/csv_file.py",
    ("python", "from hone.config"): "tests/test_contract.py",
    ("yaml", "kind"): "run.yaml",
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
    install(folder, folder / "site")
    return folder, {**variables, "PYTHONPATH": os.pathsep.join([str(folder / "site"), str(ROOT)])}


def run(command, folder, variables):
    """The output of a command that has to succeed."""
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wait_for(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "nothing happened within 120 s"
        time.sleep(0.05)


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
    assert "18 passed, 1 skipped" in told, told


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
    (_, *arguments), printed = command_of("hone check")
    shown = run([sys.executable, "-m", "hone", *arguments], folder, variables)
    assert shown.startswith(printed.removesuffix("...\n"))


@pytest.mark.slow
def test_its_run_file_trains_and_a_killed_run_continues_the_csv(plugin):
    folder, variables = plugin
    command = [sys.executable, "-m", "hone", "train", "run.yaml"]
    record = folder / "runs/guess/metrics.jsonl"
    with (folder / "log.txt").open("w") as log:
        first = subprocess.Popen([*command, "run.steps=1000"], cwd=folder, env=variables, stdout=log, stderr=log)
    try:
        wait_for(lambda: first.poll() is not None or (record.is_file() and record.read_bytes().count(b"\n") > 3))
        assert first.poll() is None, (folder / "log.txt").read_text(encoding="utf-8")
    finally:
        first.kill()
        first.wait(60)
    saved = max(int(path.name.removeprefix("step_")) for path in record.parent.glob("checkpoints/step_*"))
    run([*command, f"run.steps={saved + 3}"], folder, variables)
    steps = read_metrics(record.parent)
    expected = [(step["step"], name) for step in steps for name in step if name != "step"]
    found = [line.split(",")[:2] for line in (record.parent / "metrics.csv").read_text(encoding="utf-8").splitlines()]
    assert sorted((int(step), name) for step, name in found) == sorted(expected)
    assert {step for step, _ in expected} == set(range(saved + 4))
