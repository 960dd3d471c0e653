"""GRPO teaches a LoRA adapter beside a warm-started base, judged by exact match: a row of the table in docs/lora.md."""

import json
from pathlib import Path

import pytest

from hone.registry import resolve

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCRIPT = f"{ROOT}/benchmarks/lora_table.py"


def script(name):
    return resolve(f"{SCRIPT}:{name}")


@pytest.mark.timeout(900)
def test_an_adapter_of_rank_8_learns_to_reverse_two_characters(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (row,) = [row for row in script("ROWS") if row.name == "rank 8"]
    result = script("learn")(row, script("warm_start")(tmp_path / "warm"), tmp_path / "run")
    assert result.before < 0.6, "there is something left to learn"
    assert result.exact_match >= 0.99
    assert result.steps is not None
    everything = sum(file.stat().st_size for file in (tmp_path / "run" / "export").glob("*.safetensors"))
    assert result.sync_bytes < everything / 4


def test_a_row_says_when_it_reached_the_target_and_where_it_stood_at_the_end(tmp_path):
    match = script("EXACT_MATCH")
    steps = [
        {"step": 0, match: 0.25},
        {"step": 1, "weights/bytes": 4000},
        {"step": 5, match: 0.992, "weights/bytes": 4000},
        {"step": 10, match: 0.98},
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(step) + "\n" for step in steps))
    (row,) = [row for row in script("ROWS") if row.name == "rank 8"]
    found = script("summary")(row, path, 12.34)
    assert (found.before, found.steps, found.exact_match) == (0.25, 5, 0.98)
    assert (found.cpu_seconds, found.sync_bytes) == (12.3, 4000)
    lines = script("table")({row.name: found}).splitlines()
    assert lines[2] == "| rank 8 | 0.004 | 4,000 | 0.250 | 5 | 0.980 | 12 |"
    assert lines[-1].startswith("Not measured yet: all weights, rank 1, ")
