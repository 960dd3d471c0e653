"""Whole runs of models that see images: SFT and GRPO on pictures and text, continued, evaluated, exported, refused."""

import json

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from hone.cli.main import main
from hone.config import ConfigError, load
from hone.data.packing import Sample, pack_samples
from hone.models.errors import ModelError
from hone.models.settings import ModelConfig
from hone.models.vision.image_processor import load_image_processor
from hone.tracking.trackers.jsonl import rollout_lines
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.launch import run_policy, run_supervised
from hone.trainers.supervised.reference import sequence_keys
from hone.trainers.supervised.settings import SupervisedRunConfig
from tests.data.test_images import png
from tests.trainers.tiny import metrics

MODEL = {
    "build": {
        "architecture": "qwen2_5_vl", "hidden_size": 32, "layers": 1, "heads": 2, "mlp_size": 64, "max_positions": 64,
        "characters": " abcdefghijklmnopqrstuvwxyz?0123456789",
        "vision": {"hidden_size": 16, "layers": 1, "heads": 2, "mlp_size": 24, "temporal_patch_size": 1},
    }
}  # fmt: skip
SHAPES = {"name": "shapes", "size": 64, "seed": 1, "text_share": 0.4}
COMMON = {"model": MODEL, "tracking": {"trackers": ["jsonl"]}, "runtime": {"threads": 1}}
ENGINE = {"compute_dtype": "float32", "max_tokens_per_microbatch": 100, "optimizer": {"lr": 3e-3}}


def sft(folder, **changes):
    settings = {
        "kind": "sft",
        "run": {"dir": str(folder / "run"), "steps": 4, "seed": 3},
        "data": {"train": {"source": SHAPES}},
        "samples_per_step": 8,
        "actor": ENGINE,
        "evaluation": {"sets": {"held_out": {"source": {**SHAPES, "seed": 2, "size": 8}}}},
        "checkpoint": {"every_steps": 2},
        **COMMON,
    }
    return written(folder, {**settings, **changes})


def rl(folder, **changes):
    settings = {
        "kind": "rl",
        "run": {"dir": str(folder / "run"), "steps": 4, "seed": 3},
        "data": {"train": {"source": SHAPES}},
        "update": {"prompts_per_step": 4, "samples_per_prompt": 4},
        "rollout": {"sampling": {"max_response_tokens": 3}},
        "reward": {"components": {"short": {"reward": f"{folder}/task.py:early"}}, "workers": 1},
        "actor": ENGINE,
        "weights": {"verify": "probe"},
        "evaluation": {"sets": {"held_out": {"source": {**SHAPES, "seed": 2, "size": 6}}}},
        "checkpoint": {"every_steps": 2},
        **COMMON,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "task.py").write_text(
        "def early(response, ground_truth, row):\n"
        "    content = row['messages'][0]['content']\n"  # text alone is no list
        "    assert content if isinstance(content, str) else content[-1]['text']\n"
        "    return sum(letter < 'n' for letter in response) / 3\n"
    )
    return written(folder, {**settings, **changes})


def written(folder, settings):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def weights(folder):
    return load_file(folder / "run/export/model.safetensors")


def test_fine_tuning_on_pictures_and_text_exports_a_whole_model(tmp_path):
    run_supervised(load(SupervisedRunConfig, sft(tmp_path), []))
    steps = metrics(tmp_path / "run")
    assert steps[-1]["eval/held_out/loss"] < steps[0]["eval/held_out/loss"]
    export = tmp_path / "run/export"
    model = AutoModelForImageTextToText.from_pretrained(export)
    assert model.model.visual.config.patch_size == 8
    assert Qwen2VLImageProcessorPil.from_pretrained(export).patch_size == 8
    own, built = (load_image_processor(ModelConfig(**one)) for one in ({"path": str(export)}, MODEL))
    np.testing.assert_array_equal(own.image(png(48, 48)).patches(), built.image(png(48, 48)).patches())
    before = load_file(tmp_path / "run/model/model.safetensors")
    after = weights(tmp_path)
    assert after.keys() == before.keys()
    assert any("visual" in name and not torch.equal(after[name], before[name]) for name in after)


@pytest.mark.slow
def test_a_run_that_stopped_goes_on_to_the_same_weights(tmp_path):
    run_supervised(load(SupervisedRunConfig, sft(tmp_path / "whole"), []))
    path = sft(tmp_path / "cut")
    run_supervised(load(SupervisedRunConfig, path, ["run.steps=2"]))
    run_supervised(load(SupervisedRunConfig, path, []))
    whole, cut = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


