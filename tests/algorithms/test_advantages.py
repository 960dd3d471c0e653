"""Every estimator against numbers worked out by hand, and the rules that hold for all of them."""

import pytest
import torch

from hone.algorithms import ADVANTAGES
from hone.algorithms.process_reward.settings import PrimeSettings
from hone.algorithms.settings import (
    GaeSettings,
    GdpoSettings,
    GpgAdvantageSettings,
    GrpoPassKSettings,
    GrpoSettings,
    MaxRlSettings,
    OpoSettings,
    OptimalTokenBaselineSettings,
    ReinforcePpBaselineSettings,
    ReinforcePpSettings,
    RemaxSettings,
    RlooSettings,
    TirOptimalTokenBaselineSettings,
)

GROUP_ESTIMATORS = [
    GrpoSettings(),
    GrpoSettings(scale_by="batch"),
    GrpoSettings(scale_by="none"),
    GrpoPassKSettings(),
    RlooSettings(),
    OpoSettings(),
    GpgAdvantageSettings(),
    MaxRlSettings(),
]
LABELS = [f"{s.name}-{getattr(s, 'scale_by', '')}".strip("-") for s in GROUP_ESTIMATORS]


def estimate(batch, settings):
    return ADVANTAGES.get(settings.name)(batch, settings)


def of_sequences(batch, settings):
    """One advantage per sequence: that of its first loss token."""
    values = estimate(batch, settings).advantages
    found = []
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True):
        tokens = values[start:end][batch.loss_mask[start:end]]
        assert (tokens == tokens[0]).all()
        found.append(tokens[0])
    return torch.stack(found)


@pytest.fixture
def three(batches):
    """A group with rewards 1, 0, 0 and answers of 1, 2 and 1 tokens."""
    return batches.build([[0, 1], [0, 1, 1], [0, 1]], rewards=[1.0, 0.0, 0.0])


# ------------------------------------------------------------------------------------------------------------- gae


def test_gae_steps_over_tokens_with_mask_0(batches, close):
    batch = batches.build(
        [[0, 1, 0, 1, 1], [0, 1]],
        rewards=[10.0, 1.0],
        values=[9.0, 1.0, 9.0, 2.0, 3.0, 9.0, 0.5],
    )
    result = estimate(batch, GaeSettings(gamma=0.5, lam=0.5))
    # first sequence: deltas 0.5*2-1 = 0, 0.5*3-2 = -0.5, 10-3 = 7; A = 0.3125, 1.25, 7. Second: 1-0.5 = 0.5
    close(result.returns, [0, 1.3125, 0, 3.25, 10, 0, 1.0])
    # mean 2.265625; centred -1.953125, -1.015625, 4.734375, -1.765625; unbiased variance 10.125977
    close(result.advantages, [0, -0.613778, 0, -0.319165, 1.487798, 0, -0.554856], 2e-6)


def test_gae_of_one_token_is_its_reward_minus_its_value(batches, close):
    result = estimate(batches.build([[0, 1]], rewards=[3.0], values=[7.0, 1.0]), GaeSettings())
    close(result.returns, [0, 3.0])
    close(result.advantages, [0, 0])  # one token has no spread to whiten by


def test_gae_critic_may_have_its_own_lambda(batches, close):
    batch = batches.build([[0, 1, 1]], rewards=[1.0], values=[0.0, 0.2, 0.6])
    result = estimate(batch, GaeSettings(lam=0.0, critic_lam=1.0))
    close(result.returns, [0, 1.0, 1.0])  # the Monte-Carlo return
    close(estimate(batch, GaeSettings(lam=0.0)).returns, [0, 0.6, 1.0])  # one step ahead


def test_gae_length_adaptive_lambda(batches, close):
    batch = batches.build([[0, 1, 1], [0, 1]], rewards=[1.0, 1.0], values=[0.0, 0.2, 0.6, 0.0, 0.5])
    result = estimate(batch, GaeSettings(length_adaptive_alpha=1.0))
    # two tokens: lambda = 1 - 1/2; A = (0.4 + 0.5*0.4, 0.4); one token: lambda 0, A = 0.5
    close(result.returns, [0, 0.8, 1.0, 0, 1.0])


def test_gae_without_values_says_so(three):
    with pytest.raises(ValueError, match=r"Batch\.values"):
        estimate(three, GaeSettings())


# ---------------------------------------------------------------------------------------------- one value a sequence


def test_grpo(three, close):
    close(of_sequences(three, GrpoSettings()), [1.154699, -0.577349, -0.577349], 2e-6)


