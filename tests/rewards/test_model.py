"""Reward models in a rubric: two moments of judging, one weighted sum, and no reward before all of it is known."""

import asyncio
import dataclasses
import json
import math

import pytest
from pydantic import ValidationError

from hone.config import ConfigError
from hone.data.packing import pack
from hone.rewards.model import Answer, RewardModels
from hone.rewards.pool import Outcome
from hone.rewards.rubric import Rubric
from hone.rewards.settings import RewardComponent, RewardConfig
from hone.types import Status

MODEL = {"model": {"path": "nowhere"}, "weight": 0.5}


def length(answers):
    """A model that scores an answer by its length; an empty one cannot be scored."""
    return [Outcome(value=float(len(one.response))) if one.response else Outcome(error="empty") for one in answers]


def judged(components, groups, **colocated):
    """(after `score`, after `complete`, metrics)."""

    async def run():
        rubric = Rubric(RewardConfig(components=components, workers=1), RewardModels({}, colocated))
        await rubric.start()
        try:
            scored = await asyncio.gather(*(rubric.score(group) for group in groups))
            done = rubric.complete(scored)
            return scored, done, {name: metric.value for name, metric in rubric.metrics().items()}
        finally:
            await rubric.close()

    return asyncio.run(run())


def test_function_and_model_are_weighed_together(user, group):
    components = {"right": {"reward": "exact_match"}, "liked": MODEL}
    scored, done, counts = judged(components, [group(["four", "abc"], "abc")], liked=length)
    assert all(math.isnan(one.reward) for one in scored[0].trajectories)
    assert [one.reward for one in done[0].trajectories] == [2.0, 2.5]
    assert [one.components for one in done[0].trajectories] == [
        {"right": 0.0, "liked": 4.0},
        {"right": 1.0, "liked": 3.0},
    ]
    assert counts["reward/scored"] == 2


def test_what_is_not_complete_cannot_be_trained_on(group):
    scored, done, _ = judged({"liked": MODEL}, [group(["ab"])], liked=length)
    with pytest.raises(ValueError, match="reward nan"):
        pack(scored)
    assert pack(done).rewards.tolist() == [1.0]


def test_an_answer_that_the_model_cannot_score_has_failed_and_keeps_what_is_known(group):
    components = {"right": {"reward": "exact_match"}, "liked": MODEL}
    _, done, counts = judged(components, [group(["", "ab"], "")], liked=length)
    lost, kept = done[0].trajectories
    assert (lost.status, lost.error, lost.components) == (Status.REWARD_FAILED, "liked: empty", {"right": 1.0})
    assert (kept.status, kept.reward) == (Status.OK, 1.0)
    assert (counts["reward/scored"], counts["reward/failed"]) == (1, 1)


def test_everything_collected_is_asked_at_once_failures_left_out_and_greedy_answers_included(group):
    asked = []

    def model(answers):
        asked.append([one.response for one in answers])
        return length(answers)

    first, second = group(["a", "bb"]), group(["ccc"])
    failed = dataclasses.replace(first.trajectories[0], status=Status.ENV_FAILED, error="gone")
    first = dataclasses.replace(first, trajectories=(failed, first.trajectories[1]))
    greedy = dataclasses.replace(second.trajectories[0], response="dddd", reward=math.nan)

    async def run():
        rubric = Rubric(RewardConfig(components={"liked": MODEL}), RewardModels({}, {"liked": model}))
        return rubric.complete([first, dataclasses.replace(second, greedy=greedy)])

    one, other = asyncio.run(run())
    assert asked == [["bb", "ccc", "dddd"]]
    assert one.trajectories[0] is failed
    assert one.trajectories[1].reward == 1.0
    assert (other.trajectories[0].reward, other.greedy.reward) == (1.5, 2.0)
    assert one.greedy is None


def test_an_answer_crosses_to_a_process_unchanged(group):
    played = group(["ab"], content="é")
    answer = Answer.of(played.prompt, played.trajectories[0])
    assert answer == Answer((1, 2), 1, ({"role": "user", "content": "?"},), "ab", 1)
    offered = dataclasses.replace(played.prompt, tools=({"name": "add", "parameters": {"x": {"type": "int"}}},))
    for one in (answer, Answer.of(offered, played.trajectories[0])):
        assert Answer.decode(json.loads(one.encode())) == one
    assert one.tools == offered.tools


def test_a_model_that_nobody_placed_is_refused():
    with pytest.raises(ConfigError, match=r"reward\.components\.liked\.model"):
        Rubric(RewardConfig(components={"liked": MODEL}))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "exactly one of reward and model should be set, found neither"),
        ({"reward": "gsm8k", "model": {"path": "x"}}, "found both"),
        ({"model": {"path": "x"}, "options": {"a": 1}}, "under model"),
        ({"model": {"path": "x", "environment": {"A": "1"}}}, "place: process"),
        ({"model": {"path": "x", "aggregation": "max"}}, "'last', 'mean' or 'min'"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        RewardComponent(**settings)
