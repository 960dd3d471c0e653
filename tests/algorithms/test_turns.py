"""Credit by turn against numbers worked out by hand; with one turn the estimators equal those without turns."""

import pytest
import torch

from hone.algorithms import ADVANTAGES
from hone.algorithms.settings import GaeSettings, GigpoSettings, GrpoSettings, MtGrpoSettings, TurnGaeSettings
from hone.algorithms.turns import Turns

ROOT_2 = 0.5**0.5  # (1 - 0.5) / std of 1 and 0
# two episodes of two turns, then one of one turn; observations between the turns
MASKS = [[0, 1, 1, 0, 1], [0, 1, 0, 0, 1, 1], [0, 1]]


def estimate(batch, settings):
    return ADVANTAGES.get(settings.name)(batch, settings)


def test_turns_are_runs_of_sampled_tokens(batches):
    turns = Turns.of(batches.build([*MASKS, [0, 0]], rewards=[0.0] * 4))
    assert turns.sequence.tolist() == [0, 0, 1, 1, 2]
    assert turns.number.tolist() == [0, 1, 0, 1, 0]
    assert turns.last.tolist() == [False, True, False, True, True]
    assert turns.tokens.tolist() == [1, 2, 4, 6, 9, 10, 12]
    assert turns.starts.tolist() == [0, 2, 3, 4, 6, 7]
    adjacent = Turns.of(batches.build([[1, 1], [1, 1]], rewards=[0.0, 0.0]))
    assert adjacent.starts.tolist() == [0, 2, 4], "a turn ends with its sequence"


def test_mt_grpo_compares_turns_and_outcomes(batches, close):
    """Turn rewards 1 and 0, outcomes 0 and 2; the third episode has no turn before its last, and outcome 1."""
    rewards = [0, 0, 1.0, 0, 0, 0, 0, 0, 0, 0, 2.0, 0, 1.0]
    batch = batches.build(MASKS, rewards=[1.0, 2.0, 1.0], token_rewards=rewards)
    plain = estimate(batch, MtGrpoSettings(scale_by="none")).advantages
    # outcomes 0, 2, 1: advantages -1, 1, 0; first turns 1 and 0: +0.5, -0.5
    close(plain, [0, -0.5, -0.5, 0, -1, 0, 0.5, 0, 0, 1, 1, 0, 0])
    half = estimate(batch, MtGrpoSettings(scale_by="none", outcome_coef=0.5)).advantages
    close(half, [0, 0, 0, 0, -1, 0, 0, 0, 0, 1, 1, 0, 0])
    scaled = estimate(batch, MtGrpoSettings()).advantages  # std of 0, 2, 1 is 1; std of 1 and 0 is sqrt(0.5)
    first, second = ROOT_2 - 1, 1 - ROOT_2
    close(scaled, [0, first, first, 0, -1, 0, second, 0, 0, 1, 1, 0, 0], 1e-5)


def test_mt_grpo_compares_within_a_group_only(batches, close):
    rewards = [0, 0, 1.0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0, 1.0]
    batch = batches.build(MASKS, groups=[0, 1, 1], rewards=[1.0, 0.0, 1.0], token_rewards=rewards)
    found = estimate(batch, MtGrpoSettings(scale_by="none")).advantages
    # group 0: one episode, outcome 0; its first turn has nothing to compare with. Group 1: outcomes 0 and 1
    close(found, [0, 0, 0, 0, 0, 0, -0.5, 0, 0, -0.5, -0.5, 0, 0.5])


def test_gigpo_compares_returns_of_equal_states(batches, close):
    """Both first episodes reach state 1 in their second turn; state 0 is where all begin."""
    rewards = [0, 0, 1.0, 0, 0, 0, 0, 0, 0, 0, 2.0, 0, 0.0]
    anchors = [-1, 0, 0, -1, 1, -1, 0, -1, -1, 1, 1, -1, 0]
    batch = batches.build(MASKS, rewards=[1.0, 2.0, 0.0], token_rewards=rewards)
    batch = batch.with_(anchors=torch.tensor(anchors))
    found = estimate(batch, GigpoSettings(scale_by="none", gamma=0.5, weight=10)).advantages
    # episodes 1, 2, 0: advantages 0, 1, -1. State 1: returns 0 and 2, so -1 and +1. State 0 only begins episodes
    close(found, [0, 0, 0, 0, -10, 0, 1, 0, 0, 11, 11, 0, -1])
    # a third episode that begins in state 1: returns there are 0, 2 and 0; state 0 is left with beginnings
    anchors[-1] = 1
    found = estimate(
        batch.with_(anchors=torch.tensor(anchors)), GigpoSettings(scale_by="none", gamma=0.5, weight=3)
    ).advantages
    close(found, [0, 0, 0, 0, -2, 0, 1, 0, 0, 5, 5, 0, -3])


