"""Two runs of the calculator's recipe with the same seed are equal bit for bit, calls of tools included."""

import json

import pytest

from hone.tracking.trackers.jsonl import rollout_lines
from tests.recipes.test_recipes import started
from tests.trainers.test_asynchronous import OF_THE_CLOCK

pytestmark = pytest.mark.slow

SMALL = (
    "run.steps=3",
    "update.prompts_per_step=4",
    "update.samples_per_prompt=4",
    "evaluation.every_steps=0",
    "evaluation.sets.held_out.source.size=8",
    "tracking.rollouts_per_step=all",
)
AHEAD = ("asynchrony.staleness=1", "rollout.builtin.process=separate", "algorithm.correction.old=rollout")
SECONDS = "rollout/tools/mul/seconds"


@pytest.fixture(scope="module")
def warm(tmp_path_factory, request):
    """A policy that mostly guesses and sometimes calls."""
    folder = tmp_path_factory.mktemp("warm")
    short = ("run.steps=1", "warm_start.steps=60", "warm_start.samples_per_step=32", *SMALL[1:])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(request.config.rootpath)  # the recipe's paths are relative to the project
        started("train", "tools/calculator.yaml", folder, *short)
    return folder / "run" / "warm_start" / "export"


@pytest.mark.parametrize("ahead", [(), AHEAD], ids=["synchronous", "one step ahead"])
def test_two_runs_are_equal(warm, tmp_path, monkeypatch, request, ahead):
    monkeypatch.chdir(request.config.rootpath)
    start = ("model.build=null", f"model.path={warm}", "warm_start=null")
    runs = [tmp_path / name for name in ("one", "other")]
    one, other = (started("train", "tools/calculator.yaml", run, *SMALL, *start, *ahead) for run in runs)
    assert [_repeatable(line) for line in one] == [_repeatable(line) for line in other]
    assert sum(line.get("rollout/tools/mul/calls", 0) for line in one) >= 5, "tools are called"
    assert _rows(runs[0]) == _rows(runs[1])
    name = "run/export/model.safetensors"
    assert (runs[0] / name).read_bytes() == (runs[1] / name).read_bytes()


def _repeatable(line):
    return {key: value for key, value in line.items() if key != SECONDS and not key.startswith(OF_THE_CLOCK)}


def _rows(folder):
    rows = [json.loads(line) for line in rollout_lines(folder / "run" / "rollouts.jsonl.gz")]
    for row in rows:
        for turn in row["conversation"]:
            for call in turn["calls"]:
                del call["seconds"]
    return rows
