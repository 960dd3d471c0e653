"""Tools of MCP servers, spoken to with real servers of the official package, by pipes and by HTTP."""

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest

from hone.config import ConfigError, build
from hone.envs.base import ToolLost
from hone.envs.episode import EpisodeRunner, Play
from hone.envs.mcp import client, transports
from hone.envs.mcp.environment import McpEnv
from hone.envs.settings import EpisodeConfig, McpServer
from hone.envs.text_codec import TextCodec
from hone.envs.tool_calls import Call, Said, pythonic
from hone.processes.supervisor import descendants
from hone.types import Completion, Prompt, SamplingParams, Status, StopReason
from tests.envs.language import Language
from tests.envs.listening import listening

SERVER = str(Path(__file__).with_name("mcp_server.py"))
PROMPT = Prompt("set/0", (1,), ({"role": "user", "content": "?"},), "a", "set")
NOTHING = Completion("x", (), (), (), StopReason.STOP)
TOOLS = ["add", "process", "fail", "large", "hang"]


def config_of(servers, **env):
    return build(EpisodeConfig, {"env": {"name": "mcp", "servers": servers, **env}}, "recipe.yaml")


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def piped(loop):
    config = config_of({"test": {"command": ["python", SERVER, "piped"]}}, tool_timeout_s=60)
    servers = McpEnv.for_run(config)
    assert [one for one in descendants(os.getpid()) if b"piped" in _command(one)] == []  # only checked so far
    yield lambda: servers(PROMPT, 0, config)
    loop(servers.close())


@pytest.fixture(scope="module")
def by_http(loop):
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    process = subprocess.Popen([sys.executable, SERVER, "http", str(port)], stderr=subprocess.DEVNULL)
    loop(listening(port))
    config = config_of({"test": {"url": f"http://127.0.0.1:{port}/mcp", "tools": ["add", "fail"]}})
    servers = McpEnv.for_run(config)
    yield lambda: servers(PROMPT, 0, config), process
    loop(servers.close())
    process.kill()
    process.wait()


def _command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


async def say(env, *calls):
    result = await env.step(Said("", calls=calls), NOTHING)
    return [(note.fault, message["content"]) for note, message in zip(result.calls, result.messages, strict=True)]


async def play_once(env):
    start = await env.start()
    calls = (Call("add", {"a": 2, "b": 40}), Call("add", {"a": "x"}), Call("fail"))
    return [one["function"] for one in start.tools], await say(env, *calls)


def check(functions, said):
    add = functions[0]
    assert (add["name"], add["description"], add["parameters"]["required"]) == ("add", "Add two numbers.", ["a"])
    good, wrong, broken = said
    assert good == ("", "42")
    assert wrong[0] == "error"
    assert "valid integer" in wrong[1]
    assert broken == ("error", "error: Error executing tool fail")


def test_a_server_over_pipes(loop, piped):
    functions, said = loop(play_once(piped()))
    assert [one["name"] for one in functions] == TOOLS
    check(functions, said)


@pytest.mark.slow
def test_a_result_of_10_mb_arrives_whole_and_its_record_is_short(loop, piped):
    env = piped()
    loop(env.start())
    result = loop(env.step(Said("", calls=(Call("large"),)), NOTHING))
    assert len(result.messages[0]["content"]) == 10_000_000  # the episode loop cuts it
    assert len(result.calls[0].result) == 2000


def test_a_server_over_http_offers_the_chosen_tools(loop, by_http):
    functions, said = loop(play_once(by_http[0]()))
    assert [one["name"] for one in functions] == ["add", "fail"]
    check(functions, said)


def test_a_late_call_is_read_by_the_policy_and_the_server_goes_on(loop, piped):
    env = piped()
    loop(env.start())
    env._tools["hang"].timeout_s = 0.1
    assert loop(say(env, Call("hang"), Call("add", {"a": 1}))) == [
        ("timeout", "error: hang did not finish within 0.1 s"),
        ("", "2"),
    ]


HOSTILE = str(Path(__file__).with_name("hostile_mcp_server.py"))


