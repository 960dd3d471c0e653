"""mean@n, best@n and maj@n, by hand."""

import re

from hone.trainers.policy.evaluation import reduce_answers
from hone.types import Prompt, Status, StopReason, Trajectory, TrajectoryGroup


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
