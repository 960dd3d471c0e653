"""The endpoint's protocols, spoken by the real clients: every token that a client causes is on one track."""

import json

import aiohttp
import anthropic
import openai
import pytest
from transformers import AutoModelForCausalLM

from hone.data.rendering import Renderer
from hone.envs.agents.endpoint import DIALECTS, Endpoint
from hone.envs.agents.sessions import AgentTask
from hone.envs.tool_calls import hermes, opening_of, pythonic, qwen3_coder
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.settings import BuiltinSettings
from hone.types import Completion, SamplingParams, StopReason

SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}
CALLS = ('I look.<tool_call>\n{"name": "search", "arguments": {"q": "x", "k": 2}}\n</tool_call>', "It is 4.")
WHOLE = [False, True]


def saying(language, asked, *texts):
    """A GenerateFn that says one text after another, and notes what it was asked."""
    left = list(texts)

    async def generate(request):
        asked.append(request.tokens)
        ids = language.tokenizer(left.pop(0), add_special_tokens=False)["input_ids"]
        cut = ids[: request.sampling.max_tokens]
        reason = StopReason.STOP if len(cut) == len(ids) else StopReason.LENGTH
        return Completion(request.id, tuple(cut), (-0.5,) * len(cut), (3,) * len(cut), reason)

    return generate


@pytest.fixture
def talk(tokenizer, finish):
    """`talk(story, *texts)`: run `story(url, session)`, in which the policy says the texts.

    Returns what the story returned, the session, and the prompts that the policy was asked.
    """

    def run(story, *texts, parse=hermes, **task):
        async def all_of_it():
            language, asked = Renderer(tokenizer, unrendered="drop"), []  # its template shows no calls
            sampling = SamplingParams(400, stop_token_ids=tuple(language.end_token_ids))
            async with Endpoint(language, parse) as endpoint:
                generate = saying(language, asked, *texts)
                key = endpoint.open_session(AgentTask(generate, sampling, "1/7/0", lambda number: number, **task))
                result = await story(endpoint.url_of(key), endpoint.session(key))
                return result, endpoint.close_session(key), asked

        return finish(all_of_it())

    return run


def of_openai(url):
    http = openai.DefaultAsyncHttpxClient(verify=False, trust_env=False)
    return openai.AsyncOpenAI(base_url=url, api_key="sk-own", timeout=30, http_client=http)


def of_anthropic(url):
    http = anthropic.DefaultAsyncHttpxClient(verify=False, trust_env=False)
    return anthropic.AsyncAnthropic(base_url=url, api_key="sk-own", timeout=30, http_client=http)


def one_track(session, asked, turns=2):
    """The only trajectory, whose ids are what the policy was asked, then what it said, each time."""
    (track,) = session.trajectories("p", 0)
    assert track.turns == turns
    for prompt, span in zip(asked, track.spans, strict=True):
        assert track.token_ids[: span.start] == prompt
        assert all(track.loss_mask[span.start : span.end])
    assert sum(track.loss_mask) == sum(span.end - span.start for span in track.spans)
    return track


# ------------------------------------------------------------------------------------------------------- Responses


@pytest.mark.parametrize("stream", WHOLE)
def test_responses_calls_there_and_back_on_one_track(talk, stream):
    tool = {"type": "function", "name": "search", "parameters": SCHEMA, "strict": False}

    async def ask(client, items):
        if not stream:
            return await client.responses.create(model="policy", input=items, tools=[tool], instructions="be brief")
        async with client.responses.stream(
            model="policy", input=items, tools=[tool], instructions="be brief"
        ) as events:
            kinds = [one.type async for one in events]
            assert kinds[:2] == ["response.created", "response.in_progress"]
            assert kinds[-1] == "response.completed"
            return await events.get_final_response()

    async def story(url, session):
        async with of_openai(url) as client:
            items = [{"role": "user", "content": "ab"}]
            first = await ask(client, items)
            items += [one.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for one in first.output]
            items.append({"type": "function_call_output", "call_id": first.output[1].call_id, "output": "4"})
            return first, await ask(client, items)

    (first, last), session, asked = talk(story, *CALLS)
    message, call = first.output
    assert (message.type, message.content[0].text) == ("message", "I look.")
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "search", {"q": "x", "k": 2})
    assert (last.output_text, last.status) == ("It is 4.", "completed")
    assert last.usage.input_tokens == len(asked[1])
    one_track(session, asked)


def test_responses_log_probs_ids_and_a_cut_answer(talk):
    async def story(url, session):
        async with of_openai(url) as client:
            return await client.responses.create(
                model="policy",
                input="ab",
                max_output_tokens=3,
                include=["message.output_text.logprobs"],
                extra_body={"return_token_ids": True},
            )

    found, session, asked = talk(story, "It is four.")
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    (message,) = found.output
    assert [one.logprob for one in message.content[0].logprobs] == [-0.5] * 3
    track = one_track(session, asked, turns=1)
    assert tuple(message.token_ids) == track.token_ids[track.prompt_length :]


# ------------------------------------------------------------------------------------------------------- Anthropic


