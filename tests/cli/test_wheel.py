"""A wheel of hone, installed away from the repository, has a working quickstart."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHORT = ["warm_start=null", "evaluation.sets=null", "evaluation.score=", "evaluation.every_steps=0", "run.steps=1"]
SHORT += ["update.prompts_per_step=2", "data.train.source.size=50", "actor.schedule.warmup_fraction=0"]


def run(*command, cwd):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.ci
@pytest.mark.slow
def test_the_quickstart_of_an_installed_wheel_trains_outside_the_repository(tmp_path):
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    source = tmp_path / "source"
    for name in ("hone", "recipes/quickstart", "recipes/smollm2"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source / name)
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source), cwd=tmp_path)
    (wheel,) = tmp_path.glob("hone_rl-*.whl")

    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv/bin/python"
    run(*pip, "--python", str(python), "install", "--no-deps", "--no-index", str(wheel), cwd=tmp_path)
    (site,) = (tmp_path / "venv/lib").glob("*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))  # the packages of this environment

    outside = tmp_path / "elsewhere"
    outside.mkdir()
    said = run(str(tmp_path / "venv/bin/hone"), "quickstart", "--tiny", *SHORT, cwd=outside)
    assert (outside / "runs/quickstart/export/config.json").is_file()
    assert "report: runs/quickstart/report.html" in said
    text = (outside / "runs/quickstart/config.yaml").read_text()
    assert f"function: {site}/hone/recipes/quickstart/task.py:rows" in text
    assert (site / "hone/recipes/smollm2/grpo.yaml").is_file()
