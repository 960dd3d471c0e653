"""`hone plan` says what a run needs, what makes it fit, and which mapping is the fastest."""

import json
from pathlib import Path

import pytest

from hone.cli.main import main
from hone.cli.recipe import load_recipe
from hone.planner.devices import known_devices
from tests.families.types import save_tiny
from tests.trainers.tiny import BASE, recipe

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "recipes/quickstart/grpo.yaml"  # 64 prompts x 16 answers of at most 6 tokens
SMALL = "{memory_gib: 0.05, tflops: 1, memory_gb_s: 100, link_gb_s: 10, network_gb_s: 1, context_gib: 0}"


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def planned(capsys, *arguments):
    code = main(["plan", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_run_that_fits(capsys):
    code, found = planned(capsys, RECIPE, "--devices", "2xRTX-4090", "--lengths", "constant:4")
    assert (code, found["fits"]) == (0, True)
    assert list(found["memory"]) == ["load", "generate", "forward", "backward", "optimizer", "sync", "checkpoint"]
    assert found["peak"]["bytes"] == max(one["bytes"] for one in found["memory"].values())
    batch = {one["what"]: one for one in found["batch"]}
    assert batch["answers per step"]["value"] == "1,024"
    assert batch["prompts per step"]["source"] == f"update.prompts_per_step ({RECIPE})"
    assert batch["mini-batches"]["source"] == "update.minibatches (default)"
    assert found["steps"] == 100
    assert found["device_hours"] == pytest.approx(2 * found["hours"])
    assert found["price"] == pytest.approx(0.4 * found["device_hours"])
    assert sum(found["seconds"].values()) == pytest.approx(found["step_s"], rel=1e-6)


def test_a_run_that_does_not_fit_gets_overrides_that_make_it_fit(capsys, tmp_path):
    facts = tmp_path / "facts.yaml"
    facts.write_text(f"Small: {SMALL}\n")
    code, found = planned(capsys, RECIPE, "--devices", "Small", "--device-facts", facts)
    assert (code, found["fits"], found["peak"]["phase"]) == (1, False, "backward")
    first = found["ways_to_fit"][0]
    assert first["fits"]
    assert first["saves_bytes"] == found["peak"]["bytes"] - first["peak_bytes"]
    keys = [f"{key}={str(value).lower()}" for key, value in first["overrides"].items()]
    code, again = planned(capsys, RECIPE, *keys, "--devices", "Small", "--device-facts", facts)
    assert (code, again["peak"]["bytes"]) == (0, first["peak_bytes"])


def test_the_search_gives_overrides_that_load(capsys):
    arguments = [RECIPE, "update.prompts_per_step=8", "--devices", "4xH100", "--lengths", "constant:4", "--search"]
    code, found = planned(capsys, *arguments)
    assert code == 0
    seconds = [one["step_s"] for one in found["search"]]
    assert 3 <= len(seconds) <= 10
    assert seconds == sorted(seconds)
    assert any("asynchrony.staleness" in one["overrides"] for one in found["search"])
    for one in found["search"]:
        load_recipe(Path(RECIPE), [f"{key}={str(value).lower()}" for key, value in one["overrides"].items()])


def test_the_search_tries_the_dimensions_that_the_engine_has_and_says_when_nothing_fits(capsys, tmp_path):
    arguments = ["recipes/moe/grpo.yaml", "actor.backend.parallel.tensor=2", "--lengths", "constant:4", "--search"]
    _, found = planned(capsys, *arguments, "--devices", "4xH100")
    tried = [one["overrides"] for one in found["search"]]
    assert all(one["actor.backend.parallel.tensor"] == 1 for one in tried[:1])  # takes back what is set
    keys = {key for one in tried for key in one}
    assert {"actor.backend.parallel.expert", "runtime.backend.pools.rollout.devices"} <= keys
    assert "actor.backend.parallel.pipeline" not in keys
    mappings = [{key: value for key, value in one.items() if key != "asynchrony.staleness"} for one in tried]
    assert [one for place, one in enumerate(mappings) if one in mappings[:place]] == []
    facts = tmp_path / "facts.yaml"
    facts.write_text(f"Small: {SMALL.replace('0.05', '0.0005')}\n")
    assert main(["plan", *arguments, "--devices", "4xSmall", "--device-facts", str(facts)]) == 1
    assert "No mapping to 4xSmall fits" in capsys.readouterr().out


def test_the_search_tries_a_copy_on_each_machine(capsys):
    """Two machines: weights are gathered over their fast links, and only gradients go over the network."""
    arguments = ["recipes/sft/chat.yaml", "--devices", "4xH100", "--nodes", "2", "--search"]
    _, found = planned(capsys, *arguments)
    key = "actor.backend.parallel.replicate"
    assert found["search"][0]["overrides"][key] == 2
    assert load_recipe(Path(arguments[0]), [f"{key}=2"]).config.actor.backend.layout(8).replicate == 2


def test_supervised_runs_have_a_plan_too(capsys):
    assert main(["plan", "recipes/sft/chat.yaml", "--devices", "8xH100", "--nodes", "2"]) == 0
    shown = capsys.readouterr().out
    assert "Memory of one device (2 x 8xH100)" in shown
    assert "ranks that split a batch" in shown
    assert "rollout" not in shown


def test_a_plan_for_more_devices_than_the_run_takes_says_so(capsys):
    ray = "runtime.backend={name: ray, nodes: 1, devices: 8}"
    assert main(["plan", "recipes/sft/chat.yaml", ray, "--devices", "8xH100", "--nodes", "4"]) == 0
    assert "The run file takes 8 devices, and 4 x 8xH100 has 32" in capsys.readouterr().out
    assert main(["plan", "recipes/sft/chat.yaml", "--devices", "8xH100"]) == 0
    assert "takes" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([RECIPE, "--devices", "8xH101"], "did you mean 'H100'"),
        ([RECIPE, "--lengths", "constant"], "expected constant:N"),
        (["recipes/sft/chat.yaml", "--lengths", "constant:3"], "are for runs that generate answers"),
        (["recipes/sft/chat.yaml", "--grid", "staleness=1"], "found kind sft"),
    ],
)
def test_what_makes_no_plan_is_refused(arguments, says, capsys):
    assert main(["plan", *arguments]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("actor", "positions"), [({}, 32), ({"lora": {"rank": 2}}, 16)])
