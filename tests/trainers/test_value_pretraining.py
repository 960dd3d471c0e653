"""VAPO's value pretraining: the critic learns plain returns of a fixed policy, from whatever weights it starts with."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel

from hone.config import ConfigError, load
from hone.models.loading import VALUE_HEAD_FILE, load_value_model
from hone.models.settings import BuildConfig, ModelConfig
from hone.models.tokenizer import load_tokenizer
from hone.tracking.trackers.jsonl import rollout_lines
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.launch import run_policy
from tests.trainers.preference_task import prefer, written
from tests.trainers.tiny import BASE, metrics, recipe

CRITIC = {"engine": {"compute_dtype": "float32", "optimizer": {"lr": 1e-3}}}
EVERY_STEP = {
    "evaluation": {},
    "checkpoint": {"every_steps": 1, "keep": 99},
    "tracking": {"trackers": ["jsonl"], "rollouts_per_step": "all"},
}


def train(folder, *changes):
    run = run_policy(load(PolicyRunConfig, recipe(folder, EVERY_STEP, *changes)))
    lines = list(rollout_lines(run / "rollouts.jsonl.gz"))
    return run, metrics(run), [json.loads(line) for line in lines]


def test_a_run_pretrains_its_critic_on_the_answers_of_the_fixed_policy(tmp_path):
    change = {
        "algorithm": {"advantage": {"name": "gae", "lam": 0.0}},
        "critic": {"engine": {"compute_dtype": "float32", "optimizer": {"lr": 1e-12}}, "warmup_steps": 2},
    }
    _, steps, rollouts = train(tmp_path, change, {"run": {"steps": 3}})
    assert ["train/grad_norm" in step for step in steps] == [False, False, False, True]  # the policy learns in step 3

    def token_mean_of_rewards(step):
        played = [one for one in rollouts if one["step"] == step]
        tokens = sum(one["response_length"] for one in played)
        return sum(one["reward"] * one["response_length"] for one in played) / tokens

    # The head starts at 0 and hardly moves: with lambda 0 a return would be the next value, but for the last token.
    for step in (1, 2):
        assert steps[step]["critic/return"] == pytest.approx(token_mean_of_rewards(step), rel=1e-4)
    assert steps[3]["critic/return"] < 0.6 * token_mean_of_rewards(3)


def reward_model(folder, characters="abcd"):
    """What `export_hf` of a value engine writes: body, head and tokenizer."""
    build = BuildConfig(**{**BASE["model"]["build"], "characters": characters, "seed": 9})
    value_model = load_value_model(ModelConfig(build=build))
    torch.nn.init.normal_(value_model.score.weight, std=0.5, generator=torch.Generator().manual_seed(1))
    value_model.save_pretrained(folder)
    load_tokenizer(ModelConfig(build=build)).save_pretrained(folder)
    return {"critic": {**CRITIC, "model": {"path": str(folder)}}, "algorithm": {"preset": "vapo"}, "run": {"steps": 1}}


def test_a_critic_may_start_from_a_reward_model(tmp_path):
    change = reward_model(tmp_path / "reward_model")
    _, steps, rollouts = train(tmp_path, change)
    body = AutoModel.from_pretrained(tmp_path / "reward_model", dtype=torch.float32)
    head = load_file(tmp_path / "reward_model" / VALUE_HEAD_FILE)["score.weight"][0]
    values = []
    for one in rollouts:
        ids = one["prompt_token_ids"] + one["token_ids"]
        with torch.no_grad():
            states = body(torch.tensor([ids])).last_hidden_state[0]
        values += (states[len(one["prompt_token_ids"]) - 1 : -1] @ head).tolist()
    assert abs(sum(values)) > 1.0
    assert steps[1]["critic/value"] == pytest.approx(sum(values) / len(values), rel=1e-4)


@pytest.mark.parametrize("key", ["critic.model", "reference.model", "process_reward.model", "prefer"])
def test_a_model_whose_tokens_are_not_the_policys_is_refused(tmp_path, key):
    change = reward_model(tmp_path / "other", characters="dcba")
    model = change["critic"]["model"]
    prime = {"preset": "prime", "dynamic_sampling": None}
    changes = {
        "critic.model": change,
        "reference.model": {"reference": {"model": model}, "algorithm": {"kl": {"coef": 0.1}}},
        "process_reward.model": {"process_reward": {"model": model}, "algorithm": prime},
        "prefer": {"reference": {"model": model}},
    }

    def start(change):
        if key == "prefer":
            prefer(written(tmp_path, "prefer", "dpo", **change))
        else:
            train(tmp_path, change)

    with pytest.raises(
        ConfigError, match=rf"^{'reference.model' if key == 'prefer' else key}: its tokens are not the policy's"
    ):
        start(changes[key])
