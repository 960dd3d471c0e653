"""Shared prefixes: n answers to one prompt hold its tokens once, and nothing else changes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.data.packing import Sample, pack_samples, select
from hone.engines.forward import scored_rows
from hone.engines.layout import cut_batch, lay_out
from hone.models.settings import BuildConfig, ModelConfig
from hone.types import LossOutput

SMALL = {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_size": 48, "max_positions": 64}
WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
SOFTCAP = {"sliding_window": 4, "attn_logit_softcapping": 0.5}
ARCHITECTURES = {
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2},
    "gemma3_text": WINDOW,
    "gemma2": SOFTCAP,
}


def batch_of(sequences, groups):
    batch = pack_samples([Sample(tuple(ids), (0,) + (1,) * (len(ids) - 1)) for ids in sequences])
    return batch.with_(group_index=torch.tensor(groups))


def test_a_row_by_hand():
    shared = [5, 6, 7, 8]
    batch = batch_of([[*shared, 1], [9, 9], [*shared, 2, 3], [*shared, 4]], [0, 1, 0, 0])
    layout = lay_out(batch)
    # Whole sequences and prefixes by length, then the branches by length: 9 9 | 5 6 7 8 | 1 | 4 | 2 3
    assert layout.token_ids.tolist() == [9, 9, 5, 6, 7, 8, 1, 4, 2, 3]
    assert layout.position_ids.tolist() == [0, 1, 0, 1, 2, 3, 4, 4, 4, 5]
    assert layout.packing.lengths == (2, 4, 1, 1, 2)
    assert [(run.count, run.length, run.prefix) for run in layout.packing.runs] == [
        (1, 2, 0),
        (1, 4, 0),
        (2, 1, 4),
        (1, 2, 4),
    ]
    assert layout.where.tolist() == [2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5, 8, 9, 2, 3, 4, 5, 7]


def test_a_token_that_sequences_share_is_scored_once():
    shared = [5, 6, 7, 8]
    batch = batch_of([[*shared, 1], [9, 9], [*shared, 2, 3], [*shared, 1]], [0, 1, 0, 0])
    mask = batch.loss_mask.clone()
    mask[2] = 0  # the 7 of the first sequence, whose score the two others still need
    batch = batch.with_(loss_mask=mask)
    rows, where, (trained, first) = scored_rows(batch, lay_out(batch), None)
    assert rows.tolist() == [1, 2, 3, 4, 6, 11, 12, 17]  # 6 7 8 1 | 9 | 2 3 | 1: each once, but for what has its own 1
    assert where.tolist() == [2, 3, 4, 5, 0, 5, 8, 5]
    assert trained.tolist() == [1, 3, 4, 6, 8, 9, 10, 11, 12, 14, 15, 16, 17]
    assert first.tolist() == [1, 3, 4, 6, 1, 2, 3, 11, 12, 1, 2, 3, 17]
    asked = batch.with_(ids_at=torch.zeros(batch.num_tokens, 1, dtype=torch.long))  # which tokens may differ in
    assert scored_rows(asked, lay_out(asked), None)[0].tolist() == trained.tolist()
    alone = batch.with_(group_index=torch.arange(4))
    assert scored_rows(alone, lay_out(alone), None)[2] is None


def test_a_shared_token_whose_loss_is_in_a_later_sequence_is_scored_at_the_first():
    batch = batch_of([[5, 6, 7, 8, 1], [5, 6, 7, 8, 2]], [0, 0])
    batch = batch.with_(loss_mask=batch.loss_mask * torch.arange(10).ge(5))
    rows, where, (trained, first) = scored_rows(batch, lay_out(batch), None)
    assert (rows.tolist(), where.tolist()) == ([1, 2, 3, 9], [0, 1, 2, 3])
    assert (trained.tolist(), first.tolist()) == ([6, 7, 8, 9], [1, 2, 3, 9])


def test_branches_of_one_shape_share_a_kernel_call_across_groups():
    groups = {0: [10] * 5, 1: [11] * 6, 2: [12] * 5}
    layout = lay_out(batch_of([groups[g] + [g, g, i] for i in (0, 1) for g in groups], [0, 1, 2] * 2))
    shapes = [(run.count, run.length, run.prefix) for run in layout.packing.runs]
    assert shapes == [(2, 7, 0), (1, 8, 0), (4, 1, 7), (2, 1, 8)]  # each begins with two more tokens in common


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 8), st.lists(st.integers(0, 1), min_size=1, max_size=5)),
        min_size=1,
        max_size=8,
    )
)
def test_every_token_finds_itself_and_what_comes_before_it(rows):
    """Each sequence is a group number, how much of that group's beginning it has, and tokens of its own."""
    sequences = [[10 + group] * begin + own for group, begin, own in rows]
    batch = batch_of(sequences, [group for group, _, _ in rows])
    layout = lay_out(batch)
    assert torch.equal(layout.token_ids[layout.where], batch.token_ids)
    assert torch.equal(layout.position_ids[layout.where], batch.position_ids)
    assert len(layout.token_ids) == layout.packing.num_tokens <= batch.num_tokens
    for i, ids in enumerate(sequences):  # what a token sees before it, whether shared or not, is its own sequence
        at = layout.where[batch.cu_seqlens[i] : batch.cu_seqlens[i + 1]]
        assert layout.token_ids[at].tolist() == ids
        assert len(set(at.tolist())) == len(ids)


