"""Objectives: what is added to what, and what they complain about."""

import math

import pytest
import torch

from hone.algorithms.objective import FULL_KL, PolicyObjective, SftObjective, ValueObjective
from hone.algorithms.settings import (
    AlgorithmConfig,
    CorrectionSettings,
    KlSettings,
    ReinforceSettings,
    ValueLossSettings,
)
from hone.types import ModelOutput


def output(lp, **more):
    return ModelOutput(logprobs=torch.tensor(lp, dtype=torch.float64, requires_grad=True), **more)


@pytest.fixture
def batch(batches):
    return batches.build([[0, 1, 1]], advantages=[0.0, 1.0, -1.0], rewards=[1.0])


def test_kl_and_entropy_are_added_to_the_policy_loss(batch, close):
    config = AlgorithmConfig(loss=ReinforceSettings(), kl=KlSettings(coef=0.5, kind="k2"), entropy_coef=0.1)
    objective = PolicyObjective(config)
    entropy = torch.tensor([7.0, 2.0, 4.0], dtype=torch.float64, requires_grad=True)
    result = objective(
        output([0, -1.0, -2.0], entropy=entropy), batch.with_(ref_logprobs=torch.tensor([0, -2.0, -2.0]).double())
    )
    # 1*1 + 0.5*0.5 - 0.1*2 = 1.05;  -1*2 + 0 - 0.1*4 = -2.4
    close(result.values, [0, 1.05, -2.4])
    close(result.metrics["train/kl_loss"], [0, 0.5, 0])
    close(result.metrics["train/entropy"], [7.0, 2.0, 4.0])
    close(torch.autograd.grad(result.values.sum(), entropy)[0], [0, -0.1, -0.1])


def test_without_old_log_probs_the_ratio_is_1_and_the_gradient_is_not_0(batch, close):
    given = output([0, -1.0, -2.0])
    result = PolicyObjective(AlgorithmConfig())(given, batch)
    close(result.values, [0, -1.0, 1.0])
    close(torch.autograd.grad(result.values.sum(), given.logprobs)[0], [0, -1.0, 1.0])


def test_one_step_is_the_same_with_or_without_old_log_probs(batch):
    results = []
    for old in (None, torch.tensor([0, -1.0, -2.0]).double()):
        given = output([0, -1.0, -2.0])
        values = PolicyObjective(AlgorithmConfig())(given, batch.with_(old_logprobs=old)).values
        results.append(torch.autograd.grad(values.sum(), given.logprobs)[0])
    assert torch.equal(*results)


def test_importance_weights_come_from_the_batch_or_from_the_forward(batch, close):
    config = AlgorithmConfig(correction=CorrectionSettings(weights="token", truncate=1.5))
    rollout = torch.tensor([0, -1.0 - math.log(2.0), -2.0 + math.log(2.0)]).double()
    result = PolicyObjective(config)(output([0, -1.0, -2.0]), batch.with_(rollout_logprobs=rollout))
    close(result.values, [0, -1.5, 0.5])  # weights min(2, 1.5) and 0.5
    given = batch.with_(rollout_logprobs=rollout, extras={"is_weights": torch.tensor([0, 3.0, 4.0]).double()})
    close(PolicyObjective(config)(output([0, -1.0, -2.0]), given).values, [0, -3.0, 4.0])


def test_the_gap_to_the_rollout_is_measured_where_old_is_the_current_policy(batch, close):
    rollout = torch.tensor([0, -1.5, -2.0]).double()
    metrics = PolicyObjective(AlgorithmConfig())(output([0, -1.0, -2.0]), batch.with_(rollout_logprobs=rollout)).metrics
    close(metrics["correction/kl"], [0, -0.5, 0])
    close(metrics["correction/k3"], [0, math.exp(0.5) - 1.5, 0])
    close(metrics["correction/mean_abs_difference"], [0, 0.5, 0])
    close(metrics["correction/chi2_token"], [0, math.e - 1, 0])
    close(metrics["correction/outside_band"], [0, 0, 0])  # 0.5 to 2
    whole = PolicyObjective(AlgorithmConfig())(output([0, -1.0, -2.0]), batch.with_(rollout_logprobs=rollout))
    assert whole.counted["correction/trainer_perplexity"].tolist() == [False, False, True]  # once per sequence
    close(whole.metrics["correction/trainer_perplexity"], [math.exp(1.5)] * 3)
    close(whole.metrics["correction/rollout_perplexity"], [math.exp(1.75)] * 3)
    close(whole.metrics["correction/log_perplexity_difference"], [-0.25] * 3)
    close(whole.metrics["correction/chi2_sequence"], [math.e - 1] * 3)
    close(whole.largest["correction/max_abs_difference"], [0, 0.5, 0])
    known = batch.with_(rollout_logprobs=rollout, old_logprobs=rollout)
    assert "correction/kl" not in PolicyObjective(AlgorithmConfig())(output([0, -1.0, -2.0]), known).metrics
    of_rollout = PolicyObjective(AlgorithmConfig(correction=CorrectionSettings(old="rollout")))
    close(of_rollout(output([0, -1.0, -2.0]), known).metrics["correction/kl"], [0, -0.5, 0])  # old says nothing of it


