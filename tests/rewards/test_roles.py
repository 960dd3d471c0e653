"""Rewards of episodes in which the policy plays several roles: a function learns which role an answer is of."""

import asyncio
import json

import pytest

from hone.cli.main import main
from hone.rewards.judge import JudgeFailed, PairwiseJudge
from hone.types import Status, TrajectoryGroup

ROLES = ("proposer", "solver", "proposer", "solver")


@pytest.fixture
def played(group):
    """Two episodes of self-play."""
    plain = group(["what?", "it is 42", "say 42", "what?"], None)
    roles = [
        one.with_(role=role, episode=place // 2)
        for place, (one, role) in enumerate(zip(plain.trajectories, ROLES, strict=True))
    ]
    return TrajectoryGroup(plain.prompt, tuple(roles))


def test_one_function_rewards_two_roles_differently(score, group, played, user):
    components = {
        "goal": {"reward": user("goal_of_role")},
        "handicap": {"reward": user("Handicap"), "weight": 0.5, "options": {"solver": -1.0}},
        "shared": {"reward": user("zero_sum"), "weight": 10.0},
    }
    (scored,), _ = score(components, [played])
    found = [[one.components[name] for name in components] for one in scored.trajectories]
    # the goals are "?" and "42"; one of two solvers says 42, so proposers share 1 - 1/2
    assert found == [[1.0, 0.0, 0.5], [1.0, -1.0, 1.0], [0.0, 0.0, 0.5], [0.0, -1.0, 0.0]]
    assert [one.reward for one in scored.trajectories] == [6.0, 10.5, 5.0, -0.5]
    (alone,), _ = score({"told": {"reward": user("told_role")}}, [group(["a"])])
    assert alone.trajectories[0].reward == 0.0, "with one role only, the role is empty"


def test_answers_are_compared_within_a_role():
    """The judge is asked about proposers and about solvers; equal texts are ties that need no judge."""
    judge = PairwiseJudge(url="http://127.0.0.1:1/v1", model="m")
    assert asyncio.run(judge(["a", "b", "a", "b"], None, {}, ROLES)) == [0.5] * 4
    with pytest.raises(JudgeFailed, match="has one answer of each role only"):
        asyncio.run(judge(["a", "b"], None, {}, ROLES[:2]))


def test_the_only_answer_of_a_role_fails_alone(score, group):
    """Episodes may end before a role has played: the others of the prompt are compared all the same."""
    plain = group(["a", "b", "a"], None)
    roles = [one.with_(role=role) for one, role in zip(plain.trajectories, ROLES[:3], strict=True)]
    options = {"url": "http://127.0.0.1:1/v1", "model": "m"}
    (scored,), _ = score(
        {"better": {"reward": "pairwise_judge", "options": options}}, [TrajectoryGroup(plain.prompt, tuple(roles))]
    )
    assert [one.status for one in scored.trajectories] == [Status.OK, Status.REWARD_FAILED, Status.OK]
    assert [one.reward for one in scored.trainable] == [0.5, 0.5]
    assert "no other answer has the role solver" in scored.trajectories[1].error


def test_a_file_may_have_the_role_of_each_answer(tmp_path, user, capsys):
    rows = [
        {"prompt": "p", "response": text, "ground_truth": None, "role": role}
        for text, role in zip(["what?", "42", "say", "41"], ROLES, strict=True)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def rewards(function):
        command = ["score", "--reward", user(function), "--input", str(tmp_path / "in.jsonl")]
        assert main([*command, "--output", str(tmp_path / "out.jsonl")]) == 0
        lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
        assert [line["role"] for line in lines] == list(ROLES)
        return [line["reward"] for line in lines]

    assert rewards("goal_of_role") == [1.0, 1.0, 0.0, 0.0]
    assert rewards("zero_sum") == [0.5, 1.0, 0.5, 0.0]
    (tmp_path / "bad.jsonl").write_text(json.dumps({**rows[0], "role": 3}))
    command = ["score", "--reward", user("told_role"), "--input", str(tmp_path / "bad.jsonl")]
    assert main([*command, "--output", str(tmp_path / "none.jsonl")]) != 0
    assert "bad.jsonl line 1: 'role', the role that the policy played, should be text" in capsys.readouterr().err
