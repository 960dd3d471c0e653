"""recipes/rl_loop.py: short enough to read, and it runs by itself."""

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hone.registry import resolve

ROOT = Path(__file__).resolve().parents[2]
LOOP = ROOT / "recipes" / "rl_loop.py"


def lines_of(capsys, **changes):
    """What the loop prints, a line for each step."""
    options = {"steps": 3, "prompts": 8, "samples": 4, "lr": 1e-3, "seed": 0, "evaluate_every": 100, **changes}
    asyncio.run(resolve(f"{LOOP}:train")(resolve(f"{LOOP}:Options")(**options)))
    return capsys.readouterr().out.splitlines()


def test_it_is_under_250_lines():
    assert len(LOOP.read_text(encoding="utf-8").splitlines()) < 250


@pytest.mark.slow
def test_it_runs_as_a_script_from_any_folder(tmp_path):
    arguments = ["--steps", "2", "--prompts", "4", "--samples", "2", "--threads", "1"]
    done = subprocess.run(
        [sys.executable, str(LOOP), *arguments],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [["step", "0"], ["step", "1"], ["step", "2"]]


def test_it_learns_from_its_first_steps(capsys):
    lines = lines_of(capsys, steps=16, prompts=16, samples=16, evaluate_every=8)
    assert [int(line.split()[1]) for line in lines if "held-out exact match" in line] == [0, 8, 16]
    rewards = [float(re.search(r"reward (\S+)", line).group(1)) for line in lines[1:]]
    assert len(rewards) == 16
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3])


def test_the_same_seed_gives_the_same_run(capsys):
    def figures(seed):
        return [re.sub(r"\d+\.\d+ s", "", line) for line in lines_of(capsys, seed=seed)]

    first = figures(1)
    assert first == figures(1)
    assert first != figures(2)
