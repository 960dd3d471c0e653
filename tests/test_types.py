"""The nouns: how metrics are combined, what is trainable, what a trajectory, group and batch say of themselves."""

import dataclasses
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hone.types import (
    Batch,
    Metric,
    Prompt,
    Reducer,
    Status,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    merge_metrics,
)


def trajectory(**changes) -> Trajectory:
    plain = Trajectory(
        prompt_id="sort/3",
        sample=0,
        token_ids=(7, 8, 4, 2),
        prompt_length=2,
        loss_mask=(0, 0, 1, 1),
        rollout_logprobs=(0.0, 0.0, -0.1, -0.7),
        weight_versions=(-1, -1, 5, 5),
        response="42",
        stop_reason=StopReason.STOP,
    )
    return plain.with_(**changes)


def batch() -> Batch:
    """The example of `Batch`'s docstring: sequences of 3 and 2 tokens."""
    return Batch(
        token_ids=torch.tensor([5, 6, 7, 5, 9]),
        position_ids=torch.tensor([0, 1, 2, 0, 1]),
        loss_mask=torch.tensor([0, 1, 1, 0, 1]).bool(),
        cu_seqlens=torch.tensor([0, 3, 5]),
        group_index=torch.tensor([0, 0]),
        episode_index=torch.tensor([0, 1]),
    )


@pytest.mark.parametrize(
    ("parts", "value"),
    [
        ([Metric.mean(2.0, count=1), Metric.mean(5.0, count=3)], 4.25),
        ([Metric.mean(2.0), Metric.mean(4.0)], 3.0),
        ([Metric.sum(2.0), Metric.sum(5.0)], 7.0),
        ([Metric.max(2.0), Metric.max(-5.0)], 2.0),
        ([Metric.min(2.0), Metric.min(-5.0)], -5.0),
        ([Metric.mean(9.0, count=0), Metric.mean(4.0, count=2)], 4.0),
    ],
)
def test_metrics_merge_by_their_own_reducer(parts, value):
    left, right = parts
    assert left.merge(right).value == value
    assert right.merge(left).value == value


def test_a_mean_over_nothing_is_not_a_number():
    assert math.isnan(Metric.mean(1.0, count=0).value)


def test_metrics_of_two_reducers_do_not_merge():
    with pytest.raises(ValueError, match="cannot merge a mean metric with a sum metric"):
        Metric.mean(1.0).merge(Metric.sum(1.0))


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.integers(1, 1000)), min_size=1, max_size=8), st.data())
def test_the_mean_does_not_depend_on_how_the_parts_were_cut(parts, data):
    cut = data.draw(st.integers(0, len(parts)))
    metrics = [{"x": Metric.mean(value, count)} for value, count in parts]
    left, right = merge_metrics(*metrics[:cut]), merge_metrics(*metrics[cut:])
    expected = sum(value * count for value, count in parts) / sum(count for _, count in parts)
    assert merge_metrics(left, right)["x"].value == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_merging_keeps_names_that_only_some_parts_have():
    merged = merge_metrics({"a": Metric.sum(1.0)}, {"b": Metric.max(2.0)}, {"a": Metric.sum(3.0)})
    assert {name: metric.value for name, metric in merged.items()} == {"a": 4.0, "b": 2.0}
    assert merge_metrics() == {}


def test_reducers_are_written_as_plain_words():
    assert [str(reducer) for reducer in Reducer] == ["mean", "sum", "max", "min"]


def test_only_ok_and_truncated_are_trainable():
    assert {status for status in Status if status.trainable} == {Status.OK, Status.TRUNCATED}


def test_a_trajectory_counts_what_the_policy_sampled():
    assert trajectory().response_length == 2
    assert trajectory(loss_mask=(0, 1, 0, 1)).response_length == 2


def test_nouns_are_frozen_and_with_leaves_the_original():
    one = trajectory()
    assert one.with_(reward=1.0).reward == 1.0
    assert one.reward == 0.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.reward = 1.0
    with pytest.raises(TypeError):
        one.with_(rewrad=1.0)


def test_a_group_gives_only_trainable_trajectories():
    prompt = Prompt("sort/3", (7, 8), (), None, "sort")
    members = tuple(trajectory(sample=i, status=status) for i, status in enumerate(Status))
    assert [member.status for member in TrajectoryGroup(prompt, members).trainable] == [Status.OK, Status.TRUNCATED]


def test_defaults_are_not_shared_between_objects():
    assert Prompt("a", (), (), None, "s").row is not Prompt("b", (), (), None, "s").row


def test_a_batch_knows_its_shape():
    example = batch()
    assert (example.num_tokens, example.num_sequences) == (5, 2)
    assert example.lengths.tolist() == [3, 2]


def test_a_batch_grows_by_new_batches():
    example = batch()
    grown = example.with_(advantages=torch.ones(5), extras={"mine": torch.zeros(5)})
    assert example.advantages is None
    assert grown.advantages is not None
    assert grown.token_ids is example.token_ids
    assert dict(example.extras) == {}


def test_types_config_and_registry_import_nothing_heavy():
    code = "import sys, hone.types, hone.config, hone.explain, hone.registry; print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    heavy = {"torch", "numpy", "transformers", "pyarrow", "datasets", "pandas", "rich"}
    assert heavy.isdisjoint(done.stdout.split())
