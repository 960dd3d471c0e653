"""The episode loop: append-only tokens, masks, seeds, deadlines and failures that are not rewards."""

import asyncio

import pytest

from hone.config import Choice
from hone.envs.base import StepResult
from hone.envs.chat import ChatEnv
from hone.envs.episode import EpisodeRunner, Play, Speech, request_seed
from hone.envs.settings import EpisodeConfig
from hone.types import Completion, Prompt, PromptTooLong, SamplingParams, Status, StopReason

SPEECH = Speech(
    decode=lambda ids: "".join(chr(96 + i) for i in ids),
    continue_with=lambda ids, messages: [90 + len(message["content"]) for message in messages],
)


class Engine:
    """A real, tiny `generate`: answers with two tokens made of the seed, records what it was asked."""

    def __init__(self, reason=StopReason.STOP, delay_s=0.0):
        self.asked = []
        self.reason = reason
        self.delay_s = delay_s

    async def generate(self, request_id, token_ids, sampling):
        self.asked.append((request_id, token_ids, sampling))
        await asyncio.sleep(self.delay_s)
        return Completion(request_id, (sampling.seed % 9 + 1, 2), (-0.5, -0.25), (3, 3), self.reason)


def prompt(draw=0, ids=(7, 8)):
    return Prompt(f"set/{draw}", ids, ({"role": "user", "content": "?"},), "a", "set", draw=draw)


async def unscored(group):
    return group


def run(engine, prompts, make_env=ChatEnv, samples=2, score=unscored, **settings):
    runner = EpisodeRunner(EpisodeConfig(**settings), make_env, SPEECH)
    play = Play(engine.generate, SamplingParams(max_tokens=6), seed=1, step=4, samples=samples)
    return asyncio.run(runner.run(prompts, play, score))


def play_greedily(engine, prompts, score=unscored):
    sampling = SamplingParams(max_tokens=6, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, stop=("x",))
    runner = EpisodeRunner(EpisodeConfig(), ChatEnv, SPEECH)
    play = Play(engine.generate, sampling, seed=1, step=4, samples=2, greedy=True)
    return asyncio.run(runner.run(prompts, play, score))


def test_a_single_turn_is_prompt_then_completion():
    engine = Engine()
    (group,) = run(engine, [prompt(draw=5)])
    one = group.trajectories[1]
    seed = request_seed(1, 4, 5, 1, 0)
    assert one.token_ids == (7, 8, seed % 9 + 1, 2)
    assert one.loss_mask == (0, 0, 1, 1)
    assert one.rollout_logprobs == (0.0, 0.0, -0.5, -0.25)
    assert one.weight_versions == (-1, -1, 3, 3)
    assert (one.prompt_length, one.sample, one.episode, one.status) == (2, 1, 1, Status.OK)
    assert [request for request, _, _ in engine.asked] == ["4/5/0/0", "4/5/1/0"]


def test_seeds_differ_between_samples_prompts_steps_and_turns_and_do_not_change():
    seeds = {
        request_seed(0, step, draw, sample, turn)
        for step in range(4)
        for draw in range(4)
        for sample in range(4)
        for turn in range(4)
    }
    assert len(seeds) == 256
    assert request_seed(0, 1, 2, 3, 4) == 8268827065130101739


class TwoTurns:
    """Asks once more, with a message of 5 characters, then ends."""

    def __init__(self, prompt, sample):
        self.prompt, self.turn, self.closed = prompt, 0, 0

    async def start(self):
        return self.prompt.token_ids

    async def step(self, completion, text):
        self.turn += 1
        return StepResult(done=self.turn == 2, messages=({"role": "user", "content": "again"},))

    async def close(self):
        self.closed += 1


def test_turns_append_and_never_rewrite():
    engine = Engine()
    (group,) = run(engine, [prompt()], TwoTurns, samples=1)
    (one,) = group.trajectories
    first, second = (request_seed(1, 4, 0, 0, turn) % 9 + 1 for turn in (0, 1))
    assert one.token_ids == (7, 8, first, 2, 95, second, 2)
    assert one.loss_mask == (0, 0, 1, 1, 0, 1, 1)
    assert engine.asked[1][1] == one.token_ids[:5]  # the second request extends the first, token for token
    assert engine.asked[1][2].max_tokens == 4  # what is left of the response budget
    assert one.turns == 2


def test_max_turns_and_the_token_budget_truncate():
    (group,) = run(Engine(), [prompt()], TwoTurns, samples=1, max_turns=1)
    assert group.trajectories[0].status is Status.TRUNCATED
    (group,) = run(Engine(StopReason.LENGTH), [prompt()], samples=1)
    assert group.trajectories[0].status is Status.TRUNCATED


class Broken(TwoTurns):
    async def step(self, completion, text):
        raise ConnectionError("the sandbox is gone")


def test_an_environment_that_raises_is_a_failure_with_its_reason_and_harms_nobody_else():
    made = []

    def make(prompt, sample):
        made.append(Broken(prompt, sample) if sample == 0 else TwoTurns(prompt, sample))
        return made[-1]

    (group,) = run(Engine(), [prompt()], make)
    broken, fine = group.trajectories
    assert broken.status is Status.ENV_FAILED
    assert broken.error == "ConnectionError: the sandbox is gone"
    assert fine.status is Status.OK
    assert group.trainable == (fine,)
    assert [env.closed for env in made] == [1, 1]


