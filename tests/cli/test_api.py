"""`import hone`, as a script and a notebook use it."""

import asyncio
import functools
import gzip
import json
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import datasets
import pandas
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

import hone
from hone.cli.main import main
from hone.data.sources.base import open_rows
from tests.trainers.tiny import BASE, recipe

ROOT = Path(__file__).resolve().parents[2]


def half(response, ground_truth):
    """Half of the right characters; found by its file, and called by name."""
    return sum(a == b for a, b in zip(response, ground_truth, strict=False)) / 2


def rows_of_all_kinds(seed, size):
    """Data of every kind of run; a Python function is a data source."""
    for _ in range(size):
        yield {"prompt": "ab", "completion": "ba", "chosen": "ba", "rejected": "dd"}


def untimed(result):
    return [{name: x for name, x in step.items() if not name.startswith("perf/")} for step in result.metrics]


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """One run of three steps, by the API, with a Python function as its reward, inside a running event loop."""
    folder = tmp_path_factory.mktemp("api")
    settings = yaml.safe_load(recipe(folder).read_text())
    settings["reward"]["components"] = {"half": {"reward": half}}
    seen = {}

    async def notebook():
        return hone.train(settings, "run.steps=3", on_step=lambda step, values: seen.update({step: dict(values)}))

    return settings, asyncio.run(notebook()), seen


def test_a_run_inside_an_event_loop_calls_on_step_and_returns_what_it_wrote(done):
    _, result, seen = done
    assert [one["step"] for one in result.metrics] == list(seen) == [0, 1, 2, 3]
    assert result.metrics[3]["reward/half"] == seen[3]["reward/half"]
    assert (result.model / "config.json").is_file()


def test_the_result_is_the_command_s_to_the_last_digit(done, tmp_path):
    settings, result, _ = done
    again = hone.train({**settings, "run": {**settings["run"], "dir": str(tmp_path / "b")}}, "run.steps=3")
    before, after = (
        [{k: v for k, v in step.items() if not k.startswith("perf/")} for step in one.metrics]
        for one in (result, again)
    )
    assert before == after


@pytest.mark.parametrize("kind", ["sft", "prefer", "reward_model", "distill"])
def test_the_other_kinds_of_training_from_python_objects(kind, done, tmp_path):
    source = {"name": "python", "function": rows_of_all_kinds, "size": 8, "seed": 1}
    settings = {
        "run": {"dir": str(tmp_path / "run")}, "model": BASE["model"], "data": {"train": {"source": source}},
        "actor": BASE["actor"], "tracking": {"trackers": ["jsonl"]}, "runtime": {"threads": 1},
    }  # fmt: skip
    if kind == "distill":
        teachers = {"one": {"model": {"path": str(done[1].model)}}}
        settings |= {key: BASE[key] for key in ("update", "rollout")} | {"distillation": {"teachers": teachers}}
    else:
        settings["samples_per_step"] = 4
    seen = []
    result = getattr(hone, kind)(settings, "run.steps=2", on_step=lambda step, metrics: seen.append(step))
    assert seen == result.metrics.column("step") == [0, 1, 2]
    assert (result.model / "config.json").is_file()


def test_evaluate_generate_and_score(done):
    settings, result, seen = done
    figures = hone.evaluate(settings, "run.steps=3")
    assert figures["eval/held_out/half"] == pytest.approx(seen[3]["eval/held_out/half"])
    answers = hone.generate(result.model, ["abc", "dca"], samples=2, max_response_tokens=3)
    assert [len(found) for found in answers] == [2, 2]
    rows = [{"response": "cba", "ground_truth": "cba", "level": 1}, {"response": "xbx", "ground_truth": "cba"}]
    scored = hone.score(half, rows, workers=1)
    assert [row["reward"] for row in scored] == [1.5, 0.5]
    assert scored[0]["level"] == 1
    assert hone.score("exact_match", rows[:1], workers=1)[0]["components"] == {"reward": 1.0}


