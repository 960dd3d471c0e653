"""Agent programs in a run: what they caused to be sampled is what is trained on."""

import asyncio

import pytest

from hone.cli.recipe import load_recipe
from hone.config import ConfigError
from hone.envs.agents.program import load_program
from hone.envs.agents.runner import AgentRunner
from hone.envs.episode import Play
from hone.envs.settings import AgentSettings, EpisodeConfig
from hone.trainers.run.launch import run_policy
from hone.types import PromptTooLong, SamplingParams, Status
from tests.envs.playing import Stage
from tests.trainers.tiny import BASE, metrics, recipe

PROGRAMS = """
import asyncio
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from hone.envs.agents.program import Verdict

def client_of(base_url, api_key):
    http = DefaultAsyncHttpxClient(verify=False, trust_env=False)
    return AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http)

async def once(base_url, api_key, prompt):
    async with client_of(base_url, api_key) as client:
        await client.chat.completions.create(model="policy", messages=list(prompt.messages))

async def twice(base_url, api_key, prompt):
    async with client_of(base_url, api_key) as client:
        history = list(prompt.messages)
        reply = await client.chat.completions.create(model="policy", messages=history, max_tokens=4)
        history += [reply.choices[0].message, {"role": "user", "content": "again"}]
        await client.chat.completions.create(model="policy", messages=history, max_tokens=4, n=2)
        return "what is judged"

async def greedy_for_words(base_url, api_key, prompt):
    async with client_of(base_url, api_key) as client:
        while True:
            await client.chat.completions.create(model="policy", messages=list(prompt.messages), max_tokens=4)

async def breaks(base_url, api_key, prompt):
    await once(base_url, api_key, prompt)
    raise OSError("the tool is gone")

async def sleeps(base_url, api_key, prompt):
    await once(base_url, api_key, prompt)
    await asyncio.sleep(60)

async def tidies_up(base_url, api_key, prompt):
    try:
        await once(base_url, api_key, prompt)
    finally:
        await asyncio.sleep(0.2)

async def judges(base_url, api_key, prompt):
    async with client_of(base_url, api_key) as client:
        await client.chat.completions.create(model="policy", messages=list(prompt.messages), max_tokens=4, n=2)
    return Verdict("what is judged", reward=2.5, metrics={"files": 3})

async def counts(base_url, api_key, prompt):
    await once(base_url, api_key, prompt)
    return 3

async def says_good(base_url, api_key, prompt):
    await once(base_url, api_key, prompt)
    return Verdict(reward="good")

async def divides_by_zero(base_url, api_key, prompt):
    await once(base_url, api_key, prompt)
    return Verdict(reward=float("nan"))

async def lists_files(base_url, api_key, prompt):
    await once(base_url, api_key, prompt)
    return Verdict(reward=1.0, metrics={"files": ["a"]})

async def answers_a_number(base_url, api_key, prompt):
    await once(base_url, api_key, prompt)
    return Verdict(42)

async def idle(base_url, api_key, prompt):
    pass

def blocking(base_url, api_key, prompt):
    pass
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    path = tmp_path_factory.mktemp("agents") / "programs.py"
    path.write_text(PROGRAMS)
    return path


@pytest.mark.slow
def test_an_agent_that_asks_once_trains_as_the_plain_environment_does(tmp_path, programs):
    changes = {"run": {**BASE["run"], "steps": 3}}
    agent = {"episode": {"env": {"name": "agent", "program": f"{programs}:once"}}}
    for name, more in (("chat", {}), ("agent", agent)):
        run_policy(load_recipe(recipe(tmp_path / name, changes, more)))
    one, two = (tmp_path / name / "run" for name in ("chat", "agent"))
    by_arrival = ("rollout/batch_size", "rollout/kv_cache", "rollout/prefill", "rollout/shared")
    same = [
        [{k: v for k, v in line.items() if not k.startswith(by_arrival)} for line in metrics(run)] for run in (one, two)
    ]
    assert same[0] == same[1]
    assert (one / "rollouts.jsonl.gz").read_bytes() == (two / "rollouts.jsonl.gz").read_bytes()


@pytest.fixture(scope="module")
def stage():
    return Stage()


@pytest.fixture
def play(programs, stage):
    """`play(program)`: the trajectories of two samples of one prompt."""
    return lambda program, **options: stage.play(AgentSettings(program=f"{programs}:{program}"), **options)


def test_branches_belong_to_their_episode_and_what_it_returns_is_judged(play):
    found = play("twice")
    assert sorted((one.sample, one.episode) for one in found) == [(0, 0), (0, 0), (1, 1), (1, 1)]
    assert {one.response for one in found} == {"what is judged"}
    assert sorted(one.turns for one in found) == [1, 1, 2, 2]


def test_a_program_may_give_its_episode_a_reward_and_figures(play):
    found = play("judges")
    assert [(one.episode, one.response, one.turn_reward) for one in found] == [
        (episode, "what is judged", 2.5) for episode in (0, 0, 1, 1)
    ]
    assert [{name: metric.value for name, metric in one.metrics.items()} for one in found] == [{"files": 3}, {}] * 2


def test_one_endpoint_serves_the_whole_run_and_ends_with_it(programs, stage):
    async def unjudged(group):
        return group

    async def all_of_it():
        runner = AgentRunner(EpisodeConfig(), AgentSettings(program=f"{programs}:once"), stage.language)
        how = Play(stage.engine.generate, SamplingParams(4), seed=0, samples=1)
        seen = []
        for _ in range(2):
            await runner.run([stage.prompt], how, unjudged)
            seen.append(runner._endpoint.base_url)
        await runner.close()
        await runner.close()
        assert seen[0] == seen[1]
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", int(seen[0].split(":")[2].removesuffix("/v1")))

    asyncio.run(asyncio.wait_for(all_of_it(), 60))


@pytest.mark.parametrize(
    ("program", "budget", "status", "error"),
    [
        ("breaks", 40, Status.ENV_FAILED, "OSError: the tool is gone"),
        ("counts", 40, Status.ENV_FAILED, "should return a text, None or a Verdict, found int"),
        ("says_good", 40, Status.ENV_FAILED, "the reward of the verdict should be a number, found 'good'"),
        ("divides_by_zero", 40, Status.ENV_FAILED, "the reward of the verdict should be a finite number, found nan"),
        ("lists_files", 40, Status.ENV_FAILED, "the metric files of the verdict should be a number, found ['a']"),
        ("answers_a_number", 40, Status.ENV_FAILED, "the answer of the verdict should be a text or None, found 42"),
        ("idle", 40, Status.ENV_FAILED, "asked the policy nothing"),
        ("greedy_for_words", 20, Status.TRUNCATED, "budget of sampled tokens"),
        ("greedy_for_words", 400, Status.TRUNCATED, "8 turns (episode.max_turns) are used up"),
    ],
)
def test_how_a_program_ends_is_the_status_of_its_trajectories(play, program, budget, status, error):
    found = play(program, budget=budget)
    assert len(found) >= 2
    assert {one.status for one in found} == {status}
    assert all(error in one.error for one in found)
    if program == "breaks":
        assert all(sum(one.loss_mask) for one in found), "what was sampled is kept, for people to read"


def test_a_late_program_is_ended_and_who_was_waited_for_is_named(play):
    async def never(request):
        await asyncio.sleep(60)

    late = play("sleeps", timeout_s=1.0)
    assert {(one.status, one.error) for one in late} == {
        (Status.ENV_FAILED, "not finished after 1 s, waiting for the program")
    }
    stuck = play("tidies_up", generate=never, timeout_s=1.0)
    assert {(one.status, one.error) for one in stuck} == {
        (Status.ENGINE_FAILED, "not finished after 1 s, waiting for the rollout engine")
    }


@pytest.mark.parametrize(("refusal", "status"), [(PromptTooLong, Status.TRUNCATED), (ValueError, Status.ENV_FAILED)])
def test_only_a_refusal_for_its_length_truncates_an_episode(play, stage, refusal, status):
    async def first_turns_only(request):
        if not request.id.endswith("/0"):
            raise refusal("not this prompt")
        return await stage.engine.generate(request)

    found = play("twice", generate=first_turns_only)
    assert [(one.status, one.turns) for one in found] == [(status, 1)] * 2
    assert all("not this prompt" in one.error for one in found)


def test_an_engine_that_breaks_ends_the_run(play):
    async def broken(request):
        raise RuntimeError("weights are not finite")

    with pytest.raises(RuntimeError, match="weights are not finite"):
        play("once", generate=broken)


@pytest.mark.parametrize(
    ("name", "message"), [("blocking", "should be an async function"), ("nothing", "unknown name"), ("", "should be")]
)
def test_what_is_no_program_is_refused_at_the_start(programs, name, message):
    with pytest.raises(ConfigError, match=message):
        load_program(f"{programs}:{name}" if name else "")
