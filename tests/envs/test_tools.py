"""Tools of Python functions: schemas, calls, and everything that can go wrong, each read by the one who caused it."""

import asyncio
import threading
import time
from pathlib import Path

import pytest

from hone.config import ConfigError, build
from hone.envs import functions
from hone.envs.base import ToolLost
from hone.envs.functions import FunctionTool, Signature, Toolbox
from hone.envs.settings import EpisodeConfig
from hone.envs.tool_calls import Call, Said
from hone.envs.tools import ToolEnv
from hone.types import Completion, Prompt, Status, StopReason

FILE = str(Path(__file__).with_name("my_tools.py"))
PROMPT = Prompt("set/0", (1,), ({"role": "user", "content": "?"},), "a", "set")
NOTHING = Completion("x", (), (), (), StopReason.STOP)


def episode(tools, **settings):
    env = {"name": "tools", "tools": tools, **settings.pop("env", {})}
    config = build(EpisodeConfig, {"env": env, **settings}, "recipe.yaml")
    return ToolEnv.for_run(config)(PROMPT, 0, config)


def say(env, *calls, content=""):
    return asyncio.run(env.step(Said(content, calls=calls), NOTHING))


def read(result):
    return [message["content"] for message in result.messages]


def faults(result):
    return [call.fault for call in result.calls]


def test_annotations_and_docstrings_are_the_schema():
    start = asyncio.run(episode(f"{FILE}:Calculator").start())
    assert start.messages == PROMPT.messages
    add, count = start.tools
    assert add == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "a": {"type": "number", "description": "the first"},
                    "b": {"type": "number", "description": "the second", "default": 1.0},
                },
                "required": ["a"],
            },
        },
    }
    assert (count["function"]["name"], count["function"]["parameters"]["properties"]) == ("count", {})
    names = [one["function"]["name"] for one in asyncio.run(episode(FILE).start()).tools]
    assert names == ["shout", "wait", "block", "fail", "lose", "finish"]


def test_calls_are_run_in_order_and_an_object_belongs_to_an_episode():
    config = build(
        EpisodeConfig, {"env": {"name": "tools", "tools": f"{FILE}:Calculator", "options": {"start": 10}}}, "x"
    )
    shared = ToolEnv.for_run(config)
    env, other = shared(PROMPT, 0, config), shared(PROMPT, 1, config)
    result = say(env, Call("add", {"a": 2, "b": "3"}), Call("add", {"a": 0.5}), Call("count"))
    assert read(result) == ["5.0", "1.5", "12"]
    assert [message["tool_call_id"] for message in result.messages] == ["call00001", "call00002", "call00003"]
    assert [(one.tool, one.arguments, one.result) for one in result.calls[:1]] == [("add", '{"a": 2, "b": "3"}', "5.0")]
    assert not result.done
    assert read(say(other, Call("count"))) == ["10"]
    answer = say(env, content="12")
    assert (answer.done, answer.answer, answer.messages) == (True, "12", ())


@pytest.mark.parametrize(
    ("call", "fault", "text"),
    [
        (Call("", text="<tool_call>{", error="not JSON"), "broken", "error: the call could not be read: not JSON"),
        (
            Call("sub", {}),
            "unknown",
            "error: there is no tool 'sub' (there is: shout, wait, block, fail, lose, finish)",
        ),
        (Call("shout", {}), "arguments", "error: words: Field required"),
        (Call("shout", {"words": ["a"], "to": 1}), "arguments", "error: to: Extra inputs are not permitted"),
        (Call("shout", {"words": "a"}), "arguments", "error: words: Input should be a valid list"),
        (Call("fail"), "error", "error: ZeroDivisionError: by zero"),
        (Call("wait", {"seconds": 60}), "timeout", "error: wait did not finish within 0.05 s"),
        (Call("block", {"seconds": 1}), "timeout", "error: block did not finish within 0.05 s"),
        (Call("shout", {"words": ["a", "é"]}), "", "A É!"),
    ],
)
def test_the_policy_reads_what_it_caused(call, fault, text):
    result = say(episode(FILE, env={"tool_timeout_s": 0.05 if fault == "timeout" else 30}), call)
    assert (faults(result), read(result), result.status, result.done) == ([fault], [text], Status.OK, False)


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_tool_that_leaves_the_interpreter_is_an_error_that_the_policy_reads_at_once(tmp_path, kind):
    tools = tmp_path / "leaving.py"
    tools.write_text(f"import sys\nclass Tools:\n    {kind} leave(self) -> str:\n        sys.exit(3)\n")
    began = time.monotonic()
    result = say(episode(f"{tools}:Tools", env={"tool_timeout_s": 60}), Call("leave"))
    assert (faults(result), read(result)) == (["error"], ["error: RuntimeError: SystemExit: 3"])
    assert time.monotonic() - began < 30


