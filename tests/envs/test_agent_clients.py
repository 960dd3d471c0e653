"""The agent libraries of the field, each in its own process, play an episode at the endpoint."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from hone.data.rendering import Renderer
from hone.envs.agents.endpoint import Endpoint
from hone.envs.agents.sessions import AgentTask
from hone.types import Completion, SamplingParams, StopReason

PROGRAM = Path(__file__).with_name("agent_clients.py")
PYTHON = Path(__file__).parents[2] / ".venv-agents/bin/python"
OPENING = "<tool_call>\n"  # which smolagents asks for, so the policy goes on from there


def call(name, **arguments):
    return OPENING + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


SEARCH, ANSWER = call("search", q="two and two"), "It is 4."
TOOL = (SEARCH, ANSWER), ANSWER, ["two and two is 4"], 1
CLIENTS = {  # name -> (what the policy says, what the client prints, what the policy reads after each turn, tracks)
    "openai_agents_responses": TOOL,
    "openai_agents_chat": TOOL,
    "langgraph": TOOL,
    "pydantic_ai": TOOL,
    "pydantic_ai_anthropic": TOOL,
    "smolagents": (  # tells its own history as text, which is another one each time
        (SEARCH.removeprefix(OPENING), call("final_answer", answer=ANSWER).removeprefix(OPENING)),
        ANSWER,
        ["two and two is 4"],
        2,
    ),
    "mini_swe_agent": (
        (
            call("bash", command="cat sums.py"),
            call("bash", command="sed -i s/-/+/ sums.py && python3 -c 'import sums; print(sums.add(2, 2) * 11)'"),
            call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
        ),
        "return a + b",
        ["return a - b", "44"],
        1,
    ),
}

pytestmark = pytest.mark.agents


@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_plays_its_episode_and_every_token_is_on_its_tracks(tokenizer, finish, client):
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} does not exist: make .venv-agents installs it")
    if client == "mini_swe_agent" and shutil.which("bwrap") is None:
        pytest.skip("bwrap (bubblewrap), in which its commands run, is not installed")
    says, prints, reads, tracks = CLIENTS[client]
    language, asked, left = Renderer(tokenizer), [], list(says)

    async def generate(request):
        asked.append(request.tokens)
        ids = language.tokenizer(left.pop(0), add_special_tokens=False)["input_ids"]
        return Completion(request.id, tuple(ids), (-0.5,) * len(ids), (3,) * len(ids), StopReason.STOP)

    async def played():
        async with Endpoint(language) as endpoint:
            key = endpoint.open_session(AgentTask(generate, SamplingParams(1000), "1/7/0", lambda number: number))
            child = await asyncio.create_subprocess_exec(
                PYTHON, PROGRAM, client, endpoint.url_of(key), stdout=asyncio.subprocess.PIPE
            )
            told, _ = await asyncio.wait_for(child.communicate(), 120)
            return child.returncode, told.decode(), endpoint.close_session(key)

    code, told, session = finish(played())
    assert code == 0
    assert told.splitlines()[-1] == prints
    found = session.trajectories("task/7", 0)
    assert len(found) == tracks
    spans = [(track, span) for track in found for span in track.spans]
    assert [track.token_ids[: span.start] for track, span in spans] == asked
    for prompt, text in zip(asked[1:], reads, strict=True):
        assert text in language.decode(prompt)
    assert [sum(track.loss_mask) for track in found] == [
        sum(span.end - span.start for span in track.spans) for track in found
    ]
