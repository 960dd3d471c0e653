"""Runs that have to learn, judged by exact match."""

from pathlib import Path

import pytest

from hone.registry import resolve

SCRIPT = f"{Path(__file__).parents[2]}/benchmarks/learning_table.py"


@pytest.fixture
def learns(tmp_path, capsys):
    """Train a row of the learning table to 99 % exact match, and print how long it took under this name."""

    def check(row, name):
        result = resolve(f"{SCRIPT}:learn")(row, tmp_path, deadline_s=800)
        with capsys.disabled():
            print(f"\nlearning: {name} has {result.exact_match:.3f} after {result.steps} steps ", end="")
        first = next(resolve(f"{SCRIPT}:read")(tmp_path / "run" / "metrics.jsonl"))
        assert first["eval/held_out/exact_match"] < 0.05
        assert result.exact_match >= 0.99
        assert result.steps is not None

    return check
