"""Finished models answer: `hone chat`, `hone serve`, `hone eval --beside`; a killed command keeps what was answered."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest

import hone
from hone.cli.answer_file import AnswerFile
from hone.cli.main import main
from hone.config import ConfigError, build
from hone.models.settings import ModelConfig
from hone.rollout.settings import RolloutConfig
from hone.trainers.answering.chat import chatting
from hone.trainers.answering.model import Answering, name_of
from tests.trainers.letters import letter_model
from tests.trainers.tiny import BASE, recipe

KEY = "a1" * 12
GREEDY = {"temperature": 0.0, "max_response_tokens": 12}  # more than a piece of a stream


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two folders of models whose greedy answers are letters, and differ."""
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("one", "two")):
        letter_model(folder / name, {**BASE["model"]["build"], "max_positions": 64}, seed)
    return folder


def chat(capsys, monkeypatch, lines, *arguments):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    code = main(["chat", *arguments, "--temperature", "0", "--max-response-tokens", "12"])
    return code, *capsys.readouterr()


def test_models_with_one_name_and_a_model_that_fails(models):
    """Two models are two conversations whatever their folders are called, and a turn that fails leaves nothing."""
    one = ModelConfig(path=str(models / "one"))
    assert [name_of(one, "one"), name_of(one, "one", one.path)] == [one.path, "one (2)"]
    how, heard = Answering(build(RolloutConfig, {"sampling": GREEDY}, "test")), []
    with chatting({"a": one, "b": ModelConfig(path=str(models / "two"))}, how, "", 0) as talk:
        failing = talk._conversations["a"].model
        talk._conversations["a"].model = SimpleNamespace(request=failing.request, growing=fails)
        with pytest.raises(ValueError, match="no room"):
            talk.say("abc", lambda *said: heard.append(said))
        talk._conversations["a"].model = failing
        heard.clear()
        talk.say("d", lambda *said: heard.append(said))
        roles = [[message["role"] for message in one.messages] for one in talk._conversations.values()]
        assert roles == [["user", "assistant"]] * 2
        said_by = {name: "".join(text for of, text in heard if of == name) for name in ("a", "b")}
        assert said_by == {name: one.messages[-1]["content"] for name, one in talk._conversations.items()}


async def fails(request):
    """A model that has no room for the conversation."""
    raise ValueError("no room")
    yield


def test_a_chat_streams_the_answers_that_generate_gives_and_remembers_them(models, capsys, monkeypatch):
    model = str(models / "one")
    code, out, err = chat(capsys, monkeypatch, ["abc", "d", "/new", "d", "/what", "/quit", "a"], model)
    (first,), (alone,) = hone.generate(model, ["abc", "d"], **GREEDY)
    ((second,),) = hone.generate(model, [[user("abc"), said(first), user("d")]], **GREEDY)
    assert len(first) > 8  # of 12 tokens: more than a piece of the stream
    assert code == 0
    assert out.splitlines() == [first, second, alone]
    assert err.startswith("/what is no command")


def test_a_system_prompt_and_two_models_beside_each_other(models, capsys, monkeypatch):
    paths = [str(models / "one"), str(models / "two")]
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = chat(capsys, monkeypatch, ["abc"], paths[0], "--beside", paths[1], "--system", "dd")
    answers = [hone.generate(path, [[{"role": "system", "content": "dd"}, user("abc")]], **GREEDY) for path in paths]
    (first,), (second,) = (answer[0] for answer in answers)
    assert first != second
    assert code == 0
    (line,) = [line for line in out.splitlines() if first in line]
    assert line.index(first) < 40 <= line.index(second)


def test_a_conversation_that_is_too_long_ends_no_chat(models, capsys, monkeypatch):
    code, out, err = chat(capsys, monkeypatch, ["a" * 70, "abc"], str(models / "one"))
    assert code == 0
    assert "leaves no room in sequences of at most 64" in err
    assert out.splitlines()[-1] == hone.generate(str(models / "one"), ["abc"], **GREEDY)[0][0]


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_a_limit_beyond_the_model_s_context_is_said_once(command, models, capsys, caplog, monkeypatch):
    model = str(models / "one")
    prompts = ["--prompt", "abc", "--prompt", "d"] if command == "generate" else []
    full = "max_response_tokens=400 leaves no room for a prompt: the model's context is 64 tokens; set it below 64"
    less = "of max_response_tokens=60, as the model's context is 64: its answer may end earlier"
    for limit, said_times in ((400, (1, 0)), (60, (0, 1)), (12, (0, 0))):
        caplog.clear()
        monkeypatch.setattr(sys, "stdin", io.StringIO("abc\nd\n"))
        assert main([command, model, *prompts, "--max-response-tokens", str(limit)]) == 0
        assert (caplog.text.count(full), caplog.text.count(less)) == said_times


