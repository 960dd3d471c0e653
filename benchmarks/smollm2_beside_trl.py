"""Learning of hone and of TRL's GRPOTrainer on the task of recipes/smollm2: held-out curves by step and by time.

    THREADS=1 python benchmarks/smollm2_beside_trl.py --seeds 0 1 2 --steps 12

For each seed both train in turn from the same model, on the same prompts in the same order (that of the file), with the
same batch, loss and constant learning rate, in float32. Both answer the held-out prompts greedily every `--every`
steps; the seconds of training do not contain these answers. Needs TRL's environment, which benchmarks/run.py makes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

from run import RESULTS, ROOT, environment, peer_python

RECIPE = ROOT / "recipes" / "smollm2" / "grpo.yaml"
PEER = ROOT / "benchmarks" / "smollm2_trl.py"
Curve = list[dict[str, float]]  # of one run: step, solved, training_s, peak_gb


def hone_curve(given: argparse.Namespace, seed: int) -> Curve:
    """Train with hone; the curve comes from its metrics."""
    folder = RESULTS / f"smollm2-hone-{seed}"
    shutil.rmtree(folder, ignore_errors=True)
    keys = {
        "run.dir": folder,
        "run.seed": seed,
        "run.steps": given.steps,
        "data.shuffle": "false",
        "update.prompts_per_step": given.prompts,
        "actor.optimizer.lr": given.lr,
        "actor.schedule": "constant",
        "actor.compute_dtype": "float32",
        "evaluation.every_steps": given.every,
        "checkpoint.every_steps": given.steps,
        "checkpoint.keep_best": "false",
        "runtime.threads": environment()["OMP_NUM_THREADS"],
    }
    command = [sys.executable, "-m", "hone", "train", str(RECIPE), *(f"{key}={value}" for key, value in keys.items())]
    subprocess.run(command, check=True, cwd=ROOT, env=environment())
    found: Curve = []
    seconds = 0.0
    for line in map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()):
        seconds += line.get("perf/step_s", 0.0) - line.get("perf/save_checkpoint_s", 0.0)
        if "eval/held_out/solved" in line:
            found.append({"step": line["step"], "solved": line["eval/held_out/solved"], "training_s": seconds})
    peaks = json.loads((folder / "peaks.json").read_text(encoding="utf-8"))["roles"]
    return [{**point, "peak_gb": max(peaks.values()) / 1e9} for point in found]


def trl_curve(given: argparse.Namespace, seed: int) -> Curve:
    """Train with TRL, in its own environment, from the folder that hone has made of the model."""
    options = {"steps": given.steps, "prompts": given.prompts, "lr": given.lr, "every": given.every, "seed": seed}
    model = RESULTS / f"smollm2-hone-{seed}" / "model"
    command = [peer_python(), str(PEER), str(model), *(f"--{name}={value}" for name, value in options.items())]
    done = subprocess.run(command, check=True, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, text=True)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"step"')]


def mean_and_deviation(values: list[float]) -> str:
    deviation = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{deviation}"


def at_time(curve: Curve, seconds: float) -> float:
    """Share that the last answers by then had solved."""
    return [point["solved"] for point in curve if point["training_s"] <= seconds][-1]


def report(curves: dict[str, list[Curve]]) -> None:
    """Tables by step and by time: means over the seeds with their standard deviations. The largest memory of a side."""
    print(f"\n{'step':>8}  " + "  ".join(f"{name + ' solved':>16} {'training s':>10}" for name in curves))
    for row in range(len(next(iter(curves.values()))[0])):
        cells = [f"{next(iter(curves.values()))[0][row]['step']:8.0f}"]
        for runs in curves.values():
            solved = mean_and_deviation([run[row]["solved"] for run in runs])
            cells.append(f"{solved:>16} {statistics.mean(run[row]['training_s'] for run in runs):10.1f}")
        print("  ".join(cells))
    print(f"\n{'seconds':>8}  " + "  ".join(f"{name + ' solved':>16}" for name in curves))
    longest = max(run[-1]["training_s"] for runs in curves.values() for run in runs)
    for tick in range(9):
        seconds = longest * tick / 8
        cells = [mean_and_deviation([at_time(run, seconds) for run in runs]) for runs in curves.values()]
        print(f"{seconds:8.0f}  " + "  ".join(f"{cell:>16}" for cell in cells))
    for name, runs in curves.items():
        print(f"{name}: at most {max(run[-1]['peak_gb'] for run in runs):.1f} GB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=4, help="prompts of a step, with 8 answers each")
    parser.add_argument("--lr", type=float, default=6e-5)
    parser.add_argument("--every", type=int, default=2, help="steps between evaluations")
    given = parser.parse_args()
    RESULTS.mkdir(exist_ok=True)
    curves: dict[str, list[Curve]] = defaultdict(list)
    for seed in given.seeds:
        for name, train in (("hone", hone_curve), ("TRL", trl_curve)):
            curves[name].append(train(given, seed))
            print(json.dumps({"side": name, "seed": seed, "curve": curves[name][-1]}), flush=True)
    Path(RESULTS / "smollm2_beside_trl.json").write_text(json.dumps(curves), encoding="utf-8")
    report(curves)


if __name__ == "__main__":
    main()
