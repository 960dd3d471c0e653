"""Distillation: the teacher as loss, as advantage and as reward, by hand."""

import math

import pytest
import torch
from pydantic import ValidationError

from hone.algorithms import DISTILLATION_LOSSES
from hone.algorithms.distillation.losses import Distillation, DistillationObjective, distillation_rewards
from hone.algorithms.distillation.settings import (
    DistillationConfig,
    ForwardTopKSettings,
    ReverseTopKSettings,
    SampledKlSettings,
)
from hone.algorithms.kl import full_kl
from hone.algorithms.objective import PolicyObjective
from hone.algorithms.settings import AlgorithmConfig, ReinforceSettings
from hone.types import ModelOutput


def test_reverse_kl_from_sampled_tokens(batches, close):
    batch = batches.build([[0, 1, 1]], extras={"teacher_logprobs": torch.tensor([9.0, -1.0, -2.0]).double()})
    lp = torch.tensor([0, -1.5, -1.0], dtype=torch.float64, requires_grad=True)
    result = DistillationObjective(SampledKlSettings(kind="k3+"))(ModelOutput(logprobs=lp), batch)
    close(result.values, [0, math.exp(0.5) - 1.5, math.exp(-1.0)])
    close(torch.autograd.grad(result.values.sum(), lp)[0], [0, -0.5, 1.0])
    close(result.metrics["train/distillation_loss"], result.values.tolist())
    close(result.metrics["train/teacher_kl"], [0, -0.5, 1.0])


def test_the_default_has_the_value_of_k1_and_the_gradient_of_k2(batches, close):
    batch = batches.build([[0, 1]], extras={"teacher_logprobs": torch.tensor([0.0, -1.0]).double()})
    lp = torch.tensor([0, -1.5], dtype=torch.float64, requires_grad=True)
    result = DistillationObjective(SampledKlSettings())(ModelOutput(logprobs=lp), batch)
    close(result.values, [0, -0.5])
    close(torch.autograd.grad(result.values.sum(), lp)[0], [0, -0.5])


def test_top_k_puts_the_rest_into_one_bin(batches, close):
    """Teacher 0.5, 0.25 (rest 0.25); student 0.25, 0.25 (rest 0.5)."""
    teacher = torch.tensor([[0.0, 0.0], [0.5, 0.25]]).double().log().clamp(min=-50)
    student = torch.tensor([[0.0, 0.0], [0.25, 0.25]]).double().log().clamp(min=-50)
    batch = batches.build([[0, 1]], extras={"teacher_top_k_logprobs": teacher})
    output = ModelOutput(extras={"logprobs_at": student})
    forward = DistillationObjective(ForwardTopKSettings())
    assert forward.needs == {"logprobs_at"}
    close(forward(output, batch).values, [0, 0.5 * math.log(2) + 0.25 * math.log(0.5)])
    reverse = DistillationObjective(ReverseTopKSettings())(output, batch)
    close(reverse.values, [0, 0.25 * math.log(0.5) + 0.5 * math.log(2)])


@pytest.mark.parametrize("name", ["forward_top_k", "reverse_top_k"])
def test_top_k_is_the_exact_kl_if_k_is_the_vocabulary_but_one(name, close):
    logits = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    student, teacher = (x.log_softmax(-1) for x in logits)
    found = DISTILLATION_LOSSES.get(name)(student[:, :3], teacher[:, :3], None)
    exact = full_kl(teacher, student) if name == "forward_top_k" else full_kl(student, teacher)
    close(found, exact.tolist(), 1e-9)
    fewer = DISTILLATION_LOSSES.get(name)(student[:, :2], teacher[:, :2], None)
    assert (fewer <= exact + 1e-12).all()
    assert (fewer >= 0).all()


@pytest.mark.parametrize("name", ["forward_top_k", "reverse_top_k"])
def test_all_of_a_distribution_within_the_top_k_leaves_finite_gradients(name):
    student = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(3, 4, dtype=torch.float64).log_softmax(-1)
    DISTILLATION_LOSSES.get(name)(student.log_softmax(-1), teacher, None).sum().backward()
    assert student.grad.isfinite().all()
    assert student.grad.abs().sum() > 0


def test_distillation_as_reward(batches, close):
    batch = batches.build(
        [[0, 1, 1]], old_logprobs=[0, -1.0, -2.0], extras={"teacher_logprobs": torch.tensor([9.0, -3.0, -1.0]).double()}
    )
    close(distillation_rewards(batch, coef=0.5), [0, -1.0, 0.5])
    close(distillation_rewards(batch.with_(token_rewards=torch.ones(3)), coef=0.5), [1.0, 0.0, 1.5])
    with pytest.raises(ValueError, match="old_logprobs"):
        distillation_rewards(batch.with_(old_logprobs=None), coef=0.5)


@pytest.fixture
def judged(batches):
    """Two answers; the student is above its teacher by 2 and below by 1 in the first, equal in the second."""
    return batches.build(
        [[0, 1, 1], [0, 1]],
        rewards=[1.0, 0.0],
        advantages=[0, 0.5, 0.5, 0, -0.5],
        old_logprobs=[0, -1.0, -2.0, 0, -1.0],
        extras={"teacher_logprobs": torch.tensor([9.0, -3.0, -1.0, 9.0, -1.0]).double()},
    )