def test_a_lost_tool_is_a_failure_of_the_environment():
    with pytest.raises(ToolLost, match="the server is gone"):
        say(episode(FILE), Call("lose"))


def test_calls_beyond_the_limit_are_refused_and_too_many_bad_ones_end_the_episode():
    env = episode(FILE, env={"max_calls_per_turn": 2, "max_bad_calls": 3})
    result = say(env, Call("sub"), Call("shout", {"words": []}), Call("shout", {"words": []}))
    assert faults(result) == ["unknown", "", "refused"]
    assert result.status is Status.OK
    result = say(episode(FILE, env={"max_calls_per_turn": 2}), *[Call("sub")] * 3000)
    assert (len(result.messages), len(faults(result))) == (3, 3000), "one message for all that are refused"
    result = say(env, Call("sub"), Call("", error="x"))
    assert (result.status, result.error) == (Status.TRUNCATED, "3 calls that nobody could run")


def test_a_tool_may_end_the_episode_and_reward_the_turn():
    result = say(episode(FILE), Call("finish", {"score": 0.5}), Call("finish", {"score": 0.25}))
    assert (result.done, result.reward, result.anchor) == (True, 0.75, "the end")


@pytest.mark.parametrize(
    ("tools", "error"),
    [
        (
            "bare",
            "tool bare: parameter a has no annotation, so the model cannot know what to give; write for example a: str",
        ),
        ("many", r"tool many: parameter \*values: int has no name in a call"),
        ("odd", "tool odd: an annotation cannot be read: name 'Nothing' is not defined"),
        ("Empty", "has no public method; each public method is a tool"),
        ("missing", "cannot be loaded: unknown name in"),
        ("FILE_ITSELF", "cannot be loaded"),
    ],
)
def test_tools_that_cannot_be_used_are_one_clear_error(tools, error):
    with pytest.raises(ConfigError, match=error):
        Toolbox([f"{FILE}:{tools}"], {})


def test_two_tools_of_one_name_and_options_that_do_not_fit_are_errors():
    with pytest.raises(ConfigError, match="two tools are called add; a call could mean either: rename one"):
        Toolbox([f"{FILE}:Calculator", f"{FILE}:Both"], {})
    with pytest.raises(ConfigError, match=r"episode.env.options do not fit .*unexpected keyword argument 'begin'"):
        Toolbox([f"{FILE}:Calculator"], {"begin": 1})
    with pytest.raises(ConfigError, match="has no function with @tool"):
        Toolbox([__file__], {})


def test_calls_that_never_end_do_not_use_up_the_threads(monkeypatch):
    monkeypatch.setattr(functions, "MOST_HANGING", 3)
    monkeypatch.setattr(functions, "_HANGING", set())
    free = threading.Event()
    tool = FunctionTool(Signature.of_parameters("hang", "", {}), lambda: free.wait(60), 30)

    async def story():
        for _ in range(3):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(tool({}), 0.01)
        with pytest.raises(ToolLost, match="3 calls of tools still run after their deadlines"):
            await tool({})
        free.set()
        for thread in functions._HANGING:
            thread.join(60)
        return await tool({})

    assert asyncio.run(story()).text == "true"


def test_a_machine_without_threads_is_no_answer_of_a_tool(monkeypatch):
    def refused(thread):
        raise RuntimeError("can't start new thread")

    env = episode(f"{FILE}:Calculator")
    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(ToolLost, match="no thread for a tool: can't start new thread"):
        asyncio.run(env.step(Said("", calls=(Call("add", {"a": 1}),)), NOTHING))
