"""`Algorithm`: what a run needs, what happens to a batch, and what survives a restart."""

import json
import math
from typing import get_args

import pytest
import torch

from hone.algorithms import ADVANTAGES, POLICY_LOSSES
from hone.algorithms.algorithm import Algorithm
from hone.algorithms.filtering.settings import DynamicSamplingSettings, OverlongSettings, ResampleSettings
from hone.algorithms.objective import PolicyObjective, ValueObjective
from hone.algorithms.presets import PRESETS
from hone.algorithms.settings import (
    AdaptiveKlSettings,
    AlgorithmConfig,
    CorrectionSettings,
    GaeSettings,
    GrpoSettings,
    GspoSettings,
    KlCovSettings,
    KlSettings,
    Mode,
    OptimalTokenBaselineSettings,
    ReinforcePpSettings,
    ReinforceSettings,
    RejectionSettings,
    RlooSettings,
    TopEntropySettings,
)
from hone.config import build
from hone.types import ModelOutput, Prompt, Status, StopReason, Trajectory, TrajectoryGroup

ADAPTIVE = AdaptiveKlSettings(target=0.01, horizon=20)
IN_REWARD = KlSettings(where="in_reward", coef=0.1, kind="k1")


def algorithm(steps=1, limit=None, **keys):
    return Algorithm(AlgorithmConfig(**keys), steps, limit)


@pytest.fixture
def batch(batches):
    """Two answers to one prompt, of 2 and 1 tokens, rewarded 1 and 0."""
    return batches.build(
        [[0, 1, 1], [0, 1]],
        rewards=[1.0, 0.0],
        old_logprobs=[0, -1.0, -2.0, 0, -1.5],
        ref_logprobs=[0, -1.5, -2.0, 0, -1.0],
        rollout_logprobs=[0, -1.0, -2.0 - math.log(2), 0, -1.5 + math.log(4)],
    )


# ------------------------------------------------------------------------------------------------ what a run needs


@pytest.mark.parametrize(
    ("steps", "keys", "needed"),
    [
        (1, {}, False),
        (2, {}, True),
        (1, {"kl": KlSettings(coef=0.1)}, False),
        (1, {"kl": IN_REWARD}, True),
        (1, {"loss": KlCovSettings()}, True),
        (1, {"advantage": OptimalTokenBaselineSettings()}, True),
        (1, {"correction": CorrectionSettings(weights="token")}, False),
        (1, {"correction": CorrectionSettings(weights="token", normalize=True)}, True),
        (1, {"correction": CorrectionSettings(rejections=[RejectionSettings(high=2.0)])}, True),
        (8, {"correction": CorrectionSettings(old="rollout")}, False),
    ],
)
def test_old_log_probs_are_computed_only_where_they_are_needed(steps, keys, needed):
    assert algorithm(steps, **keys).needs_old_logprobs is needed


def test_reference_and_critic_are_loaded_only_where_they_are_needed():
    assert not algorithm().needs_reference
    assert algorithm(kl=KlSettings(coef=0.1)).needs_reference
    assert not algorithm().needs_values
    assert algorithm(advantage=GaeSettings()).needs_values
    assert isinstance(algorithm(advantage=GaeSettings()).value_objective(), ValueObjective)
    with pytest.raises(ValueError, match="grpo has no critic"):
        algorithm().value_objective()


def test_required_fields_are_data():
    assert algorithm().required_fields == {"rewards"}
    assert algorithm(2, kl=KlSettings(coef=0.1)).required_fields == {"rewards", "old_logprobs", "ref_logprobs"}
    assert algorithm(advantage=GaeSettings()).required_fields == {"rewards", "values"}
    assert algorithm(correction=CorrectionSettings(old="rollout")).required_fields == {"rewards", "rollout_logprobs"}
    optimal = algorithm(advantage=OptimalTokenBaselineSettings())
    assert optimal.required_fields == {"rewards", "old_logprobs", "sum_pi_squared"}
    assert optimal.infer_needs == {"sum_pi_squared"}


