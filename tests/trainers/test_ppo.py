"""Critic, KL penalties, mini-batches, dynamic sampling, overlong penalty: whole runs, with figures computed by hand."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from hone.config import load
from hone.data.rendering import Renderer
from hone.data.stream import PromptStream
from hone.tracking.trackers.jsonl import rollout_lines
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.launch import run_policy
from hone.trainers.run.recorder import NotFinite
from tests.trainers.tiny import metrics, recipe

EVERY_STEP = {
    "evaluation": {},
    "checkpoint": {"every_steps": 1, "keep": 99},
    "tracking": {"trackers": ["jsonl"], "rollouts_per_step": "all"},
}
CRITIC = {"engine": {"compute_dtype": "float32", "optimizer": {"lr": 1e-3}}}
GAE = {"algorithm": {"advantage": "gae"}, "critic": CRITIC}
GROUPS, SAMPLES = 4, 4  # of one step, as tiny.BASE has them


def train(folder, *changes):
    """The run folder, its metrics from step 0 on, and the trajectories of its training steps."""
    config = load(PolicyRunConfig, recipe(folder, EVERY_STEP, *changes))
    run = run_policy(config)
    lines = list(rollout_lines(run / "rollouts.jsonl.gz"))
    return run, metrics(run), [json.loads(line) for line in lines]


def update(**settings):
    return {"update": {"prompts_per_step": GROUPS, "samples_per_prompt": SAMPLES, **settings}}


def state(run, step):
    path = run / "checkpoints" / f"step_{step:08d}" / "state.json"
    return json.loads(path.read_text(encoding="utf-8"))["state"]


def optimizer_steps(run, step, role="actor"):
    path = run / "checkpoints" / f"step_{step:08d}" / role / "engine.json"
    return json.loads(path.read_text(encoding="utf-8"))["schedule_step"]


def weights(run, step, role="actor"):
    return load_file(run / "checkpoints" / f"step_{step:08d}" / role / "model-00000-of-00001.safetensors")


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def of_step(rollouts, step):
    found = [one for one in rollouts if one["step"] == step]
    assert found
    return found


def token_mean(rollouts, value):
    """The mean over sampled tokens of what `value` says of their trajectory."""
    tokens = sum(one["response_length"] for one in rollouts)
    return sum(value(one) * one["response_length"] for one in rollouts) / tokens


# ----------------------------------------------------------------------------------------------------------- critic


@pytest.fixture(scope="module")
def one_step(tmp_path_factory):
    return train(tmp_path_factory.mktemp("critic"), GAE, update(), {"run": {"steps": 1}})


def test_the_first_step_of_a_critic_by_hand(one_step):
    _, steps, rollouts = one_step
    played = of_step(rollouts, 1)
    # The value head starts at zero and gamma = lambda = 1: every return is the trajectory's reward.
    assert steps[1]["critic/value"] == 0.0
    assert steps[1]["critic/return"] == pytest.approx(token_mean(played, lambda one: one["reward"]), rel=1e-5)
    squares = token_mean(played, lambda one: one["reward"] ** 2)
    assert steps[1]["critic/value_loss"] == pytest.approx(0.5 * squares, rel=1e-5)
    assert steps[1]["critic/loss"] == pytest.approx(0.5 * squares, rel=1e-5)
    assert steps[1]["critic/explained_variance"] == pytest.approx(0.0, abs=1e-6)
    # Whitened advantages have mean 0, and the ratio is 1: so has the policy's loss.
    assert steps[1]["train/ratio"] == 1.0
    assert steps[1]["train/loss"] == pytest.approx(0.0, abs=1e-6)
    assert steps[1]["reward/mean"] == pytest.approx(sum(one["reward"] for one in played) / len(played))


def test_actor_and_critic_report_learning_rates_of_their_own(one_step):
    _, steps, _ = one_step
    assert steps[1]["train/lr"] == pytest.approx(3e-3)
    assert steps[1]["critic/lr"] == pytest.approx(1e-3)
    assert steps[1]["critic/grad_norm"] != steps[1]["train/grad_norm"]
    assert steps[1]["train/skipped_steps"] == steps[1]["critic/skipped_steps"] == 0.0


def test_a_run_ends_after_so_many_steps_without_a_finite_gradient(tmp_path):
    """The first step of the critic takes its weights so far that every later value, and so every advantage, is NaN."""
    broken = {"critic": {"engine": {"compute_dtype": "float32", "optimizer": {"lr": 1e38}}}}
    with pytest.raises(NotFinite, match=r"2 optimizer steps in a row .*run\.stop_when\.skipped_steps = 2"):
        train(tmp_path, GAE, broken, {"run": {"steps": 9, "stop_when": {"skipped_steps": 2}}})


def test_critic_warm_up_leaves_the_actor_alone_and_its_schedule_for_later(tmp_path):
    change = {
        "algorithm": {"advantage": "gae"},
        "critic": {**CRITIC, "warmup_steps": 2},
        "actor": {"compute_dtype": "float32", "optimizer": {"lr": 4e-3}, "schedule": {"name": "linear"}},
        "run": {"steps": 4},
    }
    run, steps, _ = train(tmp_path, change, update(minibatches=2))
    start = weights(run, 0)
    assert same(start, weights(run, 1))
    assert same(start, weights(run, 2))
    assert not same(start, weights(run, 3))
    assert not same(weights(run, 0, "critic"), weights(run, 1, "critic"))
    assert [optimizer_steps(run, step) for step in range(5)] == [0, 0, 0, 2, 4]
    assert [optimizer_steps(run, step, "critic") for step in range(5)] == [0, 2, 4, 6, 8]
    assert ["train/policy_loss" in step for step in steps[1:]] == [False, False, True, True]
    assert [step["weights/version"] for step in steps[1:]] == [1, 2, 3, 4]
    # Four optimizer steps of a linear schedule: 1, 2/3, 1/3, 0 of the peak; a metric is the mean of its step's two.
    assert [step["train/lr"] for step in steps[3:]] == pytest.approx([4e-3 * 5 / 6, 4e-3 / 6])


# --------------------------------------------------------------------------------------------------------------- KL


def in_reward(target=None, **settings):
    adaptive = {"target": target, "horizon": 100} if target is not None else None
    kl = {"kind": "k3", "where": "in_reward", "coef": 0.05, "adaptive": adaptive, **settings}
    return {"algorithm": {"advantage": "gae", "kl": kl}, "critic": CRITIC}


def test_kl_in_the_reward_starts_at_zero_and_its_coefficient_follows_the_rule(tmp_path):
    run, steps, rollouts = train(tmp_path, in_reward(target=1e-9), update(), {"run": {"steps": 4}})
    assert steps[1]["train/reference_kl"] == 0.0  # the policy is its own reference
    assert all(step["train/reference_kl"] > 1e-6 for step in steps[2:])
    # By at most 20 % for every `horizon` sequences, and 16 of them are in a step: down at KL 0, then up.
    slower, faster = 1 - 0.2 * 16 / 100, 1 + 0.2 * 16 / 100
    expected = [0.05 * slower, 0.05 * slower * faster, 0.05 * slower * faster**2, 0.05 * slower * faster**3]
    assert [state(run, step)["algorithm"]["kl_coef"] for step in (1, 2, 3, 4)] == pytest.approx(expected)
    # A penalty of 0 leaves the returns of step 1 as they were.
    first = of_step(rollouts, 1)
    assert steps[1]["critic/return"] == pytest.approx(token_mean(first, lambda one: one["reward"]), rel=1e-5)


def test_kl_in_the_loss_adds_its_coefficient_times_the_estimate(tmp_path):
    change = {"algorithm": {"kl": {"kind": "k2", "coef": 0.5}}, "run": {"steps": 3}}
    _, steps, _ = train(tmp_path, change, update())
    assert steps[1]["train/kl_loss"] == 0.0
    assert all(step["train/kl_loss"] > 1e-7 for step in steps[2:])
    assert [step["train/kl_coef"] for step in steps[1:]] == [0.5] * 3
    for step in steps[1:]:
        assert step["train/loss"] == pytest.approx(step["train/policy_loss"] + 0.5 * step["train/kl_loss"], abs=1e-6)


@pytest.mark.slow
def test_a_reference_of_its_own_is_far_from_the_policy_at_once(tmp_path):
    run, _, _ = train(tmp_path / "other", {"run": {"steps": 3}})
    change = {
        "algorithm": {"kl": {"coef": 0.1}},
        "reference": {"model": {"path": str(run / "export")}},
        "run": {"steps": 1},
    }
    _, steps, _ = train(tmp_path / "this", change)
    assert steps[1]["train/kl_loss"] > 1e-6


# ------------------------------------------------------------------------------------------- mini-batches and epochs


@pytest.mark.slow
@pytest.mark.parametrize(("minibatches", "epochs"), [(1, 1), (2, 2), (4, 3)])
def test_optimizer_steps_are_minibatches_times_epochs(tmp_path, minibatches, epochs):
    schedule = {"compute_dtype": "float32", "optimizer": {"lr": 1e-3}, "schedule": {"warmup_steps": 1000}}
    shape = update(minibatches=minibatches, epochs=epochs)
    run, steps, _ = train(tmp_path, {"actor": schedule, "run": {"steps": 2}}, shape)
    each = minibatches * epochs
    assert [optimizer_steps(run, step) for step in range(3)] == [0, each, 2 * each]
    # In the warm-up, optimizer step s (from 1) has s/1000 of the learning rate; the metric is the mean over a step's.
    assert steps[1]["train/lr"] == pytest.approx(1e-6 * (1 + each) / 2)
    assert steps[2]["train/lr"] == pytest.approx(1e-6 * (each + (1 + each) / 2))
    assert steps[1]["train/skipped_steps"] == 0.0
    ledger = state(run, 2)["ledger"]
    assert ledger == {"next": 8, "open": {}, "trained": 8, "dropped": {}}


@pytest.mark.slow
def test_the_ratio_leaves_one_only_after_the_first_optimizer_step(tmp_path):
    fast = {"actor": {"compute_dtype": "float32", "optimizer": {"lr": 2e-2}}, "run": {"steps": 1}}
    _, once, _ = train(tmp_path / "once", fast, update())
    _, often, _ = train(tmp_path / "often", fast, update(minibatches=2, epochs=3))
    assert once[1]["train/ratio"] == 1.0
    assert once[1]["train/clip_fraction_low"] == once[1]["train/clip_fraction_high"] == 0.0
    assert often[1]["train/ratio"] != 1.0
    assert often[1]["train/clip_fraction_low"] + often[1]["train/clip_fraction_high"] > 0.0


def test_the_rollouts_log_probs_are_the_trainers(tmp_path):
    _, steps, rollouts = train(tmp_path, update(minibatches=2), {"run": {"steps": 3}})
    assert all(step["correction/mean_abs_difference"] < 1e-5 for step in steps[1:])
    gaps = [abs(gap) for one in rollouts for gap in one["logprob_gap"]]
    assert max(gaps) < 1e-4
    assert {tuple(map(tuple, one["weight_versions"])) for one in of_step(rollouts, 3)} <= {((2, n),) for n in (1, 2, 3)}


# -------------------------------------------------------------------------------------------------- dynamic sampling

REWARDS = '''
def same_for_a(response, ground_truth, row):
    """1 for every answer to a prompt that begins with "a"; otherwise every other text has another reward."""
    if ground_truth.endswith("a"):
        return 1.0
    return sum(ord(letter) * 7**place for place, letter in enumerate(response, start=1)) / 1e6
'''


def redraws(folder, config, max_draws):
    """[(prompts drawn, of these dropped)] of each step, from the prompt stream alone."""
    renderer = Renderer(AutoTokenizer.from_pretrained(folder / "run" / "model"))
    stream, counts = PromptStream(config.data, renderer, config.run.seed), []
    for _ in range(config.run.steps):
        kept = drawn = draws = 0
        while kept < GROUPS and draws < max_draws:
            taken = stream.take(GROUPS - kept)
            drawn, draws = drawn + len(taken), draws + 1
            kept += sum(not prompt.ground_truth.endswith("a") for prompt in taken)
        counts.append((drawn, drawn - kept))
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("max_draws", [1, 10])
def test_dynamic_sampling_draws_again_and_the_ledger_says_so(tmp_path, max_draws):
    rewards = tmp_path / "rewards.py"
    rewards.write_text(REWARDS, encoding="utf-8")
    change = {
        "algorithm": {"dynamic_sampling": {"max_draws": max_draws}},
        "reward": {"components": {"x": {"reward": f"{rewards}:same_for_a"}}, "workers": 1},
        "run": {"steps": 4},
    }
    run, steps, rollouts = train(tmp_path, change, update())
    config = load(PolicyRunConfig, tmp_path / "recipe.yaml").config
    expected = redraws(tmp_path, config, max_draws)
    drawn, dropped = (sum(column) for column in zip(*expected, strict=True))
    assert dropped > 0
    assert (drawn == 4 * GROUPS) == (max_draws == 1)
    assert state(run, 4)["ledger"] == {
        "next": drawn,
        "open": {},
        "trained": drawn - dropped,
        "dropped": {"reward is 1 for all 4 trajectories": dropped},
    }
    assert [step["rollout/groups_dropped"] for step in steps[1:]] == [lost for _, lost in expected]
    assert [step["rollout/status/filtered"] for step in steps[1:]] == [lost * SAMPLES for _, lost in expected]
    assert [step["rollout/trajectories"] for step in steps[1:]] == [taken * SAMPLES for taken, _ in expected]
    filtered = [one for one in rollouts if one["status"] == "filtered"]
    assert len(filtered) == dropped * SAMPLES
    assert {one["ground_truth"][-1] for one in filtered} == {"a"}
    assert {one["error"] for one in filtered} == {"reward is 1 for all 4 trajectories"}


# --------------------------------------------------------------------------------------------------------- overlong


def test_the_overlong_penalty_is_in_the_reward_and_beside_it(tmp_path):
    change = {"algorithm": {"overlong": {"buffer_tokens": 2, "factor": 0.5}}, "run": {"steps": 3}}
    _, steps, rollouts = train(tmp_path, change, update())
    by_length = {1: 0.0, 2: -0.25, 3: -0.5}  # from 3 - 2 = 1 token on, half a point over two tokens
    assert {one["response_length"] for one in rollouts} == {1, 2, 3}
    for one in rollouts:
        penalty = by_length[one["response_length"]]
        assert one["components"]["overlong_penalty"] == pytest.approx(penalty)
        assert one["reward"] == pytest.approx(one["components"]["share"] + penalty)
    for number in (1, 2, 3):
        played = of_step(rollouts, number)
        penalties = [by_length[one["response_length"]] for one in played]
        assert steps[number]["reward/overlong_penalty"] == pytest.approx(sum(penalties) / len(penalties))
        assert steps[number]["reward/mean"] == pytest.approx(sum(one["reward"] for one in played) / len(played))


def test_masked_answers_are_scored_by_the_trainer_and_not_trained_on(tmp_path):
    change = {"algorithm": {"advantage": "optimal_token_baseline", "overlong": {"mask": True}}, "run": {"steps": 2}}
    _, steps, rollouts = train(tmp_path, change, update())
    cut = [one for one in rollouts if one["status"] == "truncated"]
    assert cut
    assert all(one["response_length"] == 3 for one in cut)
    assert max(abs(gap) for one in cut for gap in one["logprob_gap"]) < 1e-4
    for number in (1, 2):
        trained = [one["response_length"] for one in of_step(rollouts, number) if one["status"] == "ok"]
        assert steps[number]["rollout/trained_length"] == pytest.approx(sum(trained) / len(trained))