def test_full_kl_is_asked_of_the_engine(batch, close):
    objective = PolicyObjective(AlgorithmConfig(kl=KlSettings(kind="full", coef=2.0)))
    assert objective.needs == {"entropy", FULL_KL}
    exact = torch.tensor([9.0, 0.25, 0.5]).double()
    result = objective(output([0, -1.0, -2.0], extras={FULL_KL: exact}), batch)
    close(result.values, [0, -1.0 + 0.5, 1.0 + 1.0])
    with pytest.raises(ValueError, match="full_kl"):
        objective(output([0, -1.0, -2.0]), batch)


def test_value_loss_is_clipped_around_the_old_value(batches, close):
    batch = batches.build([[0, 1, 1, 1]], values=[9, 1.0, 1.0, 1.0], returns=[9, 2.0, 2.0, 1.1])
    values = torch.tensor([0, 1.5, 1.1, 0.0], dtype=torch.float64, requires_grad=True)
    result = ValueObjective(ValueLossSettings(clip=0.2))(ModelOutput(values=values), batch)
    # 1.5 is clipped to 1.2: 0.5 * 0.64; 1.1 is inside: 0.5 * 0.81; 0 clipped to 0.8: max(1.21, 0.09)
    close(result.values, [0, 0.32, 0.405, 0.605])
    close(result.metrics["critic/clip_fraction"], [0, 1, 0, 0])
    close(torch.autograd.grad(result.values.sum(), values)[0], [0, 0, -0.9, -1.1])


def test_value_loss_without_clip(batches, close):
    batch = batches.build([[0, 1]], returns=[9, 2.0])
    result = ValueObjective(ValueLossSettings(clip=None))(ModelOutput(values=torch.tensor([0, 5.0])), batch)
    close(result.values, [0, 4.5])


def test_sft(batch, close):
    result = SftObjective()(output([0, -1.0, -2.0]), batch)
    close(result.values, [0, 1.0, 2.0])
    close(result.metrics["train/nll"], [0, 1.0, 2.0])


@pytest.mark.parametrize(
    ("objective", "given", "missing"),
    [
        (PolicyObjective(AlgorithmConfig()), ModelOutput(), r"ModelOutput\.logprobs"),
        (PolicyObjective(AlgorithmConfig(entropy_coef=0.1)), output([0, 0, 0]), r"ModelOutput\.entropy"),
        (PolicyObjective(AlgorithmConfig(kl=KlSettings(coef=0.1))), output([0, 0, 0]), r"Batch\.ref_logprobs"),
        (PolicyObjective(AlgorithmConfig(positive_nll_coef=0.1)), output([0, 0, 0]), r"Algorithm\.weigh"),
        (
            PolicyObjective(AlgorithmConfig(correction=CorrectionSettings(weights="token"))),
            output([0, 0, 0]),
            r"Batch\.rollout_logprobs",
        ),
        (ValueObjective(ValueLossSettings()), ModelOutput(), r"ModelOutput\.values"),
        (SftObjective(), ModelOutput(), r"ModelOutput\.logprobs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_missing_field_is_named(batch, objective, given, missing):
    with pytest.raises(ValueError, match=missing):
        objective(given, batch)


def test_missing_advantages_are_named(batches):
    with pytest.raises(ValueError, match=r"Batch\.advantages"):
        PolicyObjective(AlgorithmConfig())(output([0, 0]), batches.build([[0, 1]]))