def test_a_missing_field_is_named(batch):
    for keys, name in (
        ({"kl": IN_REWARD}, "ref_logprobs"),
        ({"correction": CorrectionSettings(old="rollout")}, "rollout_logprobs"),
        ({"correction": CorrectionSettings(weights="token")}, "rollout_logprobs"),
    ):
        with pytest.raises(ValueError, match=name):
            algorithm(**keys).advantages(batch.with_(**{name: None}))


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="max_response_tokens"):
        algorithm(overlong=OverlongSettings(buffer_tokens=4))
    with pytest.raises(ValueError, match=r"buffer_tokens \(4\).*3 tokens"):
        algorithm(limit=3, overlong=OverlongSettings(buffer_tokens=4))
    with pytest.raises(ValueError, match="at least 1"):
        algorithm(0)


@pytest.mark.parametrize("preset", list(PRESETS))
def test_presets_can_be_built(preset):
    built = algorithm(4, 8192, preset=preset)
    assert built.name == preset
    assert isinstance(built.policy_objective(), PolicyObjective)


# -------------------------------------------------------------------------------------------------------- batches


def test_advantages_are_filled(batch, close):
    done = algorithm(advantage=RlooSettings()).advantages(batch)
    close(done.token_rewards, [0, 0, 1.0, 0, 0])
    close(done.advantages, [0, 1.0, 1.0, 0, -1.0])
    assert done.returns is None
    assert torch.equal(done.loss_mask, batch.loss_mask)


def test_kl_in_reward_is_subtracted_per_token(batch, close):
    done = algorithm(advantage=RlooSettings(), kl=IN_REWARD).advantages(batch)
    close(done.token_rewards, [0, -0.05, 1.0, 0, 0.05])
    close(done.advantages, [0, 0.9, 0.9, 0, -0.9])


def test_rewards_given_per_token_are_kept(batch, close):
    process = torch.tensor([0, 0.5, 0.25, 0, 1.0]).double()
    done = algorithm(advantage=ReinforcePpSettings(), kl=IN_REWARD).advantages(batch.with_(token_rewards=process))
    close(done.token_rewards, [0, 0.45, 0.25, 0, 1.05])


def test_the_kl_coefficient_adapts_and_survives_a_restart(batch):
    keys = {"kl": KlSettings(where="in_reward", kind="k2", coef=0.1, adaptive=ADAPTIVE)}
    first = algorithm(**keys)
    done = first.advantages(batch)
    assert done.token_rewards[1].item() == pytest.approx(-0.1 * 0.125)  # the coefficient before it moved
    assert first.kl_coef == pytest.approx(0.1 * (1 + 0.2 * 2 / 20))
    second = algorithm(**keys)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.advantages(batch).token_rewards[1].item() == pytest.approx(-0.102 * 0.125)
    assert second.kl_coef == pytest.approx(0.102 * 1.02)


def test_the_kl_that_it_adapts_to_is_the_mean_over_trajectories(batch):
    """(0.125 + 0) / 2 and 0.125, so 0.09375, where the mean over tokens is 0.0833."""
    adaptive = AdaptiveKlSettings(target=0.09375 / 1.1, horizon=20)
    chosen = algorithm(kl=KlSettings(where="in_reward", kind="k2", coef=0.1, adaptive=adaptive))
    chosen.advantages(batch)
    assert chosen.kl_coef == pytest.approx(0.1 * (1 + 0.1 * 2 / 20))


def test_old_log_probs_may_be_those_of_the_rollout(batch):
    done = algorithm(4, correction=CorrectionSettings(old="rollout")).advantages(batch.with_(old_logprobs=None))
    assert torch.equal(done.old_logprobs, batch.rollout_logprobs)


def test_weights_are_computed_once_where_old_log_probs_are_known(batch, close):
    correction = CorrectionSettings(weights="token", normalize=True)
    close(algorithm(correction=correction).advantages(batch).extras["is_weights"], [0, 12 / 13, 24 / 13, 0, 3 / 13])
    plain = algorithm(correction=CorrectionSettings(weights="token"))
    assert "is_weights" not in plain.advantages(batch.with_(old_logprobs=None)).extras