def test_gigpo_discounts_per_turn_and_scales(batches, close):
    masks = [[0, 1, 0, 1, 0, 1], [0, 1, 0, 1, 0, 1]]
    rewards = [0, 0, 0, 0, 0, 1.0, 0, 0, 0, 0, 0, 0.0]
    anchors = [-1, 0, -1, 1, -1, 2, -1, 0, -1, 1, -1, -1]
    batch = batches.build(masks, rewards=[1.0, 0.0], token_rewards=rewards).with_(anchors=torch.tensor(anchors))
    found = estimate(batch, GigpoSettings(scale_by="none", gamma=0.5)).advantages
    # state 1: returns 0.5 and 0, so +-0.25; state 2 and the unknown one have nothing to compare with
    close(found, [0, 0.5, 0, 0.75, 0, 0.5, 0, -0.5, 0, -0.75, 0, -0.5])
    scaled = estimate(batch, GigpoSettings(gamma=0.5)).advantages
    close(scaled[3], 2 * ROOT_2, 1e-5)


def test_gigpo_without_states_is_an_error_where_there_are_turns(batches):
    with pytest.raises(ValueError, match="gigpo compares turns that begin in equal states, and the environment names"):
        estimate(batches.build(MASKS, rewards=[1.0, 2.0, 0.0]), GigpoSettings())


def test_turn_gae_by_hand(batches, close):
    """One episode: tokens a b | c. Values 0.5, 1.0 | 0.25; rewards 0, 1 | 2."""
    values = [0, 0.5, 1.0, 9.0, 0.25]
    batch = batches.build([MASKS[0]], rewards=[3.0], values=values, token_rewards=[0, 0, 1.0, 0, 2.0])
    settings = TurnGaeSettings(gamma=0.5, lam=0.5, turn_gamma=0.8, turn_lam=0.5)
    # turn 1: B = 2 - 0.25 = 1.75. Token c: A = 1.75
    # token b: delta = 1 + 0.8 * 0.25 - 1 = 0.2; A = 0.2 + 0.4 * 1.75 = 0.9
    # token a: delta = 0 + 0.5 * 1.0 - 0.5 = 0; A = 0.25 * 0.9 = 0.225
    returns = estimate(batch, settings).returns
    close(returns, [0, 0.725, 1.9, 0, 2.0])
    # three turns of one token: credit goes by turn_gamma * turn_lam per turn, whatever lam is
    batch = batches.build(
        [[0, 1, 0, 1, 0, 1]], rewards=[1.0], values=[0, 0.0, 0, 0.0, 0, 0.0], token_rewards=[0, 0, 0, 0, 0, 1.0]
    )
    returns = estimate(batch, TurnGaeSettings(gamma=0.1, lam=0.1, turn_gamma=0.5, turn_lam=0.5)).returns
    close(returns, [0, 0.0625, 0, 0.25, 0, 1.0])


@pytest.mark.parametrize("with_token_rewards", [False, True])
def test_with_one_turn_they_equal_the_estimators_without_turns(batches, close, with_token_rewards):
    masks = [[0, 1, 1], [0, 1], [0, 1, 1, 1], [0, 1, 0], [0, 1, 1]]
    placed = [0, 0.125, 0.5, 0, 1.0, 0, 0, 0.25, 0, 0, -1.0, 0, 0, 0, 2.0]
    rewards = [0.625, 1.0, 0.25, -1.0, 2.0]
    batch = batches.build(masks, groups=[0, 0, 0, 1, 1], rewards=rewards, values=torch.linspace(0, 1, 15))
    if with_token_rewards:
        batch = batch.with_(token_rewards=torch.tensor(placed, dtype=torch.float64))
    for scale_by in ("group", "batch", "none"):
        expected = estimate(batch, GrpoSettings(scale_by=scale_by)).advantages.tolist()
        close(estimate(batch, MtGrpoSettings(scale_by=scale_by)).advantages, expected)
        close(estimate(batch, GigpoSettings(scale_by=scale_by)).advantages, expected)
        anchors = torch.where(batch.loss_mask, torch.tensor([0] * 9 + [1] * 6)[: len(batch.loss_mask)], -1)
        close(estimate(batch.with_(anchors=anchors), GigpoSettings(scale_by=scale_by)).advantages, expected)
    expected = estimate(batch, GaeSettings(gamma=0.9, lam=0.8))
    found = estimate(batch, TurnGaeSettings(gamma=0.9, lam=0.8, turn_gamma=0.3, turn_lam=0.1))
    close(found.advantages, expected.advantages.tolist())
    close(found.returns, expected.returns.tolist())


def test_two_tracks_of_an_episode_count_once(batches, close):
    """Two trajectories of episode 0, each with the mean of their outcomes."""
    batch = batches.build([[0, 1], [0, 1], [0, 1]], episodes=[0, 0, 1], rewards=[1.0, 3.0, 0.0])
    close(estimate(batch, MtGrpoSettings(scale_by="none")).advantages, [0, 1, 0, 1, 0, -1])
