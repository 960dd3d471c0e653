"""The episode loop: append-only tokens, masks, seeds, deadlines and failures that are not rewards."""

import asyncio
from dataclasses import replace

import pytest

from hone.config import Choice, ConfigError, build
from hone.deadline import SeatWait, Stalled
from hone.envs import ENVS
from hone.envs.base import Start, StepResult
from hone.envs.chat import ChatEnv
from hone.envs.episode import EpisodeRunner, Play, request_seed
from hone.envs.runners import make_runner
from hone.envs.settings import EnvSettings, EpisodeConfig, ShellSettings
from hone.envs.text_codec import TextCodec
from hone.envs.tool_calls import no_calls
from hone.registry import Entry
from hone.types import Completion, Prompt, PromptTooLong, SamplingParams, Status, StopReason


class Letters:
    """A language of one token for each letter; a message is one token, which says how long it is."""

    end_token_ids = frozenset({2})
    template = ""
    opened_thought = ""

    def decode(self, ids, *, keep_special=False):
        return "".join(chr(96 + i) for i in ids)

    def render_prompt(self, messages, tools=()):
        return (80, *(90 + len(message["content"]) for message in messages))

    def answer(self, ids):
        return self.decode(ids)

    def render_continuation(self, ids, messages, tools=()):
        return tuple(90 + len(message["content"]) for message in messages)

    def renders_tools(self, messages, tools):
        return True

    def shorten(self, text, max_tokens):
        return text[:max_tokens]


CODEC = TextCodec(Letters(), no_calls)


class Engine:
    """A real, tiny `generate`: answers with two tokens made of the seed, records what it was asked."""

    def __init__(self, reason=StopReason.STOP, delay_s=0.0):
        self.asked = []
        self.reason = reason
        self.delay_s = delay_s

    async def generate(self, request):
        self.asked.append((request.id, request.tokens, request.sampling))
        await asyncio.sleep(self.delay_s)
        return Completion(request.id, (request.sampling.seed % 9 + 1, 2), (-0.5, -0.25), (3, 3), self.reason)


def prompt(draw=0, ids=(7, 8)):
    return Prompt(f"set/{draw}", ids, ({"role": "user", "content": "?"},), "a", "set", draw=draw)


async def unscored(group):
    return group


def run(engine, prompts, make_env=ChatEnv, samples=2, score=unscored, **settings):
    runner = EpisodeRunner(EpisodeConfig(**settings), make_env, CODEC)
    play = Play(engine.generate, SamplingParams(max_tokens=6), seed=1, step=4, samples=samples)
    return asyncio.run(runner.run(prompts, play, score))


def play_greedily(engine, prompts, score=unscored):
    sampling = SamplingParams(max_tokens=6, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, stop=("x",))
    runner = EpisodeRunner(EpisodeConfig(), ChatEnv, CODEC)
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
    assert not any(sampling.keep_kv for _, _, sampling in engine.asked)


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

    def __init__(self, prompt, sample, settings):
        self.prompt, self.turn, self.closed = prompt, 0, 0

    async def start(self):
        return Start(token_ids=self.prompt.token_ids, anchor="first")

    async def step(self, said, completion):
        self.turn += 1
        return StepResult(done=self.turn == 2, messages=({"role": "user", "content": "again"},))

    async def close(self):
        self.closed += 1


class Asks(TwoTurns):
    """Begins with the messages of the prompt."""

    offered = ()

    async def start(self):
        return Start(messages=self.prompt.messages, tools=self.offered)


class Offers(Asks):
    offered = ({"type": "function", "function": {"name": "add"}}, {"name": "more"})


def test_an_environment_offers_the_tools_of_a_prompt_or_says_that_it_does_not():
    offering = replace(prompt(), tools=({"name": "add"},))
    (group,) = run(Engine(), [offering], Offers, samples=1)
    assert group.trajectories[0].status is Status.OK
    with pytest.raises(ConfigError, match=r"prompt set/0 offers tools .* \(episode\.env\) does not have: add; remove"):
        run(Engine(), [offering], Asks, samples=1)
    (group,) = run(Engine(), [offering], samples=1)
    assert group.trajectories[0].token_ids[:2] == (7, 8), "the prompt has them already"


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
    run(engine := Engine(), [prompt()], TwoTurns, samples=1, max_turns=2)
    assert [sampling.keep_kv for _, _, sampling in engine.asked] == [True, True]
    (group,) = run(Engine(StopReason.LENGTH), [prompt()], samples=1)
    assert group.trajectories[0].status is Status.TRUNCATED


class Broken(TwoTurns):
    async def step(self, said, completion):
        raise ConnectionError("the sandbox is gone")


def test_an_environment_that_raises_is_a_failure_with_its_reason_and_harms_nobody_else():
    made = []

    def make(prompt, sample, settings):
        made.append((Broken if sample == 0 else TwoTurns)(prompt, sample, settings))
        return made[-1]

    (group,) = run(Engine(), [prompt()], make)
    broken, fine = group.trajectories
    assert broken.status is Status.ENV_FAILED
    assert broken.error == "ConnectionError: the sandbox is gone"
    assert fine.status is Status.OK
    assert group.trainable == (fine,)
    assert [env.closed for env in made] == [1, 1]


