"""Runs that train an adapter: every kind, its reference without a second model, resumed, exported, gone on with."""

import json

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hone.config import ConfigError
from hone.engines import forward
from hone.engines.fsdp2 import engine as fsdp2
from hone.trainers.exports.checkpoint import export_checkpoint
from tests.trainers.preference_task import prefer, train_reward_model, written
from tests.trainers.test_supervised import sft_recipe
from tests.trainers.tiny import BASE, PPO, fine_tune, metrics, recipe, reinforce

KL = {"algorithm": {"kl": {"kind": "k3", "where": "in_loss", "coef": 0.1}}}
FULL_KL = {"algorithm": {"kl": {"kind": "full", "where": "in_loss", "coef": 0.1}}}


def lora(section, *more):
    return [f"{section}.lora.{one}" for one in ("rank=4", "alpha=8", *more)]


@pytest.fixture
def loaded(monkeypatch):
    """Which language models the engines load, by path."""
    paths = []

    def counted(load_model):
        def load_and_count(model, *how, **named):
            paths.append(model.path)
            return load_model(model, *how, **named)

        return load_and_count

    monkeypatch.setattr(fsdp2, "load_language_model", counted(fsdp2.load_language_model))
    monkeypatch.setattr(forward, "load_head", counted(forward.load_head))
    return paths


def of_run(run, key):
    return [line[key] for line in metrics(run) if key in line]


def state(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def adapter(folder):
    return load_file(folder / "adapter_model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.slow
def test_fine_tuning_learns_exports_and_resumes(tmp_path):
    run = fine_tune(sft_recipe(tmp_path / "whole"), *lora("actor", "dropout=0.1"))
    losses = of_run(run, "eval/held_out/loss")
    assert losses[-1] < losses[0] - 0.05
    halves = sft_recipe(tmp_path / "halves")
    fine_tune(halves, *lora("actor", "dropout=0.1"), "run.steps=4")
    half = fine_tune(halves, *lora("actor", "dropout=0.1"))
    assert same(adapter(run / "adapter"), adapter(half / "adapter"))
    assert same(state(run / "export"), state(half / "export"))
    stored = load_file(next((run / "checkpoints/step_00000008/actor").glob("model-*")))
    assert all(".lora_" in name for name in stored)

    export_checkpoint(run, tmp_path / "adapter")
    assert same(adapter(tmp_path / "adapter"), adapter(run / "adapter"))
    export_checkpoint(run, tmp_path / "merged", merge=True)
    assert same(state(tmp_path / "merged"), state(run / "export"))
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(run / "model"), tmp_path / "adapter")
    ids = torch.tensor([[5, 6, 7, 3]])
    with torch.no_grad():
        by_peft = model(ids).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
    torch.testing.assert_close(by_peft, merged, rtol=0, atol=1e-5)

    # a run that goes on from the adapter begins where it ended
    more = sft_recipe(tmp_path / "more", model={"path": str(run / "model")})
    second = fine_tune(more, f"actor.lora.path={tmp_path / 'adapter'}", "run.steps=2")
    assert of_run(second, "eval/held_out/loss")[0] == pytest.approx(losses[-1], rel=1e-5)


@pytest.mark.slow
def test_there_is_nothing_to_merge_where_all_weights_were_trained(tmp_path):
    whole = fine_tune(sft_recipe(tmp_path / "full"), "run.steps=1")
    with pytest.raises(ConfigError, match=r"--merge: the run in .* trained all weights"):
        export_checkpoint(whole, tmp_path / "no", merge=True)


@pytest.mark.slow
@pytest.mark.parametrize(("loss", "asked"), [("dpo", "precomputed"), ("dpo", "live"), ("kto", "live")])
def test_preferences_are_measured_against_the_model_without_its_adapter(tmp_path, loss, asked, loaded):
    asked = f"reference.logprobs={asked}"
    one = prefer(written(tmp_path / "one", "prefer", loss), *lora("actor"), asked)
    assert loaded == [str(one / "model")]
    named = f"reference.model.path={one / 'model'}"
    other = prefer(written(tmp_path / "other", "prefer", loss), *lora("actor"), asked, named)
    assert loaded[1:] == [str(other / "model"), str(one / "model")]
    assert len(metrics(one)) == len(metrics(other)) == 9
    for mine, theirs in zip(metrics(one), metrics(other), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-6, abs=1e-6)
    assert of_run(one, "train/preference_loss")[0] != of_run(one, "train/preference_loss")[-1]


def test_a_reward_model_trains_adapter_and_head(tmp_path):
    run = train_reward_model(written(tmp_path, "reward_model", "bradley_terry"), *lora("actor"))
    measured = of_run(run, "eval/held_out/loss")
    assert measured[-1] < measured[0]
    stored = load_file(next((run / "checkpoints/step_00000008/actor").glob("model-*")))
    assert {name.rpartition(".lora_")[1] for name in stored if name != "score.weight"} == {".lora_"}
    export_checkpoint(run, tmp_path / "adapter")
    head = load_file(tmp_path / "adapter/value_head.safetensors")["score.weight"]
    assert torch.equal(head, stored["score.weight"])
    assert (tmp_path / "adapter/rendering.json").is_file()
    assert torch.equal(load_file(run / "export/value_head.safetensors")["score.weight"], head)


@pytest.mark.slow
@pytest.mark.parametrize("kl", [KL, FULL_KL], ids=["k3", "full"])
def test_a_policy_is_its_own_reference(tmp_path, kl, loaded):
    """The run with a second model for reference gives the same figures, to rounding."""
    one = reinforce(recipe(tmp_path / "one", kl), *lora("actor"))
    mine = list(loaded)
    named = {"reference": {"model": {"path": str(one / "model")}}}
    other = reinforce(recipe(tmp_path / "other", kl, named), *lora("actor"))
    theirs = loaded[len(mine) :]
    assert str(one / "model") in theirs
    assert len(theirs) - theirs.count(str(one / "model")) == len(mine)
    for line, expected in zip(metrics(one), metrics(other), strict=True):
        assert line == pytest.approx(expected, rel=1e-5, abs=1e-6)
    divergence = of_run(one, "train/kl_loss")
    assert abs(divergence[0]) < 1e-6
    assert divergence[-1] > 1e-6


@pytest.mark.slow
def test_a_policy_that_begins_with_an_adapter_is_measured_against_that(tmp_path):
    run = fine_tune(sft_recipe(tmp_path / "first", model=BASE["model"]), *lora("actor"))
    path = recipe(tmp_path / "second", KL, {"model": {"path": str(run / "model")}})
    second = reinforce(path, f"actor.lora.path={run / 'adapter'}", "run.steps=2")
    assert abs(of_run(second, "train/kl_loss")[0]) < 1e-6  # without the adapter, it would be another policy


@pytest.mark.slow
def test_policy_and_critic_train_adapters_and_resume(tmp_path):
    adapters = [*lora("actor"), *lora("critic.engine", "dora=true")]
    whole = reinforce(recipe(tmp_path / "whole", PPO), *adapters, "run.steps=4")
    halves = recipe(tmp_path / "halves", PPO)
    reinforce(halves, *adapters, "run.steps=2")
    half = reinforce(halves, *adapters, "run.steps=4")
    first, second = (
        [{k: v for k, v in line.items() if not k.startswith("eval/")} for line in metrics(run)] for run in (whole, half)
    )
    assert first == second
    assert same(state(whole / "export"), state(half / "export"))
    config = json.loads((whole / "adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8.0, str(whole / "model"))