def test_rejected_tokens_leave_the_loss_but_not_the_baseline(batch, close):
    rules = CorrectionSettings(rejections=[RejectionSettings(low=0.5, high=1.5)])
    chosen = algorithm(advantage=RlooSettings(), correction=rules)
    done = chosen.advantages(batch)
    close(done.advantages, [0, 1.0, 1.0, 0, -1.0])
    close(done.loss_mask.double(), [0, 1, 0, 0, 0])  # ratios 1, 2 and 0.25
    close(chosen.weigh(done).loss_weights, [0, 1, 0, 0, 0])
    assert chosen.measure(done)["correction/rejected"].value == pytest.approx(2 / 3)


def test_weigh_uses_the_losss_own_aggregation_unless_told(batch, close):
    close(algorithm().weigh(batch).loss_weights, [0, 1 / 3, 1 / 3, 0, 1 / 3])
    close(algorithm(loss=GspoSettings()).weigh(batch).loss_weights, [0, 0.25, 0.25, 0, 0.5])
    told = algorithm(loss=GspoSettings(), aggregation={"mode": "token_sum"})
    close(told.weigh(batch).loss_weights, [0, 1, 1, 0, 1])


def positive_nll(batches, chosen, masks, rewards, logprobs, **fields):
    """Term that `positive_nll_coef` adds to the loss where the policy loss is 0."""
    total = sum(map(len, masks))
    batch = batches.build(masks, rewards=rewards, advantages=[0.0] * total, old_logprobs=logprobs, **fields)
    weighed = chosen.weigh(batch)
    values = chosen.policy_objective()(ModelOutput(logprobs=torch.tensor(logprobs)), weighed).values
    return (values * weighed.loss_weights).sum().item()


@pytest.mark.parametrize("mode", get_args(Mode))
def test_positive_examples_are_averaged_over_their_own_tokens(batches, mode):
    """-log p is 1 and 3, then 5, in two rewarded answers: mean 3, whatever the policy loss is averaged over."""
    norm = 7 if mode.endswith("norm") else None
    chosen = algorithm(positive_nll_coef=0.1, aggregation={"mode": mode, "norm_tokens": norm})
    masks, logprobs = [[0, 1, 1], [0, 1, 1], [0, 1]], [0, -1.0, -3.0, 0, -7.0, -9.0, 0, -5.0]
    assert positive_nll(batches, chosen, masks, [1.0, 0.0, 2.0], logprobs) == pytest.approx(0.1 * 3.0)
    assert positive_nll(batches, chosen, masks, [0.0, -1.0, 0.0], logprobs) == 0


@pytest.mark.parametrize("mode", ["token_mean", "seq_mean_token_sum"])
def test_positive_examples_count_as_often_as_they_were_drawn(batches, mode):
    """-log p is 1, 3 and 5 in answers drawn 0, 1 and 3 times: (3 + 3 x 5) / 4."""
    chosen = algorithm(positive_nll_coef=0.1, aggregation={"mode": mode})
    masks, logprobs = [[0, 1], [0, 1], [0, 1]], [0, -1.0, 0, -3.0, 0, -5.0]
    drawn = {"sequence_extras": {"repeats": torch.tensor([0, 1, 3])}}
    assert positive_nll(batches, chosen, masks, [1.0] * 3, logprobs, **drawn) == pytest.approx(0.1 * 4.5)


def test_returns_are_plain_sums_while_only_the_critic_learns(batches, close):
    """Values 0.5 and 1, reward 2 at the end, lambda 0.5: the last return is 2, the first 1 + 0.5 (2 - 1) or 2."""
    batch = batches.build([[0, 1, 1]], rewards=[2.0], values=[0.0, 0.5, 1.0])
    chosen = algorithm(advantage=GaeSettings(lam=0.5))
    close(chosen.advantages(batch, pretraining=True).returns, [0, 2.0, 2.0])
    close(chosen.advantages(batch).returns, [0, 1.5, 2.0])
    own = algorithm(advantage=GaeSettings(lam=0.5, critic_lam=0.0))
    close(own.advantages(batch, pretraining=True).returns, [0, 2.0, 2.0])
    close(own.advantages(batch).returns, [0, 1.0, 2.0])


