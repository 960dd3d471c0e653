"""The journal of a run, and the groups of open draws in a checkpoint."""

import errno
import json
import math
import os
import tracemalloc
from dataclasses import replace

import numpy as np

from hone.schedule.journal import Journal, read_journal
from hone.schedule.open_draws import read_groups, write_groups
from hone.types import Called, Image, Metric, Prompt, Status, StopReason, Trajectory, TrajectoryGroup, TurnSpan


def test_a_resumed_run_writes_its_steps_again_over_what_a_kill_left(tmp_path):
    path = tmp_path / "schedule.jsonl"
    first = Journal(path)
    for step in (1, 2, 3):
        first.write({"step": step, "batch": "whole"})
    with path.open("a") as file:
        file.write('{"step": 4, "ba')
    assert [record["step"] for record in read_journal(path)] == [1, 2, 3]
    resumed = Journal(path)
    for step in (3, 4):
        resumed.write({"step": step, "batch": "again"})
    assert [(one["step"], one["batch"]) for one in read_journal(path)] == [
        (1, "whole"), (2, "whole"), (3, "again"), (4, "again")
    ]  # fmt: skip


def test_a_disk_that_is_full_for_a_moment_leaves_no_half_of_a_record(tmp_path, monkeypatch):
    real, room = os.write, [9, 0, 0]

    def write_what_fits(descriptor, data):
        left = room.pop(0) if room else len(data)
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(descriptor, data[:left])

    monkeypatch.setattr(os, "write", write_what_fits)
    Journal(tmp_path / "schedule.jsonl").write({"step": 1, "batch": "whole"})
    monkeypatch.undo()
    assert list(read_journal(tmp_path / "schedule.jsonl")) == [{"step": 1, "batch": "whole"}]


def test_a_long_journal_is_cut_without_holding_it(tmp_path):
    path = tmp_path / "schedule.jsonl"
    line = json.dumps({"step": 0, "spans": "x" * 10_000})
    path.write_text("".join(f"{line.replace('0', str(step), 1)}\n" for step in range(1, 501)) + '{"step"')
    tracemalloc.start()
    try:
        Journal(path).write({"step": 400, "batch": "again"})
        assert tracemalloc.get_traced_memory()[1] < 1 << 20  # of 5 MB
    finally:
        tracemalloc.stop()
    assert [record["step"] for record in read_journal(path)] == list(range(1, 401))


def test_groups_come_back_to_the_last_bit_with_the_images_of_their_prompt(tmp_path):
    image = Image(b"png", (1, 2, 4), 2, 9, read=lambda data: None)
    prompt = Prompt("rows/7", (1, 9, 9), (), "4", "rows", draw=7, images=(image,))
    answer = Trajectory(
        prompt_id="rows/7",
        sample=0,
        token_ids=(1, 9, 9, 4, 2),
        prompt_length=3,
        loss_mask=(0, 0, 0, 1, 1),
        rollout_logprobs=(0.0, 0.0, 0.0, -0.1, -1 / 3),
        weight_versions=(-1, -1, -1, 5, 6),
        response="4\n",
        stop_reason=StopReason.STOP,
        reward=0.1 + 0.2,
        components={"exact_match": 1.0},
        spans=(TurnSpan(3, 4, 0.5, "room", (Called("look", "{}", "a door", 0.25, "timeout"),)), TurnSpan(4, 5)),
        metrics={"rollout/calls": Metric.sum(2.0)},
        images=(image,),
        routed_experts=np.array([[[1, 2]], [[3, -1]]], np.int16),
    )
    late = answer.with_(sample=1, status=Status.ENGINE_FAILED, error="too late", reward=math.inf, routed_experts=None)
    group = TrajectoryGroup(prompt, (answer, late), greedy=replace(answer, sample=2, routed_experts=None))
    write_groups(tmp_path, [group])
    found = read_groups(tmp_path, {7: prompt})[7]
    assert found == group
    assert np.array_equal(found.trajectories[0].routed_experts, answer.routed_experts)
    assert found.trajectories[0].routed_experts.dtype == np.int16
