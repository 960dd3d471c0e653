"""Which groups are kept, why others are not, and what long answers cost."""

import dataclasses

import pytest

from hone.algorithms.filtering.group_filter import (
    metric_of,
    require_components,
    split_trainable,
    with_greedy_reward,
)
from hone.algorithms.filtering.overlong import overlong_penalty, punish_overlong
from hone.algorithms.filtering.settings import DynamicSamplingSettings, OverlongSettings
from hone.types import Prompt, Status, StopReason, Trajectory, TrajectoryGroup


def trajectory(reward, status=Status.OK, tokens=2, **components):
    return Trajectory(
        prompt_id="sort/3",
        sample=0,
        token_ids=(7, *range(tokens)),
        prompt_length=1,
        loss_mask=(0, *[1] * tokens),
        rollout_logprobs=(0.0,) * (tokens + 1),
        weight_versions=(-1,) * (tokens + 1),
        response="",
        reward=reward,
        components=components,
        stop_reason=StopReason.STOP,
        status=status,
        error="sandbox died" if status is Status.ENV_FAILED else "",
    )


def group(*trajectories):
    prompt = Prompt("sort/3", (7,), (), None, "sort")
    return TrajectoryGroup(prompt, trajectories)


def test_without_dynamic_sampling_only_untrainable_groups_go():
    good = group(trajectory(1.0), trajectory(1.0))
    failed = group(trajectory(0.0, Status.ENV_FAILED), trajectory(0.0, Status.ENGINE_FAILED))
    silent = group(trajectory(0.0, tokens=0), trajectory(1.0, tokens=0))
    kept, dropped = split_trainable([good, failed, silent], None)
    assert kept == [good]
    assert [reason for _, reason in dropped] == [
        "no trainable trajectory: 1 engine_failed, 1 env_failed",
        "no trainable trajectory has a generated token",
    ]
    assert [one.status for one in dropped[0].group.trajectories] == [Status.ENV_FAILED, Status.ENGINE_FAILED]


def test_dynamic_sampling_drops_groups_without_variance_and_marks_them():
    mixed = group(trajectory(1.0), trajectory(0.0))
    flat = group(trajectory(1.0), trajectory(1.0), trajectory(0.0, Status.ENV_FAILED))
    kept, dropped = split_trainable([flat, mixed], DynamicSamplingSettings())
    assert kept == [mixed]
    (marked, reason), *_ = dropped
    assert reason == "reward is 1 for all 2 trajectories"
    assert [one.status for one in marked.trajectories] == [Status.FILTERED, Status.FILTERED, Status.ENV_FAILED]
    assert [one.error for one in marked.trajectories] == [reason, reason, "sandbox died"]


def test_a_failure_gives_a_group_no_variance():
    """A failed trajectory's reward of 0 is no reward."""
    _, dropped = split_trainable(
        [group(trajectory(1.0), trajectory(0.0, Status.REWARD_FAILED))], DynamicSamplingSettings()
    )
    assert dropped


def test_dynamic_sampling_by_a_component():
    settings = DynamicSamplingSettings(metric="right")
    flat = group(trajectory(1.0, right=1.0), trajectory(0.5, right=1.0))
    mixed = group(trajectory(1.0, right=1.0), trajectory(1.0, right=0.0))
    assert split_trainable([flat, mixed], settings)[0] == [mixed]
    with pytest.raises(ValueError, match=r"sort/3.*'right'"):
        split_trainable([group(trajectory(1.0, wrong=1.0), trajectory(0.0))], settings)


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(10, 0.0), (60, 0.0), (70, -0.25), (80, -0.5), (100, -1.0), (120, -1.5)]
)
def test_overlong_penalty(tokens, penalty):
    assert overlong_penalty(tokens, 100, OverlongSettings(buffer_tokens=40)) == pytest.approx(penalty)
    assert overlong_penalty(tokens, 100, OverlongSettings(buffer_fraction=0.4)) == pytest.approx(penalty)


def test_the_buffer_of_a_short_answer_is_a_token():
    """0.2 of 4 tokens: only the last one is punished."""
    settings = OverlongSettings(buffer_fraction=0.2, factor=0.5)
    assert [overlong_penalty(tokens, 4, settings) for tokens in (2, 3, 4)] == [0.0, 0.0, -0.5]


def test_overlong_shaping_changes_trainable_trajectories_only():
    settings = OverlongSettings(buffer_tokens=4, factor=2.0)
    long, failed = (
        trajectory(1.0, Status.TRUNCATED, tokens=10, right=1.0),
        trajectory(0.0, Status.ENV_FAILED, tokens=10),
    )
    (shaped,) = punish_overlong([group(long, failed)], 10, settings)
    assert shaped.trajectories[0].reward == -1.0
    assert shaped.trajectories[0].components == {"right": 1.0, "overlong_penalty": -2.0}
    assert shaped.trajectories[1] is failed
    assert metric_of(shaped.trajectories[0], "reward") == 1.0


