"""The scripts behind the learning table and the curves of the recipes, on runs made up by hand."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from hone.registry import resolve

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
EXACT_MATCH = "eval/held_out/exact_match"


def learning(name):
    return resolve(f"{BENCHMARKS}/learning_table.py:{name}")


def curve(name):
    return resolve(f"{BENCHMARKS}/curve.py:{name}")


def test_a_row_ends_where_it_first_reaches_the_target():
    row = learning("row_named")("rloo-reinforce")
    steps = [
        {"step": 0, EXACT_MATCH: 0.0},
        {"step": 1},
        {"step": 10, EXACT_MATCH: 0.99},
        {"step": 20, EXACT_MATCH: 1.0},
    ]
    reached = learning("summary")(row, steps, 12.34)
    assert (reached.steps, reached.cpu_seconds, reached.exact_match) == (10, 12.3, 0.99)
    missed = learning("summary")(row, steps[:2], 1.0)
    assert (missed.steps, missed.exact_match) == (None, 0.0)
    lines = learning("table")({row.name: missed}).splitlines()
    assert lines[2:3] == ["| `rloo` | `reinforce` |  | not within 300 | 1 | 0.000 |"]
    assert lines[-1].startswith("Not measured yet: `grpo` with `ppo`, `gae` with `ppo`, ")
    assert "`rloo` with `reinforce`" not in lines[-1]


def test_a_row_that_fails_says_why(tmp_path):
    row = learning("Row")("grpo", "ppo", {"update.minibatches": 1000})
    with pytest.raises(RuntimeError, match=r"update\.minibatches = 1000 is more than update\.prompts_per_step"):
        learning("learn")(row, tmp_path)


def test_an_unknown_row_is_answered_with_those_there_are():
    with pytest.raises(SystemExit, match=r"no row 'grpo-pop' \(there is: grpo-ppo, "):
        learning("row_named")("grpo-pop")


def test_the_picture_goes_through_the_points(tmp_path):
    figures = [{"step": 0, EXACT_MATCH: 0.0}, {"step": 5, EXACT_MATCH: 0.5}, {"step": 10, EXACT_MATCH: 1.0}]
    run = tmp_path / "a<b"
    run.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in figures))
    picture = ElementTree.fromstring(curve("draw")(EXACT_MATCH, {run.name: curve("curve")(run, EXACT_MATCH)}))
    (line,) = picture.iter("{http://www.w3.org/2000/svg}polyline")
    assert line.get("points") == "44.0,250.0 287.0,132.0 530.0,14.0"
    texts = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["0", "0.25", "0.5", "0.75", "1", "0", "2", "4", "6", "8", "10", "a<b"]
    with pytest.raises(SystemExit, match=r"has no eval/x \(there is: eval/held_out/exact_match\)"):
        curve("curve")(run, "eval/x")


def test_labels_do_not_cover_each_other():
    placed = curve("spaced")({"low": 250.0, "lower": 249.0, "high": 20.0})
    assert placed == {"high": 20.0, "lower": 237.0, "low": 250.0}
