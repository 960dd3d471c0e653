"""Experts of a conversation's tokens: each keeps those that it was first noted with."""

import asyncio

import numpy as np
import pytest

from hone.data.routes import mixture_rows
from hone.envs.base import StepResult
from hone.envs.chat import ChatEnv
from hone.envs.episode import EpisodeRunner, Play
from hone.envs.settings import EpisodeConfig
from hone.envs.text_codec import TextCodec
from hone.envs.tool_calls import no_calls
from hone.types import Completion, Prompt, SamplingParams, StopReason


class Twice(ChatEnv):
    """Answers once, with one message."""

    single_turn = False

    async def step(self, said, completion):
        done = getattr(self, "answered", False)
        self.answered = True
        return StepResult(done=done, messages=() if done else ({"role": "user", "content": "?"},))


class Pairs:
    """A language in which every message is two tokens."""

    end_token_ids = frozenset({2})
    opened_thought = ""

    def decode(self, ids, *, keep_special=False):
        return "x"

    def answer(self, ids):
        return self.decode(ids)

    def render_continuation(self, ids, messages, tools=()):
        return (50, 51)

    def shorten(self, text, max_tokens):
        return text


async def generate(request):
    """Two tokens; every token of turn t goes to expert 10 t in each of two layers, whenever it was sampled."""
    turn = int(request.id.rpartition("/")[2])
    routes = np.full((len(request.tokens) + 1, 2, 1), 10 * turn, np.int16)
    return Completion(request.id, (1, 2), (-0.5, -0.25), (3, 3), StopReason.STOP, routes)


def test_turns_are_joined_and_the_first_route_stays():
    runner = EpisodeRunner(EpisodeConfig(max_turns=2), Twice, TextCodec(Pairs(), no_calls))
    play = Play(generate, SamplingParams(max_tokens=6, routed_experts=True), seed=1, samples=1)
    prompt = Prompt("set/0", (7, 8, 9), ({"role": "user", "content": "?"},), "a", "set")

    async def unscored(group):
        return group

    (group,) = asyncio.run(runner.run([prompt], play, unscored))
    one = group.trajectories[0]
    assert one.token_ids == (7, 8, 9, 1, 2, 50, 51, 1, 2)
    # turn 0: prompt and first token; turn 1: its last token, the observation and the answer's first; none of the last
    assert one.routed_experts[:, 0, 0].tolist() == [0, 0, 0, 0, 10, 10, 10, 10]


def test_rows_of_layers_without_a_mixture_are_dropped():
    told = np.arange(12).reshape(2, 3, 2).astype(np.int16)
    assert mixture_rows(told, (1, 2), 2).tolist() == told[:, 1:].tolist()
    with pytest.raises(
        ValueError, match=r"gave experts of shape \(2, 3, 2\) .*; expected 3 tokens and the layers 1, 2"
    ):
        mixture_rows(told, (1, 2), 3)
    with pytest.raises(ValueError, match="gave experts of shape None"):
        mixture_rows(None, (1,), 3)