def hostile(loop, way, *calls, environment=None, **env):
    """What an episode with the server `hostile_mcp_server.py` reads, and the longest pause of the event loop in s."""
    server = {"command": ["python", HOSTILE, way], "environment": environment or {}}
    config = config_of({"test": server}, **{"tool_timeout_s": 20, **env})
    servers = McpEnv.for_run(config)
    pauses = [0.0]

    async def beat():
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            pauses.append(time.monotonic() - began)

    async def play():
        beating = asyncio.create_task(beat())
        try:
            episode = servers(PROMPT, 0, config)
            await episode.start()
            return await say(episode, *calls)
        finally:
            beating.cancel()
            await servers.close()

    return loop(play()), max(pauses)


@pytest.mark.parametrize("way", ["odd ids", "garbage", "text and lists"])
def test_what_a_server_sends_beside_its_answer_changes_nothing_and_blocks_nobody(loop, way, caplog):
    said, pause = hostile(loop, way, Call("add"), Call("add"))
    assert said == [("", "2"), ("", "2")]
    assert pause < 1.0  # 200,000 lines are read in several seconds
    assert len(caplog.records) <= 10


def test_a_server_that_asks_and_does_not_listen_is_lost_before_it_takes_memory(loop):
    with pytest.raises(ToolLost, match="it asks, and has left more than"):
        hostile(loop, "pings", Call("add"))


def test_a_stopped_server_is_noticed_by_the_call_that_was_late(loop, monkeypatch):
    monkeypatch.setattr(client, "PING_S", 0.5)
    with pytest.raises(ToolLost, match=r"did not answer a ping within 0.5 s, after a call that was late"):
        hostile(loop, "stop", Call("add"), tool_timeout_s=0.2)
    said, _ = hostile(loop, "late", Call("add"), tool_timeout_s=0.2)
    assert said == [("timeout", "error: add did not finish within 0.2 s")]


def test_an_answer_that_cannot_be_read_is_the_servers_fault_and_no_slow_call(loop):
    with pytest.raises(ToolLost, match=r"wrote a line that is no JSON, instead of an answer: b.*\"id\": 99"):
        hostile(loop, "half a line", Call("add"), tool_timeout_s=0.2)


def test_the_log_of_a_server_does_not_grow_without_end(loop, monkeypatch):
    monkeypatch.setattr(transports, "MOST_LOG", 1_000)

    async def play():
        connected = client.McpClient("x", McpServer(command=["python", HOSTILE, "log"]))
        await connected.start()
        for _ in range(3):
            assert (await connected.call("add", {})).text == "2"
        size = connected._transport._process.log.stat().st_size
        await connected.close()
        return size

    assert loop(play()) == 100_000  # of the last call


