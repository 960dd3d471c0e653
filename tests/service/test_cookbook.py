"""The recipes of tinker-cookbook, unmodified, against `hone serve`: settings on the command line only, no network."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.service.conftest import PROGRAM, Server
from tests.service.test_tinker_client import PYTHON

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes/tinker"
MODEL = "Qwen/Qwen3-8B-Base"  # a name in the cookbook's table; here a model of 0.1 M parameters
TIMEOUT_S = 600
RL, CHAT = "dataset_builder", "dataset_builder.common_config"
GSM8K = f"{RL}=tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder"
TALKS = f"{RL}=tinker_cookbook.recipes.chat_sl.chat_datasets:NoRobotsBuilder"
SETTINGS = {
    "sl_basic": f"{TALKS} {CHAT}.model_name_for_tokenizer={MODEL} {CHAT}.renderer_name=role_colon {CHAT}.batch_size=8 "
    f"{CHAT}.max_length=512 max_steps=8 eval_every=7",
    "rl_basic": f"{GSM8K} {RL}.model_name_for_tokenizer={MODEL} {RL}.renderer_name=role_colon {RL}.batch_size=4 "
    f"{RL}.group_size=4 max_tokens=24 max_steps=3",
    "rl_loop": "loss_fn=importance_sampling batch_size=4 group_size=8 max_tokens=24 max_steps=3",
    "preference.dpo.train": "batch_size=8 max_length=512 max_steps=3",
    "distillation.on_policy_distillation": f"teacher_model={MODEL} group_size=4 groups_per_batch=4 lora_rank=8 "
    "max_tokens=24 max_steps=2 eval_every=0",
}

pytestmark = [pytest.mark.tinker, pytest.mark.skipif(not PYTHON.exists(), reason="make .venv-tinker installs it")]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    """A folder with the base model and the data sets, by the names that the cookbook asks for."""
    folder = tmp_path_factory.mktemp("cookbook")
    base = [sys.executable, "-c", PROGRAM, "sft", str(RECIPES / "sums.yaml"), f"run.dir={folder / 'base'}"]
    subprocess.run(base, check=True, cwd=folder, timeout=TIMEOUT_S, capture_output=True)
    data = [sys.executable, RECIPES / "sums.py", folder / "shelf", folder / "base/export"]
    subprocess.run(data, check=True, timeout=60)
    return folder / "shelf"


@pytest.fixture(scope="module")
def serving(tmp_path_factory, shelf):
    made = Server(tmp_path_factory.mktemp("service"), model={"path": str(shelf / MODEL)}, names=[MODEL])
    yield made
    made.close()


def start(recipe, shelf, serving, logs, *more):
    """A recipe's process, which writes into `logs`."""
    there = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    settings = {"TINKER_BASE_URL": serving.url, "TINKER_API_KEY": serving.key, "HF_HUB_OFFLINE": "1"}
    environment = {**there, **settings, "HF_HOME": str(logs / "hub"), "OMP_NUM_THREADS": "1"}
    command = [PYTHON, "-m", f"tinker_cookbook.recipes.{recipe}", f"model_name={MODEL}", f"log_path={logs / recipe}"]
    command += ["learning_rate=1e-3", *SETTINGS[recipe].split(), *more]
    with (logs / f"{recipe}.log").open("w") as log:
        return subprocess.Popen(command, cwd=shelf, env=environment, stdout=log, stderr=log)


def steps(recipe, process, logs):
    """The metrics of each step of a recipe that has ended."""
    assert process.wait(TIMEOUT_S) == 0, (logs / f"{recipe}.log").read_text()[-3000:]
    lines = (logs / recipe / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_cookbooks_recipes_run_side_by_side(shelf, serving, tmp_path):
    first = ("sl_basic", "rl_basic", "rl_loop", "preference.dpo.train")
    running = {recipe: start(recipe, shelf, serving, tmp_path) for recipe in first}
    found = {recipe: steps(recipe, process, tmp_path) for recipe, process in running.items()}

    losses = [line["train_mean_nll"] for line in found["sl_basic"]]
    assert losses[-1] < losses[0]
    tests = [line["test/nll"] for line in found["sl_basic"] if "test/nll" in line]
    assert tests[-1] < tests[0]
    trained = [line for line in found["rl_basic"] if "optim/kl_sample_train_v2" in line]
    assert len(trained) == 3
    assert all(line["optim/kl_sample_train_v2"] < 1e-6 for line in trained)  # samplers have the trainer's weights
    assert any(line["env/all/correct"] > 0 for line in trained)
    assert all(line["grad_norm:mean"] > 0 for line in found["rl_loop"])
    assert all(0 < line["reward/total"] < 1 for line in found["rl_loop"])
    preferred = [line for line in found["preference.dpo.train"] if "dpo_loss" in line]
    assert preferred[0]["dpo_loss"] == pytest.approx(math.log(2), abs=1e-5)  # policy and reference are one
    assert preferred[-1]["dpo_loss"] < preferred[0]["dpo_loss"]

    saved = [json.loads(line) for line in (tmp_path / "sl_basic/checkpoints.jsonl").read_text().splitlines()]
    recipe, teacher = "distillation.on_policy_distillation", f"teacher_checkpoint={saved[-1]['sampler_path']}"
    distilled = steps(recipe, start(recipe, shelf, serving, tmp_path, teacher), tmp_path)
    # a mean over a few sampled tokens, which may be below 0; a teacher that answered as the base would give 0 to 1e-6
    assert all(abs(line["teacher_kl"]) > 1e-4 for line in distilled if "teacher_kl" in line)
    assert sum("teacher_kl" in line for line in distilled) == 2
