"""The endpoint, asked by the real `openai` client: what it records is exactly what was sampled."""

import asyncio
import json
import socket
import threading
from collections import Counter

import aiohttp
import openai
import pytest
import uvicorn
from fastapi import Request
from transformers import AutoModelForCausalLM

from hone.data.rendering import Renderer
from hone.envs.agents import sessions
from hone.envs.agents.endpoint import LARGEST_BODY, Endpoint
from hone.envs.agents.sessions import AgentTask
from hone.envs.tool_calls import arguments_text, hermes
from hone.processes.listening import BodyRefused, LoopServer, Refusals, bounded, read_body
from hone.rollout.adapters import AdapterFiles
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.settings import BuiltinSettings
from hone.types import Completion, SamplingParams, Status, StopReason
from tests.rollout.peft_adapters import adapt

USER = {"role": "user", "content": "ab"}
SEARCH = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}


class Recording:
    """A GenerateFn that keeps what it was asked and what it gave."""

    def __init__(self, generate):
        self._generate = generate
        self.asked, self.given = [], []

    async def __call__(self, request):
        self.asked.append((request.id, request.tokens, request.sampling))
        self.given.append(await self._generate(request))
        return self.given[-1]


def saying(language, *texts):
    """A GenerateFn that says one text after another: for what a tiny model would not say by itself."""
    left = list(texts)

    async def generate(request):
        ids = language.tokenizer(left.pop(0), add_special_tokens=False)["input_ids"]
        versions, logprobs = (3,) * len(ids), tuple(-0.5 - i for i in range(len(ids)))
        return Completion(request.id, tuple(ids), logprobs, versions, StopReason.STOP)

    return generate


@pytest.fixture(scope="module")
def engine(tiny, tokenizer):
    config = tiny("qwen3").config
    config.max_position_embeddings = 512
    return BuiltinEngine(BuiltinSettings(), AutoModelForCausalLM.from_config(config), tokenizer)


@pytest.fixture
def talk(tokenizer, engine, finish):
    """`talk(story)`: run `story(client, session)`; returns (its result, session, recording)."""

    def run(story, generate=None, budget=200, **task):
        async def all_of_it():
            language = Renderer(tokenizer)
            recording = Recording(generate(language) if generate else engine.generate)
            wanted = SamplingParams(budget, stop_token_ids=tuple(language.end_token_ids))
            async with Endpoint(language) as endpoint:
                key = endpoint.open_session(AgentTask(recording, wanted, "1/7/0", lambda number: 100 + number, **task))
                async with client_of(endpoint, key) as client:
                    result = await story(client, endpoint.session(key))
                return result, endpoint.close_session(key), recording

        return finish(all_of_it())

    return run


def client_of(endpoint, key):
    """The real client; it need not load certificates to speak to loopback."""
    http = openai.DefaultAsyncHttpxClient(verify=False, trust_env=False)
    return openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=key, timeout=30, http_client=http)


def ask(client, messages, **more):
    return client.chat.completions.create(model="policy", messages=messages, **{"max_tokens": 6, **more})


def test_a_conversation_is_recorded_token_by_token(talk, tokenizer):
    async def story(client, session):
        messages = [USER]
        for _ in range(3):
            reply = await ask(client, messages, extra_body={"return_token_ids": True}, logprobs=True)
            choice = reply.choices[0]
            messages += [choice.message.model_dump(exclude_none=True), {"role": "user", "content": "more"}]
            assert reply.usage.completion_tokens == len(choice.token_ids) == len(choice.logprobs.content)
        return messages

    _, session, recording = talk(story)
    (one,) = session.trajectories("task/7", 0)
    renderer = Renderer(tokenizer)
    expected, mask, logprobs, versions = list(renderer.render_prompt([USER])), [], [], []
    assert one.prompt_length == len(expected)
    mask, logprobs, versions = [0] * len(expected), [0.0] * len(expected), [-1] * len(expected)
    for turn, (asked, given) in enumerate(zip(recording.asked, recording.given, strict=True)):
        if turn:
            new = renderer.render_continuation(expected, [{"role": "user", "content": "more"}])
            expected += new
            mask, logprobs, versions = mask + [0] * len(new), logprobs + [0.0] * len(new), versions + [-1] * len(new)
        assert asked[:2] == (f"1/7/0/{turn}", tuple(expected))
        assert asked[2].seed == 100 + turn
        expected += given.token_ids
        mask, logprobs, versions = (
            mask + [1] * len(given.token_ids),
            [*logprobs, *given.logprobs],
            [*versions, *given.weight_versions],
        )
    assert (one.token_ids, one.loss_mask) == (tuple(expected), tuple(mask))
    assert (one.rollout_logprobs, one.weight_versions) == (tuple(logprobs), tuple(versions))
    assert (one.turns, one.episode, one.prompt_id) == (3, 0, "task/7")
    assert one.status in (Status.OK, Status.TRUNCATED)