@pytest.mark.parametrize("stream", WHOLE)
def test_anthropic_calls_there_and_back_on_one_track(talk, stream):
    tool = {"name": "search", "input_schema": SCHEMA}

    async def ask(client, messages):
        fields = {"model": "policy", "max_tokens": 100, "system": "be brief", "messages": messages, "tools": [tool]}
        if not stream:
            return await client.messages.create(**fields)
        async with client.messages.stream(**fields) as events:
            return await events.get_final_message()

    async def story(url, session):
        async with of_anthropic(url) as client:
            messages = [{"role": "user", "content": "ab"}]
            first = await ask(client, messages)
            result = {"type": "tool_result", "tool_use_id": first.content[1].id, "content": "4"}
            messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
            return first, await ask(client, messages)

    (first, last), session, asked = talk(story, *CALLS)
    text, call = first.content
    assert (text.text, call.name, call.input, first.stop_reason) == (
        "I look.",
        "search",
        {"q": "x", "k": 2},
        "tool_use",
    )
    assert (last.content[0].text, last.stop_reason, last.usage.input_tokens) == ("It is 4.", "end_turn", len(asked[1]))
    assert last.usage.output_tokens == session.trajectories("p", 0)[0].spans[1].end - len(asked[1])
    one_track(session, asked)


def test_anthropic_says_why_an_answer_ended(talk):
    async def story(url, session):
        async with of_anthropic(url.removesuffix("/v1")) as client:  # with and without /v1 in the base URL
            user = [{"role": "user", "content": [{"type": "text", "text": "ab"}]}]
            cut = await client.messages.create(model="policy", max_tokens=2, messages=user)
            stopped = await client.messages.create(
                model="policy", max_tokens=100, messages=user, stop_sequences=["zz", "four"]
            )
            with pytest.raises(anthropic.BadRequestError, match="thinking") as refused:
                await client.messages.create(
                    model="policy", max_tokens=9, messages=user, thinking={"type": "enabled", "budget_tokens": 5}
                )
            return cut, stopped, refused.value.body

    (cut, stopped, body), session, _ = talk(story, "It is four.", "It is four.")
    assert cut.stop_reason == "max_tokens"
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "four", "It is ")
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert len(session.trajectories("p", 0)) == 2, "the second is a retry of the first"


# ------------------------------------------------------------------------------------------------- forced calls


@pytest.mark.parametrize(
    ("choice", "said", "opening"),
    [
        ("required", '{"name": "search", "arguments": {"q": "x"}}\n</tool_call>', "<tool_call>\n"),
        (
            {"type": "function", "function": {"name": "search"}},
            ' {"q": "x"}}\n</tool_call>',
            '<tool_call>\n{"name": "search", "arguments":',
        ),
    ],
)
def test_an_answer_that_has_to_be_a_call_begins_as_one_which_is_read_and_not_trained_on(
    talk, tokenizer, choice, said, opening
):
    tools = [{"type": "function", "function": {"name": "search", "parameters": SCHEMA}}]
    user = {"role": "user", "content": "ab"}

    async def story(url, session):
        async with of_openai(url) as client:
            asking = {"model": "policy", "messages": [user], "tools": tools}
            first = (await client.chat.completions.create(**asking, tool_choice=choice)).choices[0]
            result = {"role": "tool", "tool_call_id": first.message.tool_calls[0].id, "content": "4"}
            asking["messages"] = [user, first.message, result]
            await client.chat.completions.create(**asking)
            asking["messages"] = [user]
            await client.chat.completions.create(**asking)  # a retry that is free to answer
            return first

    first, session, asked = talk(story, said, "It is 4.", "No.")
    call = first.message.tool_calls[0].function
    assert (first.finish_reason, call.name, json.loads(call.arguments)) == ("tool_calls", "search", {"q": "x"})
    begun = tuple(tokenizer(opening, add_special_tokens=False)["input_ids"])
    assert asked[0] == asked[2] + begun
    calling, retried = session.trajectories("p", 0)
    assert (calling.prompt_length, calling.turns, retried.turns) == (len(asked[0]), 2, 1)
    assert not any(calling.loss_mask[: calling.prompt_length])
    assert calling.response.startswith(opening + said)


def test_a_call_is_asked_for_only_where_its_form_is_known(talk):
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
    cases = [
        ({"tools": [tool], "tool_choice": "required"}, "no fixed start"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "'g'"),
        ({"tools": [tool], "tool_choice": {"type": "allowed_tools"}}, "not supported"),
        ({"tools": [tool], "tool_choice": "often"}, "often"),
    ]

    async def story(url, session):
        async with of_openai(url) as client:
            for more, message in cases:
                with pytest.raises(openai.BadRequestError, match=message):
                    await client.chat.completions.create(
                        model="policy", messages=[{"role": "user", "content": "ab"}], **more
                    )

    def of_ones_own(text):
        return text, ()

    _, session, asked = talk(story, parse=of_ones_own)
    assert (asked, session.failure) == ([], None)
    assert opening_of(qwen3_coder, "f") == "<tool_call>\n<function=f>\n"
    assert opening_of(pythonic) == "["


