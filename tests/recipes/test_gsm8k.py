"""recipes/gsm8k/grpo.yaml on a tiny Qwen3: real rows, template and reward; only paths, steps and sizes are others."""

import json

import pytest
from transformers import AutoModelForCausalLM

from hone.cli.main import main
from hone.tracking.trackers.jsonl import rollout_lines
from tests.trainers.tiny import metrics


def overrides(folder, *more):
    return [
        f"run.dir={folder}/run",
        f"model.path={folder}/model",
        f"data.train.path={folder}/train.jsonl",
        f"evaluation.sets.test.path={folder}/test.jsonl",
        "run.steps=2",
        "update.prompts_per_step=4",
        "update.samples_per_prompt=2",
        "rollout.sampling.max_response_tokens=12",
        "reward.workers=1",
        "runtime.threads=1",
        "tracking.trackers=[jsonl]",
        *more,
    ]


@pytest.fixture
def rollouts(gsm8k):
    assert main(["train", "recipes/gsm8k/grpo.yaml", *overrides(gsm8k)]) == 0
    lines = list(rollout_lines(gsm8k / "run" / "rollouts.jsonl.gz"))
    return gsm8k, [json.loads(line) for line in lines]


def test_the_recipe_runs_on_any_model_of_the_hugging_face_format(rollouts):
    folder, asked = rollouts
    steps = metrics(folder / "run")
    assert [step["step"] for step in steps] == [0, 1, 2]
    assert all(step["rollout/prompts_too_long"] == 0 for step in steps[1:])
    assert all(step["reward/failed"] == 0 for step in steps[1:])
    assert steps[1]["train/kl_loss"] < 1e-2  # bfloat16: the second mini-batch has moved a little
    assert {"eval/test/gsm8k", "eval/test/marked"} <= steps[0].keys() & steps[2].keys()
    assert AutoModelForCausalLM.from_pretrained(folder / "run" / "export").config.model_type == "qwen3"

    first = asked[0]
    assert first["prompt"].startswith("<|im_start|>user\n")
    assert first["prompt"].endswith(
        'Let\'s think step by step and output the final answer after "####".<|im_end|>\n'
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"  # enable_thinking: false has reached the template
    )
    assert all(one["ground_truth"].isdigit() for one in asked)  # "1,113" is compared as 1113


@pytest.mark.slow
def test_a_chat_template_may_think(gsm8k):
    change = ["data.chat.options={enable_thinking: true}", "run.steps=1"]
    assert main(["train", "recipes/gsm8k/grpo.yaml", *overrides(gsm8k, *change)]) == 0
    line = next(rollout_lines(gsm8k / "run" / "rollouts.jsonl.gz"))
    assert json.loads(line)["prompt"].endswith("<|im_start|>assistant\n")


@pytest.mark.slow
def test_problems_that_are_too_long_are_dropped_and_counted(gsm8k):
    rows = [json.loads(line) for line in (gsm8k / "train.jsonl").read_text(encoding="utf-8").splitlines()]
    rows[::2] = [{**row, "question": row["question"] * 30} for row in rows[::2]]
    (gsm8k / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    change = ["update.prompts_per_step=8", "run.steps=1"]
    assert main(["train", "recipes/gsm8k/grpo.yaml", *overrides(gsm8k, *change)]) == 0
    assert metrics(gsm8k / "run")[1]["rollout/prompts_too_long"] > 0
