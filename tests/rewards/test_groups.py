"""Rewards that see the whole group: values, and every way in which a call for a group can fail."""

import json
import re
from pathlib import Path

import pytest

from hone.cli.main import main
from hone.rewards.base import judge_group
from hone.rewards.binding import CannotBind, bind
from hone.types import Status, TurnSpan


def test_each_answer_gets_its_own_value(score, group, user):
    components = {
        "brief": {"reward": user("shortest")},
        "rank": {"reward": user("ranked"), "weight": 0.25, "options": {"scale": 2.0}},
        "length": {"reward": user("length"), "weight": 0.0},
    }
    (scored, other), metrics = score(components, [group(["a 7", "7", "8", "so: 7"], 7), group(["22"], 2)])
    # right and shortest: the second; ranks by length: 7, 8, "a 7", "so: 7" -> 2, 0, 1, 3, times 2
    assert [one.components["brief"] for one in scored.trajectories] == [0.0, 1.0, 0.0, 0.0]
    assert [one.components["rank"] for one in scored.trajectories] == [4.0, 0.0, 2.0, 6.0]
    assert [one.components["rank/size"] for one in scored.trajectories] == [4.0] * 4
    assert [one.components["length"] for one in scored.trajectories] == [3.0, 1.0, 1.0, 5.0]
    assert [one.reward for one in scored.trajectories] == [1.0, 1.0, 0.5, 1.5]
    assert [one.reward for one in other.trajectories] == [1.0]
    assert (metrics["reward/scored"], metrics["reward/failed"]) == (5, 0)


def test_a_coroutine_and_a_class_score_groups_too(score, group, user):
    components = {"same": {"reward": user("alike")}, "new": {"reward": user("Distinct"), "options": {"bonus": 10.0}}}
    scored, _ = score(components, [group(["a", "b", "a"], 1), group(["c", "d"], 1)])
    assert [[one.reward for one in found.trajectories] for found in scored] == [[2.0, 11.0, 2.0], [11.0, 11.0]]


def test_answers_that_had_failed_are_not_in_the_group(score, group, user):
    played = group(["7", "77", "777"], 7)
    lost = played.trajectories[0].with_(status=Status.ENV_FAILED, error="lost")
    (scored,), metrics = score(
        {"a": {"reward": user("shortest")}}, [type(played)(played.prompt, (lost, *played.trajectories[1:]))]
    )
    assert [one.status for one in scored.trajectories] == [Status.ENV_FAILED, Status.OK, Status.OK]
    assert [one.components.get("a") for one in scored.trajectories] == [None, 1.0, 0.0]
    assert metrics["reward/scored"] == 2
    nobody = type(played)(played.prompt, (lost, lost))
    (scored,), metrics = score({"a": {"reward": user("shortest")}}, [nobody])
    assert [one.error for one in scored.trajectories] == ["lost", "lost"]
    assert metrics["reward/failed"] == 0


@pytest.mark.parametrize(
    ("mood", "error"),
    [
        ("short", r"^a: ValueError: the reward of a group returned 2 values for 3 answers$"),
        ("number", r"^a: TypeError: the reward of a group is 1.0 \(float\); expected a list of 3 values$"),
        ("raise", r"^a: RuntimeError: no verdict on two lines \(at .*user_rewards.py:\d+\)$"),
        ("die", r"^a: the reward process ended with exit status 3; it printed: goodbye"),
        ("sleep", r"^a: no answer within 0.5 s$"),
    ],
)
def test_a_call_that_fails_fails_its_group_only(score, group, user, mood, error):
    groups = [group(["x", "y", "z"], None, mood=mood), group(["x", "y"], None, mood="fine")]
    components = {"a": {"reward": user("group_temper"), "timeout_s": 0.5}, "length": {"reward": user("length")}}
    (failed, fine), metrics = score(components, groups)
    assert [one.status for one in failed.trajectories] == [Status.REWARD_FAILED] * 3
    assert len({one.error for one in failed.trajectories}) == 1
    assert re.search(error, failed.trajectories[0].error)
    assert [one.components for one in failed.trajectories] == [{"length": 1.0}] * 3
    assert [one.reward for one in fine.trajectories] == [2.0, 2.0]
    assert (metrics["reward/failed"], metrics["reward/scored"]) == (3, 2)
    assert metrics["reward/timeouts"] == (mood == "sleep")  # calls, not answers


def test_a_bad_value_fails_its_answer_only(score, group, user):
    (scored,), _ = score({"a": {"reward": user("group_temper")}}, [group(["x"] * 4, None, mood="one")])
    assert [one.status is Status.REWARD_FAILED for one in scored.trajectories] == [False, True, True, False]
    assert scored.trajectories[1].error == "a: ValueError: the reward is nan; expected a finite number"
    assert [scored.trajectories[i].reward for i in (0, 3)] == [1.0, 2.0]


def test_calls_are_counted_for_the_group(score, group, user):
    components = {"a": {"reward": user("shortest"), "max_calls_per_step": 2}}
    scored, _ = score(components, [group(["1", "11"], 1) for _ in range(3)])
    errors = [[one.error for one in found.trajectories] for found in scored]
    spent = "a: its 2 calls of this step are spent (max_calls_per_step)"
    assert errors == [["", ""], ["", ""], [spent, spent]]


def test_rewards_of_turns_are_added(score, group, user):
    played = group(["7", "77"], 7)
    turns = (TurnSpan(0, 1, reward=0.5), TurnSpan(1, 2))
    first, second = played.trajectories
    (scored,), _ = score(
        {"a": {"reward": user("shortest")}}, [type(played)(played.prompt, (first.with_(spans=turns), second))]
    )
    assert [one.reward for one in scored.trajectories] == [1.5, 0.0]


def one_and_all(responses, response):
    return None


def with_more(responses, tokenizer):
    return None


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (one_and_all, "it names 'responses', all answers to a prompt, and 'response', which is of one; remove one"),
        (with_more, r"cannot fill its parameter 'tokenizer' \(it can: responses, ground_truth, row, extra_info"),
    ],
)
def test_what_cannot_be_called_is_refused(function, message):
    with pytest.raises(CannotBind, match=message):
        bind(function, {})


def test_an_optional_parameter_does_not_ask_for_the_group():
    binding = bind(lambda response, responses=None: (response, responses), {})
    assert not binding.whole_group
    assert binding.names == ("response",)
    assert bind(lambda responses, **more: None, {}).names == ("responses", "ground_truth", "row")


def test_arrays_are_lists():
    numpy = pytest.importorskip("numpy")
    assert judge_group(numpy.array([1, 2.5]), 2) == [(1.0, {}), (2.5, {})]
    with pytest.raises(TypeError, match=r"'ab'.*expected a list of 2 values"):
        judge_group("ab", 2)


def test_the_example_of_the_page(tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text(encoding="utf-8")
    section = page.partition("### A reward that sees the whole group")[2].partition("\n### ")[0]
    for language, name in (("python", "my_rewards.py"), ("json", "group.jsonl")):
        (text,) = re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
        (tmp_path / name).write_text(text, encoding="utf-8")
    ((command, printed),) = re.findall(r"\$ hone (.*)\n(.*), \d", section)
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 0
    assert capsys.readouterr().out.startswith(printed.rpartition(", ")[0])
    rewards = [json.loads(line)["reward"] for line in (tmp_path / "ranked.jsonl").read_text().splitlines()]
    assert rewards == [0.0, 1.0, 0.0, 1.0]
