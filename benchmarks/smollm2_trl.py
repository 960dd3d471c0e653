"""TRL's GRPOTrainer on the task of recipes/smollm2/grpo.yaml: prints the held-out curve, one JSON object a line.

    .venv-bench/bin/python benchmarks/smollm2_trl.py MODEL_FOLDER --steps 8 --prompts 4 --lr 6e-5

Same prompts in the same order, rewards, batch, loss and constant learning rate as the run of hone beside it
(`smollm2_beside_trl.py`).
Answers to held-out prompts are greedy; the seconds of training do not contain them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import runpy
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

TASK = Path(__file__).resolve().parents[1] / "recipes" / "smollm2" / "task.py"
task = SimpleNamespace(**runpy.run_path(str(TASK)))  # the file needs neither hone nor its environment
ANSWER_TOKENS = 28


def chats(rows: list[dict[str, Any]]) -> Dataset:
    return Dataset.from_list([{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in rows])


def reward(completions: list[list[dict[str, str]]], ground_truth: list[str], **rest: Any) -> list[float]:
    """The recipe's weighted sum."""
    texts = [said[0]["content"] for said in completions]
    return [
        0.5 * task.words(text, truth) + 0.5 * task.one_sentence(text, truth) + task.solved(text, truth)
        for text, truth in zip(texts, ground_truth, strict=True)
    ]


class HeldOut(TrainerCallback):
    """Answers the held-out prompts before training and every `every` steps."""

    def __init__(self, rows: list[dict[str, Any]], every: int) -> None:
        self.rows = rows
        self.every = every
        self.seconds = 0.0
        self.began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self.answer(0, **parts)

    def on_step_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self.began = self.began or time.perf_counter()  # the batch of the first step is generated after this call

    def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        self.seconds += time.perf_counter() - self.began
        if state.global_step % self.every == 0:
            self.answer(state.global_step, **parts)
        self.began = time.perf_counter()

    @torch.no_grad()
    def answer(self, step: int, model: Any, processing_class: Any, **rest: Any) -> None:
        model.eval()
        prompts = [
            processing_class.apply_chat_template(
                [{"role": "user", "content": row["prompt"]}], tokenize=False, add_generation_prompt=True
            )
            for row in self.rows
        ]
        batch = processing_class(
            prompts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
        )
        tokens = model.generate(**batch, do_sample=False, max_new_tokens=ANSWER_TOKENS)
        texts = processing_class.batch_decode(tokens[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        truths = [row["ground_truth"] for row in self.rows]
        figures = {
            "step": step,
            "solved": sum(map(task.solved, texts, truths)) / len(texts),
            "reward": sum(reward([[{"content": text}] for text in texts], truths)) / len(texts),
            "training_s": round(self.seconds, 1),
            "peak_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        }
        print(json.dumps(figures), flush=True)
        model.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the converted model: `model` in the folder of a run of hone")
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a step, with 8 answers each")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--every", type=int, default=4, help="steps between evaluations")
    parser.add_argument("--held-out", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            max_steps=given.steps,
            learning_rate=given.lr,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            bf16=False,
            model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
            gradient_checkpointing=False,
            use_cpu=True,
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            per_device_train_batch_size=given.prompts * 8,
            num_generations=8,
            max_completion_length=ANSWER_TOKENS,
            beta=0.0,
            temperature=1.0,
            loss_type="dapo",
            seed=given.seed,
            shuffle_dataset=False,  # the order of the file, as with data.shuffle=false
        )
        GRPOTrainer(
            model=given.model,
            reward_funcs=reward,
            args=config,
            train_dataset=chats(list(task.rows(1, 2000))),
            callbacks=[HeldOut(list(task.rows(2, given.held_out, "held_out")), given.every)],
        ).train()


if __name__ == "__main__":
    main()
