"""Seconds of a step at several settings of `asynchrony`: measured, against their bound, and as predicted.

    python benchmarks/asynchronous.py [--cases balanced,ragged] [--rounds 5] [--steps 16] [key=value ...]

Each round runs all settings of a case in turn, so that a slow minute of the machine slows them alike. `inside` is the
synchronous run that generates inside the trainer, with all threads that the others have in two processes: the fairest
rival, because at staleness 0 one of two processes waits.

From the steps at staleness 0 come g, the seconds in which answers are generated, scored and weights are sent, and t,
all others. While one side works the other may, so no schedule that trains on whole batches of one version is faster
than (g + t) / max(g, t) times the synchronous one. `recompute` may be: there, batches overlap in a server.

The prediction of a round is that of `hone plan --from` the same round's run at staleness 0. A lent server
(`asynchrony.lend_trainer`) is not predicted, and may beat the bound: while the trainer waits, two servers generate.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

from hone.cli.comparison import compare
from hone.cli.recipe import load_recipe

ROOT = Path(__file__).resolve().parents[1]
RECIPE = "benchmarks/asynchronous.yaml"
WARM_UP = 4  # first steps, which are not measured
SIMULATED = 200  # steps of a prediction
INSIDE = "inside"
LEFT_OUT = 2  # last steps, in which less is generated, because nothing follows
OF_THE_ROLLOUT = ("perf/generate_s", "perf/reward_s", "perf/weight_sync_s")
WAITS = ("perf/trainer_utilisation", "perf/rollout_utilisation", "perf/publication_hidden_fraction")


@dataclass(frozen=True)
class Case:
    """A run, and the settings at which it is measured: `inside`, or staleness[:new_weights[:lend]]."""

    settings: Sequence[str]
    overrides: Sequence[str] = ()


CASES = {
    "balanced": Case((INSIDE, "0", "1", "2", "2:recompute")),
    "ragged": Case(
        (INSIDE, "0", "1", "1:finish:lend", "2", "2:recompute", "2:recompute:lend"),
        ("update.prompts_per_step=2", "update.samples_per_prompt=4", "rollout.sampling.max_response_tokens=320"),
    ),
}


@dataclass
class Found:
    """Results of the rounds for one setting."""

    step_s: list[float] = field(default_factory=list)
    age: list[float] = field(default_factory=list)
    shares: list[list[float]] = field(default_factory=list)
    predicted_s: list[float] = field(default_factory=list)
    predicted_age: list[float] = field(default_factory=list)


def train(*arguments: str) -> None:
    """Train. Ends the benchmark if it fails."""
    command = [sys.executable, "-m", "hone", "train", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}")


def keys_of(setting: str) -> list[str]:
    if setting == INSIDE:
        return ["rollout.builtin.process=inside", "runtime.threads=2"]
    staleness, new_weights, lend = [*setting.split(":"), "", ""][:3]
    keys = [f"asynchrony.staleness={staleness}", f"asynchrony.new_weights={new_weights or 'finish'}"]
    return [*keys, "asynchrony.lend_trainer=true"] if lend else keys


def measured(case: Case, setting: str, folder: Path, steps: int, more: Sequence[str]) -> list[dict[str, float]]:
    """The metrics of the measured steps of a run."""
    whole = WARM_UP + steps + LEFT_OUT
    own = [
        f"run.dir={folder}",
        f"run.steps={whole}",
        *keys_of(setting),
        "evaluation.every_steps=0",
        "evaluation.sets={}",
        f"checkpoint.every_steps={whole}",
        "tracking.trackers=[jsonl]",
        "tracking.rollouts_per_step=8",
    ]
    train(RECIPE, *own, *case.overrides, *more)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if WARM_UP < line["step"] <= WARM_UP + steps]


def predicted(case: Case, setting: str, synchronous: Path, more: Sequence[str]) -> tuple[float, float]:
    """Seconds of a step, and the mean age of its tokens, as `hone plan` predicts them from a synchronous run."""
    keys = [*keys_of(setting), *case.overrides, *more]
    printed = StringIO()
    with redirect_stdout(printed):
        grid = [f"staleness={setting.partition(':')[0]}", f"steps={SIMULATED}"]
        compare(load_recipe(ROOT / RECIPE, keys).config, [], synchronous, grid, as_json=True)
    (one,) = json.loads(printed.getvalue())
    print(
        f"{setting}: costs {one['setting']['costs']}, {one['setting']['prompt_tokens']} tokens of a prompt", flush=True
    )
    return 1 / one["outcome"]["steps_per_s"], one["outcome"]["staleness"]


def measure(name: str, rounds: int, steps: int, more: Sequence[str]) -> None:
    """Measure a case and print its table."""
    case = CASES[name]
    found = {setting: Found() for setting in case.settings}
    rollout_s: list[float] = []
    for number in range(rounds):
        with TemporaryDirectory(prefix="hone-asynchronous-") as folder:
            for setting, one in found.items():
                lines = measured(case, setting, Path(folder) / setting.replace(":", "-"), steps, more)
                one.step_s.append(fmean(line["perf/step_s"] for line in lines))
                one.age.append(fmean(line.get("schedule/staleness", 0.0) for line in lines))
                one.shares.append([fmean(line.get(share, 0.0) for line in lines) for share in WAITS])
                if setting != INSIDE and not setting.endswith(":lend"):
                    seconds, age = predicted(case, setting, Path(folder) / "0", more)
                    one.predicted_s.append(seconds)
                    one.predicted_age.append(age)
                if setting == "0":
                    rollout_s.append(fmean(sum(line.get(part, 0.0) for part in OF_THE_ROLLOUT) for line in lines))
        together = ", ".join(f"{setting}: {one.step_s[-1]:.3f}" for setting, one in found.items())
        print(f"\n{name}, round {number + 1}: {together}", flush=True)
        report(name, found, rollout_s)


def report(name: str, found: dict[str, Found], rollout_s: Sequence[float]) -> None:
    """Print the table of a case: medians over the rounds."""
    first = found["0"].step_s
    whole, generating = median(first), median(rollout_s)
    bound = whole / max(generating, whole - generating)
    print(f"{name}: g = {generating:.3f} s, t = {whole - generating:.3f} s, at most {bound:.2f} times as fast")
    print("| setting | s / step | times as fast | of the bound | predicted s / step | off by | age | predicted age |")
    print("|---|---|---|---|---|---|---|---|")
    for setting, one in found.items():
        faster = median(zero / step for zero, step in zip(first, one.step_s, strict=True))
        figures = [f"{median(one.step_s):.3f}", f"{faster:.2f}", f"{faster / bound:.0%}"]
        if one.predicted_s:
            off = median(ours / step - 1 for ours, step in zip(one.predicted_s, one.step_s, strict=True))
            figures += [f"{median(one.predicted_s):.3f}", f"{off:+.0%}"]
        else:
            figures += ["", ""]
        ages = [f"{median(one.age):.2f}", f"{median(one.predicted_age):.2f}" if one.predicted_age else ""]
        print(f"| {' | '.join([setting, *figures, *ages])} |")
    for setting, one in found.items():
        trainer, servers, hidden = (median(share) for share in zip(*one.shares, strict=True))
        print(
            f"{setting}: trainer busy {trainer:.0%}, server busy {servers:.0%}, publication hidden {hidden:.0%}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    arguments, overrides = parser.parse_known_args()
    for name in arguments.cases.split(","):
        measure(name, arguments.rounds, arguments.steps, overrides)


if __name__ == "__main__":
    main()