def test_only_a_group_shares_and_only_what_is_worth_it():
    same = [[5, 6, 7, 8, 1], [5, 6, 7, 8, 2]]
    assert lay_out(batch_of(same, [0, 1])).packing.num_tokens == 10
    assert lay_out(batch_of(same, [0, 0])).packing.num_tokens == 6
    assert lay_out(batch_of([[5, 6, 7, 1], [5, 6, 7, 2]], [0, 0])).packing.num_tokens == 8  # three tokens are too few
    assert lay_out(batch_of([[5, 6, 7, 8, 9]] * 2, [0, 0])).packing.num_tokens == 6  # each keeps a token of its own


def test_groups_stay_whole_where_that_costs_no_micro_batch():
    batch = batch_of([[5] * 10] * 8, [0, 1, 2, 3, 0, 1, 2, 3])
    assert len(cut_batch(batch, 40)) == 2
    for part in cut_batch(batch, 40):
        assert len(set(batch.group_index[part].tolist())) == 2
    assert len(cut_batch(batch, 15)) == 8  # groups of 20 tokens do not fit
    uneven = batch_of([[5] * 15] * 4, [0, 0, 1, 1])
    assert len(cut_batch(uneven, 45)) == 2
    with pytest.raises(ValueError, match="max_tokens_per_microbatch=9"):
        cut_batch(batch, 9)
    assert [sorted(part) for part in cut_batch(batch, 20, whole_groups=True)] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert cut_batch(uneven, 45, whole_groups=True) == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="sequences 0, 4 are of one group and have 20 tokens"):
        cut_batch(batch, 15, whole_groups=True)


def test_groups_that_fit_into_no_micro_batch_are_divided_as_seldom_as_possible():
    prompts = [[10 + group] * 10 for group in range(4)]
    samples = [Sample((*prompts[i % 4], 5, i), (0,) * 10 + (1, 1)) for i in range(16)]
    batch = pack_samples(samples).with_(group_index=torch.tensor([i % 4 for i in range(16)]))
    cut = cut_batch(batch, 40)  # a group has 48 tokens: three of its answers, then the fourth and two of the next ...
    assert sorted(i for part in cut for i in part) == list(range(16))
    assert [len(part) for part in cut] == [3, 3, 3, 3, 3, 1]
    rows = [lay_out(select(batch, part)).packing.num_tokens for part in cut]
    assert sum(rows) == 16 * 12 - 11 * (2 + 1 + 1 + 2 + 2)  # a prompt and the 5 after it, where they are shared
    halves = cut_batch(batch, 100)  # two groups each: as few micro-batches as without sharing
    assert [len(batch.group_index[part].unique()) for part in halves] == [2, 2]


def weighed(output, batch):
    return LossOutput(-batch.advantages * (output.logprobs + 0.1 * output.entropy))


weighed.needs = frozenset({"entropy"})


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 3e-2)])
@pytest.mark.parametrize("loss_on", ["answers", "some of the prompts", "the last of each group"])
def test_sharing_changes_neither_scores_nor_gradients(architecture, dtype, tolerance, loss_on, make_engine, make_batch):
    model = ModelConfig(build=BuildConfig(**SMALL, architecture=architecture, options=ARCHITECTURES[architecture]))
    engine = make_engine(model=model, compute_dtype=dtype, max_tokens_per_microbatch=200)
    shared = make_batch(lengths=(13, 9, 12, 7, 20, 12), prompt=6, groups=[0, 0, 1, 2, 1, 0])
    if loss_on == "some of the prompts":
        mask = shared.loss_mask | (torch.arange(shared.num_tokens) % 4 > 0)
        mask[shared.cu_seqlens[:-1]] = 0
        shared = shared.with_(loss_mask=mask)
    if loss_on == "the last of each group":  # no token with a loss is another's equal, but some are not the first
        mask = torch.ones_like(shared.loss_mask)
        mask[: int(shared.cu_seqlens[3])] = 0  # sequences 3 to 5 are the last of groups 2, 1 and 0
        mask[shared.cu_seqlens[:-1]] = 0
        shared = shared.with_(loss_mask=mask)
    alone = shared.with_(group_index=torch.arange(6))
    assert lay_out(shared).packing.num_tokens == shared.num_tokens - 3 * 6
    results = []
    for batch in (shared, alone):
        output = engine.infer_batch(batch, frozenset({"entropy"}))
        engine.forward_backward(batch, weighed)
        results.append(
            (
                torch.stack([output.logprobs, output.entropy]),
                {name: weight.grad.clone() for name, weight in engine.weights.masters.items()},
            )
        )
        engine.weights.clear_gradients()
    (one, of_one), (other, of_other) = results
    torch.testing.assert_close(one, other, rtol=tolerance, atol=10 * tolerance)
    for name, grad in of_other.items():
        assert (of_one[name] - grad).norm() <= tolerance * max(float(grad.norm()), 0.01), name


def test_a_group_that_is_cut_apart_still_gives_the_same_gradient(make_engine, make_batch, losses):
    batch = make_batch(lengths=(13, 9, 12, 7, 20, 12), prompt=6, groups=[0, 0, 1, 2, 1, 0])
    engine, small = make_engine(max_tokens_per_microbatch=200), make_engine(max_tokens_per_microbatch=26)
    found = []
    for one, whole in ((engine, batch), (small, select(batch, [5, 3, 1, 4, 0, 2]))):
        one.forward_backward(whole, losses.policy)
        found.append({name: weight.grad for name, weight in one.weights.masters.items()})
    for name in found[0]:
        scale = max(float(found[0][name].abs().max()), 1e-2)
        assert float((found[0][name] - found[1][name]).abs().max()) <= 1e-6 * scale, name
