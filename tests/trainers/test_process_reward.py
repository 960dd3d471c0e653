"""The process reward model and KL over the whole vocabulary: whole runs, with figures computed apart from them."""

import json
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from hone.cli.recipe import load_recipe
from hone.config import ConfigError
from hone.engines.settings import EngineConfig
from hone.models.settings import ModelConfig
from hone.tracking.trackers.jsonl import rollout_lines
from hone.trainers.run.launch import run_policy
from hone.workers.train import TrainSpec, TrainWorker
from tests.trainers.tiny import metrics, recipe

EVERY = {
    "evaluation": {},
    "checkpoint": {"every_steps": 1, "keep": 99},
    "tracking": {"trackers": ["jsonl"], "rollouts_per_step": "all"},
}
ENGINE = {"compute_dtype": "float32", "optimizer": {"lr": 1e-2}}
PRIME = {"algorithm": {"preset": "prime", "dynamic_sampling": None}, "process_reward": {"engine": ENGINE}}


def test_an_outcome_with_a_penalty_is_refused_before_the_run_starts(tmp_path):
    penalty = {"algorithm": {**PRIME["algorithm"], "overlong": {"buffer_tokens": 2}}}
    with pytest.raises(ConfigError, match=r"outcome = reward should be between 0 and 1.*process_reward\.outcome=share"):
        run_policy(load_recipe(recipe(tmp_path, PRIME, penalty)))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def train(folder, *changes):
    """The run folder, its metrics from step 0 on, and the trajectories of its training steps."""
    run = run_policy(load_recipe(recipe(folder, EVERY, *changes)))
    lines = list(rollout_lines(run / "rollouts.jsonl.gz"))
    return run, metrics(run), [json.loads(line) for line in lines]


def process_weights(run, step):
    """The weights of the process reward model in a checkpoint, under their Hugging Face names."""
    model = ModelConfig(path=str(run / "model"))
    worker = TrainWorker(TrainSpec(model, EngineConfig(compute_dtype="float32"), total_steps=1))
    worker.initialize()
    worker.engine.load_checkpoint(run / "checkpoints" / f"step_{step:08d}" / "process_reward")
    return {name: tensor.clone() for name, tensor in worker.weights(torch.float32)}


