"""GRPO with LoRA adapters of several ranks beside GRPO of all weights, from one warm start: how soon each has learnt.

    python benchmarks/lora_table.py                 the rows that are not finished yet; minutes on one thread
    python benchmarks/lora_table.py --row rank-8    one row, anew
    python benchmarks/lora_table.py --write         also put the table into docs/lora.md

Every row is recipes/lora/reverse.yaml with its own `actor.lora` and learning rate, from one exported warm start:
one thread, seed 0, exact match as the only reward, evaluated every five steps by greedy answers to 64 prompts.
Finished rows are kept in benchmarks/results/lora.jsonl; a row whose settings have changed is run again.
"""

from __future__ import annotations

import argparse
import json
import resource
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from hone.cli.recipe import load_recipe
from hone.trainers.run.launch import run_policy

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes" / "lora" / "reverse.yaml"
RESULTS = ROOT / "benchmarks" / "results" / "lora.jsonl"
PAGE = ROOT / "docs" / "lora.md"
BEGIN, END = "<!-- lora table: begin -->", "<!-- lora table: end -->"
TARGET = 0.99
EXACT_MATCH = "eval/held_out/exact_match"
EVERY_ROW = {
    "evaluation.every_steps": 5,
    "tracking.trackers": ["jsonl"],
    "tracking.rollouts_per_step": 0,
    "checkpoint.every_steps": 100_000,
}


@dataclass(frozen=True)
class Row:
    """One way to train; `settings` by dotted key."""

    name: str
    lr: float
    lora: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def overrides(self) -> dict[str, Any]:
        return {**EVERY_ROW, "actor.lora": self.lora, "actor.optimizer.lr": self.lr, **self.settings}


ROWS = [
    Row("all weights", 1e-3),
    Row("rank 1", 4e-3, {"rank": 1, "alpha": 2}),
    Row("rank 4", 4e-3, {"rank": 4, "alpha": 8}),
    Row("rank 8", 4e-3, {"rank": 8, "alpha": 16}),
    Row("rank 32", 4e-3, {"rank": 32, "alpha": 64}),
    Row("rank 8, DoRA", 4e-3, {"rank": 8, "alpha": 16, "dora": True}),
    Row("rank 8, merged weights sent", 4e-3, {"rank": 8, "alpha": 16, "sync": "merged"}),
]


@dataclass(frozen=True)
class Result:
    """Result of one row. `sync_bytes` is the size of one weight sync in the middle of the run."""

    name: str
    overrides: dict[str, Any]
    before: float
    steps: int | None  # to the target; None: not within the run
    cpu_seconds: float  # of the whole run; unlike the clock's, these do not depend on what else the machine does
    exact_match: float  # at the end
    sync_bytes: int


def warm_start(folder: Path) -> Path:
    """The exported model that every row begins with."""
    few = {**EVERY_ROW, "run.dir": str(folder), "run.steps": 1, "actor.lora": None}
    run_policy(load_recipe(RECIPE, assignments(few)))
    return folder / "warm_start" / "export"


def learn(row: Row, start: Path, folder: Path) -> Result:
    """Run the row from `start` to its last step."""
    begin = {"warm_start": None, "model.build": None, "model.path": str(start)}
    given = {**row.overrides(), **begin, "run.dir": str(folder)}
    before = cpu_seconds()
    run_policy(load_recipe(RECIPE, assignments(given)))
    return summary(row, folder / "metrics.jsonl", cpu_seconds() - before)


def summary(row: Row, metrics: Path, seconds: float) -> Result:
    """When the row first reached the target, and what it had at its end."""
    steps = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    evaluated = {int(step["step"]): step[EXACT_MATCH] for step in steps if EXACT_MATCH in step}
    reached = next((at for at, value in evaluated.items() if value >= TARGET), None)
    sent = next(int(step["weights/bytes"]) for step in steps[1:] if "weights/bytes" in step)
    last = evaluated[max(evaluated)]
    return Result(row.name, row.overrides(), evaluated[0], reached, round(seconds, 1), round(last, 4), sent)


def assignments(settings: Mapping[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def cpu_seconds() -> float:
    """Return the processor time of this process, and of those that it has started and seen end."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def finished() -> dict[str, Result]:
    """The results on disk that are of today's settings; the last of each row counts."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.is_file() else []
    kept = {result.name: result for result in (Result(**json.loads(line)) for line in lines)}
    wanted = {row.name: json.loads(json.dumps(row.overrides())) for row in ROWS}
    return {
        name: kept[name] for name, overrides in wanted.items() if name in kept and kept[name].overrides == overrides
    }


def table(results: Mapping[str, Result]) -> str:
    """Markdown, one line per finished row, in the order of `ROWS`."""
    lines = [
        "| trained | learning rate | bytes sent each step | before RL | steps to 99 % | at the end | CPU seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        if row.name in results:
            found = results[row.name]
            steps = str(found.steps) if found.steps is not None else "not reached"
            figures = (f"{found.sync_bytes:,}", f"{found.before:.3f}", steps, f"{found.exact_match:.3f}")
            lines.append(f"| {row.name} | {row.lr:g} | {' | '.join(figures)} | {found.cpu_seconds:.0f} |")
    missing = [row.name for row in ROWS if row.name not in results]
    return "\n".join([*lines, *(["", f"Not measured yet: {', '.join(missing)}."] if missing else [])])


def write_page(text: str) -> None:
    """Replace what stands between the markers of docs/lora.md."""
    before, begin, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{PAGE} should have the lines {BEGIN} and {END}")
    PAGE.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", action="append", default=[], help="run this row, even if it is finished")
    parser.add_argument("--table", action="store_true", help="run nothing: the table of the rows that are finished")
    parser.add_argument("--write", action="store_true", help="put the table into docs/lora.md at the end")
    given = parser.parse_args()
    if strange := set(given.row) - {row.name for row in ROWS}:
        raise SystemExit(f"no row {sorted(strange)[0]!r} (there is: {', '.join(row.name for row in ROWS)})")
    wanted = [row for row in ROWS if row.name in given.row or (not given.row and row.name not in finished())]
    RESULTS.parent.mkdir(exist_ok=True)
    if wanted and not given.table:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory(prefix="lora-table-") as folder:
            start = warm_start(Path(folder) / "warm")
            for number, row in enumerate(wanted):
                result = learn(row, start, Path(folder) / f"row-{number}")
                with RESULTS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
                print(f"{row.name:30} {result.before} -> {result.steps}, {result.cpu_seconds} s", flush=True)
    text = table(finished())
    print(text)
    if given.write:
        write_page(text)


if __name__ == "__main__":
    main()
