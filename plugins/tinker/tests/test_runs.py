"""Whole runs of hone on a service: they end as runs in one process, resume, and export."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hone.cli.main import main
from hone.schedule.journal import JOURNAL, read_journal
from tests.trainers.tiny import metrics

NOT_COMPARED = ("weights/", "train/entropy")
RL = {
    "reward/share",
    "train/loss",
    "train/policy_loss",
    "train/grad_norm",
    "train/lr",
    "correction/mean_abs_difference",
}
SEVERAL = {"update": {"prompts_per_step": 4, "samples_per_prompt": 8, "minibatches": 2}}  # each part has rewards
KL = {"algorithm": {"kl": {"coef": 0.05, "where": "in_loss"}}}


def figures(run):
    """The metrics of each step that both kinds of run have."""
    return [{k: v for k, v in line.items() if not k.startswith(NOT_COMPARED)} for line in metrics(run)]


def compare(one, other, needed):
    """Both have the same metrics, within rounding; `needed` ones are there from the first step on."""
    assert [line["step"] for line in one] == [line["step"] for line in other]
    for mine, theirs in zip(one, other, strict=True):
        both = mine.keys() & theirs.keys()
        assert needed <= both or mine["step"] == 0, needed - both
        assert {name for name in mine if name.startswith("eval/")} <= both
        unlike = {n: (mine[n], theirs[n]) for n in both if theirs[n] != pytest.approx(mine[n], rel=2e-3, abs=2e-4)}
        assert not unlike, (mine["step"], unlike)


def train(path, *overrides, command="train"):
    assert main([command, str(path), *overrides]) == 0
    return Path(path).parent / "run"


@pytest.mark.parametrize("changes", [{}, {**SEVERAL, **KL}], ids=["one update", "two updates and a reference"])
def test_a_run_on_a_service_has_the_figures_of_a_run_in_one_process(run_file, server, key, changes, caplog):
    steps = {"run": {"steps": 3}}
    here = figures(train(run_file("here", **steps, **changes)))
    with caplog.at_level("WARNING", logger="hone.tinker"):  # what a run shows
        there = figures(train(run_file("there", server.url, **steps, **changes)))
    assert caplog.text.count("shows no digest of its weights") == 1
    assert len(here) == 4
    compare(here, there, RL)


AHEAD = {
    "run": {"steps": 4},
    "algorithm": {"correction": {"old": "rollout"}},
    "asynchrony": {"staleness": 1},
}


@pytest.mark.slow
def test_answers_that_a_service_samples_while_it_trains_are_those_of_a_server_beside_the_trainer(run_file, server, key):
    rollout = {"sampling": {"max_response_tokens": 3}}
    beside = {**rollout, "builtin": {"process": "separate"}}
    here = train(run_file("here", **AHEAD, rollout=beside))
    there = train(run_file("there", server.url, **AHEAD, rollout=rollout))
    wanted, found = ([*read_journal(run / JOURNAL)] for run in (here, there))
    for one in (*wanted, *found):
        del one["batch"]  # digest: log-probs differ by rounding
    assert found == wanted  # draws and the version that sampled each token
    versions = [{span[0] for answers in one["spans"].values() for spans in answers for span in spans} for one in found]
    assert versions == [{0}, {0}, {1}, {2}]
    mine, theirs = (figures(run) for run in (here, there))
    for line in (*mine, *theirs):
        line.pop("reward/scored", None)  # while the step ran: of how many later answers is a matter of time
    compare(mine, theirs, RL)  # the ratios are to log-probs of these versions
    assert [line["schedule/staleness_max"] for line in metrics(there)[1:]] == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("key", "value", "instead"),
    [
        ("asynchrony.new_weights", "recompute", "finish"),
        ("rollout.replicas", 2, 1),
        ("weights.verify", "probe", "digest"),
    ],
)
def test_what_a_service_cannot_do_beside_training_is_refused(run_file, capsys, key, value, instead):
    assert main(["train", str(run_file("refused", "http://127.0.0.1:1", **AHEAD)), f"{key}={value}"]) == 2
    assert f"set {key}={instead}" in capsys.readouterr().err


def test_a_run_on_a_service_continues_from_its_checkpoint(run_file, server, key):
    whole = figures(train(run_file("whole", server.url, run={"steps": 4}), "evaluation.every_steps=2"))
    path = run_file("parts", server.url, run={"steps": 4})
    train(path, "run.steps=2", "evaluation.every_steps=2")
    parts = figures(train(path, "evaluation.every_steps=2"))
    compare(parts, whole, RL)


def test_the_adapter_comes_back_and_tokens_are_counted(run_file, server, key, base):
    prices = {"prefill": 1.0, "sample": 2.0, "train": 3.0}
    run = train(run_file("priced", server.url, service={"prices": prices}, run={"steps": 2}))
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), run / "adapter")
    assert adapted.peft_config["default"].r == 4
    assert any(bool(one.any()) for name, one in adapted.named_parameters() if "lora_B" in name)
    merged = run.parent / "merged"
    assert main(["export", "--merge", str(run), str(merged)]) == 0
    assert not list(merged.glob("adapter*"))
    whole, weights, adapter = (
        load_file(folder / f"{name}.safetensors")
        for folder, name in ((merged, "model"), (base, "model"), (run / "adapter", "adapter_model"))
    )
    scale, changed = adapted.peft_config["default"].lora_alpha / 4, 0
    for name, weight in weights.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{layer}.lora_A.weight" in adapter:
            weight = weight + scale * adapter[f"{layer}.lora_B.weight"] @ adapter[f"{layer}.lora_A.weight"]
            changed += 1
        torch.testing.assert_close(whole[name], weight, rtol=1e-5, atol=1e-6)
    assert (changed, whole.keys()) == (14, weights.keys())  # 7 matrices in each of 2 layers
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = lines[-1]
    counts = [last[f"perf/remote_{kind}_tokens"] for kind in ("prefilled", "sampled", "trained")]
    assert min(counts) > 0
    assert last["perf/remote_cost"] == pytest.approx((counts[0] + 2 * counts[1] + 3 * counts[2]) / 1e6)
    assert last["weights/remote_gap"] < 1e-4 < last["weights/remote_moved"]


def test_commands_on_a_run_of_a_service_work_or_say_what_to_type(run_file, server, key, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("HONE_ROLLOUT_TOKEN", "0" * 32)
    path = run_file("told", server.url, run={"steps": 6})
    run = train(path)
    merge, merged = f"hone export --merge {run} FOLDER", tmp_path / "merged"

    def said(*command):
        capsys.readouterr()
        code = main([*map(str, command)])
        found = capsys.readouterr()
        return code, found.out + found.err

    for refused, instead in {
        ("generate", run, "--prompt", "abc"): merge,
        ("chat", run): merge,
        ("eval", run): merge,
        ("eval", path): "add --model FOLDER",
        ("plan", path, "--calibrate"): "add runtime.backend=local",
        ("rollout", "serve", path, "127.0.0.1:0"): "no server to start",
    }.items():
        code, text = said(*refused)
        assert (code, text.count("\n"), instead in text) == (2, 1, True), text
    assert said("plan", path, "runtime.backend=local")[0] == 0
    assert said("check", path, "--baseline", "--prompts", 2)[0] == 0
    code, text = said("doctor", path)
    assert code == 0
    assert "rollout servers" not in text  # the service answers: no environment of a server is needed
    assert said("export", "--merge", run, merged)[0] == 0
    assert said("eval", run, "--model", merged, "--output", tmp_path / "figures.json")[0] == 0
    last, found = metrics(run)[-1], json.loads((tmp_path / "figures.json").read_text())
    assert found["eval/held_out/share"] > 0
    assert found == {name: pytest.approx(last[name]) for name in found}


def test_an_adapter_whose_base_has_no_weights_here_is_exported_alone_and_not_merged(
    run_file, server, key, base, tmp_path, capsys
):
    bare = shutil.copytree(base, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    run = train(run_file("apart", server.url, run={"steps": 1}, model={"path": str(bare)}))
    assert main(["export", str(run), str(tmp_path / "alone")]) == 0
    capsys.readouterr()
    assert main(["export", "--merge", str(run), str(tmp_path / "merged")]) == 2
    said = capsys.readouterr().err
    assert (tmp_path / "alone/adapter_config.json").exists()
    assert not (tmp_path / "merged").exists()
    assert said.count("\n") == 1
    assert f"the weights of {bare}" in said
    assert "leave --merge out" in said


def supervised(path):
    """The run file with the sections of supervised fine-tuning."""
    settings = yaml.safe_load(path.read_text())
    kept = {key: settings[key] for key in ("run", "model", "actor", "data", "runtime")}
    kept["tracking"] = {"trackers": ["jsonl"]}
    kept["data"]["train"]["answer_template"] = "{{ ground_truth }}"
    path.write_text(yaml.safe_dump({"kind": "sft", "samples_per_step": 4, **kept}))
    return path


def test_supervised_fine_tuning_on_a_service_has_the_figures_of_one_process(run_file, server, key):
    steps = {"run": {"steps": 3}}
    here = figures(train(supervised(run_file("sft-here", **steps)), command="sft"))
    there = figures(train(supervised(run_file("sft-there", server.url, **steps)), command="sft"))
    compare(here, there, {"train/nll", "train/loss", "train/grad_norm"})


@pytest.mark.parametrize("served", [False, True], ids=["computed here", "the service's base"])
def test_distillation_from_likely_tokens_on_a_service_has_the_figures_of_one_process(
    run_file, server, key, base, teacher, served
):
    judge = {"model": {"path": str(base if served else teacher)}}
    loss = {"name": "forward_top_k" if served else "reverse_top_k", "k": 3}
    changes = {
        "kind": "distill",
        "run": {"steps": 3},
        "distillation": {"teachers": {"other": judge}, "loss": loss, "task_coef": 0.5},
    }
    here = figures(train(run_file("here", **changes), command="distill"))
    named = f"{{name: tinker, url: '{server.url}', base_model: tiny}}"  # as docs/tinker_client.md has it
    there = figures(
        train(
            run_file("there", server.url, **changes),
            *([f"distillation.teachers.other.engine.backend={named}"] if served else []),
            command="distill",
        )
    )
    compare(here, there, RL | {"train/distillation_loss", "train/teacher_kl"})
    assert here[-1]["train/distillation_loss"] > (0 if served else 0.01)  # the student begins as the base


def preferring(path):
    """The run file with the sections of direct preference optimisation."""
    settings = yaml.safe_load(path.read_text())
    (path.parent / "pairs.py").write_text(
        "def pairs(seed, size):\n"
        "    for number in range(size):\n"
        "        text = 'abcdbca'[number % 5 :][:3]\n"
        "        yield {'prompt': text, 'chosen': text[::-1], 'rejected': text}\n"
    )
    source = {"name": "python", "function": f"{path.parent / 'pairs.py'}:pairs", "size": 64, "seed": 1}
    kept = {key: settings[key] for key in ("run", "model", "actor", "runtime")}
    more = {"data": {"train": {"source": source}}, "tracking": {"trackers": ["jsonl"]}}
    path.write_text(yaml.safe_dump({"kind": "prefer", "samples_per_step": 4, "loss": {"name": "dpo"}, **kept, **more}))
    return path


def test_preferences_on_a_service_have_the_figures_of_one_process(run_file, server, key):
    steps = {"run": {"steps": 3}}
    here = figures(train(preferring(run_file("dpo-here", **steps)), command="prefer"))
    there = figures(train(preferring(run_file("dpo-there", server.url, **steps)), command="prefer"))
    compare(here, there, {"train/loss", "train/grad_norm"})
    assert here[-1]["train/loss"] < math.log(2) == pytest.approx(here[1]["train/loss"], abs=1e-4)