class Figures(TwoTurns):
    async def step(self, said, completion):
        return replace(await super().step(said, completion), metrics={"placed": 1.0})


def test_figures_that_are_no_metrics_are_a_failure_of_the_environment():
    (group,) = run(Engine(), [prompt()], Figures, samples=1)
    (broken,) = group.trajectories
    assert (broken.status, broken.error.partition(", found ")[2]) == (Status.ENV_FAILED, "placed=1.0")


class Panic(BaseException):
    """What a library in another language raises."""


@pytest.mark.parametrize(("error", "told"), [(SystemExit(0), "SystemExit: 0"), (Panic("lost"), "Panic: lost")])
def test_foreign_code_that_leaves_the_interpreter_fails_its_own_episode_only(error, told):
    class Leaving(TwoTurns):
        async def step(self, said, completion):
            raise error

    (group,) = run(Engine(), [prompt()], lambda *of: (Leaving if of[1] == 0 else TwoTurns)(*of))
    left, fine = group.trajectories
    assert (left.status, left.error, fine.status) == (Status.ENV_FAILED, told, Status.OK)


def test_the_end_of_a_run_that_is_raised_inside_an_environment_ends_the_run():
    class Stopped(TwoTurns):
        async def step(self, said, completion):
            raise Stalled("no progress")  # as the watchdog does in a synchronous run, wherever the main thread is

    with pytest.raises(Stalled, match="no progress"):
        run(Engine(), [prompt()], Stopped)


def test_a_late_episode_ends_and_says_whom_it_waited_for():
    (group,) = run(Engine(delay_s=30), [prompt()], samples=1, timeout_s=0.05)
    (one,) = group.trajectories
    assert one.status is Status.ENGINE_FAILED
    assert one.error == "set/0: not finished after 0.05 s, waiting for the rollout engine"


def test_an_aborted_completion_is_not_trained_on():
    (group,) = run(Engine(StopReason.ABORTED), [prompt()], samples=1)
    assert group.trajectories[0].status is Status.ENGINE_FAILED


def test_an_engine_that_raises_ends_the_run():
    class Dead(Engine):
        async def generate(self, request):
            raise RuntimeError("the engine died")

    with pytest.raises(RuntimeError, match="the engine died"):  # itself, not a group of groups of it
        run(Dead(), [prompt(0), prompt(1)])


class Full(Engine):
    """Serves at most `room` tokens of prompt."""

    def __init__(self, room, refusal=PromptTooLong):
        super().__init__()
        self.room, self.refusal = room, refusal

    async def generate(self, request):
        if len(request.tokens) > self.room:
            raise self.refusal(f"a prompt of {len(request.tokens)} tokens leaves no room")
        return await super().generate(request)


def test_a_prompt_that_cannot_be_served_fails_alone():
    long, short = run(Full(room=2), [prompt(0, (7, 8, 9)), prompt(1)], samples=1)
    assert long.trajectories[0].status is Status.ENGINE_FAILED
    assert long.trajectories[0].error == "set/0: a prompt of 3 tokens leaves no room"
    assert short.trajectories[0].status is Status.OK


def test_a_conversation_that_outgrows_the_context_is_truncated():
    (group,) = run(Full(room=4), [prompt()], TwoTurns, samples=1)
    (one,) = group.trajectories
    assert (one.status, one.stop_reason, one.turns) == (Status.TRUNCATED, StopReason.LENGTH, 1)
    assert one.loss_mask == (0, 0, 1, 1), "no observation follows the last answer"


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


def test_a_wait_for_a_seat_does_not_end_an_episode():
    """One seat, and answers that take as long as the deadline: each is finished, however long it waited."""

    class OneSeat(Engine):
        seats = None

        async def generate(self, request):
            self.seats = self.seats or asyncio.Semaphore(1)
            with SeatWait():
                await self.seats.acquire()
                await asyncio.sleep(0.25)  # the answer before
            self.seats.release()
            return await super().generate(request)

    (group,) = run(OneSeat(), [prompt()], samples=6, timeout_s=1.0)
    assert [one.status for one in group.trajectories] == [Status.OK] * 6


class Talker(TwoTurns):
    """Asks again for ever, with a message of 5 characters; rewards each turn with its number."""

    async def step(self, said, completion):
        self.turn += 1
        message = {"role": "user", "content": "again"}
        return StepResult(False, (message,), reward=float(self.turn), anchor=f"state {self.turn}", answer=said.content)


class Wordy(Engine):
    """Says as much as it may."""

    async def generate(self, request):
        self.asked.append((request.id, request.tokens, request.sampling))
        ids = (1,) * request.sampling.max_tokens
        return Completion(request.id, ids, (-0.5,) * len(ids), (3,) * len(ids), StopReason.LENGTH)