@pytest.mark.slow
def test_files_go_from_generate_to_score_and_a_run_s_folder_is_evaluated(done, tmp_path):
    _, result, seen = done
    rows = [{"prompt": "abc", "solution": "cba"}, {"prompt": "dca", "solution": "acd", "note": "\ud83d"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("rows", "answers", "scored")}
    asked = ["--input", files["rows"], "--output", files["answers"], "--samples", "2", "--max-response-tokens", "3"]
    assert main(["generate", str(result.model), *asked]) == 0
    answers = [json.loads(line) for line in Path(files["answers"]).read_text().splitlines()]
    assert answers[2]["note"] == "\ud83d"  # half a surrogate pair
    assert main(["generate", "model", "--prompt", "abc", "--output", str(tmp_path / "none/x.jsonl")]) == 2
    assert [(one["prompt"], one["sample"]) for one in answers] == [("abc", 0), ("abc", 1), ("dca", 0), ("dca", 1)]
    asked = ["--reward", "exact_match", "--input", files["answers"], "--output", files["scored"], "--workers", "1"]
    assert main(["score", *asked, "--ground-truth-column", "solution"]) == 0
    scored = [json.loads(line) for line in Path(files["scored"]).read_text().splitlines()]
    assert [one["reward"] for one in scored] == [float(one["response"] == one["solution"]) for one in answers]
    assert main(["eval", str(result.folder), "--output", str(tmp_path / "figures.json"), "--threads", "2"]) == 0
    assert torch.get_num_threads() == 2
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures == hone.evaluate(result.folder)
    assert figures["eval/held_out/half"] == pytest.approx(seen[3]["eval/held_out/half"])


def test_a_run_s_rollouts_are_a_list_of_records(done):
    _, result, _ = done
    training = [one for one in result.rollouts if one["set"] is None]
    assert [one["step"] for one in training] == [1, 1, 2, 2, 3, 3]  # `rollouts_per_step: 2`
    assert all(len(one["prompt_token_ids"]) > 0 and isinstance(one["response"], str) for one in training)
    assert {one["set"] for one in result.rollouts} == {None, "held_out"}
    assert hone.Result(result.folder / "none").rollouts == []


def test_a_mapping_has_defaults_and_objects(done, tmp_path):
    """A data set, a model, its tokenizer and a list of rewards, over a run file; the same objects are the same run."""
    _, result, _ = done
    rows = datasets.Dataset.from_list([{"prompt": "ab", "ground_truth": "ba"}] * 4)
    chosen = {
        "defaults": str(recipe(tmp_path)),
        "model": {
            "build": None,
            "path": AutoModelForCausalLM.from_pretrained(result.model),
            "tokenizer": AutoTokenizer.from_pretrained(result.model),
        },
        "data": {"train": {"source": None, "path": rows}},
        "reward": {"components": [half]},
        "run": {"dir": str(tmp_path / "objects"), "steps": 1},
    }
    loaded = hone.load(chosen)
    assert loaded.config.update.samples_per_prompt == BASE["update"]["samples_per_prompt"]
    assert hone.load(chosen).config == loaded.config
    saved = sorted(type(one).__name__ for one in (rows, chosen["model"]["path"], chosen["model"]["tokenizer"]))
    assert sorted(one.name.partition("-")[0] for one in (tmp_path / "objects/objects").iterdir()) == saved
    trained = hone.train(loaded)
    assert "reward/half" in trained.metrics[-1]
    assert {one["question"] for one in trained.rollouts if one["set"] is None} == {"ab"}
    with pytest.raises(hone.ConfigError, match="two rewards of the list have the same name"):
        hone.load({**chosen, "reward": {"components": [half, half]}})
    short = {"defaults": chosen["defaults"], "reward": {"components": [half, "gsm8k"]}}
    named = hone.load(short).config
    assert named.reward.components["gsm8k"].reward == "gsm8k"
    assert hone.load(short, f"run.dir={tmp_path / 'other'}").config.run.dir == str(tmp_path / "other")
    objects = {"model": chosen["model"]["path"], "data": {"train": rows}, "reward": {"components": [half]}}
    short = {**objects, "run": {"dir": str(tmp_path / "short"), "steps": 1}}
    config = hone.load({**short, "update": {"prompts_per_step": 2}}, kind="rl").config
    assert {Path(config.model.path).parent, Path(config.data.train.path).parent} == {tmp_path / "short/objects"}
    with pytest.raises(hone.ConfigError, match=r"update\.prompts_per_step is required and was not set"):
        hone.load(short, kind="rl")
    with pytest.raises(hone.ConfigError, match=r"run\.dir is required, because Dataset is stored there"):
        hone.load({"data": {"train": {"path": rows}}})


class Scale:
    """A reward with a state, which is no function."""

    def __call__(self, response):
        return 1.0


@pytest.mark.parametrize(
    ("components", "key"),
    [
        ({"a": Scale()}, r"components\.a\.reward is a Scale"),
        ({"a": {"reward": functools.partial(half, ground_truth="a")}}, r"components\.a\.reward is a partial"),
        ([Scale()], r"components\.Scale\.reward is a Scale"),
        (Scale(), r"components is a Scale"),
    ],
)
def test_an_object_that_other_processes_cannot_import_is_one_error(components, key, tmp_path):
    wanted = rf"reward\.{key} object, which other processes cannot import; define a function that calls it"
    with pytest.raises(hone.ConfigError, match=wanted):
        hone.load({"defaults": str(recipe(tmp_path)), "reward": {"components": components}})


def test_score_refuses_an_object_that_other_processes_cannot_import():
    with pytest.raises(hone.ConfigError, match="reward is a Scale object, which other processes cannot import"):
        hone.score(Scale(), [{"response": "a"}])


@pytest.mark.parametrize(("components", "name"), [({"a": half}, "a"), (half, "half")])
def test_a_function_alone_is_a_component(components, name, tmp_path):
    run_file = recipe(tmp_path, {"reward": {"components": {}}})
    found = hone.load({"defaults": str(run_file), "reward": {"components": components}}).config.reward.components
    assert found[name].reward == f"{Path(__file__)}:half"


ROWS = [{"prompt": "ab", "ground_truth": "ba"}, {"prompt": "dc", "ground_truth": "cd"}]


@pytest.mark.parametrize("rows", [ROWS, pandas.DataFrame(ROWS)], ids=["list", "frame"])
@pytest.mark.parametrize("place", [lambda rows: rows, lambda rows: {"path": rows, "source": None}], ids=["set", "path"])
def test_rows_in_a_list_or_a_frame_are_a_data_set_named_by_its_content(rows, place, tmp_path):
    """They replace a run file's source; the same rows are the same file, others are another."""
    settings = {"defaults": str(recipe(tmp_path)), "data": {"train": place(rows)}}
    train = hone.load(settings).config.data.train
    assert [dict(row) for row in open_rows(train, "data.train")] == ROWS
    assert hone.load(settings).config.data.train == train
    other = hone.load({**settings, "data": {"train": place(rows[:1])}}).config.data.train
    assert other.path != train.path
    assert Path(train.path).parents[1] == Path(other.path).parents[1] == tmp_path / "run" / "objects"
    held_out = {**settings, "evaluation": {"sets": {"held_out": place(rows)}}}
    assert hone.load(held_out).config.evaluation.sets["held_out"].path == train.path


@pytest.mark.parametrize(
    ("rows", "wanted"),
    [
        (["ab"], r"data\.train row 0 should be a dict of columns, found 'ab'"),
        ([{"prompt": object()}], r"data\.train row 0 cannot be written as JSON: Object of type object"),
        (pandas.DataFrame({"prompt": ["a", 1]}), r"data\.train cannot be written as Parquet: "),
        (
            datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS), test=datasets.Dataset.from_list(ROWS)),
            r"data\.train is a DatasetDict of train, test; give one split, such as dataset\['train'\]",
        ),
    ],
)
def test_rows_that_cannot_be_used_are_one_error(rows, wanted, tmp_path):
    with pytest.raises(hone.ConfigError, match=wanted):
        hone.load({"defaults": str(recipe(tmp_path)), "data": {"train": rows}})


