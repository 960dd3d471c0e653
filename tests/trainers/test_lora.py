"""Runs that train a LoRA adapter: resumed, exported, evaluated; the adapter alone travels and is saved."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file

from hone.config import ConfigError, load
from hone.models.settings import ModelConfig
from hone.trainers.exports.checkpoint import export_checkpoint
from hone.trainers.policy.evaluate_model import evaluate_model
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.launch import run_policy
from tests.trainers.tiny import BASE, metrics, recipe

LORA = {"actor": {**BASE["actor"], "optimizer": {"lr": 3e-2}, "lora": {"rank": 2, "alpha": 8, "dropout": 0.1}}}
WARM = {
    "steps": 3,
    "samples_per_step": 8,
    "actor": {"compute_dtype": "float32", "optimizer": {"lr": 1e-2}},
}


def train(path, *overrides):
    run_policy(load(PolicyRunConfig, path, list(overrides)))


def without_evaluation(run):
    return [{name: value for name, value in step.items() if not name.startswith("eval/")} for step in metrics(run)]


@pytest.mark.slow
def test_two_halves_equal_the_whole_and_a_checkpoint_holds_the_adapter_alone(tmp_path):
    whole, halves = recipe(tmp_path / "whole", LORA), recipe(tmp_path / "halves", LORA)
    train(whole)
    train(halves, "run.steps=4", "actor.schedule.name=constant")
    train(halves)
    first, second = (without_evaluation(tmp_path / name / "run") for name in ("whole", "halves"))
    assert first == second
    ends = [load_file(tmp_path / name / "run" / "export" / "model.safetensors") for name in ("whole", "halves")]
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    everything = sum(tensor.numel() for tensor in ends[0].values())
    files = (tmp_path / "whole" / "run" / "checkpoints").glob("step_00000006/actor/model*.safetensors")
    saved = sum(tensor.numel() for file in files for tensor in load_file(file).values())
    assert 0 < saved < everything / 4
    assert all(0 < step["weights/bytes"] < everything for step in first[1:]), "a quarter of all weights, or less"


@pytest.fixture
def trained(tmp_path):
    """A run that was warm-started in full and then trained an adapter: (its settings, its folder)."""
    path = recipe(tmp_path / "run", LORA)
    rows = yaml.safe_load(path.read_text())["data"]["train"]["source"]
    warm = {**WARM, "data": {"train": {"source": rows, "answer_template": "{{ ground_truth }}"}}}
    overrides = [f"warm_start={json.dumps(warm)}", "run.steps=3"]
    train(path, *overrides)
    return load(PolicyRunConfig, path, overrides).config, tmp_path / "run" / "run"


@pytest.mark.slow
def test_merged_export_adapter_and_the_runs_own_export_answer_alike(trained, tmp_path):
    config, run = trained
    export_checkpoint(run, tmp_path / "merged", merge=True)
    export_checkpoint(run, tmp_path / "adapter")
    merged, own = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", run / "export"))
    assert merged.keys() == own.keys()
    assert all(torch.equal(merged[name], own[name]) for name in own)
    of_merged = evaluate_model(config, ModelConfig(path=str(tmp_path / "merged")))
    of_base = evaluate_model(
        config, ModelConfig(path=str(run / "warm_start" / "export")), {"tuned": str(tmp_path / "adapter")}
    )
    last = metrics(run)[-1]
    for figure, value in of_merged.items():
        assert of_base[figure.replace("eval/", "eval/tuned/", 1)] == pytest.approx(value, abs=1e-6)
        assert last[figure] == pytest.approx(value, abs=1e-6), "what the run itself has measured at its end"


@pytest.mark.slow
def test_adapters_beside_a_policy_whose_weights_change_are_refused(tmp_path, trained):
    _, run = trained
    export_checkpoint(run, tmp_path / "adapter")
    program = tmp_path / "agent.py"
    program.write_text("async def ask(base_url, api_key, prompt):\n    pass\n")
    env = {"name": "agent", "program": f"{program}:ask", "adapters": {"judge": str(tmp_path / "adapter")}}
    changes = {"episode": {"env": env}, "run": {**BASE["run"], "steps": 1}}
    with pytest.raises(ConfigError, match="adapters judge need base weights that do not change"):
        train(recipe(tmp_path / "other", changes))
    env["adapters"] = {"policy": str(tmp_path / "adapter")}
    named = recipe(tmp_path / "named", LORA, changes)
    with pytest.raises(ConfigError, match="'policy', which is the name of the policy's own"):
        train(named)
