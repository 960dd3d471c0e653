"""Filters against transformers' own, the random stream, and the inverse of the distribution."""

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hone.rollout.builtin.sampling import Rules, sample, stream_of, uniforms

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def rules(rows):
    columns = {name: [{**OFF, **row}[name] for row in rows] for name in OFF}
    return Rules(
        np.array(columns["temperature"], np.float32),
        np.array(columns["top_k"], np.int64),
        np.array(columns["top_p"], np.float32),
        np.array(columns["min_p"], np.float32),
    )


def reference(logits, row):
    """log-probs of one row [V] after transformers' warpers, in the same order."""
    row = {**OFF, **row}
    warpers = [TemperatureLogitsWarper(row["temperature"])]
    warpers += [TopKLogitsWarper(row["top_k"])] if row["top_k"] else []
    warpers += [TopPLogitsWarper(row["top_p"])] if row["top_p"] < 1 else []
    warpers += [MinPLogitsWarper(row["min_p"])] if row["min_p"] else []
    scores = logits[None]
    for warper in warpers:
        scores = warper(None, scores)
    return scores.log_softmax(-1)[0]


MIXED = [
    {},
    {"temperature": 0.5},
    {"top_k": 5},
    {"top_p": 0.6},
    {"min_p": 0.2},
    {"temperature": 1.7, "top_k": 50, "top_p": 0.9, "min_p": 0.05},
    {"top_k": 1},
    {"top_p": 1e-6},
    {"min_p": 1.0},
    {"top_k": 5000},
    {"top_k": 3, "top_p": 0.5},
]


@pytest.mark.parametrize("vocabulary", [200, 3000])
def test_every_reachable_token_has_the_logprob_of_transformers_filters(vocabulary):
    """Each row has its own rules; u sweeps [0, 1), so exactly the tokens that the filters leave are drawn."""
    torch.manual_seed(0)
    logits = 2 * torch.randn(len(MIXED), vocabulary)
    expected = torch.stack([reference(row, rule) for row, rule in zip(logits, MIXED, strict=True)])
    reached = [set() for _ in MIXED]
    for u in np.linspace(0, 1, 400, endpoint=False, dtype=np.float32):
        tokens, logprobs = sample(logits.clone(), rules(MIXED), np.full(len(MIXED), u, np.float32))
        assert torch.allclose(logprobs, expected.gather(1, tokens[:, None])[:, 0], atol=1e-5)
        for row, token in enumerate(tokens.tolist()):
            reached[row].add(token)
    for row, rule in enumerate(MIXED):
        kept = set(torch.isfinite(expected[row]).nonzero()[:, 0].tolist())
        assert reached[row] <= kept, rule
        if len(kept) <= 10:
            assert reached[row] == kept, rule


def test_top_p_looks_further_when_the_likeliest_tokens_do_not_reach_it():
    logits = torch.zeros(1, 4000)  # flat: the first look at 1024 tokens holds a quarter
    logits[0, :2000] = 1.0
    tokens, logprobs = sample(logits, rules([{"top_p": 0.5}]), np.array([0.99], np.float32))
    assert tokens.item() < 2000  # ties at the edge are all kept
    assert logprobs.item() == pytest.approx(-np.log(2000), abs=1e-4)


def test_a_row_does_not_see_the_other_rows_rules():
    torch.manual_seed(1)
    logits, u = (
        torch.randn(len(MIXED), 300),
        uniforms(np.arange(len(MIXED), dtype=np.uint64), np.zeros(len(MIXED), int)),
    )
    tokens, logprobs = sample(logits.clone(), rules(MIXED), u)
    for i, rule in enumerate(MIXED):
        one, logprob = sample(logits[i : i + 1].clone(), rules([rule]), u[i : i + 1])
        assert (one.item(), logprob.item()) == (tokens[i].item(), pytest.approx(logprobs[i].item(), abs=1e-6))


def test_draws_follow_the_distribution():
    p = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
    n = 40_000
    u = uniforms(np.array([stream_of(s) for s in range(n)]), np.full(n, 3))
    tokens, _ = sample(p.log().expand(n, 5).clone(), rules([{}] * n), u)
    share = torch.bincount(tokens, minlength=5) / n
    assert torch.all((share - p).abs() < 4 * (p * (1 - p) / n).sqrt())


def test_draws_of_neighbouring_seeds_and_positions_are_independent():
    streams = np.array([stream_of(s) for s in range(300)])
    grid = np.stack([uniforms(streams, np.full(300, t)) for t in range(300)])
    assert grid.min() >= 0
    assert grid.max() < 1
    assert abs(grid.mean() - 0.5) < 4 * (1 / 12 / grid.size) ** 0.5
    for one, two in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1])):
        assert abs(np.corrcoef(one.ravel(), two.ravel())[0, 1]) < 4 / one.size**0.5
    assert len(np.unique(grid)) > 0.99 * grid.size


def test_the_stream_is_the_published_one():
    """splitmix64's first outputs for the state 0 (Vigna's reference): 0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4."""
    first = uniforms(np.zeros(2, np.uint64), np.array([0, 1]))
    assert first.tolist() == [(0xE220A8397B1DCDAF >> 40) / 2**24, (0x6E789E6AA1B965F4 >> 40) / 2**24]


@pytest.mark.parametrize("seed", [-1, 0, 2**63, 2**64 + 5, 10**30])
def test_any_integer_is_a_seed(seed):
    assert stream_of(seed) == stream_of(seed % 2**64)


def test_the_ends_of_the_unit_interval():
    logits = torch.tensor([[float("-inf"), 0.0, 0.0, float("-inf")]] * 2)
    u = np.array([0.0, 1 - 2.0**-24], np.float32)
    tokens, logprobs = sample(logits, rules([{}, {}]), u)
    assert tokens.tolist() == [1, 2]  # never a token of probability 0
    assert logprobs.tolist() == pytest.approx([-np.log(2)] * 2)


def test_greedy_rows_among_others():
    torch.manual_seed(0)
    logits = torch.randn(3, 50)
    tokens, logprobs = sample(
        logits.clone(), rules([{"temperature": 0.0, "top_k": 2}, {}, {"temperature": 0.0}]), np.full(3, 0.9, np.float32)
    )
    assert tokens[[0, 2]].tolist() == logits[[0, 2]].argmax(-1).tolist()
    assert tokens[1] != logits[1].argmax()
    assert torch.allclose(logprobs, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0], atol=1e-6)


def test_a_row_that_is_not_finite_says_so():
    logits = torch.zeros(2, 8)
    logits[1, 3] = float("nan")
    _, logprobs = sample(logits, rules([{}, {}]), np.full(2, 0.5, np.float32))
    assert torch.isfinite(logprobs).tolist() == [True, False]