def test_openai_s_client_talks_to_a_served_model(models):
    variables = {**os.environ, "HONE_SERVE_KEY": KEY}
    command = [
        sys.executable,
        "-m",
        "hone",
        "serve",
        str(models / "one"),
        "--port",
        "0",
        "rollout.request_timeout_s=60",
    ]
    served = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables)
    try:
        url = served.stdout.readline().split()[-1]
        assert served.stdout.readline() == "key: as in HONE_SERVE_KEY\n"
        (greedy,) = hone.generate(str(models / "one"), ["abc"], **GREEDY)[0]
        http = openai.DefaultHttpxClient(verify=False, trust_env=False)
        client = openai.OpenAI(base_url=url, api_key=KEY, timeout=60, max_retries=0, http_client=http)
        assert [one.id for one in client.models.list()] == ["one"]
        other = openai.OpenAI(base_url=url.removesuffix("/v1") + "/oai/api/v1", api_key=KEY, timeout=60, max_retries=0)
        assert [one.id for one in other.models.list()] == ["one"]  # as of a training service
        other.close()
        asked = {"model": "one", "messages": [user("abc")], "temperature": 0, "max_tokens": 12}
        for _ in range(2):  # nothing of the first is in the way of the second: there is no record and no budget
            assert client.chat.completions.create(**asked).choices[0].message.content == greedy
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        told = [one.choices[0].delta.content for one in chunks if one.choices and one.choices[0].delta.content]
        assert len(told) == 2  # 8 tokens, then 4
        assert "".join(told) == greedy
        assert [one.choices[0].finish_reason for one in chunks if one.choices][-1] == "length"
        assert chunks[-1].usage.completion_tokens == 12
        drawn = client.chat.completions.create(**{**asked, "temperature": 1}, n=4).choices
        assert len({one.message.content for one in drawn}) > 1  # a client chooses the sampling
        with pytest.raises(openai.BadRequestError, match="'gpt-4' is not served here: one"):
            client.chat.completions.create(**{**asked, "model": "gpt-4"})
        with pytest.raises(openai.BadRequestError, match="leaves no room"):
            client.chat.completions.create(**{**asked, "messages": [user("a" * 70)], "stream": True})
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="b2" * 12).models.list()
        client.close()
    finally:
        served.send_signal(signal.SIGTERM)
        assert served.wait(60) == 0
        served.stdout.close()


@pytest.mark.parametrize(
    ("arguments", "key", "expected"),
    [
        (["run.yaml"], "", "run.yaml"),
        (["model", "data.train.path=x"], "", "data is no setting of hone serve, which takes keys of rollout only"),
        (["model"], "short", "HONE_SERVE_KEY should be at least 16 letters and digits, found 5"),
        (["nowhere/at/all"], "", "nowhere/at/all"),
    ],
)
def test_what_cannot_be_served_is_said(arguments, key, expected, capsys, monkeypatch):
    monkeypatch.setenv("HONE_SERVE_KEY", key)
    assert main(["serve", *arguments]) == 2
    assert expected in capsys.readouterr().err


def test_two_models_are_compared_on_the_same_prompts(models, tmp_path, capsys):
    run_file = recipe(tmp_path, {"model": {"path": str(models / "one")}})
    files = {name: tmp_path / f"{name}" for name in ("page.html", "answers.jsonl", "figures.json")}
    options = ["--page", files["page.html"], "--answers", files["answers.jsonl"], "--output", files["figures.json"]]
    asked = ["eval", str(run_file), "--beside", str(models / "two"), *map(str, options)]
    assert main([*asked, "evaluation.samples=3", "evaluation.sampling.temperature=1"]) == 0
    rows = [json.loads(line) for line in files["answers.jsonl"].read_text().splitlines()]
    assert [row["model"] for row in rows] == ["one"] * 8 + ["two"] * 8  # greedy: one answer each
    assert [row["prompt_id"] for row in rows[:8]] == [f"held_out/{i}" for i in range(8)]
    figures = json.loads(files["figures.json"].read_text())
    for name in ("one", "two"):
        rewards = [row["reward"] for row in rows if row["model"] == name]
        assert figures[name]["eval/held_out/share"] == pytest.approx(sum(rewards) / 8)
    page = files["page.html"].read_text()
    changes = [abs(a["reward"] - b["reward"]) for a, b in zip(rows[:8], rows[8:], strict=True)]
    most = rows[changes.index(max(changes))]["prompt"]
    assert max(changes) > 0
    assert page.index(f"<td>{most}</td>") == page.index("<td>")  # the largest change comes first
    assert page.count("<tr>") == 9
    table = capsys.readouterr().out
    assert "one" in table
    assert "two" in table


