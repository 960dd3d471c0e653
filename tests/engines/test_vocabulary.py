"""Scores of a vocabulary that ranks share are those of the whole one, with their gradients."""

import torch

from hone.engines.logprobs import WHOLE, Head, Queries, Reference, score_tokens
from hone.engines.vocabulary import SharedVocabulary
from tests.ranks import run_ranks

TOKENS, ROWS, WIDTH, SHARE = 11, 6, 4, 6
NEEDS = frozenset({"entropy", "sum_pi_squared"})


def _inputs():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    ids = torch.tensor([[0, 5], [6, 10], [1, 7], [5, 6], [10, 0], [2, 3]])
    return draw(ROWS, WIDTH), draw(TOKENS, WIDTH), torch.tensor([0, 5, 6, 10, 3, 7]), draw(TOKENS, WIDTH), ids


def _scored(rows, vocabulary=WHOLE):
    """All scores, and the gradients of a sum that uses each of them."""
    hidden, weight, targets, reference, ids = _inputs()
    hidden.requires_grad_()
    mine = weight[rows].clone().requires_grad_()
    queries = Queries(ids, 3, Reference(hidden.detach() + 1, Head(reference[rows])))
    found = score_tokens(
        hidden, targets, Head(mine, vocabulary=vocabulary), temperature=0.7, needs=NEEDS, queries=queries
    )
    ramp = torch.arange(1.0, ROWS + 1)
    total = (found.logprobs * ramp).sum() - (found.entropy * ramp).sum() + (found.full_kl * ramp).sum()
    (total + (found.logprobs_at * ramp[:, None]).sum()).backward()
    names = ("logprobs", "entropy", "sum_pi_squared", "logprobs_at", "full_kl", "top_k_ids", "top_k_logprobs")
    return {**{name: getattr(found, name).detach() for name in names}, "hidden": hidden.grad, "weight": mine.grad}


def share():
    rank = torch.distributed.get_rank()
    vocabulary = SharedVocabulary(torch.distributed.group.WORLD, rank, 2, SHARE)
    return _scored(slice(SHARE * rank, min(SHARE * (rank + 1), TOKENS)), vocabulary)


def test_two_ranks_score_as_one():
    whole, ranks = _scored(slice(None)), run_ranks(2, share)
    for name in set(whole) - {"hidden", "weight"}:
        for rank in ranks:
            torch.testing.assert_close(rank[name], whole[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    torch.testing.assert_close(torch.cat([rank["weight"] for rank in ranks]), whole["weight"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sum(rank["hidden"] for rank in ranks), whole["hidden"], rtol=1e-5, atol=1e-5)
