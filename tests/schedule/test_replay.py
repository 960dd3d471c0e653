"""The plan of a replay: what is asked for, and what differs."""

from pathlib import Path

import pytest

from hone.rollout.pending import PendingRequest
from hone.schedule.replay import RecordedRun, ReplayError
from hone.types import GenerationRequest, SamplingParams

RECORDS = [
    {
        "step": 1,
        "version": 0,
        "admitted": [0, 1],
        "taken": [0],
        "dropped": {},
        "spans": {"0": [[[0, 3]]]},
        "batch": "a",
    },
    {
        "step": 2,
        "version": 1,
        "admitted": [2],
        "taken": [1, 2],
        "dropped": {},
        "spans": {"1": [[[0, 2], [1, 4]], [[0, 1]]], "2": [[[1, 5]]]},
        "batch": "b",
    },
]


@pytest.fixture
def plan():
    return RecordedRun(Path("schedule.jsonl"), RECORDS)


def test_turns_of_an_answer_continue_its_spans(plan):
    draw = plan.draw(1)
    assert draw.rest("1/1/0/0") == ((0, 2), (1, 4))
    draw.sampled("1/1/0/0", 3)
    assert draw.rest("1/1/0/1") == ((1, 3),)
    assert draw.rest("1/1/1/0") == ((0, 1),)
    draw.sampled("1/1/0/1", 3)
    with pytest.raises(ReplayError, match="answer 0 to draw 1 goes on after the 6 tokens"):
        draw.rest("1/1/0/2")
    assert draw.rest("1/1/0/0") == ((0, 2), (1, 4))  # the episode is played again
    assert plan.draw(3) is None


def test_a_version_is_needed_until_the_draws_that_used_it_have_ended(plan):
    assert [version for version in range(4) if plan.needs(version)] == [0, 1]
    plan.ended(0)
    assert plan.needs(0)
    plan.ended(1)
    assert not plan.needs(0)
    assert plan.needs(1)
    plan.ended(2)
    assert not plan.needs(1)


def test_a_replay_goes_on_only_where_no_draw_needs_weights_of_before(plan):
    with pytest.raises(ReplayError, match="draw 1 needs version 0, which no checkpoint has"):
        plan.resumed(1, still_open=[1], first_new=2)
    plan.resumed(1, still_open=[], first_new=2)
    assert [version for version in range(4) if plan.needs(version)] == [1]


def test_the_first_field_that_differs_is_named(plan):
    plan.check({**RECORDS[1], "more": "of a later version of hone"})
    plan.check({"step": 3})  # the record has ended
    with pytest.raises(ReplayError, match=r"step 2 .* in 'taken': expected \[1, 2\], found \[1\]"):
        plan.check({**RECORDS[1], "taken": [1], "batch": "c"})


def test_a_request_moves_from_version_to_version():
    def after(tokens, spans):
        request = GenerationRequest("1/1/0/0", (7,), SamplingParams(20), versions=(0, 9), spans=spans)
        pending = PendingRequest(request, tokens=[1] * tokens)
        return pending.restrict(), pending.request.versions

    asked = [after(tokens, ((3, 2), (5, 1), (6, 4))) for tokens in (0, 1, 2, 3, 9)]
    assert asked == [(2, (3, 3)), (1, (3, 3)), (1, (5, 5)), (None, (6, 6)), (None, (6, 6))]
    assert after(4, ()) == (None, (0, 9))