def test_each_message_of_a_long_conversation_is_compared_once_for_a_request(talk, monkeypatch):
    compared = []

    class Watched(dict):
        __hash__ = None

        def __eq__(self, other):
            compared.append(1)
            return super().__eq__(other)

    canonical = sessions.canonical
    monkeypatch.setattr(sessions, "canonical", lambda message: Watched(canonical(message)))

    async def story(client, session):
        messages, counts = [USER], []
        for _ in range(12):
            compared.clear()
            reply = await ask(client, messages, max_tokens=1)
            counts.append((len(compared), len(messages)))
            messages += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "on"}]
        return counts

    counts, session, _ = talk(story, budget=400)
    assert len(session.tracks) == 1
    assert all(0 < many <= messages for many, messages in counts[1:])


def test_a_stream_tells_the_same_as_a_whole_reply(talk):
    async def whole(client, session):
        return (await ask(client, [USER], max_tokens=60)).choices[0]

    async def streamed(client, session):
        text, finish, usage = "", None, None
        async for chunk in await ask(
            client, [USER], max_tokens=60, stream=True, stream_options={"include_usage": True}
        ):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
        return text, finish, usage

    one, _, given = talk(whole)
    (text, ended, usage), session, recording = talk(streamed)
    assert recording.given == given.given
    assert (text, ended) == (one.message.content, one.finish_reason)
    assert usage.completion_tokens == len(recording.given[0].token_ids)
    assert session.trajectories("p", 0)[0].response.replace("<pad>", "") == text, "rewards see special tokens too"


def calls_search(language):
    return saying(language, 'I look.<tool_call>\n{"name": "search", "arguments": {"q": "x"}}\n</tool_call>', "It is 4.")


@pytest.mark.parametrize("stream", [False, True])
def test_tool_calls_there_and_back(talk, stream):
    async def story(client, session):
        if stream:
            calls, content = [], ""
            async for chunk in await ask(client, [USER], tools=[SEARCH], max_tokens=100, stream=True):
                content += chunk.choices[0].delta.content or ""
                calls += chunk.choices[0].delta.tool_calls or []
                ended = chunk.choices[0].finish_reason
            told = {
                "role": "assistant",
                "content": content,
                "tool_calls": [c.model_dump(exclude={"index"}) for c in calls],
            }
        else:
            choice = (await ask(client, [USER], tools=[SEARCH], max_tokens=100)).choices[0]
            told, ended, calls = choice.message, choice.finish_reason, choice.message.tool_calls
        assert ended == "tool_calls"
        assert (calls[0].function.name, json.loads(calls[0].function.arguments)) == ("search", {"q": "x"})
        result = {"role": "tool", "tool_call_id": calls[0].id, "content": "4"}
        return (await ask(client, [USER, told, result], tools=[SEARCH], max_tokens=100)).choices[0]

    last, session, recording = talk(story, calls_search)
    assert (last.message.content, last.finish_reason, last.message.tool_calls) == ("It is 4.", "stop", None)
    (one,) = session.trajectories("p", 0)
    assert one.turns == 2
    first_end = one.prompt_length + len(recording.given[0].token_ids)
    assert one.token_ids[:first_end] == recording.asked[0][1] + recording.given[0].token_ids
    assert recording.asked[1][1][:first_end] == one.token_ids[:first_end], "the call was not encoded again"
    assert one.response.startswith("I look.<tool_call>")


def test_without_tools_on_offer_nothing_is_a_call(talk):
    async def story(client, session):
        return (await ask(client, [USER], max_tokens=100)).choices[0]

    choice, _, _ = talk(story, calls_search)
    assert choice.message.tool_calls is None
    assert "<tool_call>" in choice.message.content


@pytest.mark.parametrize(
    ("text", "left", "calls"),
    [
        ("no call", "no call", []),
        ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
        ('a<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>b', "ab", [("f", '{"x": 1}')]),
        ("<tool_call>{not json}</tool_call>", "", [("", "{}")]),
    ],
)
def test_calls_in_text(text, left, calls):
    found_left, found = hermes(text)
    assert (found_left, [(one.name, arguments_text(one)) for one in found]) == (left, calls)


def test_several_answers_are_trajectories_of_one_episode_and_nothing_is_trained_on_twice(talk):
    async def story(client, session):
        first = (await ask(client, [USER])).choices[0].message
        history = [USER, first, {"role": "user", "content": "b"}]
        return (await ask(client, history, n=3)).choices

    choices, session, recording = talk(story)
    trajectories = session.trajectories("p", 4)
    assert [choice.index for choice in choices] == [0, 1, 2]
    assert len({one.token_ids for one in trajectories}) == 3
    assert {one.episode for one in trajectories} == {4}
    assert [sampling.seed for _, _, sampling in recording.asked] == [100, 101, 102, 103]
    assert all(sampling.keep_kv for _, _, sampling in recording.asked), "an agent may go on with any history"
    assert len({prompt for _, prompt, _ in recording.asked[1:]}) == 1
    assert sum(sum(one.loss_mask) for one in trajectories) == sum(len(c.token_ids) for c in recording.given)