def test_a_machine_is_calibrated_also_for_few_tokens_and_positions(actor, positions, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HONE_DEVICE_FACTS", str(tmp_path / "mine.yaml"))
    model = {"build": BASE["model"]["build"] | {"max_positions": positions}}
    code, found = planned(capsys, recipe(tmp_path, {"actor": actor, "model": model}), "--calibrate")  # 12 tokens
    assert (code, found["fits"]) == (0, True)
    assert "hone plan --calibrate" in found["device"]
    (facts,) = known_devices()["cpu"].calibrated.values()
    assert min(sum(facts[part]) for part in ("forward", "training", "decode", "prefill", "sync")) > 0
    assert "attention" in facts


def test_a_plan_needs_neither_rows_nor_weights_nor_a_tokenizer(capsys, tmp_path):
    """A cluster's plan is made elsewhere: shapes are in config.json, and lengths are what the run file allows."""
    folder = save_tiny("qwen2", tmp_path / "model")
    for file in folder.iterdir():
        if file.name != "config.json":
            file.unlink()
    gone = ["kind: sft", f"model: {{path: {folder}}}", f"data: {{train: {{path: {tmp_path}/rows.jsonl}}}}"]
    run_file = tmp_path / "run.yaml"
    run_file.write_text("\n".join([*gone, f"run: {{dir: {tmp_path}/run, steps: 3}}", "samples_per_step: 8"]))
    limit = "data.train.max_sample_tokens=12"
    assert main(["plan", str(run_file), limit, "--devices", "8xH100", "--json"]) == 0
    said = capsys.readouterr()
    batch = {one["what"]: one["value"] for one in json.loads(said.out)["batch"]}
    assert (batch["tokens of a sequence"], batch["tokens per step"]) == ("12", "96")
    assert "passes over the data" not in batch
    assert "the rows are unknown (data.train.max_sample_tokens: no file" in said.err
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    assert main(["plan", str(run_file), limit, "--devices", "8xH100"]) == 0
    assert "no tokenizer_config.json in" in capsys.readouterr().err
    for wrong, says in (
        ([], "say how long they are: data.train.max_sample_tokens=N"),
        ([limit, "run.epochs=2"], "add run.steps=N in place of run.epochs"),
        ([limit, f"model.path={tmp_path}/none"], "a folder that holds the model's config.json is enough"),
    ):
        assert main(["plan", str(run_file), *wrong, "--devices", "8xH100"]) == 2
        assert says in capsys.readouterr().err
