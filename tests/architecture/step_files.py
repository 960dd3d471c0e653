"""Which files of hone one GRPO step on the built-in engine enters: `python -m tests.architecture.step_files`.

A tiny run trains two steps in this process, and the second is traced in every thread. Child processes (rewards) are not
counted: with `--ray`, which has ranks under Ray and the rollout in a server, these are the files of the driver. A file
is entered if a line of one of its functions ran, and a class if a line of one of its methods did. Files come in the
order in which the step entered them first.

`--write` prints them into ARCHITECTURE.md, where `test_step_files.py` compares them with a new trace.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path, PurePosixPath
from types import CodeType, FrameType
from typing import Any

import hone
from hone.cli.recipe import load_recipe
from hone.models.numerics.products import VARIABLE
from hone.trainers.policy.trainer import PolicyTrainer
from hone.trainers.run.launch import run_policy
from tests.trainers import tiny

PACKAGE = Path(hone.__file__).parent
PAGE = PACKAGE.parent / "ARCHITECTURE.md"
BEGIN = "<!-- the files of a step: python -m tests.architecture.step_files --write -->"
END = "<!-- end of the files -->"
TRACED_STEP = 2  # the first one also imports and sets up what later steps reuse
CHECKPOINT = ("hone-seal", "hone-checkpoint")  # threads that write the last checkpoint while the next steps run
CO_OPTIMIZED = 1  # set for functions, not for the bodies of modules and classes
HUNDRED = 100

Lines = dict[str, set[int]]


@dataclass(frozen=True, slots=True)
class Traced:
    """What a step entered. `lines` and `ran` are of each file, in the order in which the files were entered."""

    lines: Mapping[str, int]  # that the file has
    ran: Mapping[str, int]  # that the step ran
    classes: list[str]  # "file:class", for classes whose methods ran

    def summary(self) -> str:
        """The totals, as ARCHITECTURE.md has them: lines are rounded up to hundreds."""
        lines = -(-sum(self.lines.values()) // HUNDRED) * HUNDRED
        return f"{len(self.lines)} files, {lines:,} lines, {len(self.classes)} classes"


class Recording:
    """Lines of hone's functions that run while `on` is set."""

    def __init__(self) -> None:
        self.on = False
        self.lines: Lines = defaultdict(set)
        self.classes: set[str] = set()
        self._ours: dict[CodeType, str] = {}

    def begin(self) -> None:
        threading.settrace(self._call)
        sys.settrace(self._call)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        if not self.on or threading.current_thread().name.startswith(CHECKPOINT):
            return None
        code = frame.f_code
        if code not in self._ours:
            path = Path(code.co_filename)
            inside = code.co_flags & CO_OPTIMIZED and path.is_relative_to(PACKAGE)
            self._ours[code] = str(path.relative_to(PACKAGE.parent)) if inside else ""
        return self._line if self._ours[code] else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        if event == "line" and self.on:
            code = frame.f_code
            self.lines[self._ours[code]].add(frame.f_lineno)
            owner = code.co_qualname.partition(".<locals>")[0].rpartition(".")[0]
            if owner:
                self.classes.add(f"{self._ours[code]}:{owner}")
        return self._line


RAY = {  # as a run on many devices: ranks under Ray, the rollout in a server
    "runtime": {"threads": 1, "backend": {"name": "ray", "devices": 2}},
    "rollout": {"sampling": {"max_response_tokens": 3}, "builtin": {"process": "separate"}},
}


def trace(folder: Path, changes: Mapping[str, Any]) -> Traced:
    """Train in `folder` and trace one step."""
    recording = Recording()
    whole = PolicyTrainer.step

    def step(self: PolicyTrainer, number: int) -> None:
        recording.on = number == TRACED_STEP
        whole(self, number)
        recording.on = False

    PolicyTrainer.step = step
    os.environ["HONE_CPU_PRODUCTS"] = "torch"  # a run measures which library is faster: another one on a busy machine
    alone = {"run": {"steps": TRACED_STEP}, "evaluation": {"sets": {}}, "checkpoint": {"every_steps": TRACED_STEP + 1}}
    recipe = tiny.recipe(folder, {**alone, **changes})
    os.environ[VARIABLE] = "torch"  # or the trial decides, from one processor to the next, whether a file is entered
    recording.begin()
    run_policy(load_recipe(recipe, [], kind="rl"))
    length = {path: len((PACKAGE.parent / path).read_text(encoding="utf-8").splitlines()) for path in recording.lines}
    ran = {path: len(lines) for path, lines in recording.lines.items()}
    return Traced(length, ran, sorted(recording.classes))


def listed(traced: Traced) -> str:
    """The section of ARCHITECTURE.md: the totals, and the files in call order, with those of one folder on one line."""
    rows = []
    for folder, files in groupby(map(PurePosixPath, traced.lines), key=lambda path: path.parent):
        row = f"{folder}:"
        for file in files:
            if len(row) + len(file.stem) > HUNDRED:
                rows.append(row)
                row = " " * (len(f"{folder}:"))
            row += f" {file.stem}"
        rows.append(row)
    return "\n".join([BEGIN, f"A step enters {traced.summary()}:", "", "```", *rows, "```", END])


def files_in(page: str) -> set[str]:
    """The files that ARCHITECTURE.md lists."""
    found, folder = set(), ""
    block = page[page.index(BEGIN) : page.index(END)].split("```")[1]
    for row in block.strip().splitlines():
        named, separator, rest = row.partition(":")
        folder, names = (named, rest) if separator else (folder, row)
        found |= {f"{folder}/{name}.py" for name in names.split()}
    return found


def summary_in(page: str) -> str:
    """The totals that ARCHITECTURE.md states."""
    found = re.search(r"^A step enters (.*):$", page, re.M)
    assert found is not None, f"{PAGE} has no totals: run python -m tests.architecture.step_files --write"
    return found[1]


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        traced = trace(Path(folder), RAY if "--ray" in sys.argv else {})
    if "--json" in sys.argv:
        print(json.dumps(asdict(traced)))
        return
    if "--write" in sys.argv:
        page = PAGE.read_text(encoding="utf-8")
        page = page[: page.index(BEGIN)] + listed(traced) + page[page.index(END) + len(END) :]
        PAGE.write_text(page, encoding="utf-8")
    print("  ran  of lines  file")
    for path, lines in traced.lines.items():
        print(f"{traced.ran[path]:5}  {lines:8}  {path}")
    print(f"{traced.summary()}; {sum(traced.ran.values())} lines ran")


if __name__ == "__main__":
    main()