def test_grpo_without_scale_is_dr_grpo(three, close):
    close(of_sequences(three, GrpoSettings(scale_by="none")), [2 / 3, -1 / 3, -1 / 3])


def test_grpo_scaled_by_the_batch(batches, close):
    batch = batches.build([[0, 1]] * 4, groups=[7, 7, 3, 3], rewards=[1.0, 0.0, 4.0, 2.0])
    # the batch's std of 1, 0, 4, 2 is 1.707825
    close(of_sequences(batch, GrpoSettings(scale_by="batch")), [0.292770, -0.292770, 0.585540, -0.585540], 1e-5)


@pytest.mark.parametrize(("scale", "expected"), [(False, 0.25), (True, 0.25 / 0.520417)])
def test_grpo_pass_k(batches, close, scale, expected):
    batch = batches.build([[0, 1]] * 4, groups=[0, 1, 0, 0], rewards=[0.75, 5.0, 1.0, 0.0])
    found = of_sequences(batch, GrpoPassKSettings(scale=scale))
    close(found, [0, 0, expected, 0], 2e-6)


def test_grpo_pass_k_with_two_best_gives_nothing(batches, close):
    batch = batches.build([[0, 1]] * 3, rewards=[1.0, 1.0, 0.0])
    close(of_sequences(batch, GrpoPassKSettings()), [0, 0, 0])


def test_gdpo_normalises_each_component(batches, close):
    batch = batches.build(
        [[0, 1]] * 2 + [[0, 1]] * 2,
        groups=[0, 0, 1, 1],
        rewards=[0.0] * 4,
        components={"right": [1.0, 0.0, 1.0, 0.0], "short": [100.0, 0.0, 0.0, 0.0]},
    )
    # each component +-0.707 in a group that differs; sums with weights 1 and 2: 2.1213, -2.1213, 0.7071, -0.7071
    # whitened: variance (2 * 4.5 + 2 * 0.5) / 3 = 10/3
    found = of_sequences(batch, GdpoSettings(weights={"right": 1.0, "short": 2.0}))
    close(found, [1.161895, -1.161895, 0.387298, -0.387298], 1e-5)


def test_gdpo_names_a_missing_component(batches):
    batch = batches.build([[0, 1]], rewards=[0.0], components={"right": [1.0]})
    with pytest.raises(ValueError, match=r"'wrong' .*right"):
        estimate(batch, GdpoSettings(weights={"wrong": 1.0}))


def test_rloo(three, close):
    close(of_sequences(three, RlooSettings()), [1.0, -0.5, -0.5])


def test_opo_weighs_the_baseline_by_length(three, close):
    close(of_sequences(three, OpoSettings()), [0.75, -0.25, -0.25])  # baseline (1*1 + 2*0 + 1*0) / 4


def test_gpg(three, close):
    close(of_sequences(three, GpgAdvantageSettings(f_norm=2.0)), [1.0, -0.5, -0.5])  # alpha = 3 / 1


def test_max_rl(three, close):
    close(of_sequences(three, MaxRlSettings()), [1.999994, -0.999997, -0.999997], 1e-5)


def test_reinforce_pp_baseline(three, close):
    # tokens: 2/3, -1/3, -1/3, -1/3; mean -1/12; unbiased variance 0.25
    close(of_sequences(three, ReinforcePpBaselineSettings()), [1.5, -0.5, -0.5], 1e-5)


# ------------------------------------------------------------------------------------------------ one value a token


def test_reinforce_pp_discounts_per_generated_token(batches, close):
    batch = batches.build([[0, 1, 0, 1], [0, 1]], rewards=[4.0, 3.0])
    found = estimate(batch, ReinforcePpSettings(gamma=0.5)).advantages
    # returns 2, 4, 3; mean 3, unbiased variance 1
    close(found, [0, -1, 0, 1, 0, 0])


def test_remax(batches, close):
    batch = batches.build([[0, 1, 1], [0, 1]], rewards=[1.0, 0.0], components={"greedy_reward": [0.25, 0.5]})
    close(estimate(batch, RemaxSettings()).advantages, [0, 0.75, 0.75, 0, -0.5])


def test_remax_without_a_greedy_answer_says_so(three):
    with pytest.raises(ValueError, match="greedy_reward"):
        estimate(three, RemaxSettings())


