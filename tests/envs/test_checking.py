"""`hone env check`: every fault that it finds, in environments that have it, and none in those that do not."""

import asyncio
import json
import re
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from hone.cli.main import main
from hone.envs.checking import check
from hone.envs.checking.policies import Random, fitting
from hone.envs.functions import Signature
from hone.envs.gym_class import GymClass, GymClassEnv
from hone.envs.settings import EpisodeConfig
from hone.registry import resolve
from hone.types import Prompt
from tests.trainers.tiny import recipe

BAD = Path(__file__).with_name("bad_envs.py")
GYM = Path(__file__).with_name("gym_classes.py")
TOOLS = Path(__file__).with_name("my_tools.py")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def run(capsys):
    """run(target, ...) -> exit code, lines of the output, errors."""

    def checked(*arguments):
        code = main(["env", "check", *map(str, arguments)])
        told = capsys.readouterr()
        return code, told.out.splitlines(), told.err

    return checked


def test_a_good_environment_has_no_problem(run):
    assert run(f"{BAD}:Good") == (
        0,
        [
            f"{BAD}:Good: 4 episodes, 8 turns, longest text 9 characters",
            "scripted policy: 2 done",
            "random policy: 2 done",
            "no problem found",
        ],
        "",
    )


def test_a_run_file_names_the_environment_of_a_file(run, tmp_path):
    path = recipe(tmp_path, {"episode": {"env": f"{BAD}:Good"}})
    code, told, _ = run(path)
    assert (code, told[-1]) == (0, "no problem found")
    code, _, said = run(recipe(tmp_path, {"episode": {"env": f"{BAD}:Goood"}}))
    assert code == 2
    assert "did you mean 'Good'" in said


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("TwoOfOneName", "2 tools are called add; a call could mean any of them"),
        ("Untyped", "tool add: parameter a has no type (annotation), so the model has to guess it"),
        ("Endless", "it never ends: no episode was done within 8 turns (episode.max_turns)"),
        (
            "Large",
            "an observation has 10,000,000 characters; the policy reads 8192 tokens of it "
            "(episode.env.max_observation_tokens)",
        ),
        ("RandomStart", "two episodes of one prompt and sample start differently, so no run can be repeated"),
        ("Raises", "step() for the answer 'done' raised ZeroDivisionError: by zero"),
        ("Fails", "step() for the answer 'done' failed: the database is gone"),
        ("Silent", "step() for the answer 'done' is neither done nor has it a message"),
        ("Late", "start() did not return within 0.2 s"),
        ("Returns", "start() should return a Start with messages or token_ids, found 'a question'"),
        ("NoReward", "the reward of a turn is nan; expected a finite number"),
        ("Figures", "metrics['placed'] is 1.0; expected hone.types.Metric.mean(...)"),
        ("Speaks", "an observation has a message of the role 'assistant'; expected system, developer, user, tool"),
        ("Unclosed", "close() raised OSError: it is busy"),
    ],
)
def test_each_fault_is_a_problem(run, name, problem):
    code, lines, _ = run(f"{BAD}:{name}", "--timeout-s", "0.2" if name == "Late" else "30")
    assert code == 1
    assert f"problem: {problem}" in lines
    assert "no problem found" not in lines


@pytest.mark.parametrize(
    ("name", "warning"),
    [
        ("Special", "an observation contains the special token <|im_end|>; hone encodes it as plain text"),
        (
            "Unparsed",
            "it offers tools, but its settings have no key parser, so a run finds no call in an answer; derive the "
            "settings from hone.envs.settings.ToolCallSettings",
        ),
        ("RandomStep", "the same answers led to another response in turn 1, so no run can be repeated"),
    ],
)
def test_what_a_run_copes_with_is_a_warning(run, name, warning):
    code, lines, _ = run(f"{BAD}:{name}")
    assert code == 0
    assert f"warning: {warning}" in lines


def test_a_gym_class_reads_the_prompt_first_and_the_seed_of_its_row(tmp_path):
    cls = resolve(f"{GYM}:Guess")
    row = {"prompt": "Play.", "seed": 7}
    prompt = Prompt("p/0", (1,), ({"role": "user", "content": "Play."},), None, "p", row)
    played = GymClass(f"{GYM}:Guess", cls)(prompt, 0, EpisodeConfig())
    start = asyncio.run(played.start())
    assert start.messages == ({"role": "user", "content": "Play.\n\nGuess a number."},)
    assert played._made.seed == 7


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Numbered", "Numbered: the actions are range.0, 4., and .* episode.env.name=gymnasium episode.env.id="),
        ("Unmade", "Unmade cannot be made: TypeError: .*'size'.*each parameter of Unmade.. needs a default"),
        ("Broken", "Broken.step.. should return .observation, reward, terminated, truncated, info., found .'lower'"),
    ],
)
def test_a_gym_class_that_cannot_be_played_says_why(run, name, said):
    code, told, _ = run(f"{GYM}:{name}")
    assert code == 1
    assert any(re.search(said, line) for line in told), told


