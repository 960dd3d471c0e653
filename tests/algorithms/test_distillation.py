"""Distillation: the teacher as loss and as reward, by hand."""

import math

import pytest
import torch

from hone.algorithms import DISTILLATION_LOSSES
from hone.algorithms.distillation import DistillationObjective, choose_teacher, distillation_rewards
from hone.algorithms.distillation_settings import ForwardTopKSettings, ReverseTopKSettings, SampledKlSettings
from hone.algorithms.kl import full_kl
from hone.types import ModelOutput


def test_reverse_kl_from_sampled_tokens(batches, close):
    batch = batches.build([[0, 1, 1]], extras={"teacher_logprobs": torch.tensor([9.0, -1.0, -2.0]).double()})
    lp = torch.tensor([0, -1.5, -1.0], dtype=torch.float64, requires_grad=True)
    result = DistillationObjective(SampledKlSettings(kind="k3+"))(ModelOutput(logprobs=lp), batch)
    close(result.values, [0, math.exp(0.5) - 1.5, math.exp(-1.0)])
    close(torch.autograd.grad(result.values.sum(), lp)[0], [0, -0.5, 1.0])
    close(result.metrics["train/teacher_kl"], result.values.tolist())


def test_top_k_puts_the_rest_into_one_bin(batches, close):
    """Teacher 0.5, 0.25 (rest 0.25); student 0.25, 0.25 (rest 0.5)."""
    teacher = torch.tensor([[0.0, 0.0], [0.5, 0.25]]).double().log().clamp(min=-50)
    student = torch.tensor([[0.0, 0.0], [0.25, 0.25]]).double().log().clamp(min=-50)
    batch = batches.build([[0, 1]], extras={"teacher_logprobs": teacher})
    output = ModelOutput(extras={"top_k_logprobs": student})
    forward = DistillationObjective(ForwardTopKSettings())
    assert forward.needs == {"top_k_logprobs"}
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


def test_each_sequence_has_its_own_teacher(close):
    logprobs = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]])
    cu_seqlens = torch.tensor([0, 1, 3])
    close(choose_teacher(logprobs, torch.tensor([1, 0]), cu_seqlens), [-4.0, -2.0, -3.0])
    with pytest.raises(ValueError, match="teacher 2, and there are 2"):
        choose_teacher(logprobs, torch.tensor([2, 0]), cu_seqlens)


def test_distillation_as_reward(batches, close):
    batch = batches.build(
        [[0, 1, 1]], old_logprobs=[0, -1.0, -2.0], extras={"teacher_logprobs": torch.tensor([9.0, -3.0, -1.0])}
    )
    close(distillation_rewards(batch, coef=0.5), [0, -1.0, 0.5])
    close(distillation_rewards(batch.with_(token_rewards=torch.ones(3)), coef=0.5), [1.0, 0.0, 1.5])
    with pytest.raises(ValueError, match="old_logprobs"):
        distillation_rewards(batch.with_(old_logprobs=None), coef=0.5)


def test_a_missing_teacher_is_named(batches):
    with pytest.raises(ValueError, match="teacher_logprobs"):
        DistillationObjective(SampledKlSettings())(ModelOutput(logprobs=torch.zeros(2)), batches.build([[0, 1]]))


def test_every_registered_loss_is_in_these_tests():
    assert set(DISTILLATION_LOSSES) == {"reverse_kl", "forward_top_k", "reverse_top_k"}
    assert all(DISTILLATION_LOSSES.settings(name)().name == name for name in DISTILLATION_LOSSES)