def optimal_batch(batches, **more):
    """s_t = 1 - 2 pi + sum pi^2 is 0.5 for pi = 0.5, sum 0.5, and 0.25 for pi = 0.75, sum 0.75."""
    half, more_sure = torch.tensor(0.5).log().item(), torch.tensor(0.75).log().item()
    return batches.build(
        [[0, 1, 0, 1], [0, 1, 1]],
        rewards=[1.0, 0.0],
        old_logprobs=[0, half, half, half, 0, more_sure, half],
        sum_pi_squared=torch.tensor([0, 0.5, 0.5, 0.5, 0, 0.75, 0.5]).double(),
        extras=more,
    )


def test_tir_optimal_token_baseline_counts_generated_tokens(batches, close):
    found = estimate(optimal_batch(batches), TirOptimalTokenBaselineSettings()).advantages
    # t=1: W = 0.5, 0.25; B = 0.5/0.75 = 2/3.  t=2: W = 1.0, 0.75; B = 1/1.75 = 0.571429
    close(found, [0, 1 / 3, 0, 0.428571, 0, -2 / 3, -0.571429])


def test_optimal_token_baseline_counts_every_token_after_the_first(batches, close):
    found = estimate(optimal_batch(batches), OptimalTokenBaselineSettings()).advantages
    # t=2 is an observation in the first sequence: only the second has weight there, B = 0. t=3: only one is left, B = 0
    close(found, [0, 1 / 3, 0, 1.0, 0, -2 / 3, 0])


def test_optimal_token_baseline_uses_squared_importance_weights(batches, close):
    weights = torch.tensor([0, 2.0, 0, 1.0, 0, 1.0, 1.0]).double()
    found = estimate(optimal_batch(batches, is_weights=weights), TirOptimalTokenBaselineSettings()).advantages
    # t=1: W = 2, 0.25; B = 2/2.25.  t=2: W = 2.5, 0.75; B = 2.5/3.25
    close(found, [0, 0.111111, 0, 0.230769, 0, -0.888889, -0.769231])


def test_optimal_token_baseline_needs_sum_pi_squared(three):
    with pytest.raises(ValueError, match="sum_pi_squared"):
        estimate(three, OptimalTokenBaselineSettings())


# -------------------------------------------------------------------------------------------------- rules for all


@pytest.mark.parametrize("settings", GROUP_ESTIMATORS, ids=LABELS)
def test_a_group_of_one_has_its_reward_as_advantage(batches, close, settings):
    batch = batches.build([[0, 1]] * 3, groups=[0, 0, 1], rewards=[1.0, 0.0, 1.0])
    alone = of_sequences(batch, settings)[2].item()
    expected = {"grpo_pass_k": 0.0, "gpg": 1.5}.get(settings.name, 1.0)  # gpg: alpha is 3 / 2
    close(alone, expected)


