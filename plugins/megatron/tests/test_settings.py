"""How layers are divided over the parts of a pipeline."""

import json
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from hone.cli.main import main
from hone.cli.recipe import load_recipe
from hone.platforms.layout import Layout
from hone_megatron.settings import MegatronParallel, MegatronSettings


@pytest.mark.parametrize(
    ("settings", "layers", "wanted"),
    [
        ({}, 5, (5,)),
        ({"pipeline": 2}, 4, (2, 2)),
        ({"pipeline": 2}, 5, (3, 2)),
        ({"pipeline": 2, "virtual_pipeline": 2}, 7, (2, 2, 2, 1)),
        ({"pipeline": 3, "layers": (4, 4, 2)}, 10, (4, 4, 2)),
    ],
)
def test_the_first_parts_have_more_layers_unless_said_otherwise(settings, layers, wanted):
    assert MegatronParallel(**settings).layers_of_parts(layers, "m") == wanted


def test_a_forecast_counts_whole_weights_on_data_parallel_ranks_and_stages_of_a_pipeline(capsys):
    parallel = MegatronParallel(tensor=2, pipeline=2, context=2, virtual_pipeline=2, sequence=True)
    settings = MegatronSettings(parallel=parallel)
    wanted = Layout(replicate=2, sequence=2, tensor=2, pipeline=2, parts=2, whole=True, between=True)
    assert settings.layout(16) == wanted
    assert MegatronSettings().layout(8) == Layout(replicate=8, whole=True)
    overrides = ["actor.backend={name: megatron, parallel: {tensor: 2}}", "--devices", "8xH100"]
    assert main(["plan", "recipes/sft/chat.yaml", *overrides, "--json"]) == 0
    batch = {one["what"]: one["value"] for one in json.loads(capsys.readouterr().out)["batch"]}
    assert batch["ranks that split a batch"] == "4"


def test_the_search_cuts_a_model_into_stages_and_shares_tokens_and_experts(capsys, tmp_path):
    facts = tmp_path / "facts.yaml"
    facts.write_text(
        "Small: {memory_gib: 0.01, tflops: 1, memory_gb_s: 100, link_gb_s: 10, network_gb_s: 1, context_gib: 0}\n"
    )
    arguments = ["--devices", "4xSmall", "--nodes", "2", "--device-facts", str(facts), "--lengths", "constant:4"]
    recipe, engine = "recipes/moe/grpo.yaml", "actor.backend=megatron"
    assert main(["plan", recipe, engine, *arguments, "--search", "--json"]) == 0
    tried = [one["overrides"] for one in json.loads(capsys.readouterr().out)["search"]]
    keys = {key.removeprefix("actor.backend.parallel.") for one in tried for key in one}
    assert {"context", "pipeline", "expert"} <= keys
    for one in tried:
        load_recipe(Path(recipe), [engine, *(f"{key}={str(value).lower()}" for key, value in one.items())])


def test_ranks_that_share_experts_are_those_that_share_other_things():
    settings = {"tensor": 2, "sequence": True, "expert": 2, "expert_tensor": 3}
    sizes = MegatronParallel(**settings).sizes(12)
    assert (sizes.data, sizes.world, sizes.expert_tensor) == (6, 12, 3)
    with pytest.raises(ValueError, match=r"expert = 2 x .*expert_tensor = 3 does not divide the 4 ranks of one"):
        MegatronParallel(**settings, pipeline=2).sizes(8)


def test_the_search_of_a_plan_tries_parts_of_stages(tmp_path, capsys):
    """On slow devices with fast links, stages of two parts are faster than stages of one: they idle less."""
    task, facts = tmp_path / "task.py", tmp_path / "facts.yaml"
    task.write_text("def rows(seed, size):\n    return [{'prompt': 'ab', 'completion': 'ba'}] * size\n")
    facts.write_text("Slow: {memory_gib: 9, tflops: 0.01, memory_gb_s: 100, link_gb_s: 99, network_gb_s: 9}\n")
    run = {
        "kind": "sft",
        "run": {"dir": str(tmp_path / "run"), "steps": 1},
        "model": {"build": {"hidden_size": 32, "layers": 4, "heads": 1, "kv_heads": 1, "mlp_size": 64}},
        "data": {"train": {"source": {"name": "python", "function": f"{task}:rows", "size": 64, "seed": 0}}},
        "actor": {"backend": {"name": "megatron"}},
        "samples_per_step": 32,
    }
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(run))
    assert main(["plan", str(file), "--devices", "2xSlow", "--device-facts", str(facts), "--search", "--json"]) == 0
    keys = [f"actor.backend.parallel.{name}" for name in ("pipeline", "virtual_pipeline")]
    found = {
        tuple(one["overrides"].get(key, 1) for key in keys): one["step_s"]
        for one in reversed(json.loads(capsys.readouterr().out)["search"])
    }
    assert set(found) == {(1, 1), (2, 1), (2, 2)}
    assert found[2, 1] > found[2, 2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline": 8}, r"pipeline = 8 x .*virtual_pipeline = 1: m has 5 layers, and each of 8 parts needs one"),
        ({"pipeline": 2, "layers": (5,)}, r"layers = \[5\] should be 2 numbers above 0 .* with the sum 5, which m has"),
        ({"pipeline": 2, "layers": (5, 0)}, r"layers = \[5, 0\] should be 2 numbers above 0"),
        ({"pipeline": 2, "layers": (2, 2)}, r"with the sum 5, which m has"),
    ],
)
def test_layers_that_are_not_those_of_the_model_are_an_error(settings, message):
    with pytest.raises(ValueError, match=message):
        MegatronParallel(**settings).layers_of_parts(5, "m")
