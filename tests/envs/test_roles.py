"""Episodes in which the policy plays several roles: each has tracks, rewards and a baseline of its own."""

import pytest
import torch
from pydantic import ValidationError

from hone.algorithms.advantages import grpo
from hone.algorithms.filtering.group_filter import split_trainable
from hone.algorithms.filtering.settings import DynamicSamplingSettings
from hone.algorithms.settings import GrpoSettings, MtGrpoSettings
from hone.algorithms.turns import mt_grpo
from hone.cli.recipe import load_recipe
from hone.config import ConfigError
from hone.data.packing import pack, select
from hone.envs.settings import AgentSettings
from hone.trainers.policy.group_metrics import describe
from hone.trainers.run.launch import run_policy
from hone.types import Prompt, Status, StopReason, Trajectory, TrajectoryGroup, TurnSpan
from tests.envs.playing import Stage
from tests.trainers.tiny import BASE, metrics, recipe

PROGRAMS = """
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from hone.envs.agents.program import Verdict

async def ask(client, model, messages):
    reply = await client.chat.completions.create(model=model, messages=messages, max_tokens=3)
    return reply.choices[0].message

def client_of(base_url, api_key):
    http = DefaultAsyncHttpxClient(verify=False, trust_env=False)
    return AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http)

async def self_play(base_url, api_key, prompt):
    async with client_of(base_url, api_key) as client:
        history = list(prompt.messages)
        task = await ask(client, "proposer", history)
        await ask(client, "solver", history)
        await ask(client, "proposer", [*history, task, {"role": "user", "content": "again"}])
    return Verdict(reward={"proposer": len(task.content), "solver": 1.0})

async def unknown_role(base_url, api_key, prompt):
    async with client_of(base_url, api_key) as client:
        await ask(client, "policy", list(prompt.messages))

async def forgets_one(base_url, api_key, prompt):
    async with client_of(base_url, api_key) as client:
        await ask(client, "solver", list(prompt.messages))
    return Verdict(reward={"solver": 1.0})

async def judges_by_words(base_url, api_key, prompt):
    await forgets_one(base_url, api_key, prompt)
    return Verdict(reward={"solver": 1.0, "proposer": None})

def helps_solvers(response, role):
    return {"proposer": 0.0, "solver": 2.0}[role]

async def lists_models(base_url, api_key, prompt):
    async with client_of(base_url, api_key) as client:
        names = [one.id async for one in client.models.list()]
        await ask(client, "solver", list(prompt.messages))
    return " ".join(names)
"""
ROLES = ("proposer", "solver")


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    path = tmp_path_factory.mktemp("roles") / "programs.py"
    path.write_text(PROGRAMS)
    return path


@pytest.fixture(scope="module")
def play(programs):
    """`play(program)`: the trajectories of two samples of one prompt."""
    stage = Stage()
    return lambda program: stage.play(AgentSettings(program=f"{programs}:{program}", roles=ROLES))


def test_each_role_has_a_track_of_its_own_even_for_equal_messages(play):
    found = play("self_play")
    assert [(one.episode, one.role, one.turns) for one in found] == [
        (episode, role, turns) for episode in (0, 1) for role, turns in (("proposer", 2), ("solver", 1))
    ]
    proposer, solver = found[:2]
    assert proposer.token_ids[: solver.prompt_length] == solver.token_ids[: solver.prompt_length]
    assert solver.turn_reward == 1.0
    assert proposer.spans[-1].reward == proposer.turn_reward
    assert proposer.spans[0].reward is None


def test_a_request_names_a_role_and_a_verdict_all_of_them(play):
    refused = play("unknown_role")
    assert {one.status for one in refused} == {Status.ENV_FAILED}
    assert "model = 'policy' is not a role of episode.env.roles: proposer, solver" in refused[0].error
    partial = play("forgets_one")
    assert {one.status for one in partial} == {Status.ENV_FAILED}
    assert "rewards for solver; the roles are proposer, solver" in partial[0].error
    (worded, *_) = play("judges_by_words")
    assert (worded.status, "reward of the verdict for proposer should be a number, found None" in worded.error) == (
        Status.ENV_FAILED,
        True,
    )
    assert {one.response for one in play("lists_models")} == {"proposer solver"}


def trajectory(episode, role, reward, sampled=2):
    return Trajectory(
        prompt_id="task/0",
        sample=episode,
        token_ids=(5, *range(6, 6 + sampled)),
        prompt_length=1,
        loss_mask=(0, *[1] * sampled),
        rollout_logprobs=(0.0, *[-0.5] * sampled),
        weight_versions=(-1, *[0] * sampled),
        response="",
        stop_reason=StopReason.STOP,
        reward=reward,
        episode=episode,
        role=role,
        spans=(TurnSpan(1, 1 + sampled),),
    )


def group_of(*trajectories):
    return TrajectoryGroup(Prompt("task/0", (5,), (), None, "task"), trajectories)


def test_advantages_compare_within_a_role():
    """The proposer's rewards are 0 and 1, the solver's 10 and 13: mixed, every proposer would be below the mean."""
    group = group_of(
        trajectory(0, "proposer", 0.0),
        trajectory(0, "solver", 10.0),
        trajectory(1, "proposer", 1.0),
        trajectory(1, "solver", 13.0),
        trajectory(1, "solver", 13.0),  # a second track of the same role and episode counts once
    )
    batch = pack([group, group])
    expected = torch.tensor([-0.5, -1.5, 0.5, 1.5, 1.5] * 2)
    unscaled = GrpoSettings(scale_by="none")
    for chosen in (list(range(10)), [9, 0, 3, 2, 1, 4, 6, 5, 8, 7]):
        part = select(batch, chosen)
        found = grpo(part, unscaled).advantages[part.loss_mask].view(-1, 2)
        torch.testing.assert_close(found, expected[chosen][:, None].expand(-1, 2))
    scaled = grpo(batch, GrpoSettings()).advantages[batch.loss_mask].view(-1, 2)[:5, 0]
    torch.testing.assert_close(scaled.abs(), torch.full((5,), 2**-0.5), rtol=1e-5, atol=0)


