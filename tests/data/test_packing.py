"""Packing: what goes in comes out once, the cap is hard, and cuts can be undone."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.data import packing
from hone.data.packing import (
    Sample,
    balanced,
    groups_of,
    microbatches,
    microbatches_of_groups,
    minibatches,
    pack,
    pack_samples,
    restore,
    select,
    sequence_costs,
)
from hone.types import COLUMNS, Axis, Batch, Prompt, Status, StopReason, Trajectory, TrajectoryGroup, TurnSpan

quick = settings(max_examples=60, deadline=None)
lengths_of_sequences = st.lists(st.integers(1, 50), min_size=1, max_size=40)


def trajectory(sample, tokens=(7, 8, 4, 2), status=Status.OK, reward=1.0, **changes):
    one = Trajectory(
        prompt_id="sort/3",
        sample=sample,
        token_ids=tuple(tokens),
        prompt_length=1,
        loss_mask=(0,) + (1,) * (len(tokens) - 1),
        rollout_logprobs=tuple(-0.5 * i for i in range(len(tokens))),
        weight_versions=(-1,) + (5,) * (len(tokens) - 1),
        response="42",
        stop_reason=StopReason.STOP,
        status=status,
        reward=reward,
        components={"exact_match": reward},
    )
    return one.with_(**changes)


def group(*trajectories):
    return TrajectoryGroup(Prompt("sort/3", (7,), (), "42", "sort"), trajectories)


def batch_of(lengths):
    """A full batch (every field set) whose token values are all different."""
    batch = pack_samples([Sample(tuple(range(n)), (0,) + (1,) * (n - 1), "x") for n in lengths])
    total, count = batch.num_tokens, batch.num_sequences
    values = {
        field.name: torch.arange(total, dtype=torch.float32) + 0.25
        for field in dataclasses.fields(Batch)
        if field.name in COLUMNS and COLUMNS[field.name].axis is Axis.TOKEN and getattr(batch, field.name) is None
    }
    return batch.with_(
        token_ids=torch.arange(total),
        rewards=torch.arange(count, dtype=torch.float32),
        components={"format": torch.arange(count, dtype=torch.float32) * 2},
        extras={"mine": torch.arange(total, dtype=torch.float32) * 3},
        sequence_extras={"repeats": torch.arange(count) * 5},
        role_index=torch.arange(count) + 7,
        **values,
    )


def test_pack_takes_trainable_trajectories_only():
    failed = trajectory(1, status=Status.REWARD_FAILED, reward=math.nan)
    batch = pack(
        [
            group(trajectory(0), failed, trajectory(2, tokens=(7, 3), reward=0.5, status=Status.TRUNCATED)),
            group(failed),
            group(trajectory(0, tokens=(9, 9, 9))),
        ]
    )
    assert batch.token_ids.tolist() == [7, 8, 4, 2, 7, 3, 9, 9, 9]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2]
    assert batch.cu_seqlens.tolist() == [0, 4, 6, 9]
    assert batch.loss_mask.dtype == torch.bool
    assert batch.loss_mask.tolist() == [False, True, True, True, False, True, False, True, True]
    assert batch.rollout_logprobs.tolist() == [0, -0.5, -1, -1.5, 0, -0.5, 0, -0.5, -1]
    assert batch.group_index.tolist() == [0, 0, 2]
    assert batch.rewards.tolist() == [1.0, 0.5, 1.0]
    assert batch.components["exact_match"].tolist() == [1.0, 0.5, 1.0]
    assert batch.token_ids.dtype == batch.cu_seqlens.dtype == batch.group_index.dtype == torch.int64


def test_episodes_are_numbered_over_the_whole_batch():
    batch = pack(
        [
            group(trajectory(0, episode=0), trajectory(1, episode=0), trajectory(2, episode=7)),
            group(trajectory(0, episode=0), trajectory(1, episode=1)),
        ]
    )
    assert batch.episode_index.tolist() == [0, 0, 1, 2, 3]
    assert batch.group_index.tolist() == [0, 0, 0, 1, 1]


def test_a_component_that_a_trajectory_lacks_is_nan():
    batch = pack([group(trajectory(0), trajectory(1, components={"format": 1.0}))])
    assert batch.components["exact_match"][0] == 1
    assert batch.components["exact_match"][1].isnan()
    assert batch.components["format"][0].isnan()


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([], "no answer of 0 groups can be trained on: no trajectories"),
        (
            [group(trajectory(0, status=Status.ENV_FAILED, error="no sandbox"))],
            "1 env_failed; the first failure: no san",
        ),
        ([group(trajectory(0, tokens=(1, 2), loss_mask=(0,)))], "sort/3 sample 0 has 2 tokens but a loss mask of 1"),
        ([group(trajectory(0, tokens=(1, 2), rollout_logprobs=(0.0,)))], "2 tokens but 1 rollout log-probs"),
        ([group(trajectory(0, tokens=(1, 2), weight_versions=(4,)))], "2 tokens but 1 weight versions"),
        ([group(trajectory(0, tokens=(1, 2), loss_mask=(1, 1)))], "first token"),
        ([group(trajectory(3, reward=math.nan))], "sample 3 has status ok but reward nan"),
    ],
)
def test_what_cannot_be_packed_is_a_clear_error(groups, said):
    with pytest.raises(ValueError, match=said):
        pack(groups)


def test_pack_samples():
    batch = pack_samples([Sample((5, 6, 7), (0, 1, 1), "a"), Sample((5, 9), (0, 1), "b")])
    assert batch.token_ids.tolist() == [5, 6, 7, 5, 9]
    assert batch.loss_mask.tolist() == [False, True, True, False, True]
    assert batch.group_index.tolist() == batch.episode_index.tolist() == [0, 1]
    assert batch.rewards is None
    with pytest.raises(ValueError, match="no samples"):
        pack_samples([])
    with pytest.raises(ValueError, match="sample 1 of b has no tokens"):
        pack_samples([Sample((5, 6), (0, 1), "a"), Sample((), (), "b")])


def test_every_field_of_a_batch_says_its_axis():
    assert {field.name for field in dataclasses.fields(Batch)} == {*COLUMNS, "images", "origin"}


def test_a_packed_batch_has_the_declared_dtypes():
    routes = np.zeros((4, 1, 2), np.int16)
    credited = trajectory(0, spans=(TurnSpan(2, 4, reward=0.5, anchor="room"),), routed_experts=routes)
    routed = trajectory(1, role="critic", routed_experts=routes)
    batch = pack([group(credited, routed)])
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for (name, _), _, tensor in packing.columns(batch)}
    assert {"components", "anchors", "role_index", "routed_experts", "rollout_logprobs"} <= dtypes.keys()
    declared = {name: COLUMNS[name].dtype or dtype for name, dtype in dtypes.items()}
    assert dtypes == declared


def test_select_takes_every_field_in_the_order_asked_for():
    batch = batch_of([2, 3, 1])
    chosen = select(batch, [2, 0])
    assert chosen.token_ids.tolist() == [5, 0, 1]
    assert chosen.position_ids.tolist() == [0, 0, 1]
    assert chosen.cu_seqlens.tolist() == [0, 1, 3]
    assert chosen.advantages.tolist() == [5.25, 0.25, 1.25]
    assert chosen.extras["mine"].tolist() == [15, 0, 3]
    assert chosen.group_index.tolist() == [2, 0]
    assert chosen.rewards.tolist() == [2, 0]
    assert chosen.components["format"].tolist() == [4, 0]
    assert chosen.sequence_extras["repeats"].tolist() == [10, 0]
    assert chosen.role_index.tolist() == [9, 7]
    assert select(batch, [1, 1]).token_ids.tolist() == [2, 3, 4, 2, 3, 4]


def test_select_refuses_a_wrong_index_or_a_wrong_shape():
    batch = batch_of([2, 3])
    with pytest.raises(IndexError, match="0 to 1"):
        select(batch, [2])
    with pytest.raises(IndexError, match="0 to 1"):
        select(batch, [-1])
    with pytest.raises(ValueError, match=r"extras\.bad should have 5 rows"):
        select(batch.with_(extras={"bad": torch.zeros(4)}), [0])


@quick
@given(lengths_of_sequences, st.randoms(use_true_random=False))
def test_any_permutation_can_be_undone(lengths, rng):
    batch = batch_of(lengths)
    order = list(range(len(lengths)))
    rng.shuffle(order)
    back = select(select(batch, order), [order.index(i) for i in range(len(order))]).with_(origin=None)
    for field in dataclasses.fields(Batch):
        before, after = getattr(batch, field.name), getattr(back, field.name)
        if before is None:
            assert after is None
            continue
        for name in before if field.name in COLUMNS and COLUMNS[field.name].named else [None]:
            assert torch.equal(*((before, after) if name is None else (before[name], after[name])))


@quick
@given(lengths_of_sequences, st.integers(50, 200))
def test_microbatches_hold_every_sequence_once_within_the_cap(lengths, max_tokens):
    batch = batch_of(lengths)
    cuts = microbatches(batch, max_tokens)
    loads = [sum(lengths[i] for i in part) for part in cuts]
    assert max(loads) <= max_tokens
    assert sorted(i for part in cuts for i in part) == list(range(len(lengths)))
    assert all(part == sorted(part) and part for part in cuts)
    assert loads == sorted(loads, reverse=True)
    assert len(cuts) <= math.ceil(sum(lengths) / max_tokens * 11 / 9 + 1) + 1
    assert cuts == microbatches(batch, max_tokens)


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "loads"),
    [
        ([6, 5, 5, 4], 10, [10, 10]),  # a greedy cut in order needs three
        ([3, 3, 2, 2, 2], 6, [6, 6]),  # largest-first balancing needs three; best fit does it in two
        ([4, 4, 4, 4], 100, [16]),
        ([4, 4, 4, 4, 4, 4], 20, [12, 12]),  # even, rather than 20 and 4
    ],
)
def test_microbatches_are_few_and_even(lengths, max_tokens, loads):
    cuts = microbatches(batch_of(lengths), max_tokens)
    assert [sum(lengths[i] for i in part) for part in cuts] == loads


def test_a_sequence_over_the_cap_is_a_clear_error():
    with pytest.raises(ValueError, match="sequence 1 has 9 tokens, more than max_tokens_per_microbatch=8"):
        microbatches(batch_of([3, 9, 2]), 8)


@quick
@given(lengths_of_sequences, st.integers(1, 8), st.sampled_from([None, 16.0]))
def test_parts_are_balanced_in_number_and_cost(lengths, parts, equal_cost_length):
    batch = batch_of(lengths)
    cuts = balanced(sequence_costs(batch, equal_cost_length), parts)
    costs = [n if equal_cost_length is None else n * (1 + n / equal_cost_length) for n in lengths]
    loads = [sum(costs[i] for i in part) for part in cuts]
    counts = [len(part) for part in cuts]
    assert sorted(i for part in cuts for i in part) == list(range(len(lengths)))
    assert len(cuts) == parts
    assert max(counts) - min(counts) <= 1
    assert max(loads) - min(loads) <= max(costs) + 1e-6


def test_parts_of_a_case_worked_by_hand():
    # rows (8, 7), (6, 5), (4, 3), each 1 apart: 8 + 5 and 7 + 6 are even, so the last row's 1 remains
    lengths = [8, 7, 6, 5, 4, 3]
    loads = [sum(lengths[i] for i in part) for part in balanced(sequence_costs(batch_of(lengths)), 2)]
    assert sorted(loads) == [16, 17]


@quick
@given(lengths_of_sequences, st.integers(50, 120))
def test_restore_undoes_a_cut(lengths, max_tokens):
    batch = batch_of(lengths)
    cuts = microbatches(batch, max_tokens)
    outputs = [select(batch, part).advantages for part in cuts]
    assert torch.equal(restore(outputs, cuts, batch.cu_seqlens), batch.advantages)


def test_restore_refuses_a_cut_that_is_not_whole():
    batch = batch_of([2, 3])
    with pytest.raises(ValueError, match="exactly once"):
        restore([batch.advantages], [[0, 0]], batch.cu_seqlens)
    with pytest.raises(ValueError, match="4 tokens in all, but the batch has 5"):
        restore([batch.advantages[:4]], [[0, 1]], batch.cu_seqlens)


@quick
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=20), st.integers(0, 40))
def test_microbatches_of_groups_never_divide_one(rows, spare):
    batch = batch_of([length for length, _ in rows]).with_(group_index=torch.tensor([group for _, group in rows]))
    sizes = [int(batch.lengths[group].sum()) for group in groups_of(batch)]
    cut = microbatches_of_groups(batch, max(sizes) + spare)
    assert sorted(i for part in cut for i in part) == list(range(len(rows)))
    found = [set(batch.group_index[part].tolist()) for part in cut]
    assert sum(len(groups) for groups in found) == len(set.union(*found))  # no group in two parts
    assert all(int(batch.lengths[part].sum()) <= max(sizes) + spare for part in cut)


def test_a_group_over_the_cap_is_a_clear_error():
    batch = batch_of([5, 4, 6]).with_(group_index=torch.tensor([0, 1, 0]))
    with pytest.raises(ValueError, match=r"sequences 0, 2 .* 11 tokens together.*max_tokens_per_microbatch=10"):
        microbatches_of_groups(batch, 10)


@quick
@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.integers(1, 4), st.integers(0, 3))
def test_minibatches_keep_groups_whole(sizes, count, epoch):
    batch = pack([group(*(trajectory(s) for s in range(size))) for size in sizes])
    if len(sizes) < count:
        with pytest.raises(ValueError, match=f"{len(sizes)} groups into minibatches={count}"):
            minibatches(batch, count, epoch, seed=1)
        return
    cuts = minibatches(batch, count, epoch, seed=1)
    assert sorted(i for part in cuts for i in part) == list(range(sum(sizes)))
    owners = [{int(batch.group_index[i]) for i in part} for part in cuts]
    assert sum(len(owner) for owner in owners) == len(sizes)
    assert max(map(len, owners)) - min(map(len, owners)) <= 1
    assert cuts == minibatches(batch, count, epoch, seed=1)
    if epoch == 0:
        assert [i for part in cuts for i in part] == list(range(sum(sizes)))


def test_later_epochs_are_shuffled_by_seed_and_epoch():
    batch = pack([group(trajectory(0), trajectory(1)) for _ in range(12)])
    orders = {
        (epoch, seed): tuple(map(tuple, minibatches(batch, 4, epoch, seed))) for epoch in (1, 2) for seed in (1, 2)
    }
    assert len(set(orders.values())) == 4


def test_rewards_of_turns_stand_at_their_ends_and_the_rest_on_the_last_sampled_token():
    two_turns = trajectory(
        0,
        (7, 8, 4, 2, 5, 9, 9),
        loss_mask=(0, 1, 1, 0, 0, 1, 0),
        reward=1.0,
        spans=(TurnSpan(1, 3, reward=0.25), TurnSpan(5, 6, reward=-0.5, anchor="x")),
    )
    plain = trajectory(1, (7, 8, 4), reward=2.0, spans=(TurnSpan(1, 3, anchor="x"),))
    other = trajectory(0, (7, 8), reward=3.0, spans=(TurnSpan(1, 2, anchor="x"),))
    batch = pack([group(two_turns, plain), group(other)])
    assert batch.token_rewards.tolist() == [0, 0, 0.25, 0, 0, 0.75, 0, 0, 0, 2.0, 0, 3.0]
    assert batch.anchors.tolist() == [-1, -1, -1, -1, -1, 0, -1, -1, 0, 0, -1, 1]  # equal within a group only
    alone = pack([group(trajectory(0, spans=(TurnSpan(1, 4),)))])
    assert alone.token_rewards is None
    assert alone.anchors is None
