"""Runs without a run file, run files written by `hone init`, and the rows and columns that they find."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import yaml

import hone
from hone.cli.flags import Flags, guessed_columns, load_command, run_file
from hone.cli.init import checked
from hone.cli.keys import keys_of
from hone.cli.main import main
from hone.composition import ConfigError, to_yaml
from hone.config import build
from hone.data.columns import SampleReader
from hone.data.settings import DatasetConfig
from hone.engines.settings import EngineConfig
from hone.tracking.trackers.jsonl import read_metrics
from tests.recipes.conftest import gsm8k_rows, save_tiny_qwen3, write_rows

SMALL = ["--rollout.sampling.max_response_tokens", "3", "--tracking.trackers", "[jsonl]", "runtime.threads=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, 40 rows with the columns `question` and `answer`, and a reward."""
    folder = tmp_path_factory.mktemp("flags")
    rows = gsm8k_rows(40)
    write_rows(folder / "rows.jsonl", rows)
    save_tiny_qwen3(folder / "model", [text for row in rows for text in row.values()])
    (folder / "my.py").write_text("def longer(response, ground_truth):\n    return len(response) / len(ground_truth)\n")
    return folder


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    return folder


def said(capsys):
    return capsys.readouterr().err.strip().splitlines()


def test_every_key_is_a_flag_and_other_flags_stay():
    given = ["sft", "--samples_per_step", "4", "--run.dir=a b", "--data", "x.jsonl", "--min-p", "actor.lora=null"]
    assert keys_of(given) == [
        *("sft", "samples_per_step=4", "run.dir=a b", "--data", "x.jsonl", "--min-p", "actor.lora=null"),
    ]
    with pytest.raises(ConfigError, match=r"--run.steps is a key of the run file and needs a value"):
        keys_of(["sft", "--run.steps", "--data"])


def test_columns_are_found_under_the_names_that_data_sets_use():
    def guessed(kind, *columns):
        return guessed_columns(kind, dict.fromkeys(columns, "x"))

    assert guessed("rl", "question", "answer", "id") == {"prompt": "question", "ground_truth": "answer"}
    assert guessed("sft", "instruction", "output") == {"prompt": "instruction", "completion": "output"}
    assert guessed("sft", "messages") == {}
    assert guessed("rl", "prompt", "question", "ground_truth") == {}
    assert guessed("prefer", "question", "chosen", "rejected") == {"prompt": "question"}
    verl = {
        "data_source": "gsm8k",
        "prompt": [{"role": "user"}],
        "reward_model": {"style": "rule", "ground_truth": "4"},
    }
    assert guessed_columns("rl", verl) == {"ground_truth": "reward_model.ground_truth"}


def test_the_input_of_an_instruction_is_a_part_of_the_prompt(here, capsys):
    rows = [{"instruction": "Translate to French", "input": "cat", "output": "chat"}]
    rows += [{"instruction": "Say hi", "input": "", "output": "hi"}, {"instruction": "Say ho", "output": "ho"}]
    write_rows(here / "alpaca.jsonl", rows)
    settings = run_file("sft", Flags("m", "alpaca.jsonl"))
    assert said(capsys) == ["columns: completion is 'output', prompt is 'instruction' and, where there is one, 'input'"]
    reader = SampleReader("train", build(DatasetConfig, settings["data"]["train"], "test"), "data.train")
    told = [[one["content"] for one in reader.conversation(reader.row(i), i)] for i in range(3)]
    assert told == [["Translate to French\n\ncat", "chat"], ["Say hi", "hi"], ["Say ho", "ho"]]
    dolly = [{"instruction": "Who?", "context": "Ada", "response": "She", "category": "qa", "length": 3}] * 3
    write_rows(here / "dolly.jsonl", dolly)
    assert main(["init", "dolly.yaml", "--kind", "sft", "--model", "model", "--data", "dolly.jsonl"]) == 0
    lines = said(capsys)
    assert lines[0] == "columns: completion is 'response', prompt is 'instruction' and, where there is one, 'context'"
    assert "not read: category" in lines
    train = yaml.safe_load((here / "dolly.yaml").read_text())["data"]["train"]
    reader = SampleReader("train", build(DatasetConfig, train, "test"), "data.train")
    assert [one["content"] for one in reader.conversation(reader.row(0), 0)] == ["Who?\n\nAda", "She"]


