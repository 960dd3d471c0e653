"""Predictions of `hone plan` held against small runs on this machine: memory by phase, seconds by phase.

    python -m benchmarks.predictions [--runs sft grpo ...] [--facts FILE] [--json]

Each run trains a few steps in a process of its own, with one thread, and writes its prediction at launch as every run
does. Seconds are the processor's (of the trainer's process), so that other programs on the machine do not count; for
the runs with more processes (`ray`, `server`) they are of the clock, and only a quiet machine gives them. With
`--facts`, the predictions use a file that `hone plan --calibrate` wrote.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from hone.tracking.report.columns import MetricsFile
from hone.tracking.report.prediction import Prediction, Row, read_prediction
from hone.tracking.trackers.jsonl import METRICS_FILE

LIMIT_S = 900
STEPS = 6
SIZES = {"hidden_size": 384, "layers": 4, "heads": 6, "mlp_size": 1152, "max_positions": 256}
TASK = """
import random
LETTERS = "abcdefghijklmnopqrstuvwxyz"
def rows(seed, size):
    rng = random.Random(seed)
    for _ in range(size):
        text = "".join(rng.choices(LETTERS, k=24))
        yield {"prompt": text, "ground_truth": text[::-1], "completion": text[::-1] * 3,
               "chosen": text[::-1] * 2, "rejected": text * 2}

def share(response, ground_truth, row):
    return sum(a == b for a, b in zip(response, ground_truth)) / len(ground_truth)
"""
RL = {
    "kind": "rl",
    "reward": {"workers": 1},
    "update": {"prompts_per_step": 8, "samples_per_prompt": 8, "minibatches": 2},
    "rollout": {"sampling": {"max_response_tokens": 40}},
}
PPO = {
    "algorithm": {"advantage": {"name": "gae"}, "kl": {"kind": "k1", "where": "in_reward", "coef": 0.05}},
    "critic": {"engine": {"compute_dtype": "float32", "max_tokens_per_microbatch": 2048}},
}
GPT2 = {"architecture": "gpt2", **SIZES}
MIXTURE = {"architecture": "qwen3_moe", **SIZES, "mlp_size": 384}
MIXTURE |= {"options": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 384}}
SFT: dict[str, Any] = {"kind": "sft", "samples_per_step": 48}
RUNS: dict[str, dict[str, Any]] = {
    "sft": SFT,
    "grpo": RL,
    "grpo-bf16": {**RL, "actor": {"compute_dtype": "bfloat16"}},
    "dpo": {"kind": "prefer", "samples_per_step": 24, "loss": {"name": "dpo"}},
    "lora": {**RL, "actor": {"lora": {"rank": 16}}},
    "ppo": {**RL, **PPO},
    "ray": {**RL, "runtime": {"threads": 1, "backend": {"name": "ray", "devices": 2}}},
    "server": {**RL, "asynchrony": {"staleness": 1}, "algorithm": {"correction": {"weights": "token", "truncate": 2}}},
    "gpt2": {**SFT, "model": {"build": GPT2}},
    "mixture": {**SFT, "model": {"build": MIXTURE}},
}
RUNS["server"]["rollout"] = {**RL["rollout"], "builtin": {"process": "separate"}}
COMMANDS = {"rl": "run_policy", "sft": "run_supervised", "prefer": "run_preference"}
SEVERAL = ("ray", "server")  # runs of more processes than the trainer's


def run_file(name: str, folder: Path) -> Path:
    """Write the run file of a run, and its task."""
    folder.mkdir(parents=True, exist_ok=True)
    task = folder / "task.py"
    task.write_text(TASK, encoding="utf-8")
    settings: dict[str, Any] = {
        "run": {"dir": str(folder / "run"), "steps": STEPS, "seed": 3},
        "model": {"build": SIZES},
        "data": {"train": {"source": {"name": "python", "function": f"{task}:rows", "size": 512, "seed": 1}}},
        "actor": {},
        "checkpoint": {"every_steps": STEPS},
        "tracking": {"trackers": ["jsonl", "memory"]},
        "runtime": {"threads": 1},
        **RUNS[name],
    }
    settings["actor"] = {"compute_dtype": "float32", "max_tokens_per_microbatch": 2048, **settings["actor"]}
    if settings["kind"] == "rl":
        settings["reward"] = {**settings["reward"], "components": {"share": {"reward": f"{task}:share"}}}
        settings["tracking"]["rollouts_per_step"] = 2
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return path


def train(name: str, path: Path) -> None:
    """Run one of `RUNS` in this process; its timings are of the processor where it has one process."""
    from hone.cli.recipe import load_recipe
    from hone.tracking.metrics import Timer
    from hone.trainers.run import launch

    if name not in SEVERAL:
        Timer.__init__.__defaults__ = (None, time.process_time)
    loaded = load_recipe(path)
    getattr(launch, COMMANDS[loaded.config.kind])(loaded)


def held(name: str, folder: Path, facts: Path | None) -> Prediction:
    """Train in a new process, and read its prediction and what happened."""
    path = run_file(name, folder)
    command = [sys.executable, "-m", "benchmarks.predictions", "--train", name, str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_worker_niceness": "0"}
    if facts is not None:
        environment["HONE_DEVICE_FACTS"] = str(facts)
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
    metrics = MetricsFile(folder / "run" / METRICS_FILE)
    while metrics.read():
        pass
    found = read_prediction(folder / "run", metrics.columns)
    assert found is not None, done.stderr
    return found


def lines(name: str, found: Prediction) -> list[str]:
    """The figures of one run, each with prediction over measurement."""
    if found.why_not:
        return [f"{name}: no prediction: {found.why_not}"]
    shown = [f"{name} ({found.source})"]
    rows: list[tuple[Row, float, str]] = [*((row, 2**20, "MiB") for row in found.memory)]
    rows += [(row, 1e-3, "ms") for row in found.seconds]
    for row, unit, label in rows:
        figures = ["-" if one is None else f"{one / unit:,.1f}" for one in (row.predicted, row.measured)]
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        shown.append(f"  {row.what:14} {figures[0]:>10} {figures[1]:>10} {label:4} {ratio:>6}")
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="*", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--facts", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", type=Path, help="folder of the runs")
    parser.add_argument("--train", nargs=2, metavar=("RUN", "FILE"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.train:
        train(asked.train[0], Path(asked.train[1]))
        return
    found: dict[str, Mapping[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="hone-predictions-") as made:
        for name in asked.runs:
            one = held(name, (asked.keep or Path(made)) / name, asked.facts)
            found[name] = asdict(one)
            if not asked.json:
                print("\n".join(lines(name, one)), flush=True)
    if asked.json:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
