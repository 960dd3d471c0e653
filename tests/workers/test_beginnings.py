"""Sequences of a training command that begin alike, such as answers to one prompt, and those without a gradient."""

import numpy as np
import pytest
import torch

from hone.algorithms.summed_losses import LOSSES
from hone.engines.layout import lay_out
from hone.engines.settings import EngineConfig, LoraConfig
from hone.models.settings import BuildConfig, ModelConfig
from hone.workers.tenants.training import Base
from hone.workers.tenants.work import GROUP_TOKENS, LARGEST_GROUP, Datum, beginning_alike, work_of

PROMPTS = [[10, 11, 12, 20, 21, 22], [10, 11, 12, 30, 31, 32, 33]]
TINY = BuildConfig(hidden_size=32, layers=2, heads=2, mlp_size=64, max_positions=64)


def answers(loss="cross_entropy"):
    """Three answers to the first prompt and two to the second, in turns, with inputs at prompts, too."""
    draw, data = np.random.default_rng(0), []
    for number in (0, 1, 0, 1, 0):
        tokens = np.array([*PROMPTS[number], *draw.integers(8, 60, 3 + len(data))])
        inputs = {"target_tokens": np.append(tokens[1:], 5)}
        inputs |= {name: draw.normal(size=len(tokens)).astype(np.float32) for name in LOSSES[loss].needs}
        if loss == "cross_entropy":
            inputs["weights"] = draw.normal(size=len(tokens)).astype(np.float32)
        data.append(Datum(tokens, inputs))
    return data


def test_sequences_that_begin_alike_are_a_group():
    prompts = [tuple(prompt) for prompt in PROMPTS]
    assert beginning_alike([]).tolist() == []
    assert beginning_alike([(1, 2, 3, 4, 5), (1, 2, 3, 6, 7)]).tolist() == [0, 1]  # three tokens are not worth it
    assert beginning_alike([(*prompts[0], 1), (*prompts[1], 1), (*prompts[0], 2)]).tolist() == [0, 1, 0]
    nested = [(1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7, 8, 9, 1), (1, 2, 3, 4, 5, 6, 7, 8, 9, 2)]
    assert beginning_alike(nested).tolist() == [0, 1, 1]  # 9 tokens once instead of 4 tokens twice
    many = beginning_alike([(1, 2, 3, 4)] * (LARGEST_GROUP + 1))
    assert many.unique(return_counts=True)[1].max() == LARGEST_GROUP
    long = beginning_alike([(1, 2, 3, 4, *([5 + number] * (GROUP_TOKENS // 3))) for number in range(7)])
    assert long.unique(return_counts=True)[1].max() == 3  # they are in memory at once


def opened(dtype):
    model = Base(ModelConfig(build=TINY), EngineConfig(compute_dtype=dtype)).open(LoraConfig(rank=4, seed=1))
    with torch.no_grad():
        for layer in model.layers.values():
            torch.nn.init.normal_(layer.lora_B["default"].weight, std=0.1, generator=torch.Generator().manual_seed(2))
    return model


def trained(model, works):
    """Gradients of several commands."""
    model.clear_gradients()
    for one in works:
        model.forward_backward(one.batch, one.loss)
    return torch.cat([one.grad.flatten() for one in model._engine.weights.masters.values()])


@pytest.mark.parametrize("loss", ["cross_entropy", "ppo"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_they_are_computed_once_and_count_for_each_sequence(loss, dtype):
    data, settings, model = answers(loss), dict(LOSSES[loss].settings), opened(dtype)
    together, alone = work_of(loss, settings, data), [work_of(loss, settings, [one]) for one in data]
    assert len(lay_out(together.batch).take) == together.batch.num_tokens - 2 * len(PROMPTS[0]) - len(PROMPTS[1])
    found, wanted = trained(model, [together]), trained(model, alone)
    assert wanted.abs().max() > 1e-2
    near = 1e-5 if dtype == "float32" else 3e-2
    assert (found - wanted).norm() < near * wanted.norm()
    for one, other in zip(together.split(), alone, strict=True):
        np.testing.assert_allclose(one, other.split()[0], atol=10 * near)


@pytest.mark.parametrize("loss", list(LOSSES))
def test_what_has_no_gradient_costs_no_backward_and_has_its_log_probs(loss):
    data, settings, model = answers(loss), dict(LOSSES[loss].settings), opened("float32")
    if (factor := LOSSES[loss].factor) and factor in data[4].inputs:
        data[4].inputs[factor][:] = 0
    wanted = trained(model, [work_of(loss, settings, data[:4])])
    rows = []
    layer = model.layers["model.layers.0.mlp.up_proj"]
    layer.register_full_backward_hook(lambda module, inputs, outputs: rows.append(outputs[0].shape[-2]))
    work = work_of(loss, settings, data)
    found = trained(model, [work])
    if not factor:  # dro's penalty pulls at every token
        assert (found - wanted).norm() > 1e-3 * wanted.norm()
        return
    assert sum(rows) == len(lay_out(work_of(loss, settings, data[:4]).batch).take)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert (work.split()[4] < 0).all()
