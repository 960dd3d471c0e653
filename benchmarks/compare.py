"""hone and TRL side by side: one step of each in turn, and the ratios of their speeds.

    round 1: hone step, TRL step, TRL step with other settings; round 2: hone step ...

Each side is a process of its own in an environment of its own, kept alive between its steps, so imports and warm-up do
not count, and whatever disturbs the machine for a while disturbs all sides. While one works the others sleep. Of each
side the best step counts (most tokens per second); processor time stands beside wall time: where the two disagree about
a ratio, something else used the machine. GB is the largest memory of the side's process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STEP_TIMEOUT_S = 900.0
UNIFORM_TOKENS, RAGGED_TOKENS, FEW_TOKENS = 64, 256, 48
WORK = ("generate", "reward", "forward", "backward")  # what a step is for; the rest of it is driver overhead


@dataclass(frozen=True)
class SidePlan:
    """Command of one side."""

    name: str
    script: str
    arguments: tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """Sides of a comparison: hone first, then its rivals with the ratio that hone should reach against each."""

    name: str
    sides: tuple[SidePlan, ...]
    targets: dict[str, float]


@dataclass
class Measured:
    """One side's steps, the warm-up left out."""

    name: str
    wall_s: list[float] = field(default_factory=list)
    process_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)
    peak_bytes: int = 0

    def per_second(self, seconds: Sequence[float]) -> float:
        """Tokens per second of the best step."""
        return max(tokens / s for tokens, s in zip(self.tokens, seconds, strict=True))

    @property
    def mean_per_second(self) -> float:
        return sum(self.tokens) / sum(self.wall_s)


