"""Teaches the reverse task with every advantage estimator and every policy loss, and writes down how long each took.

    python benchmarks/learning_table.py                    the rows that are not finished yet; about fifteen minutes
    python benchmarks/learning_table.py --row rloo-reinforce     one row, anew
    python benchmarks/learning_table.py --list             the rows and their settings
    python benchmarks/learning_table.py --table            run nothing: the table of the rows that are finished
    python benchmarks/learning_table.py --write            also put the table into docs/algorithms.md

A row is `hone train recipes/reverse/four_letters.yaml` with a few settings: random weights, one thread, seed 0, exact
match as the only reward, evaluated every ten steps on 256 held-out prompts by greedy answers. It ends when 99 % of them
are right. Finished rows are kept in benchmarks/results/learning.jsonl; a row whose settings have changed is run again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "learning.jsonl"
PAGE = ROOT / "docs" / "algorithms.md"
BEGIN, END = "<!-- learning table: begin -->", "<!-- learning table: end -->"
TARGET = 0.99
EXACT_MATCH = "eval/held_out/exact_match"
EVERY_ROW = {
    "run.steps": 300,
    "tracking.trackers": ["jsonl"],
    "tracking.rollouts_per_step": 0,
    "checkpoint.every_steps": 100_000,
}


@dataclass(frozen=True)
class Row:
    """One estimator with one loss; `settings` are what it has beyond `EVERY_ROW`, by dotted key."""

    advantage: str
    loss: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.advantage}-{self.loss}"

    def overrides(self) -> dict[str, Any]:
        """Everything that is set on the command line but the run folder."""
        chosen = {"algorithm.advantage.name": self.advantage, "algorithm.loss.name": self.loss}
        return {**EVERY_ROW, **chosen, **self.settings}


RECIPE = "recipes/reverse/four_letters.yaml"
TWO_STEPS = {"update.minibatches": 2}  # the second mini-batch is off-policy: ratios and clips matter
CRITIC = {"critic.engine.compute_dtype": "float32", "critic.engine.optimizer.lr": 1.0e-3}

SLOWER = {"actor.optimizer.lr": 5.0e-4}  # at 1e-3 the policy settles too early
# At least one token of a mini-batch loses its loss: with the paper's bounds and so few tokens, often the rare success.
MANY_CANDIDATES = {"algorithm.loss.cov_low": 0.2, "algorithm.loss.cov_high": 1.0}

ROWS = [
    # every estimator
    Row("grpo", "ppo", TWO_STEPS),
    Row("gae", "ppo", {**TWO_STEPS, **CRITIC}),
    Row("grpo_pass_k", "ppo", {**TWO_STEPS, "update.prompts_per_step": 256, "update.samples_per_prompt": 4}),
    Row("gdpo", "ppo", {**TWO_STEPS, "algorithm.advantage.weights": {"exact_match": 1.0}}),
    Row("rloo", "reinforce"),
    Row("reinforce_pp", "ppo", TWO_STEPS),
    Row("reinforce_pp_baseline", "ppo", TWO_STEPS),
    Row("remax", "reinforce", SLOWER),
    Row("opo", "ppo", TWO_STEPS),
    Row("gpg", "gpg", SLOWER),
    Row("max_rl", "reinforce"),
    Row("optimal_token_baseline", "reinforce"),
    Row("tir_optimal_token_baseline", "ppo", TWO_STEPS),
    # every other loss
    Row("grpo", "gspo", {**TWO_STEPS, "algorithm.loss.clip_low": 0.2, "algorithm.loss.clip_high": 0.28}),
    Row("grpo", "cispo", TWO_STEPS),
    Row("grpo", "sapo", TWO_STEPS),
    Row("grpo", "dppo_tv", TWO_STEPS),
    Row("grpo", "dppo_kl", TWO_STEPS),
    Row("grpo", "gmpo", TWO_STEPS),
    Row("grpo", "clip_cov", {**TWO_STEPS, **MANY_CANDIDATES}),
    Row("grpo", "kl_cov", TWO_STEPS),
    Row("grpo", "dro", TWO_STEPS),
    Row("grpo", "top_entropy", {**TWO_STEPS, **SLOWER, "algorithm.loss.share": 0.5}),
    Row("grpo", "sft", {"algorithm.resample.scheme": "power"}),
]


@dataclass(frozen=True)
class Result:
    """Result of one row. `cpu_seconds` covers the whole run, its start included."""

    name: str
    overrides: dict[str, Any]
    steps: int | None  # None: not within the row's steps
    cpu_seconds: float  # unlike the clock's, these do not depend on what else the machine does
    exact_match: float


def row_named(name: str) -> Row:
    """The row of that name. Ends the program, naming all rows, if there is none."""
    for row in ROWS:
        if row.name == name:
            return row
    raise SystemExit(f"no row {name!r} (there is: {', '.join(row.name for row in ROWS)})")


def learn(row: Row, folder: Path, deadline_s: float = 600.0) -> Result:
    """Run the row in `folder` until it has learnt the task, or to its last step.

    Raises RuntimeError with the end of its output if the run fails or takes longer than `deadline_s`.
    """
    settings = {**row.overrides(), "run.dir": str(folder / "run")}
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    command = [sys.executable, "-m", "hone", "train", RECIPE, *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    metrics, log = folder / "run" / "metrics.jsonl", folder / "output.txt"
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
    before = cpu_seconds()
    asked = False
    end = time.monotonic() + deadline_s
    try:
        while process.poll() is None and time.monotonic() < end:
            if not asked and any(step.get(EXACT_MATCH, 0.0) >= TARGET for step in read(metrics)):
                process.send_signal(signal.SIGTERM)  # the step that is under way ends first
                asked = True
            time.sleep(0.1)
    finally:
        late = process.poll() is None
        process.kill()
        process.wait(30)
    if late or (process.returncode != 0 and not asked):
        why = f"took more than {deadline_s:g} s" if late else f"ended with {process.returncode}"
        raise RuntimeError(f"{row.name}: {why}\n{log.read_text()[-3000:]}")
    return summary(row, list(read(metrics)), cpu_seconds() - before)


def cpu_seconds() -> float:
    """Return the processor time of the processes that this one has started and seen end."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def read(metrics: Path) -> Iterator[dict[str, float]]:
    """The steps of a run so far; a line that is being written is left out."""
    if metrics.is_file():
        for line in metrics.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                yield json.loads(line)


