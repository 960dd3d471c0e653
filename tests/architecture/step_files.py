"""Which files of hone one GRPO step on the built-in engine enters: `python -m tests.architecture.step_files`.

A tiny run trains two steps in this process, and the second is traced in every thread. Child processes (rewards) are not
counted: with `--ray`, which has ranks under Ray and the rollout in a server, these are the files of the driver. A file
is entered if a line of one of its functions ran, and counts as read if at least `READ` lines ran: the others are passed
through (a property, an early return).
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import hone
from hone.cli.recipe import load_recipe
from hone.trainers.policy.trainer import PolicyTrainer
from hone.trainers.run.launch import run_policy
from tests.trainers import tiny

PACKAGE = Path(hone.__file__).parent
TRACED_STEP = 2  # the first one also imports and sets up what later steps reuse
READ = 5
CHECKPOINT = ("hone-seal", "hone-checkpoint")  # threads that write the last checkpoint while the next steps run
CO_OPTIMIZED = 1  # set for functions, not for the bodies of modules and classes

Lines = dict[str, set[int]]


class Recording:
    """Lines of hone's functions that run while `on` is set."""

    def __init__(self) -> None:
        self.on = False
        self.lines: Lines = defaultdict(set)
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
            self.lines[self._ours[frame.f_code]].add(frame.f_lineno)
        return self._line


RAY = {  # as a run on many devices: ranks under Ray, the rollout in a server
    "runtime": {"threads": 1, "backend": {"name": "ray", "devices": 2}},
    "rollout": {"sampling": {"max_response_tokens": 3}, "builtin": {"process": "separate"}},
}


def step_files(folder: Path, changes: Mapping[str, Any]) -> Lines:
    """The lines that the traced step ran, for each file of hone."""
    recording = Recording()
    whole = PolicyTrainer.step

    def step(self: PolicyTrainer, number: int) -> None:
        recording.on = number == TRACED_STEP
        whole(self, number)
        recording.on = False

    PolicyTrainer.step = step
    alone = {"run": {"steps": TRACED_STEP}, "evaluation": {"sets": {}}, "checkpoint": {"every_steps": TRACED_STEP + 1}}
    recipe = tiny.recipe(folder, {**alone, **changes})
    recording.begin()
    run_policy(load_recipe(recipe, [], kind="rl"))
    return recording.lines


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        traced = step_files(Path(folder), RAY if "--ray" in sys.argv else {})
    ran = {path: len(lines) for path, lines in traced.items()}
    if "--json" in sys.argv:
        print(json.dumps(ran))
        return
    length = {path: len((PACKAGE.parent / path).read_text(encoding="utf-8").splitlines()) for path in ran}
    read = [path for path, lines in ran.items() if lines >= READ]
    print("  ran  of lines  file")
    for path in sorted(ran):
        print(f"{ran[path]:5}  {length[path]:8}  {path}")
    print(f"{len(ran)} files entered, {sum(length.values())} lines, of which {sum(ran.values())} ran")
    print(f"{len(read)} files read (at least {READ} lines ran), {sum(length[path] for path in read)} lines")


if __name__ == "__main__":
    main()