def test_wrong_answers_of_different_length_have_no_variance_of_reward():
    answers = group(trajectory(0.1, tokens=2), trajectory(0.1, tokens=9), trajectory(0.1, tokens=10))
    shaped = punish_overlong([answers], 10, OverlongSettings(buffer_tokens=3))
    assert len({one.reward for one in shaped[0].trajectories}) == 3
    assert split_trainable(shaped, DynamicSamplingSettings())[0] == []


def test_a_buffer_longer_than_the_response_is_refused():
    with pytest.raises(ValueError, match=r"buffer_tokens \(40\).*10 tokens"):
        punish_overlong([], 10, OverlongSettings(buffer_tokens=40))


def test_a_failed_greedy_answer_takes_its_group_with_it():
    failed = dataclasses.replace(trajectory(0.0, Status.REWARD_FAILED), error="no verdict")
    lost = dataclasses.replace(group(trajectory(1.0), trajectory(0.0, Status.ENV_FAILED)), greedy=failed)
    good = dataclasses.replace(group(trajectory(1.0)), greedy=trajectory(0.25))
    kept, dropped = split_trainable([lost, good], None)
    assert kept == [good]
    ((marked, reason),) = dropped
    assert reason == "the greedy answer failed: reward_failed"
    assert [one.status for one in marked.trajectories] == [Status.REWARD_FAILED, Status.ENV_FAILED]
    assert [one.error for one in marked.trajectories] == [f"{reason}: no verdict", "sandbox died"]


def test_the_greedy_reward_is_a_component_of_what_is_trained_on():
    judged = dataclasses.replace(
        group(trajectory(1.0, right=1.0), trajectory(0.0, Status.ENV_FAILED)), greedy=trajectory(0.25)
    )
    noted = with_greedy_reward(judged)
    assert [one.components for one in noted.trajectories] == [{"right": 1.0, "greedy_reward": 0.25}, {}]
    plain = group(trajectory(1.0))
    assert with_greedy_reward(plain) is plain


def test_the_greedy_answer_is_punished_for_its_length_too():
    long = dataclasses.replace(group(trajectory(1.0, tokens=10)), greedy=trajectory(0.5, tokens=8))
    (shaped,) = punish_overlong([long], 10, OverlongSettings(buffer_tokens=4))
    assert shaped.greedy.reward == 0.5 - 0.5


def episodes(*trajectories):
    return group(*(one.with_(sample=number, episode=number) for number, one in enumerate(trajectories)))


def test_the_lone_survivor_of_a_group_that_failures_shrank_is_dropped():
    failed = trajectory(0.0, Status.ENV_FAILED)
    lone = episodes(trajectory(-52.0), failed, failed)
    pair, by_setting = episodes(trajectory(1.0), trajectory(0.0), failed), episodes(trajectory(1.0))
    two_of_one_episode = group(trajectory(1.0), trajectory(1.0), failed.with_(episode=1))
    kept, dropped = split_trainable([lone, pair, by_setting, two_of_one_episode], None)
    assert kept == [pair, by_setting]
    reason = "one of 3 trajectories is left to compare with: 2 env_failed, 1 ok"
    assert dropped[0].reason == reason
    assert [one.status for one in dropped[0].group.trajectories] == [Status.FILTERED, *[Status.ENV_FAILED] * 2]
    assert dropped[1].group.trajectories[0].status is Status.FILTERED
    assert split_trainable([lone], None, compares_group=False)[0] == [lone], "an estimator without group baseline"


def test_truncated_answers_keep_their_reward_and_get_no_loss():
    cut = trajectory(0.0, Status.TRUNCATED)
    mixed, all_cut = episodes(trajectory(1.0), cut), episodes(cut, cut)
    kept, dropped = split_trainable([mixed, all_cut], DynamicSamplingSettings(), mask_truncated=True)
    assert [one.loss_tokens for one in kept[0].trajectories] == [2, 0]
    assert [one.loss_mask for one in kept[0].trajectories] == [(0, 1, 1)] * 2, "what was sampled stays known"
    assert [one.reward for one in kept[0].trajectories] == [1.0, 0.0]
    assert dropped[0].reason == "every trainable trajectory is truncated, and algorithm.overlong.mask is on"
    assert split_trainable([mixed], None)[0] == [mixed], "off unless asked for"


def test_a_missing_reward_component_is_named_with_its_prompt():
    good, without = trajectory(1.0, right=1.0, form=0.5), trajectory(1.0, right=1.0).with_(sample=3)
    failed = trajectory(0.0, Status.REWARD_FAILED)
    require_components([group(good, failed)], ["form", "right"])
    with pytest.raises(
        ValueError, match=r"prompt sort/3, sample 3: the reward has no component 'form' \(it has: right\)"
    ):
        require_components([group(good, without)], ["form", "right"])
