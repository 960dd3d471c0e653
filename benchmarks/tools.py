"""Rollout throughput with tools that wait, and without the waits: the same episodes, turns and tokens.

    python benchmarks/tools.py                                          # 200 episodes at a time, 8 turns, 0.5 s a call
    python benchmarks/tools.py --rounds 1 --steps 2 update.prompts_per_step=8 episode.max_turns=4     # a short form

The runs with and without waits take turns. Both are runs of `benchmarks/tools.yaml` with the same seed, so they sample
the same tokens. Each completion calls the tool once, because the parser `always`, which this file registers, reads a
call in any text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory

from hone.envs import PARSERS
from hone.envs.tool_calls import Call

ROOT = Path(__file__).resolve().parents[1]
RECIPE = "benchmarks/tools.yaml"
WARM_UP = 1  # first steps, which are not measured
SETTINGS = {"without": 0.0, "with": 0.5}  # seconds of a call


class Waiting:
    """A tool that waits and answers with one token."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def wait(self) -> str:
        """Wait."""
        await asyncio.sleep(self._seconds)
        return "0"


def always(text: str) -> tuple[str, tuple[Call, ...]]:
    """Read a call of `wait` in any text."""
    return text, (Call("wait", {}, text),)


def measure(seconds: float, steps: int, keys: list[str]) -> dict[str, float]:
    """Figures of one run: means over its steps after the first ones. Ends the benchmark if the run fails."""
    with TemporaryDirectory(prefix="hone-bench-") as folder:
        own = [f"run.dir={folder}/run", f"run.steps={steps + WARM_UP}", f"episode.env.options.seconds={seconds}"]
        command = [sys.executable, "-m", "hone", "train", RECIPE, *keys, *own]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "HONE_USE_EXTERNAL_MODULES": "benchmarks.tools",
        }
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3600)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}")
        lines = Path(folder, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row.get("rollout/tokens")][WARM_UP:]
    return {
        "tokens": sum(row["rollout/tokens"] for row in rows),
        "tokens_per_s": sum(row["rollout/tokens"] for row in rows) / sum(row["perf/generate_s"] for row in rows),
        "turns": fmean(row["rollout/turns"] for row in rows),
        "generate_s": fmean(row["perf/generate_s"] for row in rows),
        "step_s": fmean(row["perf/step_s"] for row in rows),
        "driver": fmean(row["perf/driver_fraction"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of a run")
    parser.add_argument("keys", nargs="*", help="key=value of the run file")
    given = parser.parse_args()
    ratios = []
    for number in range(given.rounds):
        found = {name: measure(seconds, given.steps, given.keys) for name, seconds in SETTINGS.items()}
        if found["with"]["tokens"] != found["without"]["tokens"]:
            raise SystemExit(f"the runs sampled different numbers of tokens: {found}")
        ratios.append(found["with"]["tokens_per_s"] / found["without"]["tokens_per_s"])
        for name, figures in found.items():
            print(json.dumps({"round": number, "waits": name, **{key: round(x, 4) for key, x in figures.items()}}))
        print(json.dumps({"round": number, "ratio": round(ratios[-1], 3)}), flush=True)
    print(json.dumps({"median_ratio": round(median(ratios), 3), "load": os.getloadavg()[0]}))


if __name__ == "benchmarks.tools":  # hone imports this file as a plug-in
    PARSERS.register("always", always)

if __name__ == "__main__":
    main()