def test_the_kl_coefficient_does_not_adapt_to_a_policy_that_does_not_move(batch):
    kl = KlSettings(where="in_reward", coef=0.1, adaptive=ADAPTIVE)
    chosen = algorithm(advantage=GaeSettings(), kl=kl)
    full = batch.with_(values=torch.zeros(5).double())
    chosen.advantages(full, pretraining=True)
    assert chosen.kl_coef == 0.1
    chosen.advantages(full)
    assert chosen.kl_coef != 0.1


def test_resampled_trajectories_count_as_often_as_they_were_drawn(batch):
    """Rewards 1 and 0 with power 1: the second is never drawn, the first twice."""
    chosen = algorithm(resample=ResampleSettings())
    weighed = chosen.weigh(chosen.advantages(batch))
    assert weighed.loss_weights.tolist() == [0, 0.5, 0.5, 0, 0]
    assert weighed.advantages[4] != 0  # its advantage stays its own


def test_what_is_drawn_depends_on_the_runs_seed_and_survives_a_restart(batches):
    batch = batches.build([[0, 1]] * 40, rewards=[1.0] * 40)

    def drawn(chosen):
        return chosen.advantages(batch).sequence_extras["repeats"].tolist()

    keys = AlgorithmConfig(resample=ResampleSettings())
    first, again, other = (Algorithm(keys, 1, seed=seed) for seed in (1, 1, 2))
    assert drawn(first) == drawn(again)
    assert drawn(other) != drawn(Algorithm(keys, 1, seed=1))
    resumed = Algorithm(keys, 1, seed=1)
    resumed.load_state_dict(first.state_dict())
    assert drawn(resumed) == drawn(first), "the second draw"


def test_measure_says_what_is_known(batch):
    chosen = algorithm(2, advantage=GaeSettings(), kl=KlSettings(coef=0.1, kind="k1"))
    done = chosen.advantages(batch.with_(values=torch.tensor([0, 0.5, 1.0, 0, 0.0]).double()))
    metrics = chosen.measure(done)
    assert metrics["train/reference_kl"].value == pytest.approx(0.0)  # 0.5, 0, -0.5
    assert metrics["train/kl_coef"].value == 0.1
    assert metrics["correction/max_abs_difference"].value == pytest.approx(math.log(4))
    # returns 1, 1, 0 and errors 0.5, 0, 0: 1 - (1/12) / (1/3)
    assert metrics["critic/explained_variance"].value == pytest.approx(0.75)
    of_rollout = algorithm(correction=CorrectionSettings(old="rollout"))
    assert "correction/kl" not in of_rollout.measure(of_rollout.advantages(batch)), "compared with itself it would be 0"
    nothing = algorithm().measure(batch.with_(old_logprobs=None))
    assert nothing == {}


def test_the_tokens_of_the_highest_entropy_are_picked_over_the_whole_mini_batch(batch):
    chosen = algorithm(loss=TopEntropySettings(share=0.34))  # 1 of 3 loss tokens
    assert chosen.needs_old_logprobs
    assert chosen.infer_needs == {"entropy"}
    entropy = torch.tensor([9.0, 0.5, 2.0, 9.0, 1.0])
    weighed = chosen.weigh(chosen.advantages(batch.with_(entropy=entropy)))
    assert weighed.extras["selected"].tolist() == [False, False, True, False, False]
    assert weighed.loss_weights.tolist() == pytest.approx([0, 1 / 3, 1 / 3, 0, 1 / 3]), "the denominators stay"
    ties = batch.with_(entropy=torch.ones(5))
    assert chosen.weigh(chosen.advantages(ties)).extras["selected"].tolist() == batch.loss_mask.tolist()


