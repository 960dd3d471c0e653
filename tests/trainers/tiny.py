"""A run small enough for a test: 13 k parameters, 4 prompts x 4 answers of 3 tokens."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from hone.config import load
from hone.tracking.catalogue import describe_metric
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.launch import run_policy, run_supervised
from hone.trainers.supervised.settings import SupervisedRunConfig

TASK = '''
import random
def rows(seed, size):
    rng = random.Random(seed)
    for _ in range(size):
        text = "".join(rng.choices("abcd", k=3))
        yield {"prompt": text, "ground_truth": text[::-1]}

def share(response, ground_truth, row):
    """The share of right characters: dense enough that a tiny run has gradients from its first step."""
    return sum(a == b for a, b in zip(response, ground_truth)) / len(ground_truth)
'''

BASE = {
    "kind": "rl",
    "run": {"steps": 6, "seed": 3},
    "model": {
        "build": {"hidden_size": 32, "layers": 1, "heads": 2, "mlp_size": 64, "max_positions": 32, "characters": "abcd"}
    },
    "update": {"prompts_per_step": 4, "samples_per_prompt": 4},
    "rollout": {"sampling": {"max_response_tokens": 3}},
    "reward": {"components": {}, "workers": 1},
    "actor": {"compute_dtype": "float32", "optimizer": {"lr": 3e-3}},
    "evaluation": {"every_steps": 3},
    "checkpoint": {"every_steps": 2},
    "tracking": {"trackers": ["jsonl"], "rollouts_per_step": 2},
    "runtime": {"threads": 1},
}

PPO = {
    "algorithm": {
        "advantage": {"name": "gae", "lam": 0.9},
        "kl": {"kind": "k1", "where": "in_reward", "coef": 0.05, "adaptive": {"target": 0.1, "horizon": 100}},
        "entropy_coef": 0.01,
    },
    "critic": {"engine": {"compute_dtype": "float32", "optimizer": {"lr": 1e-3}}},
    "update": {"prompts_per_step": 4, "samples_per_prompt": 4, "minibatches": 2, "epochs": 2},
}


def recipe(folder: Path, *changes: dict) -> Path:
    """Write a run file (and its task) into `folder`; `changes` replace whole top-level sections."""
    folder.mkdir(parents=True, exist_ok=True)
    task = folder / "task.py"
    task.write_text(TASK, encoding="utf-8")
    rows = {"source": {"name": "python", "function": f"{task}:rows", "size": 64, "seed": 1}}
    held_out = {"source": {"name": "python", "function": f"{task}:rows", "size": 8, "seed": 2}}
    settings = {**BASE, "data": {"train": rows}}
    settings["run"] = {**BASE["run"], "dir": str(folder / "run")}
    settings["reward"] = {**BASE["reward"], "components": {"share": {"reward": f"{task}:share"}}}
    settings["evaluation"] = {**BASE["evaluation"], "sets": {"held_out": held_out}}
    for change in changes:
        for key, value in change.items():
            settings[key] = {**settings[key], **value} if key == "run" else value
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def reinforce(path: Path, *overrides: str) -> Path:
    """Train as a run file of `recipe` says; returns the run folder."""
    run_policy(load(PolicyRunConfig, path, list(overrides)))
    return path.parent / "run"


def fine_tune(path: Path, *overrides: str) -> Path:
    """Train as a supervised run file says; returns the run folder."""
    run_supervised(load(SupervisedRunConfig, path, list(overrides)))
    return path.parent / "run"


def metrics(run: Path) -> list[dict]:
    """metrics.jsonl without timings: what has to be the same in an equal run. Each metric is in the catalogue."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    names = {name for line in lines for name in line} - {"step"}
    assert not (missing := [name for name in sorted(names) if describe_metric(name) is None]), missing
    return [{k: v for k, v in line.items() if not k.startswith("perf/")} for line in lines]
