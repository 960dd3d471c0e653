"""Runs the GPU kit: stages with a time limit each, most informative first, and one line of JSON for each.

    python benchmarks/gpu_kit/stages.py --out OUT                      every stage
    python benchmarks/gpu_kit/stages.py --out OUT doctor tests         these
    python benchmarks/gpu_kit/stages.py --out OUT --shapes tiny        on a CPU, to try the kit itself

`OUT/results.jsonl` has a line for each stage as soon as it ends: its name, whether it succeeded, its seconds, its
figures, and the end of its output. The whole output is in `OUT/NAME.log`. A stage that runs over its limit is killed
with everything that it started, and the next one begins. The exit code is the number of stages that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTHON = sys.executable
TAIL_LINES = 25
WARM_UP_STEPS = 2  # of a run that is measured
H200_BF16_FLOPS = 989e12  # dense, from the vendor's data sheet

Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Stage:
    """One measurement: a command, its limit in seconds, and what its output or its run folder says."""

    name: str
    command: Sequence[str]
    limit_s: float
    figures: Callable[[str], Figures] = field(default=lambda output: {})


def hone(*arguments: str) -> list[str]:
    return [PYTHON, "-m", "hone", *arguments]


# ------------------------------------------------------------------------------------------------------- figures


def count_tests(output: str) -> Figures:
    """What pytest's last line says."""
    return {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", output)}


def exact_match(output: str) -> Figures:
    found = re.findall(r"exact match ([\d.]+)", output)
    return {"exact_match": float(found[-1])} if found else {}


def step_figures(run: Path, parameters: int, output: str) -> Figures:
    """Medians over the steps after the first two of what the run wrote down: `perf/*`, and MFU of an update."""
    path = run / "metrics.jsonl"
    steps = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    steps = [step for step in steps if step["step"] > WARM_UP_STEPS]
    names = sorted({name for step in steps for name in step if name.startswith("perf/")})
    figures = {name: statistics.median(s[name] for s in steps if name in s) for name in names}
    if "perf/tokens_per_s" in figures:
        figures["mfu"] = figures["perf/tokens_per_s"] * 6 * parameters / H200_BF16_FLOPS
    return figures


def printed_numbers(output: str) -> Figures:
    """The table of a benchmark as it was printed."""
    return {"table": [line for line in output.splitlines() if re.search(r"\d", line)][-30:]}


# -------------------------------------------------------------------------------------------------------- stages


def make_material(shape: str, folder: Path) -> int:
    """The model and data of one shape; returns the number of its parameters."""
    command = [PYTHON, str(HERE / "material.py"), shape, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    found = re.search(r"([\d,]+) parameters", done.stdout)
    if done.returncode or found is None:
        raise RuntimeError(f"no model of shape {shape}: {done.stderr[-500:]}")
    return int(found[1].replace(",", ""))


def run_of(kind: str, shape: str, material: Path, out: Path) -> Callable[[], Stage]:
    """Supervised or GRPO steps of a model of this shape; the model is made when the stage begins."""

    def make() -> Stage:
        parameters = make_material(shape, material / shape)
        run = out / f"{kind}-{shape}"
        data = material / shape / ("samples.jsonl" if kind == "sft" else "prompts.jsonl")
        keys = [f"run.dir={run}", f"model.path={material / shape / 'model'}", f"data.train.path={data}"]
        command = hone("sft" if kind == "sft" else "train", str(HERE / f"{kind}.yaml"), *keys)
        return Stage(f"{kind}-{shape}", command, 150, partial(step_figures, run, parameters))

    return make


def all_stages(out: Path, material: Path, shapes: Sequence[str]) -> dict[str, Callable[[], Stage]]:
    """Name -> what makes the stage, in the order in which they run."""
    quickstart, reverse = str(ROOT / "recipes/quickstart/grpo.yaml"), str(ROOT / "recipes/reverse/grpo.yaml")
    tests = [PYTHON, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", str(ROOT / "tests")]
    transports = [PYTHON, str(ROOT / "benchmarks/weight_sync.py"), "--transports", "ipc", "--rounds", "5"]
    stages = [
        Stage("doctor", hone("doctor", "--full", "--json"), 60),
        Stage("tests", tests, 240, count_tests),
        Stage("quickstart", hone("train", quickstart, f"run.dir={out / 'quickstart'}"), 150, exact_match),
        Stage("head", [PYTHON, str(ROOT / "benchmarks/head.py")], 60, printed_numbers),
        Stage("weight-sync", [*transports, "--device", "cuda"], 60, printed_numbers),
        Stage("reverse", hone("train", reverse, f"run.dir={out / 'reverse'}"), 120, exact_match),
    ]
    makers: dict[str, Callable[[], Stage]] = {stage.name: partial(_same, stage) for stage in stages}
    for kind, shape in [("sft", shape) for shape in shapes] + [("grpo", shape) for shape in shapes]:
        makers[f"{kind}-{shape}"] = run_of(kind, shape, material, out)
    return makers


def _same(stage: Stage) -> Stage:
    return stage


def run_stage(name: str, make: Callable[[], Stage], out: Path) -> dict[str, Any]:
    """Run one stage to its end or its limit; what its line says."""
    started, log = time.monotonic(), out / f"{name}.log"
    try:
        stage = make()
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return {"stage": name, "ok": False, "seconds": time.monotonic() - started, "error": str(error)}
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(stage.command, stdout=file, stderr=file, cwd=ROOT, start_new_session=True)
        try:
            code: int | None = process.wait(timeout=stage.limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill_session(process)
    output = log.read_text(encoding="utf-8", errors="replace")
    line: dict[str, Any] = {"stage": name, "ok": code == 0, "seconds": round(time.monotonic() - started, 1)}
    if code is None:
        line["error"] = f"stopped after {stage.limit_s:g} s"
    line["figures"] = dict(stage.figures(output))
    line["tail"] = output.splitlines()[-TAIL_LINES:]
    return line


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """End the stage and whatever it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=30)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", help="names of stages; all of them by default")
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu-kit" / "out")
    parser.add_argument("--shapes", default="0.6b,1.7b,4b", help="model shapes of the runs that are measured")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    material = Path(tempfile.mkdtemp(prefix="gpu-kit-"))
    failed = 0
    try:
        makers = all_stages(args.out.resolve(), material, args.shapes.split(","))
        unknown = set(args.stages) - set(makers)
        if unknown:
            parser.error(f"no stage {', '.join(sorted(unknown))}; there are {', '.join(makers)}")
        with (args.out / "results.jsonl").open("a", encoding="utf-8") as results:
            for name in args.stages or makers:
                line = run_stage(name, makers[name], args.out.resolve())
                failed += not line["ok"]
                print(json.dumps(line), file=results, flush=True)
                print(f"{name}: {'ok' if line['ok'] else 'FAILED'} in {line['seconds']} s {line.get('figures', '')}")
    finally:
        shutil.rmtree(material)
    return failed


if __name__ == "__main__":
    sys.exit(main())
