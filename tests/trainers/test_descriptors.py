"""What a run needs of file descriptors is counted before it begins."""

import subprocess
import sys
from pathlib import Path

import pytest

from hone.cli.recipe import load_recipe
from hone.trainers.policy.generation import _episodes_at_a_time
from tests.trainers.tiny import recipe

PROGRAM = """
import logging, sys
from pathlib import Path
from hone.cli.recipe import load_recipe
from hone.trainers.policy import generation
logging.basicConfig(format="%(message)s")
generation.open_descriptors = lambda: 10
print(generation.within_descriptors(load_recipe(Path(sys.argv[1])).config).requests_per_replica)
"""
SERVERS = {"builtin": {"process": "separate"}, "replicas": 2, "requests_per_replica": 64}


@pytest.mark.slow  # each case is a process that imports torch
@pytest.mark.parametrize(
    ("limit", "rollout", "given", "says"),
    [
        (20_000, SERVERS, "64", ""),
        # 10 open, 256 reserved, 4 for one reward process; (400 - 270) / 2 - 16
        (400, SERVERS, "49", "needs 2 x 80 for requests to servers, beside open now 10, files and weight sync 256"),
        (280, SERVERS, "", "280 are allowed. Raise the hard limit (ulimit -Hn); none is left for requests"),
        (280, {}, "512", ""),
    ],
)
def test_a_run_takes_no_more_requests_than_it_has_descriptors_for(tmp_path, limit, rollout, given, says):
    path = recipe(tmp_path, {"rollout": rollout, "update": {"prompts_per_step": 8, "samples_per_prompt": 8}})
    command = f"ulimit -n {limit}; exec {sys.executable} -c '{PROGRAM}' {path}"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2]
    )
    assert done.stdout.strip() == given, done.stderr
    assert says in done.stderr


@pytest.mark.parametrize(
    ("changes", "episodes"),
    [
        ({}, 64),
        ({"algorithm": {"preset": "dapo", "dynamic_sampling": {"oversample": 1.5}}}, 96),
        ({"asynchrony": {"staleness": 3}, "algorithm": {"preset": "grpo", "correction": {"old": "rollout"}}}, 256),
    ],
)
def test_episodes_of_prompts_that_are_drawn_ahead_count(tmp_path, changes, episodes):
    update = {"prompts_per_step": 8, "samples_per_prompt": 8}
    assert _episodes_at_a_time(load_recipe(recipe(tmp_path, {"update": update, **changes})).config) == episodes