def test_rejections_compare_the_current_policy_where_old_is_the_rollouts(batch, close):
    """Ratios of the current policy to the rollout 1, 2 and 0.25; bounds 0.5 and 1.5."""
    rule = RejectionSettings(low=0.5, high=1.5)
    chosen = algorithm(8, correction=CorrectionSettings(old="rollout", rejections=[rule]), loss=ReinforceSettings())
    assert not chosen.needs_old_logprobs
    weighed = chosen.weigh(chosen.advantages(batch))
    assert torch.equal(weighed.loss_mask, batch.loss_mask)
    given = weighed.with_(advantages=torch.tensor([0, 1.0, 1.0, 0, -1.0]).double())
    result = chosen.policy_objective()(ModelOutput(logprobs=batch.old_logprobs), given)
    close(result.values, [0, 1.0, 0, 0, 0])
    close(result.metrics["correction/masked"], [0, 0, 1, 0, 1])


def test_off_policy_sequence_masking_keeps_answers_that_are_not_worse(batch, close):
    """Mean log-ratios of the rollout to the current policy: -0.3466 and log 4 = 1.386; threshold 0.5."""
    rule = RejectionSettings(level="sequence_mean", low=math.exp(-0.5), advantages="negative", policy="current")
    chosen = algorithm(correction=CorrectionSettings(rejections=[rule]), loss=ReinforceSettings())
    assert not chosen.needs_old_logprobs
    for advantage, expected in ((-1.0, 0.0), (0.5, 0.75)):
        given = batch.with_(advantages=torch.tensor([0, -1.0, -1.0, 0, advantage]).double())
        result = chosen.policy_objective()(ModelOutput(logprobs=batch.old_logprobs), given)
        close(result.values, [0, -1.0, -2.0, 0, expected])
    before = algorithm(correction=CorrectionSettings(rejections=[rule.model_copy(update={"policy": "old"})]))
    assert before.needs_old_logprobs
    assert before.advantages(batch).loss_mask.tolist() == [False, True, True, False, False]


def test_covariance_losses_pick_over_the_whole_mini_batch(batch):
    chosen = algorithm(loss=KlCovSettings())
    weighed = chosen.weigh(chosen.advantages(batch))
    # A = 0.7071, 0.7071, -0.7071 and old = -1, -2, -1.5: covariances 0.236, -0.236, 0; one token at least
    assert weighed.extras["selected"].tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("loss", list(POLICY_LOSSES))
@pytest.mark.parametrize("advantage", list(ADVANTAGES))
def test_every_estimator_works_with_every_loss(batches, batch, advantage, loss):
    """From rewards to a finite gradient through the public calls only."""
    keys = {"weights": {"a": 1.0}} if advantage == "gdpo" else {}
    chosen = algorithm(
        2, advantage=ADVANTAGES.settings(advantage)(**keys), loss=POLICY_LOSSES.settings(loss)(), entropy_coef=0.01
    )
    full = batch.with_(
        values=torch.zeros(5),
        components={"a": torch.tensor([1.0, 0.0]), "greedy_reward": torch.tensor([0.5, 0.5])},
        entropy=5.0 - torch.arange(5.0),
        sum_pi_squared=torch.full((5,), 0.5),
        extras={"process_rewards": torch.full((5,), 0.5)},
    )
    weighed = chosen.weigh(chosen.advantages(full))
    lp = torch.tensor([0, -1.1, -1.9, 0, -1.4], requires_grad=True)
    output = ModelOutput(logprobs=lp, entropy=torch.ones(5))
    (chosen.policy_objective()(output, weighed).values * weighed.loss_weights).sum().backward()
    assert torch.isfinite(lp.grad).all()
    assert (lp.grad[weighed.loss_mask] != 0).any()
    assert (lp.grad[~weighed.loss_mask] == 0).all()


# -------------------------------------------------------------------------------------------------- trajectories


def test_groups_are_shaped_and_kept():
    def trajectory(sample, reward):
        return Trajectory(
            prompt_id="a/1",
            sample=sample,
            token_ids=(1, 2, 3),
            prompt_length=1,
            loss_mask=(0, 1, 1),
            rollout_logprobs=(0.0, 0.0, 0.0),
            weight_versions=(-1, 0, 0),
            response="",
            reward=reward,
            stop_reason=StopReason.STOP,
        )

    def group(*rewards):
        return TrajectoryGroup(
            Prompt("a/1", (1,), (), None, "a"), tuple(trajectory(i, r) for i, r in enumerate(rewards))
        )

    chosen = algorithm(
        limit=2, overlong=OverlongSettings(buffer_tokens=1), dynamic_sampling=DynamicSamplingSettings(max_draws=3)
    )
    assert chosen.groups.max_draws == 3
    assert algorithm().groups.max_draws == 1
    kept, dropped = chosen.groups.keep(chosen.groups.shape([group(1.0, 0.0), group(1.0, 1.0)]))
    assert [one.reward for one in kept[0].trajectories] == [0.0, -1.0]
    assert dropped[0].reason == "reward is 1 for all 2 trajectories"
    assert algorithm(advantage=GrpoSettings()).groups.shape([group(1.0)])[0].trajectories[0].reward == 1.0


