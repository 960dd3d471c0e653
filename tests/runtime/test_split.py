"""Batches over ranks: groups stay whole, tokens are balanced; results come back in the batch's order."""

import pytest
import torch

from hone.data.packing import Sample, pack_samples, select
from hone.runtime.split import encode, merge, split_groups
from hone.types import Metric, ModelOutput


def make_batch(lengths, groups):
    samples = [Sample(tuple(range(2, 2 + n)), (0,) + (1,) * (n - 1)) for n in lengths]
    return pack_samples(samples).with_(group_index=torch.tensor(groups))


def test_groups_stay_whole_and_tokens_are_balanced():
    batch = make_batch([9, 1, 4, 4, 2, 8, 5, 5], [0, 0, 1, 1, 2, 2, 3, 3])
    parts = split_groups(batch, 2)
    of_group = [{int(batch.group_index[i]) for i in part} for part in parts]
    assert of_group[0].isdisjoint(of_group[1])
    tokens = [int(batch.lengths[part].sum()) for part in parts]
    assert sorted(tokens) == [18, 20]  # 10 + 8 and 10 + 10
    assert sorted(index for part in parts for index in part) == list(range(8))


def test_fewer_groups_than_parts_leave_some_empty():
    batch = make_batch([3, 3, 5], [7, 7, 2])
    assert split_groups(batch, 4) == [[0, 1], [2], [], []]
    empty = select(batch, [])
    assert (empty.num_sequences, empty.num_tokens) == (0, 0)


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