def test_turns_are_compared_within_a_role():
    def two_turns(episode, role, early, late):
        one = trajectory(episode, role, early + late, sampled=3)
        spans = (TurnSpan(1, 2, reward=early), TurnSpan(3, 4, reward=late))
        return one.with_(loss_mask=(0, 1, 0, 1), spans=spans)

    group = group_of(
        two_turns(0, "proposer", 0.0, 0.0),
        two_turns(0, "solver", 8.0, 4.0),
        two_turns(1, "proposer", 2.0, 0.0),
        two_turns(1, "solver", 8.0, 6.0),
    )
    batch = pack([group])
    found = mt_grpo(batch, MtGrpoSettings(scale_by="none", outcome_coef=1.0)).advantages[batch.loss_mask]
    assert found.tolist() == [-1.0, 0.0, -1.0, -1.0, 1.0, 0.0, 1.0, 1.0]


def test_a_role_that_one_episode_has_alone_is_not_trained_on_its_raw_reward():
    group = group_of(trajectory(0, "proposer", 0.0), trajectory(0, "solver", 5.0), trajectory(1, "proposer", 1.0))
    (kept,), dropped = split_trainable([group], None)
    assert not dropped
    assert [one.role for one in kept.trainable] == ["proposer", "proposer"]
    assert kept.trajectories[1].error == "no other episode of this prompt has the role solver"
    (by_setting,), _ = split_trainable([group_of(trajectory(0, "proposer", 0.0), trajectory(0, "solver", 5.0))], None)
    assert len(by_setting.trainable) == 2, "one episode to a prompt: A = r by setting"


def test_a_prompt_without_two_episodes_of_a_role_is_dropped_for_that_reason():
    failed = trajectory(1, "", 0.0, sampled=0).with_(status=Status.ENV_FAILED)
    two_roles = trajectory(0, "proposer", 0.0), trajectory(0, "solver", 5.0)
    for group, reason in (
        (group_of(*two_roles, failed), "one of 2 trajectories is left to compare with: 1 env_failed, 2 ok"),
        (
            group_of(two_roles[0], trajectory(1, "solver", 1.0)),
            "no role was played in two of the 2 episodes that are left: proposer, solver",
        ),
    ):
        for mask_truncated in (False, True):
            kept, ((_, found),) = split_trainable([group], None, mask_truncated=mask_truncated)
            assert (kept, found) == ([], reason)


def test_dynamic_sampling_looks_for_variance_within_a_role():
    flat = group_of(
        *(trajectory(i, role, reward) for i in (0, 1) for role, reward in (("proposer", 0.0), ("solver", 1.0)))
    )
    one_varies = group_of(*flat.trajectories[:3], trajectory(1, "solver", 0.5))
    kept, dropped = split_trainable([flat, one_varies], DynamicSamplingSettings())
    assert kept == [one_varies]
    assert dropped[0].reason == (
        "reward is 0 for all 2 trajectories of the role proposer; reward is 1 for all 2 trajectories of the role solver"
    )
    figures = describe([flat, one_varies])
    assert figures["rollout/zero_variance_fraction"].value == 0.5
    assert figures["rollout/roles/solver/reward"].value == 0.875
    assert figures["rollout/roles/proposer/trajectories"].value == 4


@pytest.mark.slow
def test_a_run_trains_both_roles(tmp_path, programs):
    env = {"name": "agent", "program": f"{programs}:self_play", "roles": list(ROLES)}
    changes = {
        "run": {"steps": 2},
        "model": {"build": {**BASE["model"]["build"], "max_positions": 128}},
        "rollout": {"sampling": {"max_response_tokens": 24}},
        "episode": {"env": env},
        "reward": {"components": {"help": {"reward": f"{programs}:helps_solvers"}}},
        "evaluation": {},
        "checkpoint": {},
    }
    run_policy(load_recipe(recipe(tmp_path, {}, changes)))
    lines = [line for line in metrics(tmp_path / "run") if "train/loss" in line]
    assert len(lines) == 2
    for line in lines:
        assert line["rollout/roles/solver/reward"] == 1.0 + 2.0, "of the program and of the function"
        assert line["reward/help"] == 1.0, "the mean of 2 and 0"
        assert line["rollout/roles/solver/trajectories"] == line["rollout/roles/proposer/trajectories"]


def test_bad_roles_are_refused(tmp_path, programs):
    for roles in (["a", "a"], ["two words"]):
        with pytest.raises(ValidationError, match="should be a name of letters, digits and _"):
            AgentSettings(program="x.py:y", roles=roles)
    with pytest.raises(ValidationError, match="'a' should be a name"):
        AgentSettings(program="x.py:y", roles=["a"], adapters={"a": "folder"})
    env = {"name": "agent", "program": f"{programs}:self_play", "roles": list(ROLES)}
    with pytest.raises(ConfigError, match=r"episode.env.roles: remax . ppo compares with one greedy answer"):
        run_policy(load_recipe(recipe(tmp_path, {}, {"episode": {"env": env}, "algorithm": {"advantage": "remax"}})))
