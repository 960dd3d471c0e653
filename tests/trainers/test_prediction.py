"""Each launch writes a prediction, and the report shows it with what was measured."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from hone.cli.main import main
from hone.cli.recipe import load_recipe
from hone.config import ConfigError, load
from hone.data.preference_readers import PairMaker
from hone.data.preferences import pack_pairs
from hone.data.stream import make_renderer
from hone.engines.layout import lay_out
from hone.models.settings import ModelConfig
from hone.models.tokenizer import load_tokenizer
from hone.planner.calibrated import shape_of
from hone.planner.devices import Device, Machine
from hone.planner.memory import Role
from hone.tracking.report.build import build_report
from hone.trainers.forecast.forecast import Given, forecast, rates_of
from hone.trainers.forecast.record import Peaks, foretell, why_refused
from hone.trainers.forecast.setup import Models, placement_of, setup_of, shared_tokens
from hone.trainers.forecast.sizes import sizes_of
from hone.trainers.run.launch import run_policy
from hone.trainers.run.run_model import local_model
from hone.trainers.supervised.settings import PreferenceRunConfig
from tests.families.types import save_tiny
from tests.trainers import tiny
from tests.trainers.preference_task import written

MIB = 2**20


def loaded(folder, *changes):
    return load_recipe(tiny.recipe(folder, *changes), [], kind="rl")


def test_a_run_has_its_prediction_beside_what_happened(tmp_path, capsys):
    short = {"run": {"steps": 4}, "evaluation": {"sets": {}}, "tracking": {"trackers": ["jsonl", "memory"]}}
    run = run_policy(loaded(tmp_path, short))
    capsys.readouterr()
    assert main(["plan", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    memory = {one["what"]: one for one in found["memory"]}
    seconds = {one["what"]: one for one in found["seconds"]}
    assert {"generate", "forward", "backward", "sync", "checkpoint"} <= {k for k, v in memory.items() if v["measured"]}
    assert {"generate", "backward", "step"} <= {k for k, v in seconds.items() if v["measured"] and v["predicted"]}
    phases = [one["measured"] for what, one in memory.items() if "peak" not in what and one["measured"]]
    assert memory["peak"]["measured"] >= max(phases)
    assert memory["peak with freed memory"]["measured"] > 100 * MIB
    ratio = memory["peak"]["predicted"] / memory["peak"]["measured"]
    assert 0.7 < ratio < 1.3  # a tiny model: the process itself is almost all of it
    assert json.loads((run / "peaks.json").read_text())["roles"]["actor"] > 100 * MIB
    assert "Predicted and measured" in build_report(run).read_text()
    assert main(["plan", str(run)]) == 0
    assert "weight sync" in capsys.readouterr().out


def test_a_run_whose_model_cannot_be_understood_starts_and_says_why_there_is_no_prediction(tmp_path, capsys):
    line = foretell(loaded(tmp_path).config, ModelConfig(path=str(tmp_path / "none")), tmp_path)
    assert line.startswith("no prediction of memory and time for this run: ")
    assert "none" in line
    assert main(["plan", str(tmp_path)]) == 0
    assert "no prediction was made" in capsys.readouterr().out


@pytest.mark.parametrize(
    "damaged",
    ['{"memory": 3}', '{"device": "x"}', '{"memory": {"load": {}}, "seconds": []}', '{"device": "\xe9"}', "{"],
)
def test_a_damaged_prediction_says_so(damaged, tmp_path, capsys):
    (tmp_path / "prediction.json").write_text(damaged, encoding="latin-1")
    assert main(["plan", str(tmp_path)]) == 0
    assert "prediction.json or a file of its peaks is damaged" in capsys.readouterr().out


def test_a_model_on_a_service_needs_no_memory_here(tmp_path):
    config = loaded(tmp_path).config
    service = type("Service", (type(config.actor.backend),), {"computes_here": False})
    config.actor.__dict__["backend"] = service()
    with pytest.raises(ConfigError, match="the model is on a service, not on this machine"):
        placement_of(config, Machine(Device("Any", 1, tflops=1, memory_gb_s=1, link_gb_s=1, network_gb_s=1)))


def test_ranks_of_several_machines_are_counted(tmp_path):
    """torchrun on two machines of 8 devices: each launch sees its own machine."""
    machine = Machine(Device("Any", 1, tflops=1, memory_gb_s=1, link_gb_s=1, network_gb_s=1), devices=8)
    config = loaded(tmp_path).config
    assert placement_of(config, machine).trainer == 8
    assert placement_of(config, machine, ranks=16).trainer == 16


def test_a_run_folder_that_cannot_be_written_ends_no_run(tmp_path, caplog):
    none = tmp_path / "none"
    assert "none" in foretell(loaded(tmp_path).config, ModelConfig(path=str(none)), none)
    Peaks(list, none)({})
    assert [one.getMessage().partition(" was not written")[0] for one in caplog.records] == [
        str(none / "prediction.json"),
        str(none / "peaks.json"),
    ]


def test_a_run_that_cannot_fit_is_refused_before_anything_is_loaded(tmp_path, monkeypatch):
    """Layers of three products of 2^16 x 2^20: 200 billion weights each, of which only the config is there."""
    config = loaded(tmp_path).config
    model = local_model(config.model, tmp_path / "model")
    file = tmp_path / "model" / "config.json"
    wide = {"hidden_size": 2**16, "intermediate_size": 2**20}
    file.write_text(json.dumps(json.loads(file.read_text()) | wide))
    with pytest.raises(ConfigError, match=r"cannot fit.*HONE_LAUNCH_OVER_MEMORY=1"):
        foretell(config, model, tmp_path)
    monkeypatch.setenv("HONE_LAUNCH_OVER_MEMORY", "1")
    assert foretell(config, model, tmp_path).startswith("predicted: ")


def test_a_launch_names_the_parts_of_the_files_that_are_not_read(tmp_path):
    folder = save_tiny("qwen3_next", tmp_path / "model")
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"mtp.fc.weight": torch.ones(2)}, file, {"format": "pt"})
    said = foretell(loaded(tmp_path).config, ModelConfig(path=str(folder)), tmp_path)
    assert said.startswith("predicted: ")
    unread = "; not read of the model's files: mtp (1 weight): not trained, not served, and not in an export"
    assert said.endswith(unread)


def test_a_launch_warns_of_answers_that_a_prompt_leaves_no_room(tmp_path):
    """The context is 32 tokens: the engine would end such answers early, as if they had reached the limit."""
    narrow = {"rollout": {"sampling": {"max_response_tokens": 30}}}
    for changes, warned in (({}, False), (narrow, True)):
        config = loaded(tmp_path / str(warned), changes).config
        said = foretell(config, local_model(config.model, tmp_path / str(warned) / "model"), tmp_path)
        assert said.startswith("predicted: ")
        left = (
            "\nwarning: the longest prompt, 6 tokens, leaves 26 of an answer's 30 tokens, as the model's context is 32"
        )
        assert (left in said) is warned


def test_a_folder_without_a_prediction_is_an_error(tmp_path, capsys):
    assert main(["plan", str(tmp_path)]) == 2
    assert "has no prediction.json" in capsys.readouterr().err


def on(device_mib, config, folder):
    device = Device("Small", device_mib / 1024, tflops=1, memory_gb_s=10, link_gb_s=1, network_gb_s=1, context_gib=0)
    machine = Machine(device)
    sizes = sizes_of(config, folder / "made")
    return sizes, machine, Given(), forecast(config, sizes, placement_of(config, machine), Given())


def test_only_what_cannot_fit_is_refused(tmp_path):
    """13,000 weights: 4 bytes each for the weight and the gradient, 8 for AdamW's state; the rollout sleeps."""
    config = loaded(tmp_path).config
    sizes, *_, found = on(100, config, tmp_path)
    weights = sizes.models["actor"].parameters
    least = weights * (4 + 4 + 8) / MIB
    assert 0.15 < least < 0.25
    assert "cannot fit" in why_refused(config, *on(least * 0.99, config, tmp_path))
    sizes, machine, given, found = on(least * 1.01, config, tmp_path)
    assert not found.fits  # activations do not fit by the estimate, which refuses nothing
    assert not why_refused(config, sizes, machine, given, found)