NOTEBOOK = """
import asyncio, json, sys
import hone

def on_step(step, values):
    print(f"step {step}", flush=True)
    if step == 1:
        sys.stdin.readline()  # until the stop button was pressed

async def cell():
    return hone.train(json.loads(sys.argv[1]), on_step=on_step)

loop = asyncio.new_event_loop()  # as a notebook's: Ctrl-C raises KeyboardInterrupt in the cell
try:
    loop.run_until_complete(cell())
except hone.Interrupted as stop:
    print(stop, flush=True)
print([int(one["step"]) for one in loop.run_until_complete(cell()).metrics])
"""


@pytest.mark.slow
def test_the_stop_button_of_a_notebook_saves_the_run_and_the_same_call_continues_it(done, tmp_path):
    settings = json.loads(json.dumps({**done[0], "reward": {"components": {"share": {"reward": "exact_match"}}}}))
    settings["run"] = {**settings["run"], "dir": str(tmp_path / "c"), "steps": 40}
    settings["evaluation"] = {"every_steps": 0}
    with subprocess.Popen(
        [sys.executable, "-c", NOTEBOOK, json.dumps(settings)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        lines = iter(process.stdout.readline, "")
        assert any(line == "step 1\n" for line in lines)
        process.send_signal(signal.SIGINT)
        process.stdin.write("go on\n")
        process.stdin.flush()
        stopped = next(line for line in lines if not line.startswith("step "))
        assert re.fullmatch(r"stopped after step \d+, which is saved\n", stopped)
        rest = list(lines)
    assert process.returncode == 0
    at = int(stopped.split()[3].strip(","))
    assert rest[0] == f"step {at + 1}\n"
    assert json.loads(rest[-1]) == list(range(41))


@pytest.mark.slow
def test_the_example_of_the_documentation_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "api.md").read_text(), flags=re.S)
    script = tmp_path / "example.py"  # it is not run again by the process that imports its function
    script.write_text(example.replace("runs/first", str(tmp_path / "first")))
    runpy.run_path(str(script), run_name="__main__")
    printed = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(("rl run", "step "))]
    assert printed[0] == "16 command line"
    steps = [line for line in printed if re.fullmatch(r"\d [\d.]*", line)]  # a rule may find something in between
    assert [line.split()[0] for line in steps] == ["0", "1", "2", "3"]
    assert len(json.loads(printed[-1])) == 2


