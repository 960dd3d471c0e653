"""The environments `python` and `shell`: a sandbox for each episode, and who caused what."""

import asyncio
import os
import signal

import pytest

from hone.config import ConfigError, build
from hone.envs.base import ToolLost
from hone.envs.sandboxed import SandboxEnv
from hone.envs.settings import EpisodeConfig
from hone.envs.tool_calls import Call, Said
from hone.types import Completion, Prompt, StopReason
from tests.sandboxes.available import skip_without

NOTHING = Completion("x", (), (), (), StopReason.STOP)
PROMPT = Prompt("set/0", (1,), ({"role": "user", "content": "?"},), "a", "set", row={"files": {"in/n.txt": "20"}})


@pytest.fixture(scope="module", autouse=True)
def _with_a_sandbox():
    skip_without("landlock")


def settings(name, **env) -> EpisodeConfig:
    return build(EpisodeConfig, {"env": {"name": name, "sandbox": "landlock", **env}}, "recipe.yaml")


def play(config, *calls):
    """The observations of one call in each turn, the faults, and the end of the episode."""

    async def episode():
        shared = SandboxEnv.for_run(config)
        env = shared(PROMPT, 0, config)
        try:
            results = [await env.step(Said("", calls=(call,)), NOTHING) for call in calls]
            return [one.messages[0]["content"] for one in results], [one.calls[0].fault for one in results]
        finally:
            await env.close()
            await shared.close()

    return asyncio.run(episode())


def test_files_stay_between_turns_and_variables_do_not():
    read, faults = play(
        settings("python", files_column="files"),
        Call("python", {"code": "n = int(open('in/n.txt').read()); open('twice', 'w').write(str(2 * n))"}),
        Call("python", {"code": "print(open('twice').read())"}),
        Call("python", {"code": "print(n)"}),
        Call("shell", {"command": "ls"}),
        Call("python", {"program": "1"}),
    )
    assert read[:2] == ["[no output]", "40"]
    assert read[2].endswith("NameError: name 'n' is not defined\n[exit status 1]")
    assert read[3] == "error: there is no tool 'shell' (there is: python)"
    assert faults == ["", "", "error", "unknown", "arguments"]


def test_what_a_program_does_is_read_by_the_policy():
    read, faults = play(
        settings("shell", tool_timeout_s=0.3, max_output_characters=6, output_kb=1),
        Call("shell", {"command": "echo 0123456789; false"}),
        Call("shell", {"command": "sleep 30"}),
        Call("shell", {"command": "yes"}),
        Call("shell", {"command": "kill -9 $$"}),
    )
    assert read[0] == "012\n[... 4 characters ...]\n789\n[exit status 1]"
    assert read[1] == "[it was stopped after 0.3 s]"
    assert read[2].endswith("[it printed more than 1 KB]")
    assert read[3] == "[ended by signal 9]"
    assert faults == ["error"] * 4


def test_a_lost_sandbox_is_no_observation():
    config = settings("shell", tool_timeout_s=300)

    async def episode():
        shared = SandboxEnv.for_run(config)
        env = shared(PROMPT, 0, config)
        task = asyncio.create_task(
            env.step(Said("", calls=(Call("shell", {"command": "echo begun; sleep 300"}),)), NOTHING)
        )
        async with asyncio.timeout(60):
            while len(shared._host.process_ids) < 3:
                await asyncio.sleep(0.01)
        os.kill(shared._host.process_ids[0], signal.SIGKILL)
        try:
            await task
        finally:
            await env.close()
            await shared.close()

    with pytest.raises(ToolLost, match="was killed while its program ran"):
        asyncio.run(episode())


def test_the_schema_and_bad_settings():
    config = settings("python")

    async def start():
        shared = SandboxEnv.for_run(config)
        return await shared(PROMPT, 0, config).start()

    (tool,) = asyncio.run(start()).tools
    assert tool["function"]["name"] == "python"
    assert tool["function"]["parameters"]["required"] == ["code"]
    with pytest.raises(ConfigError, match=r"episode.env.sandbox: landlock runs on this machine and has no url"):
        SandboxEnv.for_run(settings("python", url="http://127.0.0.1:1"))
    wrong = settings("python", files_column="none")
    with pytest.raises(ConfigError, match="set/0: column none should map paths to texts"):
        SandboxEnv.for_run(wrong)(PROMPT, 0, wrong)
