"""Masked answers (`overlong.mask`): they get no loss, and count in their group's baseline as if they had one."""

import math

import pytest
import torch

from hone.algorithms import ADVANTAGES
from hone.algorithms.algorithm import Algorithm
from hone.algorithms.distillation.losses import TEACHER_LOGPROBS, Distillation
from hone.algorithms.distillation.settings import DistillationConfig
from hone.algorithms.process_reward.losses import OUTCOMES, PROCESS_REWARDS, measure_process_rewards
from hone.algorithms.process_reward.settings import PrimeSettings
from hone.algorithms.segments import whiten
from hone.algorithms.settings import (
    AlgorithmConfig,
    CorrectionSettings,
    GigpoSettings,
    GrpoSettings,
    KlSettings,
    MtGrpoSettings,
    TurnGaeSettings,
)

TURNS = [[0, 1, 1, 0, 1], [0, 1, 1, 0, 1], [0, 1, 0, 1, 1, 1]]  # two turns in each of three answers


def masked(batches, sampled, without=(2,), **fields):
    """A batch whose sequences `without` have no loss on what they sampled."""
    batch = batches.build(sampled, **fields)
    kept = torch.cat([torch.full((len(row),), i not in without) for i, row in enumerate(sampled)])
    return batch.with_(loss_mask=batch.loss_mask & kept, sampled=batch.loss_mask)


def estimate(batch, settings):
    return ADVANTAGES.get(settings.name)(batch, settings)


def at_first_tokens(batch, advantages):
    return advantages[batch.cu_seqlens[:-1] + 1]


def test_opo_weighs_a_masked_answer_by_the_tokens_that_it_sampled(batches, close):
    batch = masked(batches, [[0] + [1] * 4, [0] + [1] * 4, [0] + [1] * 8], rewards=[1.0, 0.0, 0.0])
    found = estimate(batch, ADVANTAGES.settings("opo")()).advantages
    close(at_first_tokens(batch, found), [0.75, -0.25, 0])  # baseline 4 x 1 / 16


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_a_baseline_by_position_counts_the_positions_of_a_masked_answer(batches, close, name):
    batch = masked(batches, [[0, 1, 1], [0, 1, 1], [0, 1, 1, 1]], rewards=[1.0, 0.0, 2.0])
    batch = batch.with_(old_logprobs=torch.full((10,), -1.0), sum_pi_squared=torch.full((10,), 0.2))
    found = estimate(batch, ADVANTAGES.settings(name)()).advantages
    close(found, [0, 0, 0, 0, -1, -1, 0, 0, 0, 0])  # equal energy, so the baseline is the mean of 1, 0 and 2


def test_the_energy_of_a_masked_answer_has_its_importance_weight(batches, close):
    """log p - log p of the rollout is log 2 in the masked answer: weight 2, energy x 4, so B = (1 + 0 + 4 x 2) / 6."""
    batch = masked(batches, [[0, 1], [0, 1], [0, 1]], rewards=[1.0, 0.0, 2.0])
    rollout = torch.tensor([0, -1, 0, -1, 0, -1 - math.log(2)], dtype=torch.float64)
    batch = batch.with_(
        old_logprobs=torch.full((6,), -1.0, dtype=torch.float64),
        sum_pi_squared=torch.full((6,), 0.2),
        rollout_logprobs=rollout,
    )
    settings = ADVANTAGES.settings("optimal_token_baseline")()
    found = Algorithm(AlgorithmConfig(advantage=settings, correction=CorrectionSettings(weights="token")), 1)
    close(found.advantages(batch).advantages, [0, -0.5, 0, -1.5, 0, 0])


def test_prime_compares_process_rewards_with_those_of_a_masked_answer(batches, close):
    rewards = [0, 0.5, 0.5, 0, 0.5, 0.5, 0, 0.1, 0.2, 0.3]
    batch = masked(batches, [[0, 1, 1], [0, 1, 1], [0, 1, 1, 1]], rewards=[1.0, 0.0, 0.0])
    batch = PROCESS_REWARDS.on(batch, torch.tensor(rewards, dtype=torch.float64))
    found = estimate(batch, PrimeSettings(gamma=0.0)).advantages
    # outcomes 1 - 0 and 0 - 1/2; process rewards 0.5 - (0.5 + 0.2) / 2
    close(at_first_tokens(batch, found), [1.15, -0.35, 0])
    shown = measure_process_rewards(OUTCOMES.on(batch, torch.tensor([1.0, 0.0, 0.0])))
    assert shown["process_reward/mean"].value == pytest.approx(2.6 / 7)
    assert shown["process_reward/accuracy"].value == pytest.approx(1 / 3)  # all sums are above 0, one outcome is


def test_mt_grpo_takes_the_rewards_of_a_masked_answers_turns_from_its_outcome(batches, close):
    """The masked answer has reward 1, all of it for its first turn: outcomes 1, 0 and 0, first turns 0, 0 and 1."""
    rewards = [0, 0, 0, 0, 1.0, 0, 0, 0, 0, 0, 0, 1.0, 0, 0, 0, 0]
    batch = masked(batches, TURNS, rewards=[1.0, 0.0, 1.0], token_rewards=rewards)
    found = estimate(batch, MtGrpoSettings(scale_by="none")).advantages
    third = 1 / 3
    close(found, [0, third, third, 0, 2 * third, 0, -2 * third, -2 * third, 0, -third, *[0] * 6])


