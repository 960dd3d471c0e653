"""Runs that train an adapter beside layers in 4 bits, from the run file to the export."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hone.config import ConfigError, load
from hone.engines.settings import EngineConfig, LoraConfig
from hone.models.settings import FourBitConfig, ModelConfig
from hone.trainers.exports.checkpoint import export_checkpoint
from hone.trainers.policy.settings import PolicyRunConfig
from hone.workers.train import TrainSpec, TrainWorker
from tests.trainers.test_supervised import sft_recipe
from tests.trainers.tiny import PPO, fine_tune, metrics, recipe, reinforce

pytest.importorskip("bitsandbytes", reason="comes with hone-rl[qlora]")

KL = {"algorithm": {"kl": {"kind": "k3", "where": "in_loss", "coef": 0.1}}}


def qlora(section, *more):
    return [f"{section}.lora.{one}" for one in ("rank=4", "alpha=8", "quantise.kind=nf4", *more)]


def of_run(run, key):
    return [line[key] for line in metrics(run) if key in line]


def state(folder):
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def without_evaluation(run):
    return [{k: v for k, v in line.items() if not k.startswith("eval/")} for line in metrics(run)]


@pytest.mark.slow
def test_fine_tuning_learns_exports_and_resumes(tmp_path):
    run = fine_tune(sft_recipe(tmp_path / "whole"), *qlora("actor"))
    losses = of_run(run, "eval/held_out/loss")
    assert losses[-1] < losses[0] - 0.05
    halves = sft_recipe(tmp_path / "halves")
    fine_tune(halves, *qlora("actor"), "run.steps=4")
    half = fine_tune(halves, *qlora("actor"))
    assert same(state(run / "export"), state(half / "export"))
    export_checkpoint(run, tmp_path / "merged", merge=True)
    assert same(state(tmp_path / "merged"), state(run / "export"))
    export_checkpoint(run, tmp_path / "adapter")
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert same(tensors, load_file(run / "adapter" / "adapter_model.safetensors"))
    more = sft_recipe(tmp_path / "more", model={"path": str(run / "model")})
    second = fine_tune(more, f"actor.lora.path={tmp_path / 'adapter'}", "actor.lora.quantise.kind=nf4", "run.steps=2")
    assert of_run(second, "eval/held_out/loss")[0] == pytest.approx(losses[-1], rel=1e-5)


@pytest.mark.parametrize("sync", ["adapter", pytest.param("merged", marks=pytest.mark.slow)])
def test_a_policy_samples_from_what_it_is_trained_on(tmp_path, sync):
    """What is sent has the rounding of the 4 bits in it, so that no step has a gap between rollout and trainer."""
    path = recipe(tmp_path, KL, {"weights": {"verify": "probe"}})
    run = reinforce(path, *qlora("actor", f"sync={sync}"), "run.steps=4")
    steps = metrics(run)[1:]
    assert len(steps) == 4
    for step in steps:
        assert step["correction/probe_max_abs_difference"] < 1e-5
        assert step["correction/mean_abs_difference"] < 1e-6
    divergence = of_run(run, "train/kl_loss")
    assert abs(divergence[0]) < 1e-6, "measured against the same bits"
    assert divergence[-1] > 1e-7


@pytest.mark.slow
def test_the_original_weights_would_have_been_another_policy(tmp_path):
    """The gap that sending the unrounded base would leave: many times what the test above allows."""
    run = reinforce(recipe(tmp_path, {}), *qlora("actor"), "run.steps=1")
    model = ModelConfig(path=str(run / "model"))
    weights = []
    for quantise in (None, FourBitConfig()):
        engine = EngineConfig(compute_dtype="float32", lora=LoraConfig(rank=4, quantise=quantise))
        worker = TrainWorker(TrainSpec(model, engine, total_steps=1))
        worker.initialize()
        weights.append(dict(worker.base_weights(torch.float32)))
    gap = max(float((one - weights[1][name]).abs().max()) for name, one in weights[0].items())
    assert gap > 1e-3


@pytest.mark.slow
def test_policy_and_critic_in_four_bits_resume(tmp_path):
    adapters = [*qlora("actor", "modules_to_save=[lm_head]"), *qlora("critic.engine", "modules_to_save=[norm]")]
    whole = reinforce(recipe(tmp_path / "whole", PPO), *adapters, "run.steps=4")
    halves = recipe(tmp_path / "halves", PPO)
    reinforce(halves, *adapters, "run.steps=2")
    half = reinforce(halves, *adapters, "run.steps=4")
    assert without_evaluation(whole) == without_evaluation(half)
    assert same(state(whole / "export"), state(half / "export"))
    config = json.loads((whole / "adapter/adapter_config.json").read_text())
    assert config["modules_to_save"] == ["embed_tokens", "lm_head"]


def test_settings_of_other_words_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"lora\.quantise\.kind.*int8"):
        load(PolicyRunConfig, recipe(tmp_path, {}), ["actor.lora.quantise.kind=int8"])