def test_a_late_episode_ends_and_says_whom_it_waited_for():
    (group,) = run(Engine(delay_s=30), [prompt()], samples=1, timeout_s=0.05)
    (one,) = group.trajectories
    assert one.status is Status.ENGINE_FAILED
    assert one.error == "set/0: no end after 0.05 s; waited for the rollout engine"


def test_an_aborted_completion_is_not_trained_on():
    (group,) = run(Engine(StopReason.ABORTED), [prompt()], samples=1)
    assert group.trajectories[0].status is Status.ENGINE_FAILED


def test_an_engine_that_raises_ends_the_run():
    class Dead(Engine):
        async def generate(self, request_id, token_ids, sampling):
            raise RuntimeError("the engine died")

    with pytest.raises(RuntimeError, match="the engine died"):  # itself, not a group of groups of it
        run(Dead(), [prompt(0), prompt(1)])


class Full(Engine):
    """Serves at most `room` tokens of prompt."""

    def __init__(self, room, refusal=PromptTooLong):
        super().__init__()
        self.room, self.refusal = room, refusal

    async def generate(self, request_id, token_ids, sampling):
        if len(token_ids) > self.room:
            raise self.refusal(f"a prompt of {len(token_ids)} tokens leaves no room")
        return await super().generate(request_id, token_ids, sampling)


def test_a_prompt_that_cannot_be_served_fails_alone():
    long, short = run(Full(room=2), [prompt(0, (7, 8, 9)), prompt(1)], samples=1)
    assert long.trajectories[0].status is Status.ENGINE_FAILED
    assert long.trajectories[0].error == "set/0: a prompt of 3 tokens leaves no room"
    assert short.trajectories[0].status is Status.OK


def test_a_conversation_that_outgrows_the_context_is_truncated():
    (group,) = run(Full(room=4), [prompt()], TwoTurns, samples=1)
    (one,) = group.trajectories
    assert (one.status, one.stop_reason, one.turns) == (Status.TRUNCATED, StopReason.LENGTH, 1)
    assert one.loss_mask == (0, 0, 1, 1, 0)


def test_a_turn_that_is_refused_for_another_reason_is_a_failure():
    (group,) = run(Full(room=4, refusal=ValueError), [prompt()], TwoTurns, samples=1)
    (one,) = group.trajectories
    assert (one.status, one.turns) == (Status.ENGINE_FAILED, 1)
    assert not one.status.trainable


def test_an_environment_that_does_not_close_spoils_nothing_and_is_heard_of(caplog):
    class Stuck(TwoTurns):
        async def close(self):
            raise OSError("the container is still there")

    (group,) = run(Engine(), [prompt()], Stuck, samples=1)
    assert group.trajectories[0].status is Status.OK
    assert "set/0: the environment did not close: OSError: the container is still there" in caplog.text


def test_groups_are_scored_as_they_finish_and_come_back_in_order():
    scored = []

    async def score(group):
        scored.append(group.prompt.draw)
        await asyncio.sleep(0.02 if group.prompt.draw == 0 else 0)
        return group

    groups = run(Engine(), [prompt(0), prompt(1)], score=score)
    assert [group.prompt.draw for group in groups] == [0, 1]
    assert sorted(scored) == [0, 1]


def test_an_unknown_environment_names_those_there_are():
    from hone.config import ConfigError, build

    with pytest.raises(ConfigError, match="unknown environment 'chta'; did you mean 'chat'"):
        build(EpisodeConfig, {"env": "chta"}, "recipe.yaml")
    assert EpisodeConfig().env == Choice(name="chat")


def test_a_greedy_episode_is_played_beside_the_samples_with_the_same_limits():
    engine = Engine()
    first, second = play_greedily(engine, [prompt(draw=5), prompt(draw=6)])
    assert [request for request, _, _ in engine.asked] == [f"4/{draw}/{n}/0" for draw in (5, 6) for n in (0, 1, 2)]
    assert [sampling.temperature for _, _, sampling in engine.asked] == [0.7, 0.7, 0.0] * 2
    greedy = engine.asked[2][2]
    assert (greedy.top_k, greedy.top_p, greedy.min_p, greedy.max_tokens, greedy.stop) == (0, 1.0, 0.0, 6, ("x",))
    for group in (first, second):
        assert [one.sample for one in group.trajectories] == [0, 1]
        assert group.greedy.sample == 2
        assert group.greedy.prompt_id == group.prompt.prompt_id
    assert run(engine, [prompt()])[0].greedy is None


def test_the_greedy_episode_is_scored_as_a_group_of_its_own():
    seen = []

    async def score(group):
        seen.append(len(group.trajectories))
        scored = tuple(one.with_(reward=float(len(group.trajectories))) for one in group.trajectories)
        return type(group)(group.prompt, scored)

    (group,) = play_greedily(Engine(), [prompt()], score)
    assert sorted(seen) == [1, 2]
    assert [one.reward for one in group.trajectories] == [2.0, 2.0]
    assert group.greedy.reward == 1.0