def test_grpo_on_pictures_and_text_agrees_with_its_rollouts_and_learns(tmp_path):
    path = rl(tmp_path, run={"dir": str(tmp_path / "run"), "steps": 12, "seed": 3})
    run_policy(load(PolicyRunConfig, path, []))
    steps = metrics(tmp_path / "run")
    trained = [one for one in steps if "reward/mean" in one]
    assert len(trained) == 12
    assert all(one["rollout/status/ok"] + one["rollout/status/truncated"] == 16 for one in trained)
    assert max(one["correction/max_abs_difference"] for one in trained) < 1e-4
    assert max(one["correction/probe_max_abs_difference"] for one in trained) < 1e-4
    assert sum(one["reward/mean"] for one in trained[-4:]) > sum(one["reward/mean"] for one in trained[:4])
    lines = [json.loads(line) for line in rollout_lines(tmp_path / "run" / "rollouts.jsonl.gz")]
    shown = [one for one in lines if "<|vision_start|>" in one["prompt"]]
    assert shown
    assert len(shown) < len(lines)
    assert main(["eval", str(path), "--output", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    assert figures["eval/held_out/short"] == pytest.approx(steps[-1]["eval/held_out/short"])


@pytest.mark.slow
def test_an_agent_shows_the_policy_images_and_its_log_probs_are_the_trainers(tmp_path):
    program = (
        "from openai import AsyncOpenAI, DefaultAsyncHttpxClient\n"
        "async def look(base_url, api_key, prompt):\n"
        "    http = DefaultAsyncHttpxClient(verify=False, trust_env=False)\n"
        "    async with AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http) as client:\n"
        "        await client.chat.completions.create(model='policy', messages=list(prompt.messages))\n"
    )
    (tmp_path / "agent.py").write_text(program)
    path = rl(
        tmp_path,
        run={"dir": str(tmp_path / "run"), "steps": 2, "seed": 3},
        episode={"env": {"name": "agent", "program": f"{tmp_path}/agent.py:look"}},
        evaluation={},
        checkpoint={},
    )
    run_policy(load(PolicyRunConfig, path, []))
    trained = [one for one in metrics(tmp_path / "run") if "reward/mean" in one]
    assert [one["rollout/status/ok"] + one["rollout/status/truncated"] for one in trained] == [16, 16]
    assert max(one["correction/max_abs_difference"] for one in trained) < 1e-4
    lines = [json.loads(line) for line in rollout_lines(tmp_path / "run" / "rollouts.jsonl.gz")]
    assert any("<|vision_start|>" in one["prompt"] for one in lines)


@pytest.mark.slow
def test_the_tower_can_be_left_as_it_is(tmp_path):
    run_supervised(
        load(SupervisedRunConfig, sft(tmp_path, model={**MODEL, "use": {"vision": {"freeze_tower": True}}}), [])
    )
    before, after = load_file(tmp_path / "run/model/model.safetensors"), weights(tmp_path)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed
    assert not any("visual" in name for name in changed)


@pytest.mark.slow
def test_pictures_of_files_are_answered_on_the_command_line(tmp_path, capsys):
    run_supervised(load(SupervisedRunConfig, sft(tmp_path, run={"dir": str(tmp_path / "run"), "steps": 1}), []))
    (tmp_path / "a.png").write_bytes(png(48, 48))
    rows = [{"prompt": "which colour?", "images": ["a.png"]}, {"prompt": "repeat abc"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ["generate", str(tmp_path / "run/export"), "--input", str(tmp_path / "rows.jsonl")]
    asked += ["--compute-dtype", "float32", "--max-response-tokens", "4", "--output", str(tmp_path / "out.jsonl")]
    assert main(asked) == 0
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(one["sample"], isinstance(one["response"], str)) for one in found] == [(0, True), (0, True)]
    (tmp_path / "a.png").unlink()
    assert main(asked) == 2
    assert "there is no such file" in capsys.readouterr().err


def test_what_does_not_fit_a_model_that_sees_is_refused_at_start(tmp_path):
    served = {"builtin": {"process": "separate"}, "sampling": {"max_response_tokens": 4}}
    with pytest.raises(ConfigError, match="servers are sent text only, and qwen2_5_vl sees images"):
        run_policy(load(PolicyRunConfig, rl(tmp_path / "a", rollout=served), []))
    text = {"build": {"hidden_size": 32, "layers": 1, "heads": 2, "mlp_size": 64}}
    message = r"shapes \(seed 1\) row 0: the messages contain an image, .* takes text only"
    with pytest.raises(ConfigError, match=message):
        run_supervised(load(SupervisedRunConfig, sft(tmp_path / "b", model=text), []))
    for number, (model, says) in enumerate(
        (
            ({**text, "use": {"vision": {"freeze_tower": True}}}, "model.use.vision is set, but the model takes no"),
            ({"build": {"architecture": "qwen3_vl"}}, "takes images: set model.build.vision"),
            ({"build": {**text["build"], "vision": {}}}, "hone cannot build a vision tower for architecture 'qwen3'"),
            ({"build": {**MODEL["build"], "vision": {"options": {"windw_size": 8}}}}, "windw_size.*did you mean"),
            ({**MODEL, "use": {"vision": {"min_pixels": 512, "max_pixels": 256}}}, "min_pixels=512 should be at most"),
        )
    ):
        with pytest.raises((ConfigError, ModelError), match=says):
            run_supervised(load(SupervisedRunConfig, sft(tmp_path / f"c{number}", model=model), []))


def test_reference_log_probs_are_kept_by_image_too():
    """Equal tokens over another picture are another answer to a reference that sees."""
    first, other = (load_image_processor(ModelConfig(**MODEL)).image(png(16, 16, seed)) for seed in (1, 2))
    ids = (1, 8, *[first.token_id] * first.tokens, 10, 30)
    samples = [Sample(ids, (0,) * (len(ids) - 1) + (1,), "s", (image,)) for image in (first, other, first)]
    keys = sequence_keys(pack_samples(samples))
    assert keys[0] == keys[2] != keys[1]
    assert keys[0] == sequence_keys(pack_samples(samples[:1]))[0]