def test_the_built_in_engine_keeps_the_base_of_the_weights_that_an_adapter_changes(tmp_path):
    changes = [{"lora": {"rank": 2, **more}} for more in ({}, {"sync": "merged"}, {"targets": ["up_proj"]})]
    configs = [
        loaded(tmp_path / str(number), {"actor": {**one, "compute_dtype": "float32"}}).config
        for number, one in enumerate(changes)
    ]
    found = []
    for number, config in enumerate(configs):
        sizes, *_, forecast_of = on(100, config, tmp_path / str(number))
        (phase,) = (one for one in forecast_of.phases if one.name == "generate")
        found.append(sum(part.bytes for part in phase.parts if part.what == "adapter and base"))
    anatomy = sizes.models["actor"]
    up = [
        (count * inputs * outputs, 2 * count * (inputs + outputs))
        for name, count, inputs, outputs in anatomy.linear
        if name == "up_proj"
    ]
    both = (anatomy.linear_parameters + anatomy.lora_parameters(2), sum(map(sum, up)))
    assert found == [4 * both[0], 0, 4 * both[1]]


def test_what_the_answers_of_a_pair_begin_with_is_computed_once(tmp_path):
    config = load(PreferenceRunConfig, written(tmp_path, "prefer", "dpo"), []).config
    sizes = sizes_of(config, tmp_path)
    reader = make_renderer(config.data, load_tokenizer(local_model(config.model, tmp_path / "again")))
    maker = PairMaker("train", config.data.train, reader, "data.train")
    batch = pack_pairs([maker.make(index) for index in range(len(maker.reader))])
    row = len(lay_out(batch).take)
    assert row < batch.num_tokens
    policy = Role("actor", sizes.models["actor"])
    shared = shared_tokens(config, sizes.lengths, policy, Machine(Device("cpu", 1, 1, 1, 1, 1)))
    assert shared == pytest.approx(row / batch.num_tokens)


