"""How evaluation samples; mean@n, best@n and maj@n, by hand."""

import json
import re

import pytest

from hone.config import load
from hone.tracking.trackers.jsonl import rollout_lines
from hone.trainers.policy.evaluation import reduce_answers
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.launch import run_policy
from hone.types import Prompt, Status, StopReason, Trajectory, TrajectoryGroup
from tests.trainers.tiny import recipe


def answer(response, value, sample=0, status=Status.OK):
    components = {} if value is None else {"exact_match": value}
    return Trajectory(
        "p",
        sample,
        (1, 2),
        1,
        (0, 1),
        (0.0, -1.0),
        (-1, 0),
        response,
        StopReason.STOP,
        status,
        reward=value or 0.0,
        components=components,
    )


def group(*answers):
    return TrajectoryGroup(Prompt("p", (1,), (), "7", "set"), answers)


def test_one_answer_each_is_the_plain_mean():
    groups = [group(answer("7", 1.0)), group(answer("8", 0.0)), group(answer("7", 1.0)), group(answer("9", 0.0))]
    assert reduce_answers(groups, "exact_match") == {"exact_match": 0.5}


def test_mean_best_and_majority_of_four():
    groups = [
        group(answer("8", 0.0), answer("7", 1.0), answer("8", 0.0), answer("9", 0.0)),  # the majority is wrong
        group(answer("7", 1.0), answer(" 7\n", 1.0), answer("1", 0.0), answer("2", 0.0)),  # and here right
    ]
    assert reduce_answers(groups, "exact_match") == {
        "exact_match": 3 / 8,
        "exact_match/mean@4": 3 / 8,
        "exact_match/best@4": 1.0,
        "exact_match/maj@4": 0.5,
    }


def test_a_vote_is_the_last_match_of_the_pattern():
    groups = [group(answer("3+4 is 7", 1.0), answer("so 7", 1.0), answer("so 8", 0.0))]
    assert reduce_answers(groups, "exact_match")["exact_match/maj@3"] == 1.0
    groups = [group(answer("so 8", 0.0), answer("3+4 is 7", 1.0), answer("it is 7", 1.0))]
    assert reduce_answers(groups, "exact_match")["exact_match/maj@3"] == 0.0  # three different texts: the first
    assert reduce_answers(groups, "exact_match", re.compile(r"\d"))["exact_match/maj@3"] == 1.0


def test_a_failed_reward_counts_in_nothing():
    failed = answer("7", None, status=Status.REWARD_FAILED)
    groups = [group(answer("7", 1.0), failed), group(failed, failed)]
    assert reduce_answers(groups, "exact_match") == {
        "exact_match": 1.0,
        "exact_match/mean@2": 1.0,
        "exact_match/best@2": 1.0,
        "exact_match/maj@2": 1.0,
    }
    assert reduce_answers([group(failed)], "exact_match") == {}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """`answers(setting, ...)`: the sampled tokens for each held-out prompt, always from the same policy."""

    def found(*overrides):
        folder = tmp_path_factory.mktemp("sampling")
        path = recipe(folder, {"tracking": {"trackers": ["jsonl"], "rollouts_per_step": "all"}})
        sampling = [f"evaluation.sampling.{one}" for one in overrides]
        run_policy(load(PolicyRunConfig, path, ["run.steps=1", *sampling]))
        lines = [json.loads(line) for line in rollout_lines(folder / "run/rollouts.jsonl.gz")]
        return [one["token_ids"] for one in lines if one["step"] == 0]

    return found


@pytest.mark.slow
def test_evaluation_samples_as_its_own_section_says(answers):
    greedy, warm = answers(), answers("temperature=1.5")
    assert len(greedy) == 8
    assert warm != greedy
    # Either filter leaves the likeliest token alone, so the temperature changes nothing.
    assert answers("temperature=1.5", "top_k=1") == answers("temperature=1.5", "top_p=0.001") == greedy
    assert max(map(len, warm)) == 3  # rollout.sampling.max_response_tokens
    assert answers("temperature=1.5", "max_response_tokens=2") == [tokens[:2] for tokens in warm]
