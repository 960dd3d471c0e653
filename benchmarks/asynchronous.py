"""Steps per second at several values of `asynchrony.staleness`, against the best that any schedule could reach.

    python benchmarks/asynchronous.py [--recipe RECIPE] [--staleness 0 1 2] [--rounds 5] [--steps 12] [key=value ...]

Each round runs all values in turn, so that a slow minute of the machine slows them alike. From the steps at staleness 0
come g, the seconds in which answers are generated, scored and weights are sent, and t, all others. While one side works
the other may, so no schedule is faster than (g + t) / max(g, t) times the synchronous one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
RECIPE = "recipes/asynchronous/grpo.yaml"
WARM_UP = 3  # first steps, which are not measured
OF_THE_ROLLOUT = ("perf/generate_s", "perf/reward_s", "perf/weight_sync_s")


def steps_of(recipe: str, staleness: int, steps: int, overrides: list[str]) -> list[dict[str, float]]:
    """The metrics of the measured steps of one run."""
    with TemporaryDirectory(prefix="hone-asynchronous-") as folder:
        own = [
            f"run.dir={folder}/run",
            f"run.steps={steps}",
            f"asynchrony.staleness={staleness}",
            "evaluation.every_steps=0",
            "evaluation.sets={}",
            f"checkpoint.every_steps={steps}",
            "tracking.trackers=[jsonl]",
            "tracking.rollouts_per_step=0",
        ]
        command = [sys.executable, "-m", "hone", "train", recipe, *own, *overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines][1 + WARM_UP :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default=RECIPE)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    arguments, overrides = parser.parse_known_args()
    chosen = sorted({0, *arguments.staleness})
    step_s: dict[int, list[float]] = {staleness: [] for staleness in chosen}
    rollout_s: list[float] = []
    for number in range(arguments.rounds):
        for staleness in chosen:
            steps = steps_of(arguments.recipe, staleness, arguments.steps, overrides)
            step_s[staleness].append(median(step["perf/step_s"] for step in steps))
            if staleness == 0:
                rollout_s.append(median(sum(step.get(name, 0.0) for name in OF_THE_ROLLOUT) for step in steps))
        print(f"round {number + 1}: { ({value: round(found[-1], 3) for value, found in step_s.items()}) }", flush=True)
    whole, generating = median(step_s[0]), median(rollout_s)
    training = whole - generating
    bound = whole / max(generating, training)
    print(f"\nstaleness 0: g = {generating:.3f} s, t = {training:.3f} s, so at most {bound:.2f} times as fast")
    print("| staleness | s / step (median) | times as fast | of the bound |\n|---|---|---|---|")
    for staleness in chosen:
        faster = median(zero / one for zero, one in zip(step_s[0], step_s[staleness], strict=True))
        print(f"| {staleness} | {median(step_s[staleness]):.3f} | {faster:.2f} | {faster / bound:.0%} |")


if __name__ == "__main__":
    main()