def test_a_calibrated_step_reads_the_columns_of_its_answers_and_prefills_together_what_begins_together(tmp_path):
    """A row and column takes one second, a prefill 100. With seats for one group, each prompt is computed alone."""
    none = [0.0] * 4
    timed = {"forward": none, "training": none, "optimizer": none, "decode": none}
    timed |= {"attention": [1.0, 0.0, 0.0, 0.0], "prefill": [100.0, 0.0, 0.0, 0.0]}
    update = {"prompts_per_step": 4, "samples_per_prompt": 2}
    for slots, calls in ((8, 1), (2, 4)):
        rollout = {"sampling": {"max_response_tokens": 6}, "builtin": {"slots": slots}}
        config = loaded(tmp_path / str(slots), {"update": update, "rollout": rollout}).config
        sizes, machine, *_ = on(100, config, tmp_path / str(slots))
        (policy, *_) = Models(config, sizes, placement_of(config, machine)).passes()
        shapes = {shape_of(policy.role): timed}
        machine = replace(machine, device=replace(machine.device, calibrated=shapes))
        costs = rates_of(config, sizes, placement_of(config, machine)).costs
        prompt = sizes.lengths.prompt
        assert costs.decode_row_s == pytest.approx(prompt + 6 / 2 + 16 / 2)
        assert costs.prefill_token_s == pytest.approx(100 * calls / (4 * prompt))


def test_work_outside_the_models_is_the_drivers_without_the_sync(tmp_path, capsys):
    predicted = {"device": "", "memory": {"load": {"bytes": 1, "parts": []}}, "step_s": 4.0}
    (tmp_path / "prediction.json").write_text(json.dumps({**predicted, "seconds": {"other_work": 2.0}}))
    step = {"perf/driver_s": 3.0, "perf/weight_sync_s": 1.0, "perf/step_s": 5.0}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": n, **step}) + "\n" for n in range(1, 5)))
    assert main(["plan", str(tmp_path), "--json"]) == 0
    seconds = json.loads(capsys.readouterr().out)["seconds"]
    assert (seconds[0]["what"], seconds[0]["predicted"], seconds[0]["measured"]) == ("other_work", 2.0, 2.0)


def test_servers_on_a_cpu_are_sent_a_copy_while_the_policy_is_trained(tmp_path):
    apart = {"rollout": {"builtin": {"process": "separate"}}}
    found = []
    for staleness in (0, 1):
        correction = {"correction": {"weights": "token", "truncate": 2}} if staleness else {}
        changes = {**apart, "asynchrony": {"staleness": staleness}, "algorithm": correction}
        config = loaded(tmp_path / str(staleness), changes).config
        sizes = sizes_of(config, tmp_path)
        device = Device("cpu", 1, tflops=1, memory_gb_s=1, link_gb_s=1, network_gb_s=1)
        found.append(setup_of(config, sizes, placement_of(config, Machine(device))).sent)
    assert found == [0, 4 * sizes.models["actor"].parameters]