def test_tools_are_refused_where_the_chat_template_has_no_calls(talk):
    async def story(url, session):
        async with of_openai(url) as client:
            asking = {"model": "policy", "messages": [{"role": "user", "content": "ab"}]}
            with pytest.raises(openai.BadRequestError, match=r"episode\.env\.parser"):
                await client.chat.completions.create(
                    **asking, tools=[{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
                )
            return (await client.chat.completions.create(**asking)).choices[0].message.content

    assert talk(story, "It is 4.", parse=None)[0] == "It is 4."


# --------------------------------------------------------------------------------------- histories, limits, faults


def test_an_answer_that_comes_back_with_other_spaces_goes_on_its_track(talk):
    """pydantic-ai writes arguments without spaces, others strip the text."""
    tools = [{"type": "function", "function": {"name": "search", "parameters": SCHEMA}}]
    user = {"role": "user", "content": "ab"}

    async def story(url, session):
        async with of_openai(url) as client:
            first = (await client.chat.completions.create(model="policy", messages=[user], tools=tools)).choices[0]
            call = first.message.tool_calls[0]
            function = {"name": "search", "arguments": '{"k":2,"q":"x"}'}
            told = {
                "role": "assistant",
                "content": " I look. ",
                "tool_calls": [{"id": call.id, "type": "function", "function": function}],
            }
            result = {"role": "tool", "tool_call_id": call.id, "content": "4"}
            await client.chat.completions.create(model="policy", messages=[user, told, result], tools=tools)
            told["tool_calls"][0]["function"] = {"name": "search", "arguments": '{"k":3,"q":"x"}'}
            await client.chat.completions.create(model="policy", messages=[user, told, result], tools=tools)

    _, session, asked = talk(story, *CALLS, "It is 5.")
    same, other = session.trajectories("p", 0)
    assert (same.turns, other.turns) == (2, 1), "other arguments are another history"
    assert same.token_ids[: same.spans[1].start] == asked[1]


def test_turns_are_counted_and_a_failed_request_is_none(talk):
    async def story(url, session):
        async with of_openai(url) as client:
            asking = {"model": "policy", "messages": [{"role": "user", "content": "ab"}], "max_tokens": 2}
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(**asking, extra_body={"guided_json": {}})
            for _ in range(2):
                await client.chat.completions.create(**asking)
            with pytest.raises(openai.BadRequestError, match=r"2 turns \(episode.max_turns\) are used up") as refused:
                await client.chat.completions.create(**asking)
            return refused.value.code, session.refused_for_length

    assert talk(story, "It is 4.", "It is 5.", max_turns=2)[0] == ("turns_exhausted", True)


BODIES = [
    [],
    {},
    {"messages": [3], "input": [3], "max_tokens": 5},
    {"messages": [{"role": "user", "content": 4}], "input": [{"role": "user", "content": 4}], "prompt": {}},
    {"messages": [{"role": "assistant", "tool_calls": ["x"]}], "input": [{"type": "function_call"}]},
    {"messages": [{"role": "user", "content": [{"type": "image"}]}], "input": [{"type": "reasoning"}]},
    {"messages": [{"role": "user", "content": "a"}], "input": "a", "prompt": "a", "tools": [4], "n": []},
]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_a_malformed_request_is_the_clients_fault_in_every_protocol(talk, body):
    async def story(url, session):
        found = {}
        async with aiohttp.ClientSession() as http:
            for path in DIALECTS:
                async with http.post(url.removesuffix("/v1") + path, json=body) as reply:
                    found[path] = reply.status, bool((await reply.json())["error"]["message"])
        return found

    found, session, asked = talk(story, "unused")
    assert found == dict.fromkeys(DIALECTS, (400, True))
    assert (asked, session.failure) == ([], None)


def test_a_real_engine_answers_all_protocols_alike(tiny, tokenizer, finish):
    """The same history, the same tokens: greedy decoding by a real model through each protocol."""
    config = tiny("qwen3").config
    engine = BuiltinEngine(BuiltinSettings(), AutoModelForCausalLM.from_config(config), tokenizer)
    user = [{"role": "user", "content": "ab"}]

    async def all_of_it():
        language, told = Renderer(tokenizer), []
        sampling = SamplingParams(60, temperature=0.0, stop_token_ids=tuple(language.end_token_ids))
        async with Endpoint(language) as endpoint:
            keys = [endpoint.open_session(AgentTask(engine.generate, sampling, f"1/{i}/0", int)) for i in range(3)]
            urls = [endpoint.url_of(key) for key in keys]
            async with of_openai(urls[0]) as client:
                await client.chat.completions.create(model="policy", messages=user, max_tokens=6)
            async with of_openai(urls[1]) as client:
                await client.responses.create(model="policy", input=user, max_output_tokens=6)
            async with of_anthropic(urls[2]) as client:
                await client.messages.create(model="policy", messages=user, max_tokens=6)
            for key in keys:
                (track,) = endpoint.close_session(key).trajectories("p", 0)
                told.append(track.token_ids)
        return told

    first, *others = finish(all_of_it())
    assert others == [first, first]
    assert len(first) > 6
