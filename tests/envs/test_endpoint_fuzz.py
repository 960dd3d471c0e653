"""Requests that no client should send get an answer or a 4xx with a sentence, and never end the run."""

import asyncio
import http.client
import json
import threading
from contextlib import contextmanager
from copy import deepcopy

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from hone.data.rendering import Renderer
from hone.envs.agents.endpoint import Endpoint
from hone.envs.agents.sessions import AgentTask
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.settings import BuiltinSettings
from hone.types import SamplingParams

FUNCTION = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {"a": {}}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
VALID = {
    "/v1/chat/completions": {
        "model": "policy",
        "messages": [
            {"role": "system", "content": "ab"},
            {"role": "user", "content": [{"type": "text", "text": "ab"}, IMAGE]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "2", "name": "add"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        "stop": ["b"],
        "max_tokens": 3,
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 2,
        "min_p": 0.5,
        "logprobs": True,
        "n": 2,
        "stream": False,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    },
    "/v1/completions": {"model": "policy", "prompt": [5, 6, 7], "max_tokens": 3, "echo": True, "logprobs": 2, "n": 1},
    "/v1/responses": {
        "model": "policy",
        "instructions": "ab",
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "ab"}]},
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "2"}]},
        ],
        "tools": [{"type": "function", **FUNCTION}],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}},
        "include": ["message.output_text.logprobs"],
        "max_output_tokens": 3,
    },
    "/v1/messages": {
        "model": "policy",
        "system": [{"type": "text", "text": "ab", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "ab"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "2"}]},
        ],
        "tools": [{"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any"},
        "stop_sequences": ["b"],
        "max_tokens": 3,
    },
}
DEEP = json.loads("[" * 60 + "]" * 60)
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2, 127, 1 << 31, 1 << 63, -(1 << 70), 10**400, 0.0, -0.5, 1e308, float("nan")]),
    st.sampled_from(["", "\ud800", "\0", "<|im_end|>", "<tool_call>", "auto", "user", "tool", "developer", "x" * 3000]),
    st.sampled_from(
        [[], {}, [[]], [None], [{}], {"": None}, {"type": "text"}, {"role": "user"}, DEEP, [1, "a"], ["a"]]
    ),
    st.sampled_from([[10**400], [-1], [[1, 2], [3]], [True], [0.5], {"type": "text", "text": 1}, {"a": {"\ud800": 1}}]),
)


def places(value, at=()):
    """Every place in a JSON value: the keys that lead there."""
    yield at
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(inner, (*at, key))


@st.composite
def requests(draw):
    """A route, and a valid body of it in which up to three places are left out, replaced, or have another key."""
    route = draw(st.sampled_from(sorted(VALID)))
    body = json.loads(json.dumps(VALID[route]))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(list(places(body))))
        if not place:
            return route, draw(ODD)
        holder = body
        for key in place[:-1]:
            holder = holder[key]
        how = draw(st.sampled_from(["replace", "replace", "drop", "twice"]))
        if how == "replace":
            holder[place[-1]] = deepcopy(draw(ODD))  # a value that is drawn again may be put into itself
        elif how == "drop":
            del holder[place[-1]]
        elif isinstance(holder, list):
            holder.append(deepcopy(holder[place[-1]]))
        else:
            holder[draw(st.sampled_from(["best_of", "suffix", "user", "role", "type", "thinking"]))] = deepcopy(
                draw(ODD)
            )
    return route, body


@contextmanager
def serving(tiny, tokenizer):
    """An endpoint with a real engine, on an event loop in a thread: yields (its port, open a session, close it)."""
    config = tiny("qwen3").config
    config.max_position_embeddings = 512
    engine = BuiltinEngine(BuiltinSettings(), AutoModelForCausalLM.from_config(config), tokenizer)
    language, loop, ready, ends = Renderer(tokenizer), asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    found = {}

    async def serve():
        async with Endpoint(language) as endpoint:
            found["endpoint"] = endpoint
            ready.set()
            await ends.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    wanted = SamplingParams(12, stop_token_ids=tuple(language.end_token_ids))
    try:
        assert ready.wait(60)
        yield found["endpoint"], AgentTask(engine.generate, wanted, "1/7/0", lambda number: number)
    finally:
        loop.call_soon_threadsafe(ends.set)
        thread.join(60)
        assert not thread.is_alive()


def post(port, key, route, data):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("POST", route, data, {"authorization": f"Bearer {key}", "content-type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@pytest.fixture(scope="module")
def endpoint(tiny, tokenizer):
    with serving(tiny, tokenizer) as found:
        yield found


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(requests(), st.booleans())
def test_an_odd_request_is_answered_or_refused_with_a_sentence(endpoint, asked, own_sampling):
    route, body = asked
    served, task = endpoint
    port = int(served.base_url.rpartition(":")[2].partition("/")[0])
    key = served.open_session(AgentTask(task.generate, task.sampling, "1/7/0", task.seed_of, own_sampling))
    status, said = post(port, key, route, json.dumps(body))
    session = served.close_session(key)
    assert session.failure is None, (route, body, session.failure)
    assert status in (200, 400), (status, said)
    if status == 200:
        assert said.startswith((b"{", b"data: ", b"event: "))
        for one in session.trajectories("task/7", 0):
            lengths = {len(one.token_ids), len(one.loss_mask), len(one.rollout_logprobs), len(one.weight_versions)}
            assert len(lengths) == 1
    else:
        assert not session.tracks, "a request that is refused leaves no record"
        message = json.loads(said)["error"]["message"]
        assert len(message.split()) > 2, message