def test_gdpo_needs_its_components_in_every_answer(batches):
    weights = {"advantage": {"name": "gdpo", "weights": {"right": 1.0, "form": 0.5}}}
    chosen = Algorithm(build(AlgorithmConfig, weights, "test"), 1)
    nan = float("nan")
    batch = batches.build([[0, 1], [0, 1]], components={"right": [1.0, 0.0], "form": [0.5, nan]}, rewards=[1.0, 0.0])
    with pytest.raises(ValueError, match="'form' is missing in 1 of 2 sequences"):
        chosen.advantages(batch)
    answer = Trajectory(
        "a/1", 0, (1, 2), 1, (0, 1), (0.0, 0.0), (-1, 0), "", StopReason.STOP, components={"right": 1.0}
    )
    with pytest.raises(ValueError, match="prompt a/1, sample 0: the reward has no component 'form'"):
        chosen.groups.keep([TrajectoryGroup(Prompt("a/1", (1,), (), None, "a"), (answer,))])


@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_a_lone_survivor_is_trained_on_only_by_estimators_without_group_baseline(name):
    keys = {"weights": {"a": 1.0}} if name == "gdpo" else {}
    chosen = algorithm(advantage=ADVANTAGES.settings(name)(**keys))
    answer = Trajectory("a/1", 0, (1, 2), 1, (0, 1), (0.0, 0.0), (-1, 0), "", StopReason.STOP, components={"a": 1.0})
    failed = answer.with_(sample=1, episode=1, status=Status.ENV_FAILED)
    kept, _ = chosen.groups.keep([TrajectoryGroup(Prompt("a/1", (1,), (), None, "a"), (answer, failed))])
    assert bool(kept) is (name in ("gae", "reinforce_pp", "remax", "turn_gae"))


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            {"advantage": {"name": "gdpo", "weights": {"a": 1.0}}, "kl": {"where": "in_reward", "coef": 0.1}},
            "gdpo reads",
        ),
        ({"advantage": "max_rl", "kl": {"where": "in_reward", "coef": 0.1}}, "max_rl is for rewards of 0 and 1"),
        ({"advantage": "max_rl", "overlong": {"buffer_tokens": 2}}, "max_rl is for rewards of 0 and 1"),
        ({"advantage": {"name": "gdpo", "weights": {"a": 1.0}}, "overlong": {"buffer_tokens": 2}}, "overlong_penalty"),
    ],
)
def test_a_reward_that_the_estimator_would_not_see_is_refused(parts, message):
    with pytest.raises(ValueError, match=message):
        Algorithm(build(AlgorithmConfig, parts, "test"), 1, 8)


def test_gdpo_takes_the_overlong_penalty_as_a_component():
    weights = {"a": 1.0, "overlong_penalty": 0.5}
    parts = {"advantage": {"name": "gdpo", "weights": weights}, "overlong": {"buffer_tokens": 2}}
    assert Algorithm(build(AlgorithmConfig, parts, "test"), 1, 8).name == "gdpo + ppo"


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_a_token_baseline_gets_its_forward_also_where_old_is_the_rollout(name):
    """The forward is for `sum_pi_squared`; its log-probs give way to the rollout's."""
    parts = {"advantage": name, "correction": {"old": "rollout"}}
    chosen = Algorithm(build(AlgorithmConfig, parts, "test"), 1)
    assert chosen.needs_old_logprobs
    assert chosen.infer_needs == {"sum_pi_squared"}
    assert "old_logprobs" not in chosen.required_fields
