"""Importing reasoning-gym (0.1.x) where one of its dependencies cannot be built.

The package imports every task at once, and one family of logic puzzles needs pycosat, which is published as C source
only: without a compiler and Python's headers the whole package could not be imported.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

SAT_SOLVER = "pycosat"


class _MissingSolver(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what the import system asks of any module
            raise AttributeError(name)
        raise ImportError(f"this logic puzzle needs the package {SAT_SOLVER}, which is not installed")


def load_package() -> Any:
    """The module `reasoning_gym`. Raises ImportError if it is not installed."""
    stand_in_for_sat_solver()
    return importlib.import_module("reasoning_gym")


def stand_in_for_sat_solver() -> None:
    """Where pycosat is missing, a module in its place that fails when a puzzle uses it, not when it is imported.

    No longer needed once https://github.com/open-thought/reasoning-gym imports it where it is used.
    """
    if sys.modules.get(SAT_SOLVER) is None and importlib.util.find_spec(SAT_SOLVER) is None:
        sys.modules[SAT_SOLVER] = _MissingSolver(SAT_SOLVER)