class Side:
    """A process that trains a step when asked (`wire.py`)."""

    def __init__(self, plan: SidePlan, python: str, log: Path) -> None:
        self.plan = plan
        self._log = log
        with log.open("w", encoding="utf-8") as errors:
            self._process = subprocess.Popen(
                [python, str(HERE / plan.script), *plan.arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self.hear()  # ready

    def step(self) -> dict[str, Any]:
        self._say("step")
        return self.hear()

    def end(self) -> dict[str, Any]:
        """The side's last word; its process is gone when this returns."""
        self._say("end")
        last = self.hear()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
        return last

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def hear(self) -> dict[str, Any]:
        """The next answer. Raises RuntimeError if the process died or takes longer than STEP_TIMEOUT_S."""
        answers = self._process.stdout
        assert answers is not None
        deadline, line = time.monotonic() + STEP_TIMEOUT_S, b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([answers], [], [], max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise RuntimeError(f"{self.plan.name} did not answer in {STEP_TIMEOUT_S:.0f} s; its log: {self._log}")
            part = os.read(answers.fileno(), 1 << 20)
            if not part:
                raise RuntimeError(f"{self.plan.name} died; its log: {self._log}")
            line += part
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _say(self, ask: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"ask": ask}).encode() + b"\n")
        self._process.stdin.flush()


def cases(material: Path, precision: str) -> list[Case]:
    """Return the cases that are measured in one precision."""
    folder = str(material)

    def hone(case: str, *more: str) -> SidePlan:
        return SidePlan("hone", "side_hone.py", (case, precision, folder, *more))

    def trl(name: str, case: str, form: str, *more: str) -> SidePlan:
        return SidePlan(f"TRL {name}".strip(), "side_trl.py", (case, form, folder, *more))

    # fp32 has one form; in bf16 TRL runs with bf16 weights (its fastest) and with fp32 weights (what hone does)
    forms = {"": "fp32"} if precision == "fp32" else {"bf16 weights": "bf16_weights", "mixed precision": "bf16"}
    fastest = next(iter(forms.values()))
    wanted = 2.0
    uniform, ragged = ("--max-tokens", str(UNIFORM_TOKENS)), ("--max-tokens", str(RAGGED_TOKENS))
    few, small = ("--max-tokens", str(FEW_TOKENS)), ("--batch", "32")
    padded = {f"padded {name}".strip(): form for name, form in forms.items()}
    return [
        Case(
            "grpo_step",
            (hone("grpo_step", *uniform), *(trl(n, "grpo_step", f, *uniform, *small) for n, f in forms.items())),
            {f"TRL {n}".strip(): wanted for n in forms},
        ),
        Case(
            "grpo_step_ragged",
            (
                hone("grpo_step_ragged", *ragged),
                *(trl(n, "grpo_step_ragged", f, *ragged, *small) for n, f in forms.items()),
            ),
            {f"TRL {n}".strip(): 3.0 for n in forms},
        ),
        Case(
            "grpo_step_pretrained",
            (
                hone("grpo_step_pretrained", *few, "update.prompts_per_step=8", "update.samples_per_prompt=4"),
                *(
                    trl(n, "grpo_step_pretrained", f, *few, "--prompts", "8", "--samples", "4")
                    for n, f in forms.items()
                ),
            ),
            {f"TRL {n}".strip(): 2.2 if precision == "fp32" else 3.0 for n in forms},
        ),
        Case(
            "sft",
            (
                hone("sft"),
                *(trl(n, "sft", f, "--batch", "4") for n, f in padded.items()),
                trl("padded, grouped by length", "sft", fastest, "--batch", "4", "--variant", "grouped"),
                trl("packed", "sft_packed", fastest, "--max-tokens", "512"),
            ),
            {**{f"TRL {n}": 2.2 for n in padded}, "TRL packed": 1.1},
        ),
    ]


def measure(case: Case, pythons: dict[str, str], rounds: int, logs: Path) -> list[Measured]:
    """Start every side of a case, and let them step in turn: one warm-up round, then `rounds` that count."""
    sides: list[Side] = []
    try:
        for number, plan in enumerate(case.sides):
            sides.append(Side(plan, pythons[plan.script], logs / f"{case.name}-{number}.log"))
        results = [Measured(plan.name) for plan in case.sides]
        for turn in range(rounds + 1):
            for side, result in zip(sides, results, strict=True):
                answer = side.step()
                if turn > 0:
                    result.wall_s.append(answer["wall_s"])
                    result.process_s.append(answer["process_s"])
                    result.tokens.append(answer.get("tokens", 0))
        for side, result in zip(sides, results, strict=True):
            last = side.end()
            result.figures, result.peak_bytes = last.get("figures", []), last["peak_bytes"]
            if result.figures:
                result.tokens = tokens_by_step(result.figures)[1 : rounds + 1]
    finally:
        for side in sides:
            side.kill()
    return results


def tokens_by_step(figures: Sequence[dict[str, Any]]) -> list[int]:
    """Tokens that count, of each step: generated ones in RL, all in supervised training."""
    steps = [one for one in figures if one["step"] > 0]
    return [int(one.get("rollout/tokens", one.get("train/tokens", 0))) for one in steps]


def summary(case: Case, precision: str, results: Sequence[Measured]) -> list[dict[str, Any]]:
    """One row per side; the ratios are hone's speed over the side's."""
    ours = results[0]
    return [
        {
            "case": case.name,
            "precision": precision,
            "side": one.name,
            "wall_s": min(one.wall_s),
            "process_s": min(one.process_s),
            "tokens_per_s": one.per_second(one.wall_s),
            "ratio": ours.per_second(ours.wall_s) / one.per_second(one.wall_s),
            "ratio_process": ours.per_second(ours.process_s) / one.per_second(one.process_s),
            "peak_gb": one.peak_bytes / 1e9,
            "ratio_of_means": ours.mean_per_second / one.mean_per_second,
            "target": case.targets.get(one.name),
            "steps": {"wall_s": one.wall_s, "process_s": one.process_s, "tokens": one.tokens},
        }
        for one in results
    ]


def driver_overhead(results: Measured) -> dict[str, float]:
    """The share of a step that is neither generation, forward, backward nor reward: as hone says, and by our clock.

    Our clock sees the whole loop, what lies between two steps included; hone's timer only sees the step.
    """
    figures = [one for one in results.figures if one["step"] > 0][1 : len(results.wall_s) + 1]
    work = [sum(one.get(f"perf/{name}_s", 0.0) for name in WORK) for one in figures]
    outside = [1 - done / wall for done, wall in zip(work, results.wall_s, strict=True)]
    return {
        "perf/driver_fraction": min(one["perf/driver_fraction"] for one in figures),
        "by our clock": min(outside),
    }


HEAD = (
    f"{'case':17} {'precision':9} {'side':30} {'wall s':>8} {'cpu s':>8} {'tokens/s':>9} {'ratio':>6} {'by cpu':>7}"
    f" {'GB':>5} {'target':>7}"
)


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    target = row["target"]
    verdict = "" if target is None else f"{target:.1f} {'ok' if row['ratio'] >= target else 'NO'}"
    return (
        f"{row['case']:17} {row['precision']:9} {row['side']:30} {row['wall_s']:8.2f} {row['process_s']:8.2f} "
        f"{row['tokens_per_s']:9.0f} {row['ratio']:6.2f} {row['ratio_process']:7.2f} {row['peak_gb']:5.1f} {verdict:>7}"
    )


def machine() -> dict[str, Any]:
    return {
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "threads": int(os.environ["OMP_NUM_THREADS"]),
        "time": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", required=True, help="Python of the environment that has TRL")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each side, after one to warm up")
    parser.add_argument("--cases", nargs="*", default=["grpo_step", "grpo_step_ragged", "grpo_step_pretrained", "sft"])
    parser.add_argument("--precisions", nargs="*", default=["fp32", "bf16"])
    args = parser.parse_args()
    pythons = {"side_hone.py": sys.executable, "side_trl.py": args.peer_python}
    logs = args.results / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    print(HEAD, flush=True)
    for precision in args.precisions:
        for case in cases(args.results / "material", precision):
            if case.name not in args.cases:
                continue
            results = measure(case, pythons, args.rounds, logs)
            rows = summary(case, precision, results)
            overhead = driver_overhead(results[0])
            for row in rows:
                print(line(row), flush=True)
            shares = ", ".join(f"{name} {share:.2%}" for name, share in overhead.items())
            print(f"{case.name:17} {precision:9} driver overhead (target under 3 %): {shares}", flush=True)
            report = {"machine": machine(), "rows": rows, "driver_overhead": overhead, "hone": results[0].figures}
            (args.results / f"{case.name}-{precision}.json").write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
