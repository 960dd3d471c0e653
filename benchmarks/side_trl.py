"""TRL's side: its own GRPOTrainer and SFTTrainer, stepping when asked.

Settings are those that were fastest here on a CPU (docs/benchmarks.md says what was tried).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from reward import score
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer
from wire import Ended, Gate

MATERIAL = {
    "grpo_step": ("model-uniform", "prompts"),
    "grpo_step_ragged": ("model-ragged", "prompts"),
    "grpo_step_pretrained": ("model-pretrained", "prompts-pretrained"),
}  # case -> model folder, data
SFT_SAMPLES = 64
FOREVER = 1_000_000  # steps: the driver says when it is enough


def give_back() -> None:
    """Return the memory of a GPU that torch keeps for later, because the other side computes on the same GPU now."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


class StepGate(TrainerCallback):
    """Stops the trainer's loop between two steps."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.tokens = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.gate.wait(threads=torch.get_num_threads())

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        tokens, self.tokens = self.tokens, 0
        self.gate.wait(give_back, tokens=tokens)


def shared_settings(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    dtype = "bfloat16" if args.precision == "bf16_weights" else "float32"
    return {
        "output_dir": folder,
        "max_steps": FOREVER,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": 1.0,
        "bf16": args.precision == "bf16",
        "model_init_kwargs": {"dtype": dtype, "attn_implementation": "sdpa"},
        "gradient_checkpointing": False,
        "use_cpu": not torch.accelerator.is_available(),
        "report_to": "none",
        "logging_strategy": "no",
        "save_strategy": "no",
        "disable_tqdm": True,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
    }


def grpo(args: argparse.Namespace, folder: str, gate: StepGate) -> GRPOTrainer:
    model, data = MATERIAL[args.case]
    tokenizer = AutoTokenizer.from_pretrained(args.material / model)

    def reward(completions: list[Any], completion_ids: list[list[int]], **rest: Any) -> list[float]:
        gate.tokens += sum(map(len, completion_ids))
        return [score(said if isinstance(said, str) else said[0]["content"]) for said in completions]

    answers = args.prompts * args.samples
    per_device = args.batch or answers
    config = GRPOConfig(
        **shared_settings(args, folder),
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=answers // per_device,
        num_generations=args.samples,
        max_completion_length=args.max_tokens,
        num_iterations=1,
        beta=0.0,
        temperature=1.0,
        loss_type="dapo",
        shuffle_dataset=False,
        use_vllm=False,
        use_transformers_continuous_batching=args.variant == "continuous",
        cache_implementation="static" if args.variant == "static" else None,
    )
    return GRPOTrainer(
        model=str(args.material / model),
        reward_funcs=reward,
        args=config,
        train_dataset=load_dataset("json", data_files=str(args.material / f"{data}.jsonl"), split="train"),
        processing_class=tokenizer,
        callbacks=[gate],
    )


def sft(args: argparse.Namespace, folder: str, gate: StepGate) -> SFTTrainer:
    packing = args.case == "sft_packed"
    per_device = args.batch or (1 if packing else SFT_SAMPLES)
    config = SFTConfig(
        **shared_settings(args, folder),
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=1 if packing else SFT_SAMPLES // per_device,
        max_length=args.max_tokens or 1024,
        packing=packing,
        packing_strategy="wrapped" if args.variant == "wrapped" else "bfd",
        train_sampling_strategy="group_by_length" if args.variant == "grouped" else "random",
    )
    trainer = SFTTrainer(
        model=str(args.material / "model-uniform"),
        args=config,
        train_dataset=load_dataset("json", data_files=str(args.material / "samples.jsonl"), split="train"),
        processing_class=AutoTokenizer.from_pretrained(args.material / "model-uniform"),
        callbacks=[gate],
    )
    if packing:  # one step is one pass over the samples, however many packs they make
        rows = len(trainer.train_dataset)
        trainer.args.gradient_accumulation_steps = max(rows // per_device, 1)
        trainer.accelerator.gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    collate = trainer.data_collator

    def counting(examples: list[dict[str, Any]]) -> dict[str, Any]:
        gate.tokens += sum(len(example["input_ids"]) for example in examples)
        return collate(examples)

    trainer.data_collator = counting
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=[*MATERIAL, "sft", "sft_packed"])
    parser.add_argument("precision", choices=["fp32", "bf16", "bf16_weights"])
    parser.add_argument("material", type=Path)
    parser.add_argument("--max-tokens", type=int, default=0)
    parser.add_argument("--prompts", type=int, default=16, help="prompts of a GRPO step")
    parser.add_argument("--samples", type=int, default=8, help="answers to each")
    parser.add_argument("--batch", type=int, default=0, help="sequences in one forward; default: all of them")
    parser.add_argument("--variant", default="", help="a setting that was tried: see docs/benchmarks.md")
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    wire = Gate()
    gate = StepGate(wire)
    with tempfile.TemporaryDirectory() as folder:
        trainer = (grpo if args.case.startswith("grpo") else sft)(args, folder, gate)
        try:
            trainer.train()
        except Ended:
            wire.finish()


if __name__ == "__main__":
    main()