def test_a_typed_length_replaces_the_one_of_the_run_file(here):
    (here / "length.yaml").write_text(to_yaml(run_file("sft", Flags("m", "rows.jsonl"))))
    assert load_command("sft", Path("length.yaml"), ["run.steps=2"], Flags()).config.run.epochs is None
    assert load_command("sft", Path("length.yaml"), ["run.epochs=3"], Flags()).config.run.epochs == 3
    with pytest.raises(ConfigError, match="found steps 2 and epochs 3"):
        load_command("sft", Path("length.yaml"), ["run.steps=2", "run.epochs=3"], Flags())


def test_the_topmost_length_counts_in_three_layers(here, capsys):
    (here / "base.yaml").write_text(to_yaml(run_file("rl", Flags("m", "rows.jsonl", "my.py:longer"))))
    (here / "child.yaml").write_text("defaults: base.yaml\nrun: {steps: 5}\n")

    def length(*keys):
        run = load_command("rl", Path("child.yaml"), keys, Flags()).config.run
        return run.steps, run.epochs

    assert length() == length("run.seed=3") == (5, None)
    assert length("run.epochs=2") == (None, 2)
    assert length("run.steps=null") == (None, 1)
    taken = hone.load({"defaults": "base.yaml", "run": {"steps": 3}}, "run.seed=4").config.run
    assert (taken.steps, taken.epochs, taken.seed) == (3, None, 4)
    assert main(["train", "child.yaml", "--sweep", "run.seed=1,1"]) == 2
    assert "would share the folder" in said(capsys)[-1]  # the settings were read


def test_data_beside_a_run_file_have_a_path_to_type(here, capsys):
    (here / "conf" / "data").mkdir(parents=True)
    (here / "conf" / "run.yaml").write_text(to_yaml(run_file("sft", Flags("m", "rows.jsonl"))).replace("rows", "mine"))
    write_rows(here / "conf" / "mine.jsonl", [{"question": "a", "answer": "b"}])
    assert main(["sft", "conf/run.yaml"]) == 2
    begin = f"error: conf/run.yaml: data.train.path: no file mine.jsonl (current folder: {here}), where paths of data"
    assert said(capsys)[-1] == f"{begin} start; there is one beside the run file: data.train.path=conf/mine.jsonl"
    loaded = load_command("sft", Path("conf/run.yaml"), ["data.train.path=conf/mine.jsonl"], Flags())
    assert loaded.config.data.train.path == "conf/mine.jsonl"
    assert load_command("sft", Path("conf/run.yaml"), ["data.train.path=data"], Flags())  # what is typed is as typed


def test_the_smallest_run_file(here):
    assert run_file("rl", Flags("a/Qwen3-0.6B", "rows.jsonl", "my.py:longer")) == {
        "kind": "rl",
        "run": {"dir": "runs/train-Qwen3-0.6B", "epochs": 1},
        "model": {"path": "a/Qwen3-0.6B"},
        "data": {"train": {"path": "rows.jsonl", "columns": {"prompt": "question", "ground_truth": "answer"}}},
        "update": {"prompts_per_step": 32},
        "reward": {"components": {"longer": {"reward": "my.py:longer"}}},
    }
    assert run_file("sft", Flags("m", "rows.jsonl"))["actor"] == {"optimizer": {"lr": 1e-5}}


def test_what_is_missing_is_said(here, capsys):
    for arguments, expected in [
        (["sft"], "hone sft needs a run file, or --model and --data: hone sft --model PATH --data FILE"),
        (["train", "--model", "m", "--data", "rows.jsonl"], "hone train needs a run file, or --reward: hone train"),
        (["sft", "--model", "m", "--data", "row.jsonl"], "--data: no file row.jsonl; did you mean rows.jsonl?"),
        (["init", "x.yaml"], "--data and --reward are missing: hone init --help; for --reward see hone list rewards"),
        (["init", "rows.jsonl"], "rows.jsonl: the run file to write ends in .yaml or .yml; give data by --data FILE"),
    ]:
        assert main(arguments) == 2
        assert expected in said(capsys)[0]


