"""`hone score`: files in, files out, with real reward processes."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import typer
from typer.testing import CliRunner

from hone.cli.main import main
from hone.cli.score import score
from hone.config import ConfigError

USER = Path(__file__).parents[1] / "rewards" / "user_rewards.py"
app = typer.Typer(pretty_exceptions_enable=False)
app.command()(score)


def run(*arguments, exit_code=0):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, ConfigError):
        raise result.exception
    assert result.exit_code == exit_code, (result.output, result.exception)
    return result.output


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


ROWS = [
    {"response": "so it is 1,000", "ground_truth": "1000", "question": "é?", "reward": 9, "error": "old"},
    {"response": "#### 7", "ground_truth": 7, "question": "half \ud83d a pair"},
    {"response": "#### 8", "ground_truth": "work\n#### 7", "question": None},
]


def test_rows_come_back_with_reward_and_components(tmp_path):
    source, target = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    summary = run("--reward", "gsm8k", "--input", source, "--output", target)
    scored = read(target)
    assert [row["reward"] for row in scored] == [1.0, 1.0, 0.0]
    assert [row["components"] for row in scored] == [{"gsm8k": 1.0}, {"gsm8k": 1.0}, {"gsm8k": 0.0}]
    assert not any("error" in row for row in scored)
    assert [row["question"] for row in scored] == [row["question"] for row in ROWS]
    assert "3 rows, mean reward 0.6667, 0 failed" in summary
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "out.jsonl"]  # nothing left over

    run("--reward", "gsm8k", "--option", "extraction=strict", "--input", target, "--output", target)
    assert [row["reward"] for row in read(target)] == [0.0, 1.0, 0.0]

    packed = tmp_path / "rollouts.jsonl.gz"  # as a run writes them
    packed.write_bytes(gzip.compress(source.read_bytes()))
    run("--reward", "gsm8k", "--input", packed, "--output", target)
    assert read(target) == scored


def test_parquet_keeps_its_types_and_gains_columns(tmp_path):
    source, target = tmp_path / "in.parquet", tmp_path / "out.parquet"
    table = pyarrow.table(
        {
            "response": ["a", "raise", "abc"],
            "ground_truth": pyarrow.array([1, 2, 3], pyarrow.int32()),
            "day": pyarrow.array([0, 1, 2], pyarrow.date32()),
            "small": pyarrow.array([0.5, None, 1.5], pyarrow.float32()),
        }
    )
    pyarrow.parquet.write_table(table, source)
    run("--reward", f"{USER}:parts", "--input", source, "--output", target, "--workers", 1)
    scored = pyarrow.parquet.read_table(target)
    assert scored.select(table.column_names).equals(table)
    assert scored["reward"].to_pylist() == [0.5, 0.5, 0.5]
    assert scored["components"].to_pylist()[2] == {"parts": 0.5, "parts/format": 1.0, "parts/length": 3.0}

    run("--reward", f"{USER}:temper", "--input", target, "--output", target)
    scored = pyarrow.parquet.read_table(target)
    assert scored["reward"].to_pylist() == [1.0, None, 1.0]
    assert [error is None for error in scored["error"].to_pylist()] == [True, False, True]


def test_a_failed_row_has_no_reward_and_says_why(tmp_path):
    responses = ["fine", "raise", "none", "die", "sleep", "fine"]
    rows = [{"response": response, "ground_truth": None} for response in responses]
    source, target = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    summary = run("--reward", f"{USER}:temper", "--timeout-s", 0.5, "--input", source, "--output", target)
    scored = read(target)
    assert [row["reward"] for row in scored] == [1.0, None, None, None, None, 1.0]
    assert [row.get("error", "")[:12] for row in scored] == [
        "",
        "RuntimeError",
        "TypeError: t",
        "the reward p",
        "no answer wi",
        "",
    ]
    assert "mean reward 1.0000, 4 failed (1 timed out)" in summary


def test_when_every_row_fails_the_command_fails_but_the_file_is_there(tmp_path):
    for suffix in (".jsonl", ".parquet"):
        source = write(tmp_path / "in.jsonl", [{"response": "raise", "ground_truth": None}] * 3)
        target = tmp_path / f"out{suffix}"
        output = run("--reward", f"{USER}:temper", "--input", source, "--output", target, exit_code=1)
        assert "every row failed; the first error: RuntimeError" in output
        assert target.is_file()


def test_more_rows_than_fit_the_window_stay_in_order(tmp_path):
    rows = [{"response": "x", "ground_truth": None, "n": n} for n in range(5000)]
    source, target = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    run("--reward", f"{USER}:number", "--input", source, "--output", target, "--workers", 2)
    assert [row["reward"] for row in read(target)] == list(range(5000))


def test_exit_codes_of_the_command(tmp_path, capsys):
    source, target = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    rest = ["--input", str(source), "--output", str(target)]
    assert main(["score", "--reward", "gsm8k", *rest]) == 0
    assert main(["score", "--reward", "gsm9k", *rest]) == 2
    assert main(["score", "--reward", f"{USER}:lenght", *rest]) == 2
    assert main(["score", "--reward", "gsm8k"]) == 2
    assert main(["score", "--reward", f"{USER}:number", *rest]) == 1  # no row has the column it reads
    errors = capsys.readouterr().err
    assert "error: hone score: reward: unknown reward 'gsm9k'; did you mean 'gsm8k'" in errors
    assert "every row failed; the first error: KeyError: 'n'" in errors


def test_an_interrupt_ends_the_processes_and_writes_nothing(tmp_path):
    source = write(tmp_path / "in.jsonl", [{"response": "child", "ground_truth": 1, "pid_file": f"{tmp_path}/pid"}])
    command = [sys.executable, "-X", "faulthandler", "-c", "from hone.cli.main import run; run()"]
    command += ["score", "--reward", f"{USER}:temper", "--timeout-s", "600", "--input", str(source)]
    with subprocess.Popen([*command, "--output", str(tmp_path / "out.jsonl")], stderr=subprocess.PIPE) as running:
        pid_file = tmp_path / "pid"
        while not (pid_file.is_file() and pid_file.read_text()):
            assert running.poll() is None
            time.sleep(0.02)
        running.send_signal(signal.SIGINT)
        try:
            assert running.wait(60) == 130
        except subprocess.TimeoutExpired:
            masks = Path(f"/proc/{running.pid}/status").read_text().partition("SigQ")[2]
            running.send_signal(signal.SIGABRT)  # faulthandler prints where each thread is
            pytest.fail(f"the interrupt did nothing for 60 s\n{masks}{running.stderr.read().decode()}")
        assert b"interrupted" in running.stderr.read()
    assert sorted(os.listdir(tmp_path)) == ["in.jsonl", "pid"]
    stat = Path("/proc") / pid_file.read_text() / "stat"
    assert not stat.is_file() or stat.read_text().rsplit(")", 1)[1].split()[0] == "Z"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": "missing.jsonl"}, r"no file .*missing.jsonl"),
        ({"input": "in.txt"}, r"should end in \.jsonl"),
        ({"output": "out.csv"}, r"--output .*out.csv should end in"),
        ({"output": "nowhere/out.jsonl"}, "there is no folder"),
        ({"reward": "gsm9k"}, "unknown reward 'gsm9k'; did you mean 'gsm8k'"),
        ({"reward": "nothing:f"}, "cannot be loaded"),
        ({"option": "extraction"}, "should be key=value"),
        ({"option": "extraction=[1"}, "not valid YAML"),
        ({"option": "extraction=strct"}, "did you mean 'strict'"),
        ({"text": '{"response": "x", "ground_truth": 1}\n{"respo'}, r"in.jsonl line 2"),
        (
            {"text": '{"response": "x", "ground_truth": 1}\n{"response": "x", "groundtruth": 1}'},
            r"line 2.*did you mean 'groundtruth'",
        ),
        ({"text": '{"response": 5, "ground_truth": 1}'}, r"line 1: 'response' should be text, found 5"),
        ({"text": "{not json}"}, r"line 1 is not valid JSON"),
        ({"text": ""}, "has no rows"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, change, message):
    source = write(tmp_path / "in.jsonl", ROWS)
    if "text" in change:
        source.write_text(change.pop("text"), encoding="utf-8")
    arguments = {"reward": "gsm8k", "input": "in.jsonl", "output": "out.jsonl"} | change
    for key in ("input", "output"):
        arguments[key] = tmp_path / arguments[key]
    with pytest.raises(ConfigError, match=message) as caught:
        run(*[part for key, value in arguments.items() for part in (f"--{key}", value)])
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_a_value_that_the_output_format_cannot_hold_leaves_the_old_file(tmp_path):
    source, target = tmp_path / "in.parquet", tmp_path / "out.jsonl"
    pyarrow.parquet.write_table(pyarrow.table({"response": ["a"], "ground_truth": [1], "image": [b"png"]}), source)
    target.write_text("precious\n")
    with pytest.raises(ConfigError, match=r"out\.jsonl: a value of type bytes"):
        run("--reward", f"{USER}:length", "--input", source, "--output", target)
    assert target.read_text() == "precious\n"
    assert sorted(os.listdir(tmp_path)) == ["in.parquet", "out.jsonl"]


def test_a_column_of_another_name(tmp_path):
    rows = [{"answer": "#### 7", "reward_model": {"ground_truth": 7}}]
    source, target = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    asked = ["--reward", "gsm8k", "--input", source, "--output", target]
    with pytest.raises(ConfigError, match=r"'response'.*; if it has another name, give --response-column NAME"):
        run(*asked)
    with pytest.raises(ConfigError, match=r"'ground_truth'.*, give --ground-truth-column NAME"):
        run(*asked, "--response-column", "answer")
    with pytest.raises(ConfigError, match=r"unknown column 'answr'; did you mean 'answer'\? \(there is: answer, rew"):
        run(*asked, "--response-column", "answr")
    run(*asked, "--response-column", "answer", "--ground-truth-column", "reward_model.ground_truth")
    (row,) = read(target)
    assert (row["reward"], row["answer"], row["reward_model"]) == (1.0, "#### 7", {"ground_truth": 7})


def test_the_rows_of_a_prompt_are_one_group(tmp_path):
    """Wherever they stand; the function gets the columns in which they agree."""
    answers = [("a", "so: 7"), ("b", "7"), ("a", "7"), ("b", "8"), ("a", "is 7")]
    rows = [{"prompt": p, "response": r, "ground_truth": 7, "sample": i} for i, (p, r) in enumerate(answers)]
    source, target = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    asked = ["--input", source, "--output", target]
    run("--reward", f"{USER}:shortest", *asked)
    scored = read(target)
    assert [row["reward"] for row in scored] == [0.0, 1.0, 1.0, 0.0, 0.0]
    assert [row["sample"] for row in scored] == [0, 1, 2, 3, 4]
    run("--reward", f"{USER}:ranked", "--option", "scale=5e-1", *asked)
    assert [row["reward"] for row in read(target)] == [1.0, 0.0, 0.0, 0.5, 0.5]  # of "a": 7, is 7, so: 7
    assert read(target)[0]["components"] == {"ranked": 1.0, "ranked/size": 3.0}


def test_a_group_that_fails_says_why_in_each_of_its_rows(tmp_path):
    moods = ["short", "fine", "short", "fine"]
    rows = [{"prompt_id": mood, "mood": mood, "response": "x", "ground_truth": None} for mood in moods]
    source, target = write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    summary = run("--reward", f"{USER}:group_temper", "--input", source, "--output", target)
    assert [row["reward"] for row in read(target)] == [None, 1.0, None, 1.0]
    error = "ValueError: the reward of a group returned 1 values for 2 answers"
    assert [row.get("error") for row in read(target)] == [error, None, error, None]
    assert "4 rows, mean reward 1.0000, 2 failed" in summary

    write(source, [{"response": "x", "ground_truth": None, "mood": "fine"}])
    with pytest.raises(
        ConfigError, match=r"rows need the column prompt_id or prompt or messages.*\(columns: response,"
    ):
        run("--reward", f"{USER}:group_temper", "--input", source, "--output", target)
