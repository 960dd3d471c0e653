"""The gradient does not depend on how an optimizer step was cut, packed or spread: every loss, every mode."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.algorithms import POLICY_LOSSES
from hone.algorithms.algorithm import Algorithm
from hone.algorithms.settings import AggregationSettings, AlgorithmConfig, CorrectionSettings, KlSettings
from hone.types import ModelOutput

MODES = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "token_sum")
LOSSES = tuple(POLICY_LOSSES)


def algorithm(loss, mode, **more):
    """Everything on: KL in the loss, entropy bonus, NLL of rewarded trajectories, sequence-level weights."""
    return Algorithm(
        AlgorithmConfig(
            loss=POLICY_LOSSES.settings(loss)(),
            aggregation=AggregationSettings(mode=mode, norm_tokens=7 if mode == "seq_mean_token_sum_norm" else None),
            kl=KlSettings(coef=0.1, kind="k3+"),
            entropy_coef=0.01,
            positive_nll_coef=0.1,
            correction=CorrectionSettings(weights="sequence", truncate=2.0),
            **more,
        ),
        steps_per_batch=2,
    )


@st.composite
def steps(draw, batches):
    """A mini-batch and the model's outputs on it, as leaves: (batch, log-probs, entropy)."""
    masks = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=7))
    masks = [[0, *mask] for mask in masks]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    tokens = sum(map(len, masks))

    def normal(size=tokens, scale=1.0):
        return scale * torch.randn(size, generator=generator, dtype=torch.float64)

    old = -normal().abs()
    batch = batches.build(
        masks,
        groups=[draw(st.integers(0, 2)) for _ in masks],
        rewards=[float(draw(st.integers(0, 1))) for _ in masks],
        old_logprobs=old,
        ref_logprobs=old + normal(scale=0.3),
        rollout_logprobs=old + normal(scale=0.1),
        advantages=normal(scale=2.0),
        entropy=normal().abs(),
    )
    return batch, old + normal(scale=0.3), normal().abs()


def gradients(model, objective, batch, parts, batches):
    """Gradient of sum(values * loss_weights), accumulated over parts of the weighed mini-batch."""
    leaves = [tensor.clone().requires_grad_() for tensor in model]
    total = 0.0
    for rows in parts:
        at = batches.positions(batch, rows)
        micro = batches.take(batch, rows)
        output = ModelOutput(logprobs=leaves[0][at], entropy=leaves[1][at])
        loss = (objective(output, micro).values * micro.loss_weights).sum()
        loss.backward()
        total += loss.item()
    return total, [leaf.grad for leaf in leaves]


def cut(rows, sizes):
    """The rows in consecutive parts of the given sizes (repeated), none empty."""
    rows, parts = list(rows), []
    for size in itertools.cycle(sizes):
        if not rows:
            return parts
        parts.append(rows[:size])
        rows = rows[size:]
    return parts


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_is_the_same_for_any_cut_and_any_order(batches, loss, mode):
    part = algorithm(loss, mode)
    objective = part.policy_objective()

    @settings(max_examples=6, deadline=None, database=None, derandomize=True)
    @given(step=steps(batches), data=st.data())
    def check(step, data):
        batch, *model = step
        rows = list(range(batch.num_sequences))
        expected, reference = gradients(model, objective, part.weigh(batch), [rows], batches)

        order = data.draw(st.permutations(rows))
        sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
        at = batches.positions(batch, order)
        shuffled = part.weigh(batches.take(batch, order))
        found, others = gradients([x[at] for x in model], objective, shuffled, cut(rows, sizes), batches)

        assert found == pytest.approx(expected, abs=1e-10)
        for one, other in zip(reference, others, strict=True):
            torch.testing.assert_close(other, one[at], atol=1e-10, rtol=0)

    check()


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_is_the_same_on_two_ranks(batches, mode):
    """Each rank weighs its own sequences with the counts of both."""
    part = algorithm("ppo", mode)
    generator = torch.Generator().manual_seed(1)
    masks = [[0, 1, 1, 0, 1], [0, 1], [0, 0], [0, 1, 1]]
    old = -torch.rand(12, generator=generator, dtype=torch.float64)
    batch = batches.build(
        masks,
        rewards=[1.0, 0.0, 1.0, 1.0],
        old_logprobs=old,
        ref_logprobs=old - 0.2,
        rollout_logprobs=old + 0.1,
        advantages=torch.randn(12, generator=generator, dtype=torch.float64),
    )
    weighed = part.weigh(batch)
    ranks = [batches.take(batch, [0, 2]), batches.take(batch, [1, 3])]
    total = part.counts(ranks[0]) + part.counts(ranks[1])
    parts, order = [part.weigh(rank, total) for rank in ranks], batches.positions(batch, [0, 2, 1, 3])
    assert torch.equal(torch.cat([one.loss_weights for one in parts]), weighed.loss_weights[order])
    assert torch.equal(torch.cat([one.extras["positive_nll"] for one in parts]), weighed.extras["positive_nll"][order])


@pytest.mark.parametrize("mode", MODES)
def test_padding_with_sequences_without_loss_tokens_changes_nothing(batches, mode):
    part = algorithm("gspo", mode)
    batch = batches.build([[0, 1, 1], [0, 0, 0, 0], [0, 1]], rewards=[1.0, 1.0, 0.0])
    batch = dataclasses.replace(batch, advantages=torch.ones(9), old_logprobs=torch.zeros(9))
    without = part.weigh(batches.take(batch, [0, 2])).loss_weights
    with_padding = part.weigh(batch).loss_weights
    assert torch.equal(with_padding[batches.positions(batch, [0, 2])], without)
    assert (with_padding[3:7] == 0).all()