def test_a_model_is_fine_tuned_by_one_line_that_can_be_kept(here, capsys):
    line = ["sft", "--model", "model", "--data", "rows.jsonl", "--run.dir", "runs/one", "--tracking.trackers=[jsonl]"]
    assert main([*line, "--write", "kept.yaml", "--samples_per_step", "20"]) == 0
    assert [one["step"] for one in read_metrics(here / "runs/one")] == [0, 1, 2]  # one epoch: 40 rows, 20 in a step
    kept = yaml.safe_load((here / "kept.yaml").read_text())
    assert kept["data"] == {"train": {"path": "rows.jsonl", "columns": {"prompt": "question", "completion": "answer"}}}
    assert kept["samples_per_step"] == 20
    assert "columns: prompt is 'question', completion is 'answer'" in said(capsys)
    flags = load_command("sft", None, keys_of(line[5:]), Flags("model", "rows.jsonl"))
    assert load_command("sft", here / "kept.yaml", ["samples_per_step=32"], Flags()).config == flags.config
    assert main([*line, "--write", "kept.yaml"]) == 2
    assert "kept.yaml exists; run it with `hone sft kept.yaml`" in said(capsys)[-1]


def test_a_policy_is_trained_by_one_line_for_an_epoch(here):
    line = ["train", "--model", "model", "--data", "rows.jsonl", "--reward", "my.py:longer", "--run.dir", "runs/rl"]
    assert main([*line, *SMALL, "--update.prompts_per_step", "30", "--update.samples_per_prompt", "2"]) == 0
    steps = read_metrics(here / "runs/rl")
    assert [one["step"] for one in steps if "reward/mean" in one] == [1, 2]  # 40 prompts, 30 in a step
    assert steps[-1]["reward/longer"] > 0


def test_teachers_alone_need_no_reward(here):
    line = ["distill", "--model", "model", "--data", "rows.jsonl", "--teacher", "model", "--run.dir", "runs/distil"]
    assert main([*line, *SMALL, "--update.prompts_per_step", "2", "--run.steps", "1", "--write", "distil.yaml"]) == 0
    kept = yaml.safe_load((here / "distil.yaml").read_text())
    assert kept["distillation"] == {"teachers": {"teacher": {"model": {"path": "model"}}}}
    assert load_command("distill", here / "distil.yaml", [], Flags()).config.run.steps == 1
    (step,) = [one for one in read_metrics(here / "runs/distil") if one["step"] == 1]
    assert step["reward/mean"] == 0.0
    assert step["rollout/status/ok"] + step.get("rollout/status/truncated", 0) == 16


@pytest.mark.parametrize("command", ["prefer", pytest.param("reward-model", marks=pytest.mark.slow)])
def test_pairs_train_by_one_line_that_can_be_kept(command, here):
    pairs = [{"question": f"{n} + 1?", "chosen": f"{n + 1}", "rejected": f"{n}"} for n in range(8)]
    write_rows(here / f"{command}.jsonl", pairs)
    line = [command, "--model", "model", "--data", f"{command}.jsonl", "--run.dir", f"runs/{command}"]
    keys = ["--samples_per_step", "4", "--tracking.trackers=[jsonl]", "runtime.threads=1"]
    assert main([*line, *keys, "--write", f"{command}.yaml"]) == 0
    steps = read_metrics(here / f"runs/{command}")
    assert [one["step"] for one in steps if "train/loss" in one] == [1, 2]  # one epoch
    kept = yaml.safe_load((here / f"{command}.yaml").read_text())
    assert (kept["kind"], kept["samples_per_step"]) == (command.replace("-", "_"), 4)
    assert kept["data"] == {"train": {"path": f"{command}.jsonl", "columns": {"prompt": "question"}}}
    assert main([command, f"{command}.yaml", "--run.dir", f"runs/{command}-again"]) == 0
    again = read_metrics(here / f"runs/{command}-again")
    assert [one.get("train/loss") for one in again] == [one.get("train/loss") for one in steps]


def test_flags_replace_the_model_data_and_reward_of_a_run_file(here):
    (here / "whole.yaml").write_text(
        "run: {dir: r, steps: 3}\nmodel: {build: {layers: 1}}\nupdate: {prompts_per_step: 1}\n"
        "data: {train: {source: {name: python, function: x:y}, columns: {prompt: question}}}\n"
        "reward: {components: {r: {reward: exact_match}}}\n"
    )
    config = load_command("rl", here / "whole.yaml", [], Flags("model", "rows.jsonl", "my.py:longer")).config
    assert (config.model.path, config.model.build) == ("model", None)
    assert (config.data.train.path, config.data.train.source) == ("rows.jsonl", None)
    assert {name: one.reward for name, one in config.reward.components.items()} == {"longer": "my.py:longer"}
    emptied = load_command("rl", here / "whole.yaml", ["data.train.columns=null"], Flags()).config
    assert emptied.data.train.columns == {}