def test_a_server_gets_named_variables_of_hones_environment_and_its_own(loop, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a secret")
    said, _ = hostile(loop, "environment", Call("add"), environment={"MY_TOKEN": "x"})
    names = said[0][1].split()
    assert {"PATH", "MY_TOKEN"} <= set(names)
    assert not [name for name in names if "WANDB" in name or "HONE" in name]


def test_a_tool_whose_schema_is_no_object_is_refused_by_name(loop):
    with pytest.raises(ConfigError, match=r"lists inputSchema 'an object' of the tool 'add'; expected an object"):
        hostile(loop, "schema", Call("add"))


def test_a_closed_connection_keeps_nothing_of_what_it_received(loop):
    async def play():
        connected = client.McpClient("x", McpServer(command=["python", HOSTILE, "late"]))
        await connected.start()
        held = weakref.ref(connected._transport)
        gc.disable()  # it counts objects, and one of these holds up to 128 MiB
        try:
            await connected.close()
            return held()
        finally:
            gc.enable()

    assert loop(play()) is None


class Policy:
    """Asks for the server's process id, then adds; `between` runs before its second turn."""

    def __init__(self, between):
        self.between = between

    async def __call__(self, request):
        turn = int(request.id.rsplit("/", 1)[1])
        if turn == 1:
            self.between()
        text = ["[process()]", "[add(a=1)]", "done"][turn]
        ids = tuple(map(ord, text))
        return Completion(request.id, ids, (0.0,) * len(ids), (0,) * len(ids), StopReason.STOP)


def servers_of():
    """Processes of the server `victim` and of its supervisor, parents first."""
    return [one for one in descendants(os.getpid()) if b"victim" in _command(one)]


def kill_server():
    os.kill(servers_of()[-1], signal.SIGKILL)  # the last: below its supervisor


@pytest.mark.slow
@pytest.mark.parametrize(("retries", "status"), [(1, Status.OK), (0, Status.ENV_FAILED)])
def test_a_killed_server_is_a_retry_or_a_failure_and_never_a_reward(loop, retries, status):
    """kill -9 between two turns: the episode is played again with a new server, or is `env_failed`."""
    config = config_of({"test": {"command": ["python", SERVER, "victim"]}}, retries=retries)
    servers = McpEnv.for_run(config)
    killed = []

    def once():
        if not killed:
            kill_server()
            killed.append(True)

    async def unscored(group):
        return group

    async def run():
        runner = EpisodeRunner(config, servers, TextCodec(Language(), pythonic))
        play = Play(Policy(once), SamplingParams(max_tokens=100), seed=0, samples=1)
        groups = await runner.run([PROMPT], play, unscored)
        await servers.close()
        return groups[0].trajectories[0]

    trajectory = loop(run())
    assert trajectory.status is status
    if status is Status.OK:
        assert [one.calls[0].result for one in trajectory.spans[1:2]] == ["2"]
    else:
        assert "ToolLost: the server mcp test is lost: it ended with signal SIGKILL" in trajectory.error
    assert servers_of() == []


SCRIPTED = """
import json, sys
version, tools = sys.argv[1], json.loads(sys.argv[2])
for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:
        result = {"protocolVersion": version, "tools": tools}
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
"""


def scripted(version, tools):
    return {"command": ["python", "-c", SCRIPTED, version, tools]}


@pytest.mark.parametrize(
    ("server", "error"),
    [
        ({"command": ["no-such-program"]}, "no-such-program cannot be started: No such file or directory"),
        (
            {"command": ["python", "-c", "raise SystemExit('the database is missing')"]},
            "ended with exit status 1; the last lines of its log:\nthe database is missing",
        ),
        (
            {"command": ["python", "-c", "import time; time.sleep(60)"], "start_timeout_s": 0.5},
            "no answer within 0.5 s",
        ),
        ({"command": ["python", "-c", "print('x' * 10); input(); print(7)"]}, "is lost: it ended with exit status 0"),
        (scripted("1999-01-01", "[]"), "speaks protocol '1999-01-01'; hone speaks 2024-11-05"),
        (scripted("2025-06-18", "7"), "answered tools/list without a list of tools"),
        (scripted("2025-06-18", '[{"name": "a"}, {"name": "a"}]'), "it lists the tool a twice"),
        (scripted("2025-06-18", "[{}]"), "lists a tool without a name"),
        (scripted("2025-06-18", '[{"name": " "}]'), "lists a tool without a name: {'name': ' '}"),
        ({"url": "http://127.0.0.1:1/mcp"}, "at http://127.0.0.1:1/mcp is lost: ClientConnectorError"),
    ],
)
def test_a_server_that_does_not_start_is_one_clear_error_before_the_run(server, error):
    with pytest.raises(ConfigError, match=f"episode.env.servers.one: [\\s\\S]*{error}"):
        McpEnv.for_run(config_of({"one": server}))


@pytest.mark.slow
def test_one_tool_in_two_servers_and_an_unknown_tool_are_errors():
    with pytest.raises(ConfigError, match=r"has no tool 'sub' \(it has: add, process, fail"):
        McpEnv.for_run(config_of({"one": {"command": ["python", SERVER], "tools": ["sub"]}}))
    server = {"command": ["python", SERVER], "tools": ["add"]}
    with pytest.raises(ConfigError, match=r"servers.b: its tool add exists in the server a too"):
        McpEnv.for_run(config_of({"a": server, "b": server}))


def test_a_server_is_a_command_or_an_address():
    for wrong, error in (
        ({}, "found neither"),
        ({"command": ["x"], "url": "http://y"}, "found both"),
        ({"command": []}, "an empty list"),
        ({"url": "u", "environment": {"A": "b"}}, "to a command"),
    ):
        with pytest.raises(ConfigError, match=error):
            config_of({"one": wrong})


def test_an_http_server_that_dies_is_lost(loop, by_http):
    make, process = by_http
    env = make()
    loop(env.start())
    process.kill()
    process.wait()
    with pytest.raises(ToolLost, match="the MCP server test at http"):
        loop(say(env, Call("add", {"a": 1})))