@pytest.mark.slow
def test_a_function_without_a_file_is_stored_with_the_run(done, tmp_path):
    """As in a notebook, whose cells are no files."""
    cell = "def mine(response):\n    return float(len(set(response)))\n"
    program = (
        "import json, linecache, sys, hone\n"
        f"cell = {cell!r}\n"
        "linecache.cache['<cell 1>'] = (len(cell), None, cell.splitlines(True), '<cell 1>')\n"
        "exec(compile(cell, '<cell 1>', 'exec'))\n"
        "settings = json.loads(sys.argv[1])\n"
        "settings['reward']['components'] = {'mine': {'reward': mine}}\n"
        "print(hone.load(settings).config.reward.components['mine'].reward)\n"
    )
    settings = {**done[0], "run": {**done[0]["run"], "dir": str(tmp_path / "d")}, "reward": {}}
    found = subprocess.run(
        [sys.executable, "-c", program, json.dumps(settings)], capture_output=True, text=True, timeout=120
    )
    assert found.stdout.strip() == f"{tmp_path}/d/functions/mine.py:mine", found.stderr
    assert "len(set(response))" in (tmp_path / "d" / "functions" / "mine.py").read_text()


def test_a_stored_function_has_the_constants_of_its_script_but_nothing_that_the_script_changes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import json\nLIMIT = 3\nsettings = json.loads('{}')\nsettings['run'] = {'dir': 'd'}\ntable = {'b': {}}\n"
        "table['b']['c'] = 2\ncount = 0\ncount += 1\ndef mine(response):\n    return float(len(response) < LIMIT)\n"
        "if __name__ == '__main__':\n    from hone.objects import reference_to\n    from pathlib import Path\n"
        f"    print(reference_to(mine, Path({str(tmp_path)!r})))\n"
    )
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert found.stdout.strip() == f"{tmp_path}/functions/mine.py:mine", found.stderr
    assert (tmp_path / "functions" / "mine.py").read_text() == (
        "import json\nLIMIT = 3\n\ndef mine(response):\n    return float(len(response) < LIMIT)\n"
    )