# --------------------------------------------------------------------------------------------------------- hone init


def test_init_writes_and_checks_a_run_file(here, capsys):
    given = ["init", "mine.yaml", "--model", "model", "--data", "rows.jsonl", "--reward", "my.py:longer"]
    assert main(given) == 0
    lines = said(capsys)
    assert lines[1].startswith("data: 36 rows; the first prompt is 'Mia has 700 red apples")
    assert lines[-2:] == [
        "one step: 32 prompts x 8 answers of at most 512 tokens; on a CPU, lower all three",
        "to run it: hone train mine.yaml",
    ]
    assert main(["config", "mine.yaml"]) == 0
    written = yaml.safe_load((here / "mine.yaml").read_text())
    assert written["data"]["train"]["max_rows"] == written["evaluation"]["sets"]["held_out"]["skip_rows"] == 36
    assert written["actor"]["optimizer"]["lr"] == EngineConfig().optimizer.lr
    assert written["actor"]["compute_dtype"] == "auto"
    text = (here / "mine.yaml").read_text()
    assert main(given) == 2  # what is there stays
    assert (here / "mine.yaml").read_text() == text


def test_init_fits_the_answers_into_the_model_s_context(here, capsys):
    (here / "small").mkdir()
    (here / "small" / "config.json").write_text('{"max_position_embeddings": 64}')
    given = ["init", "small.yaml", "--model", "small", "--data", "rows.jsonl", "--reward", "my.py:longer"]
    assert main(given) == 0
    assert "answers of at most 32 tokens, half of the model's context of 64: prompts need the rest" in said(capsys)
    written = yaml.safe_load((here / "small.yaml").read_text())
    assert written["rollout"]["sampling"]["max_response_tokens"] == 32
    given = [
        "init",
        "taught.yaml",
        "--kind",
        "distill",
        "--model",
        "small",
        "--data",
        "rows.jsonl",
        "--teacher",
        "model",
    ]
    assert main(given) == 0
    assert "one step: 32 prompts x 1 answers of at most 32 tokens; on a CPU, lower all three" in said(capsys)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"--reward": "my.py:longest"}, "unknown name in my.py 'longest'; did you mean 'longer'"),
        ({"--column": "prompt=answer"}, "reward my.py:longer needs ground_truth, and the first row has none"),
        ({"--column": "prompt=qestion"}, "did you mean 'question'?"),
        ({"--model": "."}, "has no config.json, so it is not a Hugging Face model folder"),
        ({"--kind": "rlhf"}, "--kind: unknown kind 'rlhf'"),
        ({"--column": "prompt"}, "--column 'prompt' should be hone's column=yours"),
    ],
)
def test_init_writes_nothing_that_does_not_run(here, capsys, changes, expected):
    given = {"--model": "model", "--data": "rows.jsonl", "--reward": "my.py:longer", **changes}
    assert main(["init", "wrong.yaml", *(one for pair in given.items() for one in pair)]) == 2
    assert expected in said(capsys)[-1]
    assert not (here / "wrong.yaml").exists()


def test_init_reads_sharegpt_and_says_what_text_lacks(here, capsys):
    said_by = [("system", "Be kind."), ("human", "2 + 2?"), ("gpt", "4")]
    turns = [{"from": who, "value": text} for who, text in said_by]
    write_rows(here / "sharegpt.jsonl", [{"conversations": turns}] * 3)
    assert main(["init", "sharegpt.yaml", "--kind", "sft", "--model", "model", "--data", "sharegpt.jsonl"]) == 0
    lines = said(capsys)
    assert "columns: messages is 'conversations'" in lines
    assert "data: 3 rows; the first answer is '4'" in lines
    written = yaml.safe_load((here / "sharegpt.yaml").read_text())
    assert written["data"]["train"]["columns"] == {"messages": "conversations"}
    assert written["actor"]["optimizer"]["lr"] == 1e-5
    for row in ({"text": "a text"}, {"id": "7", "text": "a text"}):
        write_rows(here / "text.jsonl", [row] * 3)
        assert main(["init", "text.yaml", "--kind", "sft", "--model", "model", "--data", "text.jsonl"]) == 2
        assert "text.jsonl has the column 'text', which does not say where an answer begins" in said(capsys)[-1]
    write_rows(here / "odd.jsonl", [{"conversations": [{"from": "bird", "value": "x"}]}] * 3)
    assert main(["init", "odd.yaml", "--kind", "sft", "--model", "model", "--data", "odd.jsonl"]) == 2
    assert "a message is from 'bird'; known are human, user, gpt" in said(capsys)[-1]


