"""GRPO of a mixture of experts from a run file: routes recorded, replayed, measured; and what cannot be is refused."""

import pytest
import torch

from hone.cli.main import main
from hone.config import ConfigError, load
from hone.models.loading import load_language_model
from hone.models.settings import BuildConfig, ModelConfig
from hone.models.tokenizer import load_tokenizer
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.launch import run_policy
from tests.trainers.tiny import BASE, PPO, metrics, recipe

OPTIONS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "initializer_range": 0.3}
SIZES = {"hidden_size": 32, "layers": 2, "heads": 2, "mlp_size": 64, "max_positions": 32, "characters": "abcd"}
MODEL = {"build": {**SIZES, "architecture": "qwen3_moe", "options": OPTIONS}}
ROLLOUT = {"sampling": {"max_response_tokens": 3}, "builtin": {"dtype": "bfloat16"}}
SHORT = {"run": {"steps": 2}, "evaluation": {}, "checkpoint": {"every_steps": 2}}


def mixture(moe, **more):
    return {"model": MODEL, "rollout": ROLLOUT, "actor": {**BASE["actor"], "moe": moe}, **SHORT, **more}


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """A mixture whose routers cannot tell experts 0 to 3 apart in bfloat16."""
    folder = tmp_path_factory.mktemp("model") / "tied"
    source = ModelConfig(build=BuildConfig(**MODEL["build"]))
    model = load_language_model(source)
    noise = torch.Generator().manual_seed(1)
    for layer in model.model.layers:
        weight = layer.mlp.gate.weight.data
        weight.copy_(weight[:1] * (1 + 2e-4 * torch.randn(weight.shape, generator=noise)))
    model.save_pretrained(folder)
    load_tokenizer(source).save_pretrained(folder)
    return {"model": {"path": str(folder)}}


@pytest.mark.slow
def test_routes_of_the_rollout_are_replayed_in_both_forwards(tied, tmp_path):
    """Two mini-batches, so there is a forward for old log-probs; the first trains a policy that has not changed."""
    found = {}
    for replay in ("rollout", "none"):
        moe = {"routing_replay": replay, "router_aux_loss_coef": 0.01, "router_z_loss_coef": 0.001}
        update = {"prompts_per_step": 4, "samples_per_prompt": 4, "minibatches": 2}
        changes = mixture(moe, **tied, update=update, run={"steps": 1})
        assert main(["train", str(recipe(tmp_path / replay, changes))]) == 0
        found[replay] = metrics(tmp_path / replay / "run")[-1]
    replayed, own = found["rollout"], found["none"]
    assert replayed["train/routes_replaced"] > 0.1
    assert "train/routes_replaced" not in own
    assert own["correction/mean_abs_difference"] > 2 * replayed["correction/mean_abs_difference"]
    for step in (replayed, own):
        assert step["train/router_aux_loss"] > 0.9
        assert step["train/expert_load_max_over_mean"] >= 1.0


@pytest.mark.slow
def test_routes_of_the_old_log_probs_are_replayed_in_a_server_and_with_ppo(tmp_path):
    """The second pass over the same batch replays what the forward for old log-probs chose, whatever it has learned."""
    actor = {"compute_dtype": "float32", "optimizer": {"lr": 1e-1}, "moe": {"routing_replay": "old_logprobs"}}
    rollout = {**ROLLOUT, "builtin": {"process": "separate", "dtype": "float32"}}
    ppo = {**PPO, "update": {"prompts_per_step": 4, "samples_per_prompt": 4, "epochs": 3}}
    assert main(["train", str(recipe(tmp_path, ppo, mixture({}), {"actor": actor, "rollout": rollout}))]) == 0
    steps = metrics(tmp_path / "run")[1:]
    assert steps[0]["train/routes_replaced"] > 0
    assert steps[0]["critic/expert_load_max_over_mean"] >= 1.0  # the critic is a mixture too, and chooses itself
    assert "critic/routes_replaced" not in steps[0]


@pytest.mark.slow
def test_a_server_of_the_built_in_engine_returns_routes(tmp_path):
    rollout = {**ROLLOUT, "builtin": {"process": "separate", "dtype": "float32"}}
    changes = mixture({"routing_replay": "rollout"}, rollout=rollout, run={"steps": 1})
    assert main(["train", str(recipe(tmp_path, changes))]) == 0
    assert metrics(tmp_path / "run")[-1]["train/routes_replaced"] == 0  # as the trainer chooses, in float32


REPLAY = {"routing_replay": "rollout"}
CRITIC = {"engine": {**PPO["critic"]["engine"], "moe": REPLAY}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (mixture(REPLAY, model=BASE["model"]), r"actor\.moe\.routing_replay: rollout, but .* \(qwen3\) has no experts"),
        (
            mixture({"routing_replay": "old_logprobs"}),
            r"actor\.moe\.routing_replay: old_logprobs replays .*minibatches x update\.epochs = 1.*set none, or",
        ),
        ({**PPO, **mixture({}), "critic": CRITIC}, r"critic: moe\.routing_replay = rollout is for the policy"),
    ],
)
def test_what_cannot_be_replayed_is_refused_at_the_start(changes, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        run_policy(load(PolicyRunConfig, recipe(tmp_path, changes)))