def test_a_gym_class_is_closed_once_per_episode_and_is_no_tool(run):
    cls = resolve(f"{GYM}:Old")
    before = cls.closed
    code, told, _ = run(f"{GYM}:Old")
    assert (code, told[-1]) == (0, "no problem found")
    assert cls.closed - before == 4
    code, told, _ = run("tools", f"episode.env.tools={GYM}:Guess")
    assert code == 1
    assert told[-1].endswith(f"a class with the reset and step of gym is an environment: episode.env={GYM}:Guess")


@pytest.mark.parametrize("name", ["Slow", "SlowAsync"])
def test_an_object_that_is_made_after_its_episode_ended_is_closed(name):
    cls = resolve(f"{GYM}:{name}")
    for event in (cls.begun, cls.go, cls.closed):
        event.clear()
    env = GymClassEnv(cls, Prompt("p/0", (1,), ({"role": "user", "content": "Play."},), None, "p", {}))

    async def cancelled():
        starting = asyncio.create_task(env.start())
        assert await asyncio.to_thread(cls.begun.wait, 30)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await env.close()

    asyncio.run(cancelled())
    assert not cls.closed.is_set()
    cls.go.set()
    assert cls.closed.wait(30)


def test_a_call_that_blocks_the_event_loop_is_given_up(run, monkeypatch):
    monkeypatch.setattr(check, "GRACE_S", 0.2)
    code, lines, _ = run(f"{BAD}:Blocks", "--timeout-s", "0.1")
    resolve(f"{BAD}:RELEASE").set()  # of the module as the command loads it
    assert code == 1
    assert "problem: start() blocks the event loop and so all episodes: use await, or asyncio.to_thread" in lines


def test_processes_that_stay_are_a_problem(run):
    code, lines, _ = run(f"{BAD}:Leaves")
    left = resolve(f"{BAD}:LEFT")
    assert len(left) == 4
    for process in left:
        process.communicate(b"\n", timeout=30)
    assert code == 1
    assert any(line.startswith("problem: after the last episode 4 of its processes still run: [") for line in lines)


def test_tools_are_called_with_arguments_that_fit(run):
    code, lines, _ = run(f"{TOOLS}:Calculator", "episode.env.options={start: 3}", "--row", '{"prompt": "?"}')
    assert code == 0
    assert lines[0].startswith(f"{TOOLS}:Calculator: tools: add, count; 4 episodes")
    assert "scripted policy: 2 done" in lines


def test_a_tool_without_annotations_and_a_lost_server_are_problems(run):
    code, lines, _ = run(f"{TOOLS}:bare")
    assert (code, "parameter a has no annotation" in lines[-1]) == (1, True)
    code, lines, _ = run(f"{TOOLS}:lose")
    assert code == 1
    assert "problem: step() for the answer 'lose({})' raised ToolLost: the server is gone" in lines


def test_a_run_file_is_played_with_its_prompts_and_its_tokenizer(run, monkeypatch, tmp_path):
    """Its limit is 12 tokens of its own tokenizer, and its template decides whether the model sees the tools."""
    monkeypatch.chdir(ROOT)
    code, lines, _ = run("recipes/tools/calculator.yaml", "--prompts", "3")
    assert code == 0
    assert lines[0].startswith("recipes/tools/calculator.yaml: tools: mul; 12 episodes")
    assert lines[1] == "scripted policy: 6 done"
    assert lines[-1] == "no problem found"
    assert any("the policy reads 12 tokens of it" in line for line in lines)
    blind = tmp_path / "blind.jinja"
    blind.write_text(Path("recipes/tools/template.jinja").read_text().replace("if tools", "if false"))
    code, lines, _ = run("recipes/tools/calculator.yaml", f"data.chat_template={blind}", "--prompts", "1")
    assert code == 1
    assert "problem: the chat template does not show the tools to the model; set data.chat_template" in lines


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["toools"], "unknown environment 'toools'; did you mean 'tools'"),
        (["agent"], "agent leads its episodes itself"),
        (["no.yaml"], "no run file no.yaml"),
        (["chat", "--row", "{"], "--row is not JSON"),
        (["chat", "--row", "[]"], '--row should be a JSON object with a text "prompt"'),
        (["chat", "episode.max_turn=3"], "did you mean"),
        ([str(ROOT / "recipes/sft/chat.yaml")], "has kind: sft, which has no environment"),
    ],
)
def test_a_wrong_command_is_one_error(run, arguments, error, monkeypatch):
    monkeypatch.chdir(ROOT)
    code, lines, told = run(*arguments)
    assert (code, lines) == (2, [])
    assert error in told


def nested(words: list[int], limits: dict[str, float], mode: str = "fast", size: int | None = None) -> None:
    """Have arguments of many types."""


def test_made_up_arguments_fit_their_schema():
    signature = Signature.of(nested, "here")
    schema = signature.spec["function"]["parameters"]
    for rng in (None, *(Random(Prompt(f"a/{i}", (1,), (), None, "a"), 0)._rng for i in range(20))):
        signature.arguments.model_validate(fitting(schema, rng))
    assert fitting(schema, None) == {"words": [1], "limits": {}}
    deep = TypeAdapter(dict[str, list[list[list[list[list[int]]]]]]).json_schema()
    assert json.dumps(fitting({"type": "array", "items": deep, "minItems": 2}, None)) == "[{}, {}]"