def summary(row: Row, steps: Sequence[Mapping[str, float]], seconds: float) -> Result:
    """When the row first reached the target, or where it stood at its end."""
    evaluated = [(int(step["step"]), step[EXACT_MATCH]) for step in steps if EXACT_MATCH in step]
    reached = next((at for at, value in evaluated if value >= TARGET), None)
    last = evaluated[-1][0] if reached is None else reached
    exact_match = dict(evaluated)[last]
    return Result(row.name, row.overrides(), reached, round(seconds, 1), round(exact_match, 4))


def finished() -> dict[str, Result]:
    """The results on disk that are of today's settings; the last of each row counts."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.is_file() else []
    kept = {result.name: result for result in (Result(**json.loads(line)) for line in lines)}
    return {
        row.name: kept[row.name] for row in ROWS if row.name in kept and kept[row.name].overrides == row.overrides()
    }


def table(results: Mapping[str, Result]) -> str:
    """Markdown, one line per finished row, in the order of `ROWS`; the others are named below."""
    lines = [
        "| estimator | loss | settings that differ | steps to 99 % | CPU seconds | exact match |",
        "|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        if row.name in results:
            found = results[row.name]
            steps = str(found.steps) if found.steps else f"not within {found.overrides['run.steps']}"
            cells = (f"`{row.advantage}`", f"`{row.loss}`", differing(row), steps, f"{found.cpu_seconds:.0f}")
            lines.append(f"| {' | '.join(cells)} | {found.exact_match:.3f} |")
    missing = [f"`{row.advantage}` with `{row.loss}`" for row in ROWS if row.name not in results]
    if missing:
        lines += ["", f"Not measured yet: {', '.join(missing)}."]
    return "\n".join(lines)


def differing(row: Row) -> str:
    """The row's own settings, as short as they are unmistakable."""
    parts = []
    for key, value in row.settings.items():
        last = key.removeprefix("algorithm.").removeprefix("update.").removeprefix("actor.optimizer.")
        parts.append(f"`{last}: {json.dumps(value)}`".replace('"', ""))
    return ", ".join(parts)


def write_page(text: str) -> None:
    """Replace what stands between the markers of docs/algorithms.md."""
    page = PAGE.read_text(encoding="utf-8")
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE} should have the lines {BEGIN} and {END}")
    PAGE.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", action="append", default=[], help="run this row, even if it is finished")
    parser.add_argument("--list", action="store_true", help="print the rows and run nothing")
    parser.add_argument("--table", action="store_true", help="run nothing: the table of the rows that are finished")
    parser.add_argument("--write", action="store_true", help="put the table into docs/algorithms.md at the end")
    given = parser.parse_args()
    if given.list:
        print("\n".join(f"{row.name:40} {differing(row)}" for row in ROWS))
        return
    RESULTS.parent.mkdir(exist_ok=True)
    wanted = [row_named(name) for name in given.row] or [row for row in ROWS if row.name not in finished()]
    for row in [] if given.table else wanted:
        with tempfile.TemporaryDirectory(prefix="learning-") as folder:
            try:
                result = learn(row, Path(folder))
            except RuntimeError as error:
                print(error, flush=True)
                continue
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        print(f"{row.name:40} {result.steps or '-'}  {result.cpu_seconds} s, {result.exact_match}", flush=True)
    text = table(finished())
    print(text)
    if given.write:
        write_page(text)


if __name__ == "__main__":
    main()
