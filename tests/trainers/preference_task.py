"""Runs on preferences that are small enough for a test: which of two words is sorted, 13 k parameters."""

from __future__ import annotations

from pathlib import Path

import torch
import yaml

from hone.config import load
from hone.data.packing import Sample
from hone.trainers.run.launch import run_preference, run_reward_model
from hone.trainers.supervised.settings import PreferenceRunConfig, RewardModelRunConfig
from tests.trainers.tiny import BASE

TASK = '''
import random
def pairs(seed, size):
    """Two to four letters: in order, and in another order; the last column is how much that matters."""
    rng = random.Random(seed)
    for _ in range(size):
        letters = rng.sample("abcd", k=rng.randint(2, 4))
        worse = sorted(letters)
        while worse == sorted(letters):
            rng.shuffle(worse)
        yield {"prompt": "".join(letters), "chosen": "".join(sorted(letters)), "rejected": "".join(worse),
               "margin": len(letters) / 4}

def answers(seed, size):
    rng = random.Random(seed)
    for row in pairs(seed, size):
        good = rng.random() < 0.5
        yield {"prompt": row["prompt"], "completion": row["chosen" if good else "rejected"], "label": good}

def lopsided(seed, size):
    """Long prompts with short answers, and short prompts with long ones."""
    rng = random.Random(seed)
    for _ in range(size):
        long, short = "".join(rng.choices("abcd", k=8)), rng.choice("abcd")
        prompt, answer = (long, short) if rng.random() < 0.5 else (short, long)
        yield {"prompt": prompt, "completion": answer, "label": rng.random() < 0.5}

def steps(seed, size):
    """Pairs of letters: right if they are in the order of the alphabet."""
    rng = random.Random(seed)
    for _ in range(size):
        taken = [rng.sample("abcd", k=2) for _ in range(rng.randint(1, 3))]
        yield {"prompt": "ab", "completions": ["".join(one) for one in taken], "labels": [a < b for a, b in taken]}
'''


def source(folder: Path, rows: str, size: int, seed: int) -> dict:
    task = folder / "preferences.py"
    task.write_text(TASK, encoding="utf-8")
    return {"source": {"name": "python", "function": f"{task}:{rows}", "size": size, "seed": seed}}


def settings_of(folder: Path, kind: str, loss: str | dict, **changes: object) -> dict:
    """A run file's content; `changes` replace top-level sections."""
    name = loss if isinstance(loss, str) else loss["name"]
    rows = {"kto": "answers", "process": "steps"}.get(name, "pairs")
    return {
        "kind": kind,
        "run": {"dir": str(folder / "run"), "steps": 8, "seed": 3},
        "model": BASE["model"],
        "data": {"train": source(folder, rows, 48, 1)},
        "samples_per_step": 8,
        "loss": loss,
        "actor": {
            "compute_dtype": "float32",
            "max_tokens_per_microbatch": 40,  # several micro-batches in a step
            "optimizer": {"name": "AdamW", "lr": 5e-3, "weight_decay": 0.01},
            "schedule": {"name": "constant", "warmup_steps": 2},
        },
        "evaluation": {"sets": {"held_out": source(folder, rows, 20, 2)}, "every_steps": 4},
        "checkpoint": {"every_steps": 2},
        "tracking": {"trackers": ["jsonl"]},
        "runtime": {"threads": 1},
        **changes,
    }


def written(folder: Path, kind: str, loss: str | dict, **changes: object) -> Path:
    """The run file, written into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings_of(folder, kind, loss, **changes)), encoding="utf-8")
    return path


def prefer(path: Path, *overrides: str) -> Path:
    return run_preference(load(PreferenceRunConfig, path, list(overrides)))


def train_reward_model(path: Path, *overrides: str) -> Path:
    return run_reward_model(load(RewardModelRunConfig, path, list(overrides)))


def answer_logprob(model: torch.nn.Module, sample: Sample) -> float:
    """Summed log-prob of the learnt tokens of one sequence, by a plain forward."""
    ids = torch.tensor([sample.token_ids])
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0, :-1].double(), dim=-1)
    taken = logprobs.gather(1, ids[0, 1:, None])[:, 0]
    return float(taken[torch.tensor(sample.loss_mask[1:]).bool()].sum())
