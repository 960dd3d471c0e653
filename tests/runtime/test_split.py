"""Batches over ranks: groups stay whole, tokens are balanced; results come back in the batch's order."""

import pytest
import torch

from hone.data.packing import Sample, pack_samples, select, sequence_costs
from hone.runtime.split import encode, merge, split_batch, whole_groups_for
from hone.types import Metric, ModelOutput
from hone.workers.train import equal_cost_length
from tests.runtime.workers import SQUARE


def make_batch(lengths, groups):
    samples = [Sample(tuple(range(2, 2 + n)), (0,) + (1,) * (n - 1)) for n in lengths]
    return pack_samples(samples).with_(group_index=torch.tensor(groups))


def test_groups_stay_whole_and_tokens_are_balanced():
    batch = make_batch([9, 1, 4, 4, 2, 8, 5, 5], [0, 0, 1, 1, 2, 2, 3, 3])
    parts = split_batch(batch, 2, whole_groups=True)
    of_group = [{int(batch.group_index[i]) for i in part} for part in parts]
    assert of_group[0].isdisjoint(of_group[1])
    tokens = [int(batch.lengths[part].sum()) for part in parts]
    assert sorted(tokens) == [18, 20]  # 10 + 8 and 10 + 10
    assert sorted(index for part in parts for index in part) == list(range(8))


def test_fewer_groups_than_parts_leave_some_empty():
    batch = make_batch([3, 3, 5], [7, 7, 2])
    assert split_batch(batch, 4, whole_groups=True) == [[0, 1], [2], [], []]
    empty = select(batch, [])
    assert (empty.num_sequences, empty.num_tokens) == (0, 0)


def loads(batch, parts, length=None):
    costs = sequence_costs(batch, length)
    return [sum(costs[i] for i in part) for part in parts]


def test_few_groups_leave_no_rank_idle():
    """8 prompts x 16 answers on 16 ranks: half a group for each."""
    batch = make_batch([10] * 128, [number // 16 for number in range(128)])
    parts = split_batch(batch, 16)
    assert loads(batch, parts) == [80] * 16
    assert all(len({int(batch.group_index[i]) for i in part}) == 1 for part in parts), "prompts are shared in a group"
    assert sum(load > 0 for load in loads(batch, split_batch(batch, 16, whole_groups=True))) == 8


def test_a_group_of_long_answers_is_shared_out():
    """16 groups of 8 answers, of which one group has answers of 1000 tokens and all others of 100: 8 ranks."""
    lengths = [1000 if number < 8 else 100 for number in range(128)]
    batch = make_batch(lengths, [number // 8 for number in range(128)])
    mean = sum(lengths) / 8
    assert max(loads(batch, split_batch(batch, 8, whole_groups=True))) / mean > 3
    assert max(loads(batch, split_batch(batch, 8))) / mean <= 1.05


def test_groups_stay_together_where_that_costs_nothing():
    batch = make_batch([10] * 32, [number // 4 for number in range(32)])
    parts = split_batch(batch, 4)
    assert [len({int(batch.group_index[i]) for i in part}) for part in parts] == [2] * 4


def test_attentions_square_is_balanced():
    """Lengths 8 and four times 4 on two ranks, attention as dear as the rest at 4: costs 24 and 8 each."""
    batch = make_batch([8, 4, 4, 4], [0, 1, 2, 3])
    assert sorted(loads(batch, split_batch(batch, 2, equal_cost_length=4.0), 4.0)) == [16, 32]
    batch = make_batch(SQUARE, range(len(SQUARE)))
    assert split_batch(batch, 2) == [[2, 3], [0, 1, 4]]  # 19 tokens, 18 tokens
    assert split_batch(batch, 2, equal_cost_length=4.0) == [[0, 1, 2], [3, 4]]  # costs 58.5, 56.25


def test_more_ranks_than_sequences():
    batch = make_batch([3, 5], [0, 0])
    assert sorted(split_batch(batch, 4)) == [[], [], [0], [1]]


def test_a_loss_says_whether_groups_stay_whole():
    class Compares:
        whole_groups = True

    assert whole_groups_for((make_batch([2], [0]), Compares()))
    assert not whole_groups_for((make_batch([2], [0]), frozenset({"entropy"})))


def test_outputs_are_put_back_in_the_order_of_the_batch():
    batch = make_batch([2, 3, 1, 2], [0, 1, 2, 3])
    parts = [[1, 2], [], [0, 3]]
    whole = torch.arange(8.0)
    ids = torch.arange(16).view(8, 2)
    results = []
    for part in parts:
        rows = torch.cat([torch.arange(*batch.cu_seqlens[i : i + 2].tolist()) for i in part]) if part else None
        output = ModelOutput(logprobs=whole[rows], extras={"ids": ids[rows]}) if part else ModelOutput()
        results.append(encode(output))
    merged = merge(results, parts, batch)
    assert torch.equal(merged.logprobs, whole)
    assert torch.equal(merged.extras["ids"], ids)
    assert merged.entropy is None


def test_metrics_are_merged_by_their_reducers():
    one = {"a": Metric.mean(2.0, count=1), "b": Metric.sum(1.5), "c": Metric.max(3)}
    other = {"a": Metric.mean(5.0, count=3), "b": Metric.sum(2.0), "c": Metric.max(1), "d": Metric.min(float("nan"))}
    merged = merge([encode(one), encode(other)], None, None)
    assert {name: metric.value for name, metric in merged.items() if name != "d"} == {"a": 4.25, "b": 3.5, "c": 3}


@pytest.mark.parametrize("result", [None, 3, "text", iter(())])
def test_other_results_are_not_exchanged(result):
    assert encode(result) is None


def test_attention_costs_as_much_as_the_rest_at_the_length_of_a_hand_count():
    """2 layers of (4 x 8 x 8 + 3 x 8 x 16) weights and 8 x 10 of the head, over 2 layers x 2 heads x 4."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    assert equal_cost_length({**sizes, "vocab_size": 10}) == (2 * (4 * 64 + 3 * 128) + 80) / 16
    assert equal_cost_length({"text_config": {**sizes, "vocab_size": 10}}) == 85
    mixture = {**sizes, "vocab_size": 10, "num_experts_per_tok": 2, "moe_intermediate_size": 4}
    assert equal_cost_length(mixture) == (2 * (4 * 64 + 3 * 8 * 8) + 80) / 16
    assert equal_cost_length(sizes) is None
