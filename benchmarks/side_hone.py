"""hone's side: the trainers that `hone train` and `hone sft` run, from a run file, stepping when asked."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from unsaved import save_nothing
from wire import Ended, Gate

from hone.config import load
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.policy.trainer import PolicyTrainer
from hone.trainers.run.launch import run_policy, run_supervised
from hone.trainers.run.loop import Trainer
from hone.trainers.supervised.settings import SupervisedRunConfig
from hone.trainers.supervised.trainer import SupervisedTrainer

HERE = Path(__file__).parent
MATERIAL = {
    "grpo_step": ("model-uniform", "prompts"),
    "grpo_step_ragged": ("model-ragged", "prompts"),
    "grpo_step_pretrained": ("model-pretrained", "prompts-pretrained"),
    "sft": ("model-uniform", "samples"),
}  # case -> model folder, data


def give_back() -> None:
    """Return the memory of a GPU that torch keeps for later, because the other side computes on the same GPU now."""
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()


def gated(trainer: type[Trainer], gate: Gate) -> None:
    """Stop the trainer's loop between two steps: where it would evaluate, before it writes the step's figures down."""
    evaluate = trainer.evaluate

    def wait(self: Trainer, step: int) -> Mapping[str, float]:
        gate.wait(give_back)
        return evaluate(self, step)

    trainer.evaluate = wait  # type: ignore[method-assign]


def overrides(args: argparse.Namespace, folder: Path) -> list[str]:
    """Return the driver's choices as overrides of the run file."""
    model, data = MATERIAL[args.case]
    keys = [
        f"run.dir={folder / 'run'}",
        f"model.path={args.material / model}",
        f"data.train.path={args.material / data}.jsonl",
        f"runtime.threads={os.environ['OMP_NUM_THREADS']}",
        f"actor.compute_dtype={'bfloat16' if args.precision == 'bf16' else 'float32'}",
    ]
    if args.case != "sft":
        keys.append(f"rollout.sampling.max_response_tokens={args.max_tokens}")
    return [*keys, *args.overrides]


def figures_of(run: Path) -> list[dict[str, Any]]:
    """Return the metrics that the run wrote for each step."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("case", choices=list(MATERIAL))
    parser.add_argument("precision", choices=["fp32", "bf16"])
    parser.add_argument("material", type=Path)
    parser.add_argument("--max-tokens", type=int, default=0)
    parser.add_argument("overrides", nargs="*", help="key=value, as for `hone train`")
    return parser.parse_intermixed_args(given)  # before Python 3.12.7, overrides after an option are refused otherwise


def main() -> None:
    args = arguments()
    gate = Gate()
    trainer: type[Trainer] = SupervisedTrainer if args.case == "sft" else PolicyTrainer
    gated(trainer, gate)
    save_nothing(trainer)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            if args.case == "sft":
                run_supervised(load(SupervisedRunConfig, HERE / "sft.yaml", overrides(args, folder)))
            else:
                run_policy(load(PolicyRunConfig, HERE / "grpo.yaml", overrides(args, folder)))
        except Ended:
            gate.finish(figures=figures_of(folder / "run"))


if __name__ == "__main__":
    main()
