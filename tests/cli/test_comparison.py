"""`hone plan --grid` compares settings of a run file, and says in one line what it lacks."""

import json
from pathlib import Path

import pytest

from hone.cli.main import main

RECIPE = "recipes/asynchronous/grpo.yaml"  # 64 prompts x 16 answers of at most 3 tokens, one server of 512 seats
COSTS = ["--cost", "decode_s=1", "--cost", "train_token_s=0.001"]
LENGTHS = ["--grid", "lengths=constant:3"]
SHARED = [*LENGTHS, "--grid", "devices=4", "--grid", "split=shared"]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_a_grid_is_simulated(capsys):
    grid = ["devices=8,16", "split=shared,0.25", "prompts_per_device=2", "staleness=0,1"]
    arguments = [argument for one in grid for argument in ("--grid", one)]
    assert main(["plan", RECIPE, *COSTS, *LENGTHS, *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    shapes = [
        (
            one["setting"]["split"],
            one["setting"]["trainer_devices"],
            one["setting"]["replicas"],
            one["setting"]["staleness"],
        )
        for one in found
    ]
    eight = [("shared", 8, 8, 0), ("0.25", 2, 6, 0), ("0.25", 2, 6, 1)]
    assert shapes == [*eight, ("shared", 16, 16, 0), ("0.25", 4, 12, 0), ("0.25", 4, 12, 1)]
    assert found[0]["setting"]["prompts_per_step"] == 16
    assert 1 / found[0]["outcome"]["steps_per_s"] == pytest.approx(3 + 16 * 16 * 3 * 0.001 / 8)
    assert found[2]["outcome"]["staleness_max"] == 1


def test_all_ranks_of_a_server_need_a_device(capsys):
    server = ["rollout.backend=vllm", "rollout.tensor_parallel=2", "rollout.engine.pipeline_parallel_size=2"]
    arguments = [RECIPE, *server, *COSTS, *LENGTHS, "--grid", "split=0.5", "--json"]
    assert main(["plan", *arguments, "--grid", "devices=16"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["setting"]["replicas"] == 2
    assert main(["plan", *arguments, "--grid", "devices=4"]) == 2
    said = "servers of 4 (rollout.tensor_parallel = 2 x pipeline parallel size = 2); each side needs one at least"
    assert said in capsys.readouterr().err


def test_a_table_has_a_row_for_each_combination(capsys):
    assert main(["plan", RECIPE, "rollout.replicas=2", *COSTS, *LENGTHS, "--grid", "staleness=0,1"]) == 0
    shown = capsys.readouterr().out
    assert "lengths=constant:3" in shown
    rows = [[cell.strip() for cell in line.split("│")] for line in shown.splitlines() if line.startswith("│")]
    assert [row[1:4] for row in rows] == [["0", "1", "2"], ["1", "1", "2"]]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([*LENGTHS], "nothing says what generation costs: add --cost decode_s=SECONDS, or --from RUN"),
        ([*COSTS], "nothing says how long answers are"),
        ([*COSTS, *LENGTHS, "--grid", "stale=1"], "did you mean 'staleness'"),
        ([*COSTS, *LENGTHS, "--grid", "staleness"], "--grid staleness: expected NAME=VALUE"),
        ([*COSTS, *LENGTHS, "--grid", "staleness=-1"], "--grid staleness=-1: expected a whole number, 0 or more"),
        ([*COSTS, *LENGTHS, "--grid", "split=0.5"], "--grid split needs the devices"),
        ([*COSTS, *LENGTHS, "--grid", "devices=4", "--grid", "split=1.5"], "between 0 and 1"),
        ([*COSTS, *LENGTHS, "--grid", "devices=1", "--grid", "split=0.5"], "each side needs one at least"),
        (
            [*COSTS, *LENGTHS, "--grid", "devices=4", "--grid", "split=shared", "--grid", "staleness=1"],
            "no combination",
        ),
        (["--cost", "decode=1", *LENGTHS], "did you mean 'decode_s'"),
        (["--cost", "decode_s=-1", *LENGTHS], "expected seconds, 0 or more"),
        (["--from", "no/such/run", *LENGTHS], "expected the folder of a finished run"),
    ],
)
def test_what_makes_no_simulation_is_refused(arguments, says, capsys):
    assert main(["plan", RECIPE, *arguments]) == 2
    assert says in capsys.readouterr().err
