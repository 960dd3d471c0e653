"""Patches of reasoning-gym (0.1.x): its import without pycosat, and tasks that compare tuples.

The package imports every task at once, and one family of logic puzzles needs pycosat, which is published as C source
only: without a compiler and Python's headers, importing the whole package would fail.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

SAT_SOLVER = "pycosat"
GRID_TASKS = ("arc_agi", "rearc")  # they compare an entry's grids as tuples, which are lists after JSON


class _MissingSolver(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system reads these from any module
            raise AttributeError(name)
        raise ImportError(f"this logic puzzle needs the package {SAT_SOLVER}, which is not installed")


def load_package() -> Any:
    """Import the module `reasoning_gym`. Raises ImportError if it is not installed."""
    stand_in_for_sat_solver()
    return importlib.import_module("reasoning_gym")


def stand_in_for_sat_solver() -> None:
    """Replace a missing pycosat with a module that fails when a puzzle uses it, not when it is imported.

    Remove this once https://github.com/open-thought/reasoning-gym imports pycosat only where it is used.
    """
    if sys.modules.get(SAT_SOLVER) is None and importlib.util.find_spec(SAT_SOLVER) is None:
        sys.modules[SAT_SOLVER] = _MissingSolver(SAT_SOLVER)


def as_made(task: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry that may have been JSON meanwhile, with the tuples that its task's verifier expects."""
    if task not in GRID_TASKS:
        return dict(entry)
    return {**entry, "metadata": {key: _as_tuples(value) for key, value in entry["metadata"].items()}}


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(one) for one in value) if isinstance(value, list | tuple) else value
