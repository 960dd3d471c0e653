"""How evaluation samples; mean@n, best@n and maj@n, by hand."""

import json
import time

import pytest

from hone.config import load
from hone.tracking.catalogue import describe_metric
from hone.tracking.names import held_out_headlines
from hone.tracking.trackers.jsonl import rollout_lines
from hone.trainers.policy import evaluation
from hone.trainers.policy.collection import RolloutLog
from hone.trainers.policy.evaluation import EvaluationSet, Evaluator, Vote, reduce_answers
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.launch import run_policy
from hone.types import Prompt, Status, StopReason, Trajectory, TrajectoryGroup
from hone.workers.rollout_role import RolloutHandle
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
    """A prompt's answers, each in an episode of its own."""
    return played(*(one.with_(episode=number) for number, one in enumerate(answers)))


def played(*answers):
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
        "exact_match/pass@2": (1 / 2 + 5 / 6) / 2,  # 3 of the 6 pairs have the one right answer, 5 one of the two
    }


def test_a_vote_is_the_last_match_of_the_pattern():
    groups = [group(answer("3+4 is 7", 1.0), answer("so 7", 1.0), answer("so 8", 0.0))]
    assert reduce_answers(groups, "exact_match")["exact_match/maj@3"] == 1.0
    groups = [group(answer("so 8", 0.0), answer("3+4 is 7", 1.0), answer("it is 7", 1.0))]
    assert reduce_answers(groups, "exact_match")["exact_match/maj@3"] == 0.0  # three different texts: the first
    assert reduce_answers(groups, "exact_match", Vote(r"\d"))["exact_match/maj@3"] == 1.0


def test_an_answer_that_makes_the_pattern_backtrack_has_no_vote(caplog, monkeypatch):
    monkeypatch.setattr(evaluation, "VOTE_S", 0.05)
    monkeypatch.setattr(evaluation, "MOST_LATE", 2)
    trap = "a" * 3000
    vote = Vote(r"(?:a|a)+b|\d")
    hostile = group(answer(trap, 1.0), answer(trap, 1.0), answer("8", 0.0))
    assert reduce_answers([hostile], "exact_match", vote)["exact_match/maj@3"] == 0.0  # 8 alone has a vote
    began = time.monotonic()
    more = [group(answer(f"{n}{trap}", 1.0), answer(f"{n}{trap}{n}", 1.0)) for n in range(500)]
    assert reduce_answers(more, "exact_match", vote)["exact_match/maj@2"] == 0.0
    assert time.monotonic() - began < 5  # 1,000 answers of 0.05 s would take 50
    assert "no other answer of this set votes" in caplog.text


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


def test_the_share_of_answers_that_were_cut_off():
    cut, whole = answer("7", 1.0, status=Status.TRUNCATED), answer("7", 1.0)
    figures, _ = evaluated(group(cut, whole), group(whole, whole))
    assert figures["eval/test/truncated"] == 0.25


def as_role(role, episode, response, value):
    return answer(response, value).with_(role=role, episode=episode)


class Answered:
    """A collector that has the answers, and a tracker of them."""

    def __init__(self, *groups):
        self.groups = groups

    def collect(self, prompts, play, versions):
        return self.groups

    def metrics(self):
        return {}

    def evaluated(self, step, name, groups):
        assert groups == self.groups


def evaluated(*groups):
    answered = Answered(*groups)
    evaluator = Evaluator([EvaluationSet("test", ())], answered, None, answered)
    figures = evaluator.run(0)
    return figures, evaluator.score(figures)


def test_each_role_has_figures_of_its_own():
    """Two self-play episodes with one proposer and four solvers each, and one that failed: n is 3, not 11."""
    solvers = [as_role("solver", episode, "7", 1.0 - episode / 2) for episode in (0, 1) for _ in range(4)]
    failed = answer("", None, status=Status.ENV_FAILED).with_(episode=2)
    group = played(as_role("proposer", 0, "?", 0.0), as_role("proposer", 1, "!", 0.5), *solvers, failed)
    figures, score = evaluated(group)
    expected = {"mean@3": 0.75, "best@3": 1.0, "maj@3": 1.0}
    assert {name: value for name, value in figures.items() if "solver" in name} == {
        "eval/test/solver/exact_match": 0.75,
        **{f"eval/test/solver/exact_match/{name}": value for name, value in expected.items()},
        "eval/test/solver/reward": 0.75,
        "eval/test/solver/response_length": 1.0,
        "eval/test/solver/truncated": 0.0,
    }
    assert figures["eval/test/proposer/reward"] == 0.25
    assert figures["eval/test/proposer/exact_match/best@3"] == 0.5
    assert figures["eval/test/failed"] == 1.0
    assert len(figures) == 15
    assert score == figures["eval/test/proposer/exact_match"]
    titles = [one.title for one in held_out_headlines(figures)]
    assert titles == ["test proposer exact match", "test solver exact match"]
    assert all(describe_metric(name) is not None for name in figures)


def test_an_episode_counts_once_however_many_trajectories_it_has():
    tracks = [answer("7", value).with_(episode=0) for value in (1.0, 1.0, 0.0, 0.0)]
    figures, score = evaluated(played(*tracks, answer("8", 0.0).with_(episode=1)))
    assert figures == {
        "eval/test/exact_match": 0.25,
        "eval/test/exact_match/mean@2": 0.25,
        "eval/test/exact_match/best@2": 0.5,
        "eval/test/exact_match/maj@2": 0.5,
        "eval/test/reward": 0.25,
        "eval/test/response_length": 1.0,
        "eval/test/truncated": 0.0,
        "eval/test/failed": 0.0,
    }
    assert score == 0.25


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


def test_the_rollout_has_made_room_before_the_log_asks_the_trainers_model(tmp_path, monkeypatch):
    """The log's log-probs are a forward of the model, on a device that the rollout's cache may fill."""
    events = []
    for owner, name in ((RolloutHandle, "make_room"), (RolloutLog, "write"), (RolloutHandle, "publish")):
        real = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *given, real=real, name=name, **named: events.append(name) or real(*given, **named)
        )
    path = recipe(tmp_path, {"run": {"steps": 1}, "evaluation": {}})
    run_policy(load(PolicyRunConfig, path, []))
    assert events == ["publish", "make_room", "write", "publish", "make_room"]  # the last one: for the export