def test_a_stored_function_has_what_it_reads_or_is_refused(tmp_path):
    """Expressions are kept whose import does nothing; of the rest, only a name that the function reads is an error."""
    script = tmp_path / "script.py"
    script.write_text(
        "try:\n    import no_such_module as re\nexcept ImportError:\n    import re\n"
        "PATTERN = re.compile(r'\\d+', re.DOTALL)\nWORDS = set(['a', 'b'])\nSIZE = 2 * 3\n"
        "table = dict(sorted({'b': 1}.items()))\n"
        "def helper(text):\n    return table[text]\n"
        "def good(response, table=None):\n    found = table or {}\n    return PATTERN, WORDS, SIZE, found\n"
        "def bad(response):\n    return helper(response)\n"
        "if __name__ == '__main__':\n    from hone.objects import reference_to\n    from pathlib import Path\n"
        f"    response = found = None\n    print(reference_to(good, Path({str(tmp_path)!r})))\n"
        f"    reference_to(bad, Path({str(tmp_path)!r}))\n"
    )
    found = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert found.stdout.strip() == f"{tmp_path}/functions/good.py:good", found.stderr
    kept = runpy.run_path(str(tmp_path / "functions" / "good.py"))
    assert kept["good"]("") == (re.compile(r"\d+", re.DOTALL), {"a", "b"}, 6, {})
    assert "ConfigError: helper reads table, which the script computes in line 8; other processes" in found.stderr


def test_what_cannot_be_used_is_one_error(done):
    settings = done[0]
    message = {"role": "user", "content": "abc"}
    conversation = r"found None|prompt 0 should be a text, or a conversation such as \[\{'role': 'user', "
    for prompts, wanted in (
        ("abc", r"takes a list of prompts, found one text; write \['abc'\]"),
        (message, r"takes a list of prompts, found one message; write \[\[message\]\]"),
        (None, r"takes a list of prompts, found None; write \['a text'\]"),
        ([message], r"prompt 0 is one message, expected a conversation; write \[messages\] for one"),
        ([None], conversation),
        ([[]], conversation),
        ([["abc"]], conversation),
    ):
        with pytest.raises(hone.ConfigError, match=wanted):
            hone.generate("no model", prompts)
    loaded = hone.load(settings)
    assert hone.load(loaded, kind="rl") is loaded
    with pytest.raises(hone.ConfigError, match="these settings have kind: rl, expected sft"):
        hone.sft(loaded)
    with pytest.raises(hone.ConfigError, match=r"loaded already; give run\.steps=3 to hone\.load"):
        hone.train(loaded, "run.steps=3")
    with pytest.raises(hone.ConfigError, match="<lambda> cannot be found by other processes"):
        hone.load({**settings, "reward": {"components": {"a": {"reward": lambda response: 0.0}}}})
    with pytest.raises(hone.ConfigError, match=r"the mapping: 'defaults' should name one run file, found \['a.yaml'\]"):
        hone.load({**settings, "defaults": ["a.yaml"]})
    with pytest.raises(
        hone.ConfigError, match=r"the mapping has kind: rl, expected sft; run it with hone\.train\(\.\.\.\)"
    ):
        hone.sft(settings)
    with pytest.raises(hone.ConfigError, match=r"override .* should be text: 'run.steps=2', 'run.seed=1'"):
        hone.train(settings, {"run.steps": 2, "run.seed": 1})
    with pytest.raises(
        hone.ConfigError, match=r"unknown key 'run.steps'; write it in its section: run: \{steps: ...\}"
    ):
        hone.train({**settings, "run.steps": 2})
    with pytest.raises(hone.ConfigError, match=r"the mapping: unknown key 'learning_rate'; did you mean 'actor.optim"):
        hone.load({**settings, "learning_rate": 1})
    with pytest.raises(AttributeError, match=r"has no attribute 'fit' \(it has: .*train\)"):
        _ = hone.fit


def test_the_package_itself_is_light():
    program = "import sys, hone; print(hone.__version__, [m for m in ('torch', 'pydantic') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert found.stdout == f"{hone.__version__} []\n"


def test_the_script_of_the_page_on_debugging_prints_the_last_answers(done, capsys):
    _, result, _ = done
    (script,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "debugging.md").read_text(), flags=re.S)
    script = "\n".join(line.removeprefix("   ") for line in script.splitlines())
    exec(script.replace("runs/quickstart", str(result.folder)), {})
    with gzip.open(result.folder / "rollouts.jsonl.gz") as file:
        rows = [json.loads(line) for line in file]
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].split() == ["ground", "truth:", rows[-1]["ground_truth"]]
    assert len(printed) == 12