def test_a_rewritten_history_begins_a_new_trajectory(talk, tokenizer):
    async def story(client, session):
        first = (await ask(client, [USER])).choices[0].message
        await ask(client, [USER, first, {"role": "user", "content": "b"}])
        await ask(client, [USER, {"role": "assistant", "content": "other"}, {"role": "user", "content": "b"}])

    _, session, recording = talk(story)
    one, two = session.trajectories("p", 0)
    assert (one.turns, two.turns) == (2, 1)
    rewritten = [USER, {"role": "assistant", "content": "other"}, {"role": "user", "content": "b"}]
    assert two.token_ids[: two.prompt_length] == Renderer(tokenizer).render_prompt(rewritten)
    assert sum(two.loss_mask) == len(recording.given[2].token_ids)


def test_a_retry_continues_from_the_recorded_prompt_of_that_point(talk):
    async def story(client, session):
        first = (await ask(client, [USER])).choices[0].message
        history = [USER, first, {"role": "user", "content": "b"}]
        await asyncio.gather(ask(client, history), ask(client, history))
        await ask(client, history)

    _, session, recording = talk(story)
    assert len({prompt for _, prompt, _ in recording.asked[1:]}) == 1
    assert sorted(one.turns for one in session.trajectories("p", 0)) == [1, 1, 2]
    sampled = sum(len(c.token_ids) for c in recording.given)
    assert sum(sum(one.loss_mask) for one in session.trajectories("p", 0)) == sampled


def test_stop_strings_end_what_is_told_and_not_what_is_recorded(talk):
    async def story(client, session):
        return (await ask(client, [USER], stop=["lo"])).choices[0]

    choice, session, recording = talk(story, lambda language: saying(language, "hello"))
    assert choice.message.content == "hel"
    assert recording.asked[0][2].stop == ("lo",)
    assert session.trajectories("p", 0)[0].token_ids[-5:] == recording.given[0].token_ids