def test_gigpo_compares_states_with_those_of_a_masked_answer(batches, close):
    """All second turns begin in state 1, with returns 1, 0 and 2: 1 - 1 and 0 - 1, as for the whole episodes."""
    rewards = [0, 0, 0, 0, 1.0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2.0]
    anchors = [-1, 0, 0, -1, 1, -1, 0, 0, -1, 1, -1, 0, -1, 1, 1, 1]
    batch = masked(batches, TURNS, rewards=[1.0, 0.0, 2.0], token_rewards=rewards)
    found = estimate(batch.with_(anchors=torch.tensor(anchors)), GigpoSettings(scale_by="none", weight=10)).advantages
    close(found, [0, 0, 0, 0, 0, 0, -1, -1, 0, -11, *[0] * 6])


def test_the_kl_penalty_is_in_the_reward_of_a_masked_answer_too(batches, close):
    batch = masked(batches, [[0, 1], [0, 1], [0, 1, 1]], rewards=[1.0, 0.0, 2.0])
    old = torch.tensor([0, 0, 0, 0, 0, -1.0, -1.0])
    batch = batch.with_(old_logprobs=old, ref_logprobs=old - torch.tensor([0, 0, 0, 0, 0, 2.0, 1.0]))
    config = AlgorithmConfig(
        advantage=GrpoSettings(scale_by="none"), kl=KlSettings(coef=0.5, kind="k1", where="in_reward")
    )
    found = Algorithm(config, 1).advantages(batch)
    close(found.advantages, [0, 0.5, 0, -0.5, 0, 0, 0])  # rewards 1, 0 and 2 - 0.5 x (2 + 1): mean 0.5


def test_a_teachers_penalty_is_in_the_reward_of_a_masked_answer_too(batches, close):
    batch = masked(batches, [[0, 1], [0, 1], [0, 1, 1]], rewards=[1.0, 0.0, 2.0])
    gap = torch.tensor([0, 0, 0, 0, 0, 2.0, 1.0])
    batch = TEACHER_LOGPROBS.on(batch.with_(old_logprobs=torch.full((7,), -1.0)), -1 - gap)
    in_reward = Distillation(DistillationConfig(where="in_reward", coef=0.5))
    found = estimate(in_reward.before_advantages(batch), GrpoSettings(scale_by="none")).advantages
    close(found, [0, 0.5, 0, -0.5, 0, 0, 0])  # rewards 1, 0 and 2 - 0.5 x (2 + 1): mean 0.5
    in_advantage = Distillation(DistillationConfig(where="in_advantage", coef=0.5))
    scaled = in_advantage.after_advantages(batch.with_(advantages=torch.zeros(7)))
    assert bool((scaled.advantages == 0).all())


def test_turn_gae_gives_a_critic_nothing_to_learn_from_a_masked_answer(batches):
    batch = masked(batches, TURNS, rewards=[1.0, 0.0, 2.0], values=[0.5] * 16)
    found = estimate(batch, TurnGaeSettings())
    assert bool((found.advantages[10:] == 0).all())
    assert bool((found.returns[10:] == 0).all())


@pytest.mark.parametrize("name", list(ADVANTAGES))
def test_a_mask_changes_no_other_answers_advantage(batches, name):
    """Up to the whitening over the tokens with a loss that some estimators end with."""
    numbers = torch.Generator().manual_seed(3)

    def drawn(*shape):
        return torch.rand(shape, generator=numbers, dtype=torch.float64)

    lengths = [row for row in TURNS for _ in range(2)]
    batch = masked(batches, lengths, without=(2, 5), groups=[0, 1, 0, 1, 0, 1], rewards=drawn(6))
    tokens = batch.num_tokens
    sampled = batch.sampled
    turn_ends = sampled & ~torch.cat([sampled[1:], torch.tensor([False])])
    batch = batch.with_(
        components={"greedy_reward": drawn(6), "a": drawn(6)},
        token_rewards=torch.where(turn_ends, drawn(tokens) / 2, 0),
        values=drawn(tokens),
        old_logprobs=torch.where(sampled, -drawn(tokens), 0),
        sum_pi_squared=torch.where(sampled, drawn(tokens), 0),
        extras={PROCESS_REWARDS.name: torch.where(sampled, drawn(tokens), 0)},
        anchors=torch.where(sampled, 0, -1) + turn_ends.long(),
    )
    settings = ADVANTAGES.settings(name)(**({"weights": {"a": 1.0}} if name == "gdpo" else {}))
    without, whole = (estimate(one, settings) for one in (batch, batch.with_(loss_mask=sampled)))
    assert bool((without.advantages[~batch.loss_mask] == 0).all())
    assert float(whole.advantages.abs().sum()) > 0
    found, expected = (whiten(one.advantages, batch.loss_mask) for one in (without, whole))
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
