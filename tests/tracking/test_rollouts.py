"""Lines of rollouts.jsonl.gz: what they say of a trajectory, and which trajectories get one."""

import math

import pytest

from hone.tracking.report.rows import advantage_of
from hone.tracking.rollouts import OfTrainer, TokenTexts, places_to_keep, rollout_record, spread
from hone.types import Called, Status, TrajectoryGroup, TurnSpan

from .conftest import decode


def test_a_record_tells_the_answer_token_by_token(group):
    record = rollout_record(group((5,), (3, 4, 8)), 1, TokenTexts(decode), OfTrainer((0.0, 0.0, -0.5, -1.25, -1.5)))
    assert record == {
        "prompt_id": "sort/1",
        "draw": 4,
        "sample": 1,
        "role": "",
        "status": "ok",
        "stop_reason": "stop",
        "reward": 0.25,
        "printed": {},
        "advantages": None,
        "components": {"exact_match": 1.0},
        "error": "",
        "question": "Sort:",
        "prompt": "Sort:",
        "response": " 3 1<|end|>",
        "ground_truth": [1, 3],
        "response_length": 3,
        "turns": 1,
        "conversation": [],
        "weight_versions": [[7, 2], [8, 1]],
        "prompt_token_ids": [1, 2],
        "token_ids": [3, 4, 8],
        "tokens": [" 3", " 1", "<|end|>"],
        "rollout_logprobs": [-0.5, -1.0, -1.5],
        "logprob_gap": [0.0, -0.25, 0.0],
    }


def test_observed_tokens_have_no_logprob(group):
    made = group((3, 5, 4))
    trajectory = made.trajectories[0].with_(loss_mask=(0, 0, 1, 0, 1), weight_versions=(-1, -1, 7, -1, 8))
    record = rollout_record(type(made)(made.prompt, (trajectory,)), 0, TokenTexts(decode), OfTrainer((0.0,) * 5))
    assert record["rollout_logprobs"] == [-0.5, None, -1.5]
    assert record["logprob_gap"] == [0.5, None, 1.5]
    assert record["weight_versions"] == [[7, 1], [8, 1]]


def test_a_failed_trajectory_has_no_reward(group):
    record = rollout_record(group((3,), status=Status.REWARD_FAILED), 0, TokenTexts(decode))
    assert record["reward"] is None
    assert record["logprob_gap"] is None


def test_logprobs_that_are_not_finite_stay_so(group):
    made = group((3,))
    trajectory = made.trajectories[0].with_(rollout_logprobs=(0.0, 0.0, -math.inf))
    record = rollout_record(type(made)(made.prompt, (trajectory,)), 0, TokenTexts(decode))
    assert record["rollout_logprobs"] == [-math.inf]


def test_an_advantage_is_one_number_where_tokens_share_it(group):
    shared, of_tokens = OfTrainer(None, (0.0, 0.0, 0.5, 0.5, 0.5)), OfTrainer(None, (0.0, 0.0, 0.5, -0.25, 1.0))
    given = [rollout_record(group((3, 4, 8)), 0, TokenTexts(decode), one) for one in (shared, of_tokens, OfTrainer())]
    assert [one["advantages"] for one in given] == [0.5, [0.5, -0.25, 1.0], None]
    assert [advantage_of(one) for one in given] == [0.5, pytest.approx(1.25 / 3, abs=1e-6), None]


def test_trainer_logprobs_of_another_length_are_an_error(group):
    with pytest.raises(ValueError, match="sort/1 sample 0: 2 trainer log-probs for 3 tokens"):
        rollout_record(group((3,)), 0, TokenTexts(decode), OfTrainer((0.0, 0.0)))


def test_each_token_is_decoded_once():
    asked = []

    def counting(ids):
        asked.append(tuple(ids))
        return decode(ids)

    texts = TokenTexts(counting)
    assert texts((3, 4, 3)) == [" 3", " 1", " 3"]
    assert texts((4,)) == [" 1"]
    assert asked == [(3,), (4,)]


def test_what_is_kept_are_whole_groups_others_in_each_step(group):
    groups = [group((3,), (4,)) for _ in range(4)]
    assert places_to_keep(groups, 4, 0) == [(0, 0), (0, 1), (3, 0), (3, 1)]
    assert places_to_keep(groups, 4, 1) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert places_to_keep(groups, 1, 2) == [(2, 0)]  # less than a group: a part of one
    assert places_to_keep(groups, None) == places_to_keep(groups, 8) == [(i, j) for i in range(4) for j in range(2)]
    assert places_to_keep(groups, 0) == []
    assert [spread(5, keep) for keep in (1, 2, 9)] == [[0], [0, 4], [0, 1, 2, 3, 4]]
    assert all(len(set(spread(total, keep))) == min(total, keep) for total in range(30) for keep in range(30))


def test_the_first_answer_that_failed_is_kept(group):
    groups = [group((3,), (4,)) for _ in range(4)]
    for at in (1, 2):
        bad = groups[at].trajectories[1].with_(status=Status.REWARD_FAILED)
        groups[at] = type(groups[at])(groups[at].prompt, (groups[at].trajectories[0], bad))
    assert places_to_keep(groups, 2, 0) == [(0, 0), (0, 1), (1, 1)]
    assert places_to_keep(groups, 2, 1) == [(1, 0), (1, 1)]


def test_a_record_has_the_turns_with_their_calls(group):
    one = group((3, 4, 8)).trajectories[0]
    call = Called("look", '{"at": 1}', "a door", seconds=0.5, fault="error")
    spans = (TurnSpan(2, 3, reward=0.5, anchor="room", calls=(call,)), TurnSpan(4, 5))
    played = TrajectoryGroup(group((5,)).prompt, (one.with_(spans=spans),))
    assert rollout_record(played, 0, TokenTexts(decode))["conversation"] == [
        {
            "said": " 3",
            "calls": [{"tool": "look", "arguments": '{"at": 1}', "result": "a door", "seconds": 0.5, "fault": "error"}],
            "read": " 1",
            "reward": 0.5,
            "anchor": "room",
        },
        {"said": "<|end|>", "calls": [], "read": "", "reward": None, "anchor": ""},
    ]
