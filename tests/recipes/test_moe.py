"""The run file of the mixture of experts: a few steps of it, from its warm start to replayed routes."""

from pathlib import Path

import pytest

from hone.cli.main import main
from tests.trainers.tiny import metrics

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("run.steps=1", "update.prompts_per_step=2", "warm_start.steps=2", "warm_start.samples_per_step=4",
         "evaluation.sets.held_out.source.size=4", "tracking.trackers=[jsonl]")  # fmt: skip


@pytest.mark.slow
def test_it_runs_from_its_warm_start_to_replayed_routes(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)  # its paths are relative to the project
    assert main(["train", "recipes/moe/grpo.yaml", f"run.dir={tmp_path}/run", *SMALL]) == 0
    step = metrics(tmp_path / "run")[-1]
    assert 0 <= step["train/routes_replaced"] < 0.2
    assert step["train/expert_load_max_over_mean"] >= 1.0
    assert "eval/held_out/exact_match" in step
    warm = metrics(tmp_path / "run" / "warm_start")[-1]
    assert warm["train/router_aux_loss"] > 0.9
    assert "train/routes_replaced" not in warm
