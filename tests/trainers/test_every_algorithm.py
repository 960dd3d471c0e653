"""Every name of the algorithms in a run of its own: what a recipe can ask for, a run provides."""

import itertools
import math

import pytest

from hone.algorithms import ADVANTAGES, POLICY_LOSSES
from hone.config import ConfigError, load
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.launch import run_policy
from tests.trainers.tiny import metrics, recipe

ESTIMATORS = list(ADVANTAGES)
LOSSES = list(POLICY_LOSSES)
MODES = ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "token_sum"]
KINDS = ["k1", "k2", "k3", "abs", "full", "k1+", "k2+", "k3+", "abs+"]
CORRECTIONS = [
    {},
    {"weights": "token", "truncate": 2.0},
    {"weights": "sequence", "band": [0.5, 2.0], "normalize": True},
    {"old": "rollout"},
    {"rejections": [{"statistic": "k1", "level": "sequence_mean", "low": 0.5, "high": 2.0}]},
    {"rejections": [{"statistic": "k2", "level": "token", "high": 1.0}, {"level": "sequence_max", "high": 9.0}]},
    {"rejections": [{"statistic": "k3", "level": "sequence_sum", "high": 1.0}]},
]
SHAPING = [
    {},
    {"overlong": {"buffer_tokens": 2}},
    {"dynamic_sampling": {"max_draws": 2}},
    {"dynamic_sampling": {"skip_zero_variance": {}}},
    {"resample": {"scheme": "power", "power": 2.0}},
    {"resample": {"scheme": "best_and_worst"}},
    {"resample": {"scheme": "mostly_best"}},
]
ENGINE = {"compute_dtype": "float32", "optimizer": {"lr": 1e-3}}
SECTIONS = {
    "gae": {"critic": {"engine": ENGINE}},
    "turn_gae": {"critic": {"engine": ENGINE}},
    "prime": {"process_reward": {"engine": ENGINE, "outcome": "share"}},
}
TURNS = [ESTIMATORS, LOSSES, MODES, KINDS, CORRECTIONS, SHAPING]
RUNS = list(zip(range(max(map(len, TURNS))), *(itertools.cycle(turn) for turn in TURNS), strict=False))


def combined(advantage, loss, mode, kind, correction, shaping):
    weights = {"share": 1.0, "overlong_penalty": 0.5} if "overlong" in shaping else {"share": 1.0}
    return {
        "advantage": {"name": advantage, **({"weights": weights} if advantage == "gdpo" else {})},
        "loss": loss,
        "aggregation": {"mode": mode, **({"norm_tokens": 3} if mode.endswith("norm") else {})},
        "kl": {"kind": kind, "coef": 0.01},
        "correction": correction,
        "entropy_coef": 0.01,
        "positive_nll_coef": 0.1,
        **shaping,
    }


@pytest.mark.slow
@pytest.mark.parametrize(("number", "advantage", "loss", "mode", "kind", "correction", "shaping"), RUNS)
def test_a_run_with(tmp_path, number, advantage, loss, mode, kind, correction, shaping):
    settings = {
        "algorithm": combined(advantage, loss, mode, kind, correction, shaping),
        "update": {"prompts_per_step": 4, "samples_per_prompt": 4, "minibatches": 2},
        "run": {"steps": 2},
        "evaluation": {},
        **SECTIONS.get(advantage, {}),
    }
    run_policy(load(PolicyRunConfig, recipe(tmp_path, settings)))
    for step in metrics(tmp_path / "run")[1:]:
        assert math.isfinite(step["train/loss"])
        assert step["train/grad_norm"] > 0
        assert step["train/policy_loss"] != 0  # what is left without KL, entropy and likelihood terms
        assert step["train/skipped_steps"] == 0
        assert step["reward/failed"] == 0


def test_every_choice_is_in_one_of_these_runs():
    for column, turn in enumerate(TURNS, 1):
        assert all(choice in [run[column] for run in RUNS] for choice in turn)


def test_a_component_that_the_run_does_not_have_is_refused_before_it_starts(tmp_path):
    settings = {"algorithm": {"advantage": {"name": "gdpo", "weights": {"share": 1.0, "style": 1.0}}}}
    with pytest.raises(ConfigError, match=r"needs components\.style, which no part of this run produces"):
        run_policy(load(PolicyRunConfig, recipe(tmp_path, settings)))