def test_in_the_reward_the_estimator_sees_task_and_teacher(judged, close):
    part = Distillation(DistillationConfig(where="in_reward", coef=0.5, task_coef=3.0))
    assert part.needs_old_logprobs
    close(part.before_advantages(judged).token_rewards, [0, -1.0, 3.5, 0, 0])
    assert part.after_advantages(judged) is judged
    policy = PolicyObjective(AlgorithmConfig())
    assert part.objective(policy) is policy
    assert part.measure(judged)["train/teacher_kl"].value == pytest.approx(1 / 3)


def test_in_the_advantage_each_token_bears_its_own_divergence(judged, close):
    part = Distillation(DistillationConfig(where="in_advantage", coef=0.5, task_coef=2.0))
    assert part.before_advantages(judged) is judged
    close(part.after_advantages(judged).advantages, [0, 0.0, 1.5, 0, -1.0])


def test_in_the_loss_the_divergence_is_added_to_the_policys(judged, close):
    part = Distillation(DistillationConfig(coef=0.5, task_coef=2.0, loss=SampledKlSettings(kind="k2")))
    assert not part.needs_old_logprobs
    assert part.measure(judged) == {}
    batch = part.after_advantages(part.before_advantages(judged))
    close(batch.advantages, [0, 1.0, 1.0, 0, -1.0])
    assert batch.token_rewards is None
    lp = torch.tensor([0, -1.0, -2.0, 0, -1.0], dtype=torch.float64, requires_grad=True)
    result = part.objective(PolicyObjective(AlgorithmConfig(loss=ReinforceSettings())))(ModelOutput(logprobs=lp), batch)
    # -A lp = 1, 2, -1; and 0.5 k2 = 0.5 (0.5 * 4, 0.5 * 1, 0)
    close(result.values, [0, 2.0, 2.25, 0, -1.0])
    assert {"train/policy_loss", "train/distillation_loss", "train/teacher_kl"} <= set(result.metrics)


def test_the_policys_maxima_are_kept_beside_a_teacher(judged):
    part = Distillation(DistillationConfig(loss=SampledKlSettings(kind="k2")))
    rollout = torch.tensor([0, -1.5, -2.0, 0, -1.25], dtype=torch.float64)
    lp = torch.tensor([0, -1.0, -2.0, 0, -1.0], dtype=torch.float64)
    batch = part.after_advantages(judged).with_(old_logprobs=None, rollout_logprobs=rollout)
    result = part.objective(PolicyObjective(AlgorithmConfig()))(ModelOutput(logprobs=lp), batch)
    assert result.largest["correction/max_abs_difference"].tolist() == [0, 0.5, 0, 0, 0.25]


def test_the_teacher_alone_gives_the_task_no_gradient(judged):
    part = Distillation(DistillationConfig(task_coef=0.0, loss=SampledKlSettings(kind="k2")))
    lp = torch.tensor([0, -1.0, -2.0, 0, -1.0], dtype=torch.float64, requires_grad=True)
    mixed = part.objective(PolicyObjective(AlgorithmConfig()))
    grad = torch.autograd.grad(mixed(ModelOutput(logprobs=lp), part.after_advantages(judged)).values.sum(), lp)[0]
    alone = DistillationObjective(SampledKlSettings(kind="k2"))(ModelOutput(logprobs=lp), judged).values.sum()
    assert torch.equal(grad, torch.autograd.grad(alone, lp)[0])


def test_top_k_asks_the_teacher_and_the_student():
    part = Distillation(DistillationConfig(loss=ForwardTopKSettings(k=5)))
    assert part.top_k == 5
    assert part.objective(PolicyObjective(AlgorithmConfig())).needs == {"entropy", "logprobs_at"}
    assert Distillation(DistillationConfig()).top_k == 0


def test_a_missing_teacher_is_named(batches):
    with pytest.raises(ValueError, match="teacher_logprobs"):
        DistillationObjective(SampledKlSettings())(ModelOutput(logprobs=torch.zeros(2)), batches.build([[0, 1]]))
    top_k = DistillationObjective(ForwardTopKSettings())
    with pytest.raises(ValueError, match="logprobs_at"):
        top_k(ModelOutput(logprobs=torch.zeros(2)), batches.build([[0, 1]]))
    with pytest.raises(ValueError, match="teacher_top_k_logprobs"):
        top_k(ModelOutput(extras={"logprobs_at": torch.zeros(2, 5)}), batches.build([[0, 1]]))


def test_settings_that_contradict_each_other_are_refused():
    with pytest.raises(ValidationError, match="loss should be reverse_kl"):
        DistillationConfig(where="in_reward", loss=ForwardTopKSettings())
    with pytest.raises(ValidationError, match="take reverse_top_k"):
        SampledKlSettings(kind="full")


def test_every_registered_loss_is_in_these_tests():
    assert set(DISTILLATION_LOSSES) == {"reverse_kl", "forward_top_k", "reverse_top_k"}
    assert all(DISTILLATION_LOSSES.settings(name)().name == name for name in DISTILLATION_LOSSES)
