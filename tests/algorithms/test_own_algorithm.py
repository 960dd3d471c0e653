"""The algorithm of docs/own_algorithm.md, installed by pip as a package of its own: listed, and trained with."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.installing import install
from tests.trainers.tiny import metrics, recipe

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "own_algorithm.md"
SOURCE = ROOT / "recipes" / "own_algorithm"
BROKEN = {
    "pyproject.toml": (SOURCE / "pyproject.toml").read_text(encoding="utf-8").replace("quantile", "snapped"),
    "hone_snapped/__init__.py": "from hone.algorithms import POLICY_LOSS\n",
}


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder into which the recipe's package is installed, from a copy: a build leaves files beside its source."""
    folder = tmp_path_factory.mktemp("own")
    for file in (SOURCE / "pyproject.toml", *SOURCE.glob("hone_quantile/*.py")):
        copy = folder / "source" / file.relative_to(SOURCE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    install(folder / "source", folder / "site")
    return folder / "site"


def hone(*arguments, path):
    environment = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1", "COLUMNS": "300"}
    environment.pop("HONE_USE_EXTERNAL_MODULES", None)
    command = [sys.executable, "-m", "hone", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.slow
def test_a_run_trains_with_the_estimator_and_the_loss_of_the_package(installed, tmp_path):
    chosen = ["algorithm.advantage={name: quantile, level: 0.25}", "algorithm.loss.name=damped"]
    overrides = [*chosen, "algorithm.loss.damping=0.1", "run.steps=2", "evaluation.every_steps=0"]
    done = hone("train", recipe(tmp_path), *overrides, path=installed)
    assert done.returncode == 0, done.stderr
    steps = metrics(tmp_path / "run")
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert steps[1]["train/grad_norm"] > 0
    saved = (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")
    assert "name: quantile" in saved
    assert "damping: 0.1" in saved


@pytest.mark.slow
def test_its_settings_are_checked_like_those_of_hone(installed, tmp_path):
    done = hone("train", recipe(tmp_path), "algorithm.loss={name: damped, dampling: 0.1}", path=installed)
    assert done.returncode == 2
    assert "did you mean 'algorithm.loss.damping'" in done.stderr


def test_its_numbers_are_those_of_its_page(installed):
    """Rewards 0, 0, 1 and 1 in a group: their median is 0.5; the loss of a failure counts half."""
    code = """
import torch
from hone.algorithms import ADVANTAGES, POLICY_LOSSES
from hone.algorithms.losses import LossInputs
from hone.plugins import load_plugins
from hone.types import Batch
assert load_plugins()["quantile"] == ""
ends = torch.arange(5)
batch = Batch(token_ids=ends[:4], position_ids=torch.zeros(4, dtype=torch.long), loss_mask=torch.ones(4).bool(),
              cu_seqlens=ends, group_index=torch.zeros(4, dtype=torch.long), episode_index=ends[:4],
              rewards=torch.tensor([0.0, 0.0, 1.0, 1.0]))
found = ADVANTAGES.get("quantile")(batch, ADVANTAGES.settings("quantile")()).advantages
print(found.tolist())
lp = torch.full((4,), -1.0)
inputs = LossInputs(lp=lp, old=lp, advantages=found, mask=batch.loss_mask, cu_seqlens=ends)
print(POLICY_LOSSES.get("damped")(inputs, POLICY_LOSSES.settings("damped")()).values.tolist())
"""
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[-0.5, -0.5, 0.5, 0.5]", "[0.25, 0.25, -0.5, -0.5]"]


def test_it_is_listed_beside_the_others(installed):
    listed = hone("list", "advantages", path=installed)
    assert listed.returncode == 0, listed.stderr
    lines = [line.split() for line in listed.stdout.splitlines()]
    assert ["quantile", "hone_quantile.mathematics:quantile"] in lines
    assert ["grpo", "hone.algorithms.advantages:grpo"] in lines


@pytest.mark.slow
def test_doctor_reports_a_broken_package_which_is_in_nobodys_way(installed, tmp_path):
    for name, text in BROKEN.items():
        (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / name).write_text(text, encoding="utf-8")
    install(tmp_path / "source", tmp_path / "site")
    examined = hone("doctor", path=os.pathsep.join([str(installed), str(tmp_path / "site")]))
    assert examined.returncode == 0
    lines = [" ".join(line.split()) for line in examined.stdout.splitlines()]
    why = "ImportError: cannot import name 'POLICY_LOSS' from 'hone.algorithms'"
    assert "quantile yes loaded" in lines
    assert any(line.startswith(f"snapped no {why}") for line in lines)
    assert any(line.startswith("losses ") and "damped" in line for line in lines)
    assert f"warning: plug-in snapped failed to load: {why}" in examined.stderr


def test_the_page_shows_the_package_as_it_is():
    shown = re.findall(r"```(?:python|toml)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    files = ["one_file.py", "hone_quantile/__init__.py", "hone_quantile/mathematics.py", "pyproject.toml"]
    assert shown == [(SOURCE / file).read_text(encoding="utf-8") for file in files]


def test_its_own_lines_are_about_thirty():
    """Of settings, mathematics and registration; docstrings, imports and blank lines are left out."""
    text = "".join(file.read_text(encoding="utf-8") for file in sorted(SOURCE.rglob("hone_quantile/*.py")))
    lines = [line.strip() for line in text.splitlines()]
    own = [line for line in lines if line and not line.startswith(('"""', "import ", "from "))]
    assert len(own) <= 30