def test_turns_have_spans_with_rewards_and_the_states_they_began_in():
    (group,) = run(Engine(), [prompt()], Talker, samples=1, max_turns=2)
    (one,) = group.trajectories
    assert [(s.start, s.end, s.reward, s.anchor) for s in one.spans] == [
        (2, 4, 1.0, "first"),
        (5, 7, 2.0, "state 1"),
    ]
    assert (one.turns, one.turn_reward) == (2, 3.0)
    assert one.loss_mask == (0, 0, 1, 1, 0, 1, 1), "no observation follows the last turn"
    assert len(one.response) == 2, "the rewards judge the environment's answer, not everything that was written"


def test_a_turn_that_is_cut_off_is_not_the_end_of_the_episode():
    engine = Wordy()
    (group,) = run(engine, [prompt()], Talker, samples=1, env=ShellSettings(max_turn_tokens=4))
    assert [sampling.max_tokens for _, _, sampling in engine.asked] == [4, 2]  # the budget of the episode is 6
    (one,) = group.trajectories
    assert (one.status, one.turns) == (Status.TRUNCATED, 2)


def test_an_episode_has_a_longest_conversation_with_its_observations():
    engine = Wordy()
    limits = ShellSettings(max_turn_tokens=1, max_episode_tokens=6)  # 2 + 1 + 1 + 1 + 1
    (group,) = run(engine, [prompt()], Talker, samples=1, env=limits)
    assert [len(ids) for _, ids, _ in engine.asked] == [2, 4]
    assert group.trajectories[0].status is Status.TRUNCATED


def test_an_observation_is_cut():
    engine = Engine()
    run(engine, [prompt()], Talker, samples=1, env=ShellSettings(max_observation_tokens=3), max_turns=2)
    assert engine.asked[1][1][-1] == 93  # the message of 5 characters has 3


def test_an_environment_without_a_message_is_a_failure_and_one_that_ends_the_episode_early_is_not():
    class Silent(TwoTurns):
        async def step(self, said, completion):
            return StepResult(done=False)

    class Impatient(TwoTurns):
        async def step(self, said, completion):
            return StepResult(done=False, status=Status.TRUNCATED, error="4 broken calls")

    silent = run(Engine(), [prompt()], Silent, samples=1)[0].trajectories[0]
    assert (silent.status, silent.error) == (
        Status.ENV_FAILED,
        "the environment is not done, but has no message for the policy",
    )
    impatient = run(Engine(), [prompt()], Impatient, samples=1)[0].trajectories[0]
    assert (impatient.status, impatient.error, impatient.turns) == (Status.TRUNCATED, "4 broken calls", 1)


def test_a_failure_of_the_environment_is_tried_again_with_the_same_seeds():
    made = []

    def make(prompt, sample, settings):
        made.append((TwoTurns if made else Broken)(prompt, sample, settings))
        return made[-1]

    engine = Engine()
    (group,) = run(engine, [prompt()], make, samples=1, env=ShellSettings(retries=1))
    assert group.trajectories[0].status is Status.OK
    assert [env.closed for env in made] == [1, 1]
    assert engine.asked[0] == engine.asked[1]


def test_a_start_with_messages_is_rendered_with_its_tools():
    class Told(TwoTurns):
        async def start(self):
            return Start(messages=({"role": "user", "content": "four"},), tools=({"type": "function"},))

    engine = Engine()
    run(engine, [prompt()], Told, samples=1)
    assert engine.asked[0][1] == (80, 94)


def test_settings_reach_the_environment_and_a_factory_of_another_signature_is_refused_at_the_start(monkeypatch):
    class Old:
        def __init__(self, prompt, sample): ...

    seen = []

    def make(prompt, sample, settings):
        seen.append(settings.env)
        return TwoTurns(prompt, sample, settings)

    monkeypatch.setitem(ENVS._entries, "made_here", Entry(make))
    monkeypatch.setitem(ENVS._entries, "old_form", Entry(Old))
    runner = make_runner(
        build(EpisodeConfig, {"env": {"name": "made_here", "max_turn_tokens": 5}}, "recipe.yaml"), Letters()
    )
    play = Play(Engine().generate, SamplingParams(max_tokens=6), seed=1, samples=1)
    asyncio.run(runner.run([prompt()], play, unscored))
    assert seen == [EnvSettings(name="made_here", max_turn_tokens=5)]
    with pytest.raises(ConfigError, match=r"environment old_form should take \(prompt, sample, settings\)"):
        make_runner(build(EpisodeConfig, {"env": "old_form"}, "recipe.yaml"), Letters())


def test_rewards_read_the_answer_as_the_language_says_it():
    """Tags such as <think> are special tokens of some tokenizers, and a reward for the format looks for them."""

    class Tags(Letters):
        def answer(self, ids):
            return f"<think>{self.decode(ids)}"

    runner = EpisodeRunner(EpisodeConfig(), ChatEnv, TextCodec(Tags(), no_calls))
    play = Play(Engine().generate, SamplingParams(max_tokens=6), seed=1, step=4, samples=1)
    (group,) = asyncio.run(runner.run([prompt()], play, unscored))
    assert group.trajectories[0].response.startswith("<think>")
