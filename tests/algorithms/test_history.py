"""Skipping prompts before rollout by what their last groups were like."""

import json

import pytest

from hone.algorithms.filtering.history import PromptHistory
from hone.algorithms.filtering.settings import SkipZeroVarianceSettings

FLAT_GOOD, FLAT_BAD, MIXED = [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]


def history(**settings):
    return PromptHistory(SkipZeroVarianceSettings(**{"explore_step": 0.0, **settings}))


def test_a_prompt_is_skipped_the_more_often_the_longer_it_taught_nothing():
    seen = history(explore=0.5)
    assert seen.skip_probability("a") == 0.0
    for expected in (0.5, 0.75, 0.875):
        seen.observe([("a", FLAT_BAD), ("b", MIXED)])
        assert seen.skip_probability("a") == pytest.approx(expected)
    assert seen.skip_probability("b") == 0.0
    seen.observe([("a", MIXED)])
    assert seen.skip_probability("a") == 0.0


def test_the_chances_move_towards_the_targets_of_their_kind():
    seen = history(explore=0.5, explore_step=0.1, target_easy=0.25, target_hard=0.5)
    batch = [("a", FLAT_GOOD), ("b", FLAT_GOOD), ("c", FLAT_BAD), ("d", MIXED)]
    seen.observe(batch)
    assert seen.skip_probability("a") == seen.skip_probability("c") == 0.5, "moved before a prompt has come back"
    # Two of four are easy (above 0.25: less exploring), one is hard (below 0.5: more).
    seen.observe(batch)
    assert seen.skip_probability("a") == pytest.approx(1 - 0.4**2)
    assert seen.skip_probability("c") == pytest.approx(1 - 0.6**2)
    metrics = seen.metrics()
    assert metrics["rollout/explore_easy"].value == pytest.approx(0.4)
    assert metrics["rollout/explore_hard"].value == pytest.approx(0.6)
    assert metrics["rollout/prompts_without_variance"].value == 3


def test_a_share_on_its_target_moves_down():
    seen = history(explore=0.5, explore_step=0.1, target_easy=0.5, target_hard=0.0)
    for _ in range(2):
        seen.observe([("a", FLAT_GOOD), ("b", MIXED)])
    assert seen.metrics()["rollout/explore_easy"].value == pytest.approx(0.4)


def test_a_prompt_keeps_a_least_chance():
    seen = history(explore=0.5)
    for _ in range(30):
        seen.observe([("a", FLAT_BAD)])
    assert seen.skip_probability("a") == 0.99


def test_the_chances_stay_within_their_bounds():
    seen = history(explore=0.2, explore_step=0.15, target_easy=0.0, target_hard=1.0)
    for _ in range(9):
        seen.observe([("a", FLAT_GOOD), ("b", MIXED)])
    assert seen.metrics()["rollout/explore_easy"].value == 0.05
    assert seen.metrics()["rollout/explore_hard"].value == 0.95


def test_a_batch_of_nothing_moves_nothing():
    seen = history(explore_step=0.1)
    seen.observe([])
    assert seen.metrics()["rollout/explore_easy"].value == 0.5


def test_it_survives_a_restart():
    first = history(explore_step=0.1)
    first.observe([("a", FLAT_GOOD), ("b", FLAT_BAD), ("c", MIXED)])
    second = history(explore_step=0.1)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert first.state_dict()["streaks"].keys() == {"a", "b"}
    for one in (first, second):
        one.observe([("a", FLAT_GOOD), ("b", MIXED)])
    assert second.state_dict() == first.state_dict()
    assert second.skip_probability("a") == first.skip_probability("a") > 0.5