def plain(folder, weights=None):
    """A model in plain transformers, with other weights if some are given."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if weights is not None:
        model.load_state_dict(weights)
    return model


def distributions(model, one):
    ids = one["prompt_token_ids"] + one["token_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return logits[len(one["prompt_token_ids"]) - 1 : -1]


def of_sampled(model, one):
    return distributions(model, one).gather(1, torch.tensor(one["token_ids"])[:, None])[:, 0]


def test_prime_rewards_are_those_of_the_model_that_has_just_learned(tmp_path):
    run, steps, rollouts = train(tmp_path, PRIME, {"run": {"steps": 1}})
    # It starts as the reference: all sums are 0, and the cross-entropy is log 2 whatever the outcomes.
    assert steps[1]["process_reward/cross_entropy"] == pytest.approx(math.log(2), abs=1e-6)
    assert steps[1]["process_reward/loss"] == pytest.approx(math.log(2), abs=1e-6)
    learned, reference = plain(run / "model", process_weights(run, 1)), plain(run / "model")
    rewards = [0.05 * (of_sampled(learned, one) - of_sampled(reference, one)) for one in rollouts]
    assert steps[1]["process_reward/mean"] == pytest.approx(torch.cat(rewards).mean().item(), abs=1e-6)
    assert abs(steps[1]["process_reward/mean"]) > 1e-4
    right = [float((part.sum() > 0) == (one["reward"] > 0.5)) for part, one in zip(rewards, rollouts, strict=True)]
    assert steps[1]["process_reward/accuracy"] == pytest.approx(sum(right) / len(right))
    assert steps[1]["train/loss"] == pytest.approx(prime_loss(rollouts, rewards), abs=1e-5)


def prime_loss(rollouts, rewards):
    """- mean over tokens of the advantages (the ratio is 1): equation 5 of the paper, answer by answer."""
    total, tokens = 0.0, 0
    for draw in {one["draw"] for one in rollouts}:
        group = [(one["reward"], part) for one, part in zip(rollouts, rewards, strict=True) if one["draw"] == draw]
        for number, (outcome, part) in enumerate(group):
            others = [other for index, other in enumerate(group) if index != number]
            baseline = sum(other.mean().item() for _, other in others) / len(others)
            ahead = outcome - sum(other for other, _ in others) / len(others)
            to_go = (part - baseline).flip(0).cumsum(0).flip(0)
            total, tokens = total + (ahead + to_go).sum().item(), tokens + len(part)
    return -total / tokens


@pytest.mark.slow
def test_a_model_that_learns_after_it_judges_gives_nothing_in_its_first_step(tmp_path):
    after = {**PRIME, "process_reward": {"engine": ENGINE, "update": "after"}}
    _, steps, _ = train(tmp_path, after, {"run": {"steps": 2}})
    assert steps[1]["process_reward/mean"] == 0.0
    assert steps[1]["process_reward/cross_entropy"] == pytest.approx(math.log(2), abs=1e-6)
    assert steps[2]["process_reward/mean"] != 0.0


@pytest.mark.slow
def test_it_learns_to_tell_outcomes_apart(tmp_path):
    change = {**PRIME, "process_reward": {"engine": ENGINE, "beta": 1.0}}
    _, steps, _ = train(tmp_path, change, {"run": {"steps": 12}})
    assert steps[12]["process_reward/cross_entropy"] < 0.6 * math.log(2)
    assert steps[12]["process_reward/accuracy"] > 0.8


@pytest.mark.slow
def test_two_halves_equal_the_whole(tmp_path):
    shape = {"run": {"steps": 4}, "update": {"prompts_per_step": 4, "samples_per_prompt": 4, "minibatches": 2}}
    whole, halves = (recipe(tmp_path / name, EVERY, PRIME, shape) for name in ("whole", "halves"))
    run_policy(load_recipe(whole))
    run_policy(load_recipe(halves, ["run.steps=2"]))
    run_policy(load_recipe(halves))
    assert metrics(tmp_path / "whole" / "run") == metrics(tmp_path / "halves" / "run")
    one, other = (process_weights(tmp_path / name / "run", 4) for name in ("whole", "halves"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    facts = json.loads((tmp_path / "whole/run/checkpoints/step_00000004/process_reward/engine.json").read_text())
    assert facts["schedule_step"] == 4 * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": {"preset": "prime", "dynamic_sampling": None}}, "needs process_rewards"),
        ({"process_reward": {"engine": ENGINE}}, "process_reward: algorithm.advantage grpo has no use for it"),
        (
            {**PRIME, "process_reward": {"engine": ENGINE, "outcome": "shares"}},
            "process_reward.outcome 'shares'.*did you mean 'share'",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_the_run(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        train(tmp_path, change)


@pytest.mark.slow
def test_an_outcome_beyond_one_is_named(tmp_path):
    reward = {"components": {"share": {"reward": f"{tmp_path}/task.py:share", "weight": 9.0}}, "workers": 1}
    with pytest.raises(ValueError, match=r"process_reward\.outcome = reward should be between 0 and 1, found"):
        train(tmp_path, PRIME, {"reward": reward})
    component = {**PRIME, "process_reward": {"engine": ENGINE, "outcome": "share"}}
    train(tmp_path / "component", component, {"run": {"steps": 1}, "reward": reward})


# --------------------------------------------------------------------------------------- KL over the whole vocabulary


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The run folder of another model: the same tokens, a narrower body."""
    build = {"hidden_size": 16, "layers": 1, "heads": 2, "mlp_size": 16, "max_positions": 32, "characters": "abcd"}
    change = {"run": {"steps": 1}, "evaluation": {}, "model": {"build": {**build, "seed": 9}}}
    return run_policy(load_recipe(recipe(tmp_path_factory.mktemp("other"), change)))


@pytest.mark.slow
def test_full_kl_in_a_run_is_that_of_plain_transformers(tmp_path, other):
    change = {
        "algorithm": {"kl": {"kind": "full", "coef": 0.5}},
        "reference": {"model": {"path": str(other / "export")}},
    }
    run, steps, rollouts = train(tmp_path, change, {"run": {"steps": 1}})
    policy, reference = plain(run / "model"), plain(other / "export")

    def kl(one):
        ours, theirs = distributions(policy, one), distributions(reference, one)
        return (ours.exp() * (ours - theirs)).sum(-1)

    expected = torch.cat([kl(one) for one in rollouts]).mean().item()
    assert expected > 1e-3
    assert steps[1]["train/kl_loss"] == pytest.approx(expected, rel=1e-4)
    assert steps[1]["train/loss"] == pytest.approx(steps[1]["train/policy_loss"] + 0.5 * expected, abs=1e-6)


def test_full_kl_starts_at_zero_against_the_policy_before_training(tmp_path):
    change = {"algorithm": {"kl": {"kind": "full", "coef": 0.5}}, "run": {"steps": 3}}
    _, steps, _ = train(tmp_path, change)
    assert steps[1]["train/kl_loss"] == pytest.approx(0.0, abs=1e-6)
    assert steps[3]["train/kl_loss"] > 1e-6