def test_half_a_surrogate_pair_in_a_request_is_a_replacement_character(talk, tokenizer):
    async def story(client, session):
        body = {"model": "policy", "prompt": "a\ud83db", "max_tokens": 4}
        await client.post("/completions", content=json.dumps(body).encode(), cast_to=object)

    _, session, _ = talk(story)
    (one,) = session.trajectories("p", 0)
    assert one.token_ids[:-4] == tuple(tokenizer("a\ufffdb", add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_no_protocol_can_carry_is_text_and_recorded_once(talk, stream):
    """Half a character in a call was an error after the record, so the client's retry left a track without reader."""
    said = '<tool_call>\n{"name": "search", "arguments": {"q": "\\ud800"}}\n</tool_call>'

    async def story(client, session):
        body = {"model": "policy", "messages": [USER], "tools": [SEARCH], "stream": stream, "max_tokens": 120}
        raw = await client.post("/chat/completions", body=body, cast_to=str)
        return len(session.tracks), raw

    (tracks, raw), session, _ = talk(story, lambda language: saying(language, said), budget=400)
    assert (tracks, session.turns) == (1, 1)
    assert '"tool_calls":[' not in raw.replace(" ", "")
    pieces = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")] or [json.loads(raw)]
    answers = [choice.get("delta") or choice.get("message") or {} for one in pieces for choice in one["choices"]]
    assert said in "".join(answer.get("content") or "" for answer in answers)


@pytest.mark.parametrize("prompt", [[-1], [10**12], [9, 1 << 31]])
@pytest.mark.parametrize("more", [{"max_tokens": 4}, {"max_tokens": 4, "echo": True}, {"max_tokens": 0, "echo": True}])
def test_token_ids_that_no_tokenizer_has_are_the_clients_error(talk, prompt, more):
    async def story(client, session):
        with pytest.raises(openai.BadRequestError, match=r"the prompt has the token id .*, and ids are from 0 to"):
            await client.completions.create(model="policy", prompt=prompt, **more)

    _, session, recording = talk(story)
    assert (session.tracks, session.failure, recording.asked) == ([], None, [])


def test_text_completions_by_text_and_by_ids(talk, tokenizer):
    async def by_text(client, session):
        one = (await client.completions.create(model="policy", prompt="abc", max_tokens=4, logprobs=1)).choices[0]
        assert len(one.logprobs.token_logprobs) == 4
        await client.completions.create(model="policy", prompt="abc" + one.text + " and", max_tokens=4)

    async def by_ids(client, session):
        given = (await client.completions.create(model="policy", prompt=[9, 10], max_tokens=4)).choices
        assert len(given) == 1
        ids = [9, 10, *session.tracks[0].ids[2:], 11]
        await client.completions.create(model="policy", prompt=ids, max_tokens=4)

    def encode(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    for story, first, between in ((by_text, "abc", " and"), (by_ids, [9, 10], [11])):
        start, new = (encode(one) if isinstance(one, str) else one for one in (first, between))
        _, session, recording = talk(story)
        (one,) = session.trajectories("p", 0)
        middle, end = (given.token_ids for given in recording.given)
        assert one.token_ids == (*start, *middle, *new, *end)


def test_a_prompt_is_echoed_with_the_logprobs_of_the_model(talk, tokenizer, engine):
    """Asked as evaluation harnesses do: by token ids in a list of prompts, with the most likely tokens."""

    async def story(client, session):
        ids = tokenizer("what is it?", add_special_tokens=False)["input_ids"]
        alone = await complete(client, [ids], echo=True, logprobs=2, max_tokens=0)
        text = await complete(client, "what is it?", echo=True, logprobs=0, max_tokens=0, n=2)
        assert (session.tracks, session.turns, session.budget) == ([], 0, 200), "nothing was sampled"
        whole = await complete(client, "what is it?", echo=True, logprobs=1, max_tokens=3)
        plain = await complete(client, "what is it?", echo=True, max_tokens=0)
        stream = await complete(client, "what is it?", echo=True, max_tokens=1, stream=True)
        streamed = "".join([chunk.choices[0].text async for chunk in stream])
        return ids, alone, text, whole, plain, streamed

    (ids, alone, text, whole, plain, streamed), session, recording = talk(story)
    scores = engine.score_all([tuple(ids)], 1.0)[0].logprobs.tolist()
    own = alone.choices[0].logprobs
    assert alone.choices[0].text == "".join(own.tokens) == "what is it?"
    assert own.tokens == [tokenizer.decode([one]) for one in ids]
    assert own.text_offset == [sum(map(len, own.tokens[:place])) for place in range(len(ids))]
    assert own.token_logprobs[0] is None
    assert own.token_logprobs[1:] == pytest.approx(scores[1:], abs=1e-4)
    assert own.top_logprobs[0] is None
    for place in range(1, len(ids)):
        top = own.top_logprobs[place]
        assert 2 <= len(top) <= 3, "the two most likely and the prompt's own"
        assert top[own.tokens[place]] == pytest.approx(scores[place], abs=1e-4)
        assert max(top.values()) >= own.token_logprobs[place]
    assert alone.choices[0].finish_reason == "length"
    assert (alone.usage.prompt_tokens, alone.usage.completion_tokens) == (len(ids), 0)
    assert [one.logprobs.token_logprobs for one in text.choices] == [own.token_logprobs] * 2
    assert text.choices[0].logprobs.top_logprobs is None
    sampled = recording.given[2]
    assert whole.choices[0].text == "what is it?" + tokenizer.decode(list(sampled.token_ids), skip_special_tokens=True)
    assert whole.choices[0].logprobs.token_logprobs == [*own.token_logprobs, *sampled.logprobs]
    assert len(whole.choices[0].logprobs.tokens) == len(whole.choices[0].logprobs.top_logprobs) == len(ids) + 3
    assert plain.choices[0].text == "what is it?"
    assert plain.choices[0].logprobs is None
    assert streamed.startswith("what is it?")
    assert [sampling.prompt_logprobs for _, _, sampling in recording.asked] == [2, 0, 1, None]
    assert [one.token_ids[: len(ids)] for one in session.trajectories("p", 0)] == [tuple(ids)] * 2


class Watching(Renderer):
    """A renderer that notes what it decodes on the event loop, and how often it decodes a token alone."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.on_loop, self.alone = [], Counter()

    def decode(self, ids, keep_special=False):
        if threading.current_thread() is threading.main_thread():
            self.on_loop.append(tuple(ids))
        if len(ids) == 1:
            self.alone.update(ids)
        return super().decode(ids, keep_special=keep_special)


def test_an_echo_is_decoded_in_a_thread_each_token_once(tokenizer, engine, finish):
    language, ids = Watching(tokenizer), [5, 6, 5, 6, 5]

    async def all_of_it():
        async with Endpoint(language) as endpoint:
            key = endpoint.open_session(AgentTask(engine.generate, SamplingParams(9), "1/7/0", lambda number: number))
            async with client_of(endpoint, key) as client:
                return await complete(client, [ids], echo=True, logprobs=2, max_tokens=0)

    reply = finish(all_of_it())
    assert len(reply.choices[0].logprobs.tokens) == len(ids)
    assert language.alone
    assert set(language.alone.values()) == {1}
    assert [one for one in language.on_loop if one] == []


def test_an_echo_that_cannot_be_is_refused(talk):
    async def story(client, session):
        for more, message in (
            ({"max_tokens": 0}, "max_tokens = 0 samples nothing: set echo = true"),
            ({"logprobs": 2}, "logprobs = 2: only tokens of a prompt have alternatives"),
            ({"logprobs": 21, "echo": True}, "logprobs"),
            ({"prompt": ["a", "b"], "echo": True}, "one prompt in a request"),
            ({"echo": True, "model": "judge"}, "echo is for prompts of the policy, and model = 'judge' is an adapter"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                await client.completions.create(**{"model": "policy", "prompt": "ab", **more})

    _, session, recording = talk(story, adapters=("judge",))
    assert (session.tracks, recording.asked) == ([], [])


def complete(client, prompt, **more):
    return client.completions.create(model="policy", prompt=prompt, **more)


def test_a_text_that_goes_on_after_a_stop_string_shows_it_once(talk, tokenizer):
    async def story(client, session):
        first = (await complete(client, "Q", stop=["\nObservation:"])).choices[0]
        assert first.text == "Act"
        await complete(client, "QAct\nObservation: 4", stop=["\nObservation:"])
        await complete(client, "QAct and so on")

    _, session, recording = talk(story, lambda language: saying(language, "Act\nObservation:", "Ok", "Ok"))
    shown = [tokenizer.decode(list(prompt)) for _, prompt, _ in recording.asked]
    assert shown == ["Q", "QAct\nObservation: 4", "QAct and so on"], "what the agent sent"
    one, two = session.trajectories("p", 0)
    assert one.token_ids[: len(recording.asked[1][1])] == recording.asked[1][1]
    assert one.token_ids[1:][: len(recording.given[0].token_ids)] == recording.given[0].token_ids, "as it was sampled"
    assert (one.turns, two.turns, sum(two.loss_mask)) == (2, 1, 2)


def test_a_text_that_goes_on_without_the_end_token_is_shown_without_it(talk, tokenizer):
    end = tokenizer.eos_token

    async def story(client, session):
        assert (await complete(client, "Q")).choices[0].text == "Act"
        await complete(client, "QAct more")
        await complete(client, f"QAct{end}more")

    _, session, recording = talk(story, lambda language: saying(language, f"Act{end}", "Ok", "Ok"))
    shown = [tokenizer.decode(list(prompt)) for _, prompt, _ in recording.asked]
    assert shown == ["Q", "QAct more", f"QAct{end}more"]
    assert [one.turns for one in session.trajectories("p", 0)] == [2, 1]


def test_a_text_does_not_go_on_from_ids_that_it_does_not_have(talk, tokenizer):
    ids = tokenizer("Q", add_special_tokens=False)["input_ids"]

    async def story(client, session):
        await complete(client, ids)
        await complete(client, "Act")
        await complete(client, "QAct")

    _, session, recording = talk(story, lambda language: saying(language, "Act", "Ok", "Ok"))
    assert [tokenizer.decode(list(prompt)) for _, prompt, _ in recording.asked] == ["Q", "Act", "QAct"]
    assert [one.turns for one in session.trajectories("p", 0)] == [2, 1]


def test_an_answer_that_nobody_waits_for_is_given_up_and_not_recorded(talk):
    ended = []

    def slow_at_first(language):
        say = saying(language, "1234")

        async def generate(request):
            if request.id.endswith("/0"):
                try:
                    await asyncio.sleep(50)
                finally:
                    ended.append(request.id)
            return await say(request)

        return generate

    async def story(client, session):
        hasty = client.with_options(timeout=0.3, max_retries=1)
        reply = await ask(hasty, [USER])
        assert (reply.choices[0].message.content, ended) == ("1234", ["1/7/0/0"])
        return session.waiting, session.budget

    (waiting, budget), session, _ = talk(story, slow_at_first)
    assert (waiting, budget) == (0, 196), "nothing runs on, and one answer was paid for"
    (one,) = session.trajectories("p", 0)
    assert (one.turns, sum(one.loss_mask)) == (1, 4)


def test_the_runs_sampling_counts_unless_the_agents_is_asked_for(talk):
    async def story(client, session):
        await ask(client, [USER], temperature=0.3, top_p=0.5, max_tokens=4)

    _, _, of_run = talk(story)
    _, _, of_client = talk(story, client_sampling=True)
    assert (of_run.asked[0][2].temperature, of_run.asked[0][2].top_p) == (1.0, 1.0)
    assert (of_client.asked[0][2].temperature, of_client.asked[0][2].top_p) == (0.3, 0.5)
    assert of_run.asked[0][2].max_tokens == 4


def test_the_budget_is_of_the_whole_session(talk):
    async def story(client, session):
        await ask(client, [USER], max_tokens=8)
        await ask(client, [USER], max_tokens=8)
        with pytest.raises(openai.BadRequestError, match="budget of sampled tokens"):
            await ask(client, [USER])

    _, session, recording = talk(story, lambda language: saying(language, "12345678", "1234"), budget=12)
    assert [sampling.max_tokens for _, _, sampling in recording.asked] == [8, 4]
    assert session.budget == 0


def test_several_answers_share_the_budget(talk):
    async def story(client, session):
        await client.chat.completions.create(model="policy", messages=[USER], n=3)
        with pytest.raises(openai.BadRequestError, match=r"budget of sampled tokens .*1 left for 2 answers"):
            await ask(client, [USER], n=2)
        return session.refused_for_length

    outgrown, session, recording = talk(story, lambda language: saying(language, "123", "123", "123"), budget=10)
    assert [sampling.max_tokens for _, _, sampling in recording.asked] == [3, 3, 3]
    assert (session.budget, outgrown) == (1, True)


def test_requests_at_the_same_time_share_the_budget(talk):
    go = asyncio.Event()

    def held_up(language):
        say = saying(language, "12", "123", "12345")

        async def generate(request):
            await go.wait()
            return await say(request)

        return generate

    async def story(client, session):
        asked = [asyncio.create_task(ask(client, [USER], max_tokens=5)) for _ in range(2)]
        while session.waiting < 2:
            await asyncio.sleep(0.01)
        asked.append(asyncio.create_task(client.chat.completions.create(model="policy", messages=[USER])))
        await asyncio.sleep(0.2)
        assert session.waiting == 2, "all is set aside, and some of it may come back"
        go.set()
        await asyncio.gather(*asked)

    _, session, recording = talk(story, held_up, budget=10)
    assert [sampling.max_tokens for _, _, sampling in recording.asked] == [5, 5, 5]
    assert session.budget == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format: .* set episode.env.client_sampling = true"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs"),
        ({"n": 0}, "n: "),
        ({"extra_body": {"guided_json": {}}}, "guided_json"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name_and_not_recorded(talk, more, message):
    async def story(client, session):
        with pytest.raises(openai.BadRequestError, match=message):
            await ask(client, [USER], **more)

    _, session, recording = talk(story)
    assert (session.trajectories("p", 0), recording.asked) == ([], [])


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def test_a_schema_reaches_the_engine_by_each_protocol(talk):
    """Answers under a schema have other log-probs than the trainer's, so a run has to ask for them."""
    form = {"type": "json_schema", "json_schema": {"name": "one", "schema": SCHEMA}}

    async def story(client, session):
        await ask(client, [USER], response_format=form)
        await ask(client, [USER], response_format={"type": "json_object"})
        await ask(client, [USER], response_format={"type": "text"})
        plain = {"type": "json_schema", "name": "one", "schema": SCHEMA}
        await client.responses.create(model="policy", input="ab", text={"format": plain})
        path, body = "/messages", {"model": "policy", "max_tokens": 3, "messages": [USER]}
        await client.post(path, body={**body, "output_config": {"format": plain}}, cast_to=object)
        with pytest.raises(openai.BadRequestError, match="can call no tool"):
            await ask(client, [USER], response_format=form, tools=[SEARCH])
        with pytest.raises(openai.BadRequestError, match="should have a schema"):
            await ask(client, [USER], response_format={"type": "json_schema", "json_schema": {"name": "one"}})
        grammar = {"type": "grammar"}
        with pytest.raises(openai.BadRequestError, match="response_format should be of type text, json_object or"):
            await ask(client, [USER], response_format=grammar)
        for asked, message in (
            ({"format": grammar}, "text.format should be of type"),
            ({"format": plain, "grammar": "abc"}, "text.grammar = 'abc' is not supported"),
            ({"verbosity": "low"}, "text.verbosity = 'low' is not supported"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                await client.responses.create(model="policy", input="ab", text=asked)
        for asked, message in (
            ({"format": grammar}, "output_config.format should be of type"),
            ({"format": plain, "task_budget": {"tokens": 9}}, "output_config.task_budget = .* is not supported"),
            ("low", "output_config should be a JSON object"),
        ):
            with pytest.raises(openai.BadRequestError, match=message):
                await client.post(path, body={**body, "output_config": asked}, cast_to=object)
        await complete(client, "ab", extra_body={"response_format": None})

    _, _, recording = talk(story, lambda language: saying(language, *["{}"] * 6), client_sampling=True)
    schemas = [sampling.json_schema and json.loads(sampling.json_schema) for _, _, sampling in recording.asked]
    assert schemas == [SCHEMA, {"type": "object"}, "", SCHEMA, SCHEMA, ""]


def test_the_built_in_engine_has_no_schemas_and_says_so(talk):
    async def story(client, session):
        with pytest.raises(openai.BadRequestError, match="the built-in rollout engine has no such constraint"):
            await ask(client, [USER], response_format={"type": "json_object"})

    _, session, _ = talk(story, client_sampling=True)
    assert session.trajectories("p", 0) == []


def test_a_prompt_that_the_engine_refuses_is_the_agents_to_hear_of(talk):
    async def story(client, session):
        with pytest.raises(openai.BadRequestError, match="leaves no room"):
            await ask(client, [{"role": "user", "content": "a" * 600}])

    _, session, _ = talk(story)
    assert session.refused_for_length
    assert session.failure is None


def test_a_refusal_that_is_not_about_length_says_so(talk):
    async def story(client, session):
        with pytest.raises(openai.BadRequestError) as long:
            await ask(client, [{"role": "user", "content": "a" * 600}])
        with pytest.raises(openai.BadRequestError, match="vocabulary of 104, found 104") as unknown:
            await complete(client, [9, 104])
        with pytest.raises(openai.BadRequestError, match="the prompt has the token id -1, and ids are from 0 to"):
            await complete(client, [9, -1])
        assert session.failure is None
        return long.value.code, unknown.value.code, session.refused_for_length

    codes, _, _ = talk(story)
    assert codes == ("context_length_exceeded", "invalid_request", False)


def test_an_engine_that_breaks_is_asked_once_and_known_to_the_session(talk):
    def broken(language):
        async def generate(request):
            raise RuntimeError("not finite")

        return generate

    async def story(client, session):
        with pytest.raises(openai.InternalServerError, match="not finite"):
            await ask(client, [USER])

    _, session, recording = talk(story, broken)
    assert str(session.failure) == "not finite"
    assert len(recording.asked) == 1
    assert session.trajectories("p", 0) == []


@pytest.mark.parametrize("error", [KeyError("row"), TypeError("no len()"), IndexError("row 4")])
def test_a_fault_inside_the_engine_is_not_the_requests(talk, error, caplog):
    def broken(language):
        async def generate(request):
            raise error

        return generate

    async def story(client, session):
        with pytest.raises(openai.InternalServerError, match="the rollout engine failed"):
            await ask(client, [USER])

    _, session, _ = talk(story, broken)
    assert session.failure is error
    assert type(error).__name__ in caplog.text


@pytest.mark.parametrize("path", ["/v1/models", "/v1/chat/completions", "/docs", "/openapi.json", "/", "/nothing"])
def test_no_door_opens_without_a_key(talk, path):
    async def story(client, session):
        url = str(client.base_url).removesuffix("/v1/") + path
        found = []
        async with aiohttp.ClientSession() as http:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {client.api_key}"}):
                for method in ("GET", "POST"):
                    async with http.request(method, url, headers=headers, json={}) as reply:
                        found.append(reply.status)
        return found

    found, _, recording = talk(story)
    assert found == [401] * 6
    assert recording.asked == []


def test_a_body_that_is_announced_too_long_is_refused_before_it_comes(talk):
    async def story(client, session):
        reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {client.api_key}\r\n"
        writer.write(f"{head}Content-Length: {LARGEST_BODY + 1}\r\n\r\n".encode())
        found = await reader.readuntil(b"}}")
        writer.close()
        return found.decode()

    found, _, recording = talk(story)
    assert found.startswith("HTTP/1.1 400 ")
    assert "the request has 16,777,217 bytes; at most 16,777,216 are taken" in found
    assert recording.asked == []


def test_a_body_that_goes_on_and_on_is_not_held():
    taken = []

    async def receive():
        taken.append(100)
        return {"type": "http.request", "body": b"x" * 100, "more_body": True}

    with pytest.raises(BodyRefused, match="more than 1,000 bytes"):
        asyncio.run(read_body(Request({"type": "http", "headers": []}, receive), 1000))
    assert sum(taken) == 1100


def test_other_tasks_run_while_a_long_prompt_is_tokenised(talk):
    """Half a MiB takes seconds; the engine refuses it by its length, and says so."""

    async def story(client, session):
        asked = asyncio.create_task(ask(client, [{"role": "user", "content": "ab" * (1 << 18)}]))
        turns = 0
        while not asked.done():
            await asyncio.sleep(0.001)
            turns += bool(session.recording.locked())
        with pytest.raises(openai.BadRequestError, match="a prompt of 524291 tokens"):
            await asked
        return turns

    turns, _, _ = talk(story)
    assert turns > 10, "the event loop went round while the prompt was tokenised"


def test_each_session_has_room_for_its_connections(tokenizer, engine, finish, monkeypatch):
    """As many agents at a time as a run has: none is refused because there are others."""
    monkeypatch.setattr("hone.envs.agents.endpoint.MOST_CONNECTIONS", 4)

    async def story():
        language = Renderer(tokenizer)
        wanted = SamplingParams(40, stop_token_ids=tuple(language.end_token_ids))
        async with Endpoint(language) as endpoint:
            keys = [
                endpoint.open_session(AgentTask(Recording(engine.generate), wanted, f"1/{i}/0", lambda number: number))
                for i in range(12)
            ]
            idle = [await asyncio.open_connection("127.0.0.1", int(endpoint.base_url.split(":")[2][:-3])) for _ in keys]
            async with client_of(endpoint, keys[0]) as client:
                await ask(client, [USER], max_tokens=1)
            for _, writer in idle:
                writer.close()
            for key in keys:
                endpoint.close_session(key)

    finish(story())


def test_half_open_connections_are_few_and_timed():
    """Connections that send no whole head, in a listener that takes eight; then one that asks."""

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"here"})

    async def story():
        refusals = Refusals("a listener")
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        config = uvicorn.Config(app, lifespan="off", log_level="warning", http=bounded(refusals, lambda: 8, head_s=0.5))
        server = LoopServer(config)
        serving = asyncio.create_task(server.serve([listener]))
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        for _, writer in idle:
            writer.write(b"GET / HTTP/1.1\r\nHost: a")
        await asyncio.gather(*(reader.read() for reader, _ in idle), return_exceptions=True)  # each is ended
        async with aiohttp.ClientSession() as http, http.get(f"http://127.0.0.1:{port}/") as reply:
            said = await reply.text()
        server.should_exit = True
        await serving
        for _, writer in idle:
            writer.close()
        listener.close()
        return said, refusals.counts

    said, counts = asyncio.run(asyncio.wait_for(story(), 60))
    assert said == "here"
    assert counts == {"there were 8 already": 12, "no request came within 0.5 s": 8}


def test_a_key_ends_with_its_session(talk, tokenizer, engine, finish):
    async def story():
        async with Endpoint(Renderer(tokenizer)) as endpoint:
            task = AgentTask(engine.generate, SamplingParams(8), "1/1/0", lambda number: number)
            keys = [endpoint.open_session(task), endpoint.open_session(task)]
            endpoint.close_session(keys[0])
            async with client_of(endpoint, keys[0]) as client:
                with pytest.raises(openai.AuthenticationError):
                    await ask(client, [USER])
            async with client_of(endpoint, keys[1]) as client:
                assert [model.id async for model in client.models.list()] == ["policy"]

    finish(story())


def test_an_adapter_beside_the_policy_answers_who_names_it_and_is_not_recorded(talk, tiny, tokenizer, tmp_path, gap):
    """An opponent or judge: its tokens are not the policy's, so they are in no trajectory and spend no budget."""
    judge, _, _ = adapt(tiny("qwen3"), 0, target_modules=["q_proj", "down_proj"])
    judge.save_pretrained(tmp_path)
    beside = {"judge": AdapterFiles.at(str(tmp_path))}
    engine = BuiltinEngine(BuiltinSettings(), tiny("qwen3"), tokenizer, adapters=beside)

    async def story(client, session):
        assert [one.id async for one in client.models.list()] == ["policy", "judge"]
        first = await ask(client, [USER])
        verdict = await ask(client, [USER], max_tokens=40, extra_body={"model": "judge", "return_token_ids": True})
        text = await client.completions.create(model="judge", prompt="ab", max_tokens=3)
        await ask(client, [USER], extra_body={"model": "gpt"})  # any other name is the policy
        return first, verdict, text

    (_, verdict, text), session, recording = talk(story, lambda language: engine.generate, 12, adapters=("judge",))
    assert [sampling.adapter for _, _, sampling in recording.asked] == ["", "judge", "judge", ""]
    assert verdict.model == text.model == "judge"
    _, asked, _, _ = zip(recording.asked, recording.given, strict=True)
    assert gap(judge, asked[0][1], asked[1]) < 1e-5
    assert gap(tiny("qwen3"), asked[0][1], asked[1]) > 1e-3
    recorded = sum(sum(track.loss_mask) for track in session.trajectories("task/7", 0))
    own = [recording.given[0], recording.given[3]]
    assert recorded == sum(len(given.token_ids) for given in own)
    assert session.budget == 12 - recorded


def test_a_key_in_the_path_opens_its_session_whatever_key_the_client_sends(talk):
    async def story(client, session):
        url = f"{str(client.base_url).removesuffix('/v1/')}/s/{client.api_key}/v1/models"
        found = []
        async with aiohttp.ClientSession() as http:
            for place in (url, url.replace(client.api_key, "wrong"), url.replace("/models", "/nothing")):
                async with http.get(place, headers={"Authorization": "Bearer sk-of-the-client"}) as reply:
                    found.append(reply.status)
        return found

    assert talk(story)[0] == [200, 401, 404]