def test_a_page_needs_a_second_model(models, tmp_path, capsys):
    run_file = recipe(tmp_path, {"model": {"path": str(models / "one")}})
    assert main(["eval", str(run_file), "--page", "page.html"]) == 2
    assert "name the other one with --beside" in capsys.readouterr().err


def test_pass_at_k_and_the_truncated_share(models, tmp_path):
    run_file = recipe(tmp_path, {"model": {"path": str(models / "one")}})
    figures = hone.evaluate(
        str(run_file), "reward.components.share.reward=exact_match", "evaluation.samples=4",
        "evaluation.sampling.temperature=1", model=models / "one",
    )  # fmt: skip
    assert figures["eval/held_out/share/pass@2"] <= figures["eval/held_out/share/best@4"]
    assert 0 < figures["eval/held_out/truncated"] <= 1


def test_an_ended_command_keeps_what_was_answered_and_a_whole_file_is_in_order(tmp_path):
    path = tmp_path / "answers.jsonl"
    kept = AnswerFile(path, "--output")
    kept.add((1, 0), {"response": "b"})
    assert path.read_text() == '{"response": "b"}\n'  # before anything ends
    kept.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert path.read_text() == '{"response": "b"}\n'
    with AnswerFile(path, "--output") as kept:
        kept.add((1, 0), {"response": "b"})
        kept.add((0, 0), {"response": "a"})
    assert path.read_text() == '{"response": "a"}\n{"response": "b"}\n'
    assert [one.name for one in tmp_path.iterdir()] == ["answers.jsonl"]
    with pytest.raises(ConfigError, match=r"--output .*/none/x.jsonl: there is no folder"):
        AnswerFile(tmp_path / "none" / "x.jsonl", "--output")


class WhileGenerating(io.StringIO):
    """A terminal that takes text only while answers are generated: RuntimeError afterwards."""

    def write(self, text):
        asyncio.get_running_loop()
        return super().write(text)


def test_generate_prints_the_answers_to_each_prompt_once_they_are_there_in_order(models, monkeypatch):
    model, prompts = str(models / "one"), ["abc", "d", "ca"]
    screen = WhileGenerating()
    monkeypatch.setattr(sys, "stdout", screen)
    asked = [part for prompt in prompts for part in ("--prompt", prompt)]
    assert main(["generate", model, *asked, "--samples", "2", "--max-response-tokens", "12"]) == 0
    answers = hone.generate(model, prompts, samples=2, max_response_tokens=12)
    expected = [line for prompt, found in zip(prompts, answers, strict=True) for line in (prompt, *found)]
    assert screen.getvalue() == "".join(f"{line}\n" for line in expected)


@pytest.mark.parametrize("command", ["chat", "generate", "serve"])
def test_help_says_that_a_model_may_be_a_packaged_one(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main([command, "--help"]) == 0
    assert "hub name or packaged:NAME" in capsys.readouterr().out


def test_the_folder_of_a_run_stands_for_its_export(models, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("kind: rl\n")
    with pytest.raises(ConfigError, match="has no export yet: let its run end"):
        hone.generate(tmp_path / "run", ["abc"])
    Path(tmp_path / "run" / "export").symlink_to(models / "one")
    assert hone.generate(tmp_path / "run", ["abc"], **GREEDY) == hone.generate(models / "one", ["abc"], **GREEDY)


def test_generate_finds_the_prompt_in_the_columns_that_init_recognises(models, tmp_path):
    rows = {
        "question": [{"question": "abc", "id": 1}, {"question": [user("d")], "id": 2}],
        "instruction": [{"instruction": "abc", "input": ""}, {"instruction": "a", "context": "d", "input": "b"}],
    }
    asked = {"question": ["abc", "d"], "instruction": ["abc", "a\n\nb"]}
    for name, given in rows.items():
        source, target = tmp_path / f"{name}.jsonl", tmp_path / f"{name}-answers.jsonl"
        source.write_text("".join(f"{json.dumps(row)}\n" for row in given))
        how = ["--temperature", "0", "--max-response-tokens", "12", "--output", str(target)]
        assert main(["generate", str(models / "one"), "--input", str(source), *how]) == 0
        answers = [json.loads(line) for line in target.read_text().splitlines()]
        expected = hone.generate(models / "one", asked[name], **GREEDY)
        assert [[one["response"]] for one in answers] == expected
        assert [one["prompt"] for one in answers] == asked[name]
        assert [{key: one[key] for key in row} for one, row in zip(answers, given, strict=True)] == given