@pytest.mark.parametrize("settings", GROUP_ESTIMATORS, ids=LABELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_nothing(batches, settings, dtype):
    batch = batches.build(
        [[0, 1], [0, 1, 1], [0, 1], [0, 1]], groups=[0, 0, 0, 1], rewards=[0.1] * 3 + [1], dtype=dtype
    )
    found = of_sequences(batch, settings)
    assert found[:3].abs().max() < 1e-9
    if dtype == torch.float32:  # what batches really hold
        assert (found[:3] == 0).all()


@pytest.mark.parametrize(
    "settings", [*GROUP_ESTIMATORS, ReinforcePpBaselineSettings()], ids=[*LABELS, "reinforce_pp_baseline"]
)
def test_an_episode_counts_once_however_many_trajectories_it_gave(batches, settings):
    """Three episodes; splitting the first into two trajectories changes nobody's advantage."""
    whole = batches.build([[0, 1, 1], [0, 1], [0, 1]], rewards=[1.0, 0.0, 0.5])
    split = batches.build([[0, 1], [0, 1], [0, 1], [0, 1]], episodes=[4, 4, 9, 2], rewards=[1.0, 1.0, 0.0, 0.5])
    expected, found = of_sequences(whole, settings), of_sequences(split, settings)
    torch.testing.assert_close(found, expected[[0, 0, 1, 2]])


def test_the_token_baseline_weighs_an_episode_once(batches, close):
    half = torch.tensor(0.5).log().item()
    batch = batches.build(
        [[0, 1], [0, 1], [0, 1]],
        episodes=[0, 0, 1],
        rewards=[1.0, 1.0, 0.0],
        old_logprobs=[0, half] * 3,
        sum_pi_squared=torch.full((6,), 0.5).double(),
    )
    close(estimate(batch, TirOptimalTokenBaselineSettings()).advantages, [0, 0.5, 0, 0.5, 0, -0.5])


ALL = [
    *GROUP_ESTIMATORS,
    GaeSettings(lam=0.9),
    GdpoSettings(weights={"a": 1.0}),
    ReinforcePpSettings(gamma=0.9),
    ReinforcePpBaselineSettings(),
    RemaxSettings(),
    OptimalTokenBaselineSettings(),
    TirOptimalTokenBaselineSettings(),
    PrimeSettings(gamma=0.9),
]


OF_TURNS = {"mt_grpo", "gigpo", "turn_gae"}  # test_turns.py: they need batches with turns


def test_every_registered_estimator_is_in_these_tests():
    assert {settings.name for settings in ALL} | OF_TURNS == set(ADVANTAGES)


@pytest.mark.parametrize("settings", ALL, ids=lambda s: f"{s.name}-{getattr(s, 'scale_by', '')}".strip("-"))
def test_the_order_of_sequences_does_not_matter(batches, settings):
    generator = torch.Generator().manual_seed(3)

    def draw(size):
        return torch.rand(size, generator=generator, dtype=torch.float64)

    masks = [[0, 1, 1], [0, 0, 1, 0, 1], [0, 1], [0, 1, 1, 1], [0, 1, 0, 1], [0, 1]]
    tokens = sum(map(len, masks))
    batch = batches.build(
        masks,
        groups=[5, 5, 2, 2, 2, 9],
        rewards=draw(6),
        values=draw(tokens),
        old_logprobs=-draw(tokens),
        components={"a": draw(6), "greedy_reward": draw(6)},
        sum_pi_squared=draw(tokens),
        extras={"process_rewards": draw(tokens)},
    )
    order = [4, 0, 5, 3, 1, 2]
    expected = estimate(batch, settings)
    found = estimate(batches.take(batch, order), settings)
    at = batches.positions(batch, order)
    torch.testing.assert_close(found.advantages, expected.advantages[at], atol=1e-12, rtol=0)
    assert (found.advantages[~batch.loss_mask[at]] == 0).all()
    if expected.returns is not None:
        torch.testing.assert_close(found.returns, expected.returns[at], atol=1e-12, rtol=0)


@pytest.mark.parametrize("settings", ALL, ids=lambda s: f"{s.name}-{getattr(s, 'scale_by', '')}".strip("-"))
def test_a_sequence_without_loss_tokens_gets_nothing_and_breaks_nothing(batches, settings):
    batch = batches.build(
        [[0, 1], [0, 0], [0, 1]],
        rewards=[1.0, 0.0, 0.0],
        values=[0.0] * 6,
        old_logprobs=[-0.5] * 6,
        components={"a": torch.tensor([1.0, 0, 0]), "greedy_reward": torch.zeros(3)},
        sum_pi_squared=torch.full((6,), 0.5),
        extras={"process_rewards": torch.full((6,), 0.5)},
    )
    found = estimate(batch, settings).advantages
    assert torch.isfinite(found).all()
    assert found[2] == 0
    assert found[3] == 0


@pytest.mark.parametrize("settings", ALL, ids=lambda s: f"{s.name}-{getattr(s, 'scale_by', '')}".strip("-"))
def test_estimators_declare_the_fields_that_they_need(batches, settings):
    """A batch with exactly the declared fields is enough; without any one of them the estimator complains."""
    full = {
        "rewards": [1.0, 0.0],
        "values": [0.0] * 4,
        "old_logprobs": [-0.5] * 4,
        "components": {"a": torch.tensor([1.0, 0.0]), "greedy_reward": torch.zeros(2)},
        "sum_pi_squared": torch.full((4,), 0.5),
        "extras": {"process_rewards": torch.full((4,), 0.5)},
    }

    def fields(names):
        chosen = {name: value for name, value in full.items() if name in names}
        chosen["components"] = {k: v for k, v in full["components"].items() if f"components.{k}" in names}
        chosen["extras"] = {k: v for k, v in full["extras"].items() if k in names}
        return chosen

    declared = settings.required_fields
    estimate(batches.build([[0, 1], [0, 1]], **fields(declared)), settings)
    for name in declared:
        with pytest.raises(ValueError, match=r"need|no re"):
            estimate(batches.build([[0, 1], [0, 1]], **fields(declared - {name})), settings)


def test_token_rewards_take_the_place_of_sequence_rewards(batches, close):
    batch = batches.build([[0, 1, 1], [0, 1]], rewards=[1.0, 0.0], token_rewards=[0, -0.5, 1.0, 0, -0.25])
    close(of_sequences(batch, RlooSettings()), [0.75, -0.75])  # 0.5 against -0.25