def test_init_says_how_a_prompt_is_made_of_an_answered_conversation(here, capsys):
    turns = [("system", "Be kind."), ("human", "2 + 2?"), ("gpt", "4")]
    write_rows(here / "asked.jsonl", [{"conversations": [{"from": who, "value": text} for who, text in turns]}] * 3)
    flags = ["--model", "model", "--data", "asked.jsonl", "--teacher", "model"]
    assert main(["init", "asked-once.yaml", "--kind", "distill", *flags]) == 2
    error = said(capsys)[-1]
    assert "the last message of 'conversations' is the assistant's, so there is nothing to answer" in error
    assert not (here / "asked-once.yaml").exists()
    (template,) = re.findall("--data.train.prompt_template '(.*?)'", error)
    given = Flags("model", "asked.jsonl", teacher="model")
    config = load_command("distill", None, [f"data.train.prompt_template='{template}'"], given).config
    assert any("the first prompt is '2 + 2?'" in fact for fact in checked(config))


def test_answers_with_a_label_are_for_kto(here, capsys):
    rows = [{"question": f"{n} + 1?", "completion": f"{n}", "label": n % 2 == 0} for n in range(4)]
    write_rows(here / "kto.jsonl", rows)
    assert main(["init", "kto.yaml", "--kind", "prefer", "--model", "model", "--data", "kto.jsonl"]) == 0
    assert "data: 4 rows; the first answer, which is good, is '0'" in said(capsys)
    written = yaml.safe_load((here / "kto.yaml").read_text())
    assert written["loss"] == {"name": "kto"}
    assert written["data"]["train"] == {"path": "kto.jsonl", "columns": {"prompt": "question"}}
    short = ["--samples_per_step", "4", "--tracking.trackers=[jsonl]", "runtime.threads=1"]
    assert main(["prefer", "kto.yaml", "--run.dir", "runs/kto", *short]) == 0


def test_csv_an_array_and_verl_s_parquet_become_run_files(here, capsys):
    (here / "table.csv").write_text("question,answer\n1 + 1?,two\n2 + 1?,three\n")
    (here / "array.json").write_text(json.dumps([{"instruction": "Say", "input": "hi", "output": "hi"}] * 2))
    asked = {"prompt": [{"role": "user", "content": "1 + 1?"}], "data_source": "sums", "ability": "math"}
    verl = [{**asked, "reward_model": {"style": "rule", "ground_truth": "2"}}] * 2
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(verl), here / "verl.parquet")
    for name, kind, facts in [
        ("table.csv", "sft", ["data: 2 rows; the first answer is 'two'"]),
        ("array.json", "sft", ["data: 2 rows; the first answer is 'hi'"]),
        ("verl.parquet", "rl", ["data: 2 rows; the first prompt is '1 + 1?', ground truth '2'"]),
        ("verl.parquet", "rl", ["not read: ability (a reward gets them in `row`)"]),
    ]:
        (here / "file.yaml").unlink(missing_ok=True)
        reward = ["--reward", "my.py:longer"] if kind == "rl" else []
        assert main(["init", "file.yaml", "--kind", kind, "--model", "model", "--data", name, *reward]) == 0
        assert {*facts} <= {*said(capsys)}
        load_command(kind, Path("file.yaml"), [], Flags())


def test_init_asks_in_a_terminal(here):
    ours, theirs = pty.openpty()
    answers = ["dpoo", "prefer", "model", "none.jsonl", "pairs.jsonl", ""]  # two are asked again; the last: as guessed
    pairs = [{"question": "2 + 2?", "chosen": "4", "rejected": "5"}]
    write_rows(here / "pairs.jsonl", pairs)
    os.write(ours, "".join(f"{one}\n" for one in answers).encode())
    command = [sys.executable, "-m", "hone", "init", "asked.yaml"]
    done = subprocess.run(command, stdin=theirs, capture_output=True, text=True, timeout=120)
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 0, done.stderr
    assert "unknown kind 'dpoo'" in done.stderr
    assert "none.jsonl" in done.stderr
    assert "column of the prompt [question]" in done.stdout
    written = yaml.safe_load((here / "asked.yaml").read_text())
    assert written["kind"] == "prefer"
    assert written["data"]["train"] == {"path": "pairs.jsonl", "columns": {"prompt": "question"}}
    assert json.dumps(written["model"]) == '{"path": "model"}'
