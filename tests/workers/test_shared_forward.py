"""Commands of several adapters in one forward: each model gets the same gradients as when it trains alone."""

import numpy as np
import pytest
import torch

from hone.algorithms.summed_losses import LOSSES
from hone.engines.settings import EngineConfig, LoraConfig
from hone.models.errors import ModelError
from hone.models.settings import BuildConfig, ModelConfig
from hone.workers.tenants.shared_forward import SharedForward
from hone.workers.tenants.training import Base
from hone.workers.tenants.work import Datum, work_of

TINY = {"hidden_size": 32, "layers": 2, "heads": 2, "mlp_size": 64, "max_positions": 64}
ADAPTERS = [
    LoraConfig(rank=4, seed=1),
    LoraConfig(rank=16, seed=2),
    LoraConfig(rank=8, seed=3, targets=("mlp",)),
]


def base(dtype, **build):
    return Base(ModelConfig(build=BuildConfig(**{**TINY, **build})), EngineConfig(compute_dtype=dtype))


def work(seed, loss="cross_entropy", lengths=(7, 4, 7), targets=None):
    """Data of one command; all sequences of all commands begin alike, as prompts do."""
    draw = np.random.default_rng(seed)
    data = []
    for length in lengths:
        tokens = np.concatenate([np.arange(10, 14), draw.integers(8, 60, length)])
        following = np.append(tokens[1:], draw.integers(8, 60))
        inputs = {"target_tokens": following if targets is None else draw.integers(8, 60, (len(tokens), targets))}
        for name in LOSSES[loss].needs:
            inputs[name] = draw.normal(size=len(tokens)).astype(np.float32)
        data.append(Datum(tokens, inputs))
    return work_of(loss, dict(LOSSES[loss].settings), data)


def learnt(model):
    """Move B away from zero, where the gradient of A is zero."""
    generator = torch.Generator().manual_seed(model.layers["model.layers.0.mlp.up_proj"].r["default"])
    with torch.no_grad():
        for layer in model.layers.values():
            weight = layer.lora_B["default"].weight
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    return model


def gradients(model):
    masters = model._engine.weights.masters
    return torch.cat([one.grad.double().flatten() for one in masters.values()])


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling"])
def test_each_model_has_the_gradients_of_training_alone(loss):
    tiny = base("float64")
    shared = SharedForward(tiny)
    models = [learnt(tiny.open(lora)) for lora in ADAPTERS]
    alone, together = ([work(seed, loss) for seed in range(3)] for _ in range(2))
    for model, one in zip(models, alone, strict=True):
        model.forward_backward(one.batch, one.loss)
    wanted = [gradients(model) for model in models]
    for model in models:
        model.clear_gradients()
    assert shared.train(list(zip(models, together, strict=True))) == [3, 3, 3]
    for model, one, first, expected in zip(models, together, alone, wanted, strict=True):
        assert expected.abs().max() > 1e-3
        torch.testing.assert_close(gradients(model), expected, rtol=1e-9, atol=1e-12)
        assert one.loss.sum == pytest.approx(first.loss.sum, rel=1e-6)  # log-probs are kept in float32
        for found, kept in zip(one.split(), first.split(), strict=True):
            np.testing.assert_allclose(found, kept, rtol=1e-6)


def test_in_bfloat16_the_difference_is_that_of_rounding():
    exact, rounded = base("float32"), base("bfloat16")
    wanted, alone = [], []
    for lora, seed in zip(ADAPTERS, range(3), strict=True):
        for tiny, found in ((exact, wanted), (rounded, alone)):
            model, one = learnt(tiny.open(lora)), work(seed)
            model.forward_backward(one.batch, one.loss)
            found.append(gradients(model))
    models = [learnt(rounded.open(lora)) for lora in ADAPTERS]
    SharedForward(rounded).train([(model, work(seed)) for seed, model in enumerate(models)])
    together = [gradients(model) for model in models]
    for truth, one, other in zip(wanted, alone, together, strict=True):
        error, mine = ((found - truth).norm() / truth.norm() for found in (one, other))
        assert 0 < mine < 2 * error < 0.2


def test_gradients_add_up_and_a_model_without_commands_gets_none():
    tiny = base("float64")
    shared, models = SharedForward(tiny), [learnt(tiny.open(lora)) for lora in ADAPTERS]
    shared.train([(models[0], work(0)), (models[1], work(1))])
    once = gradients(models[0])
    shared.train([(models[1], work(1)), (models[0], work(0))])
    torch.testing.assert_close(gradients(models[0]), 2 * once, rtol=1e-9, atol=1e-12)
    assert all(one.grad is None for one in models[2]._engine.weights.masters.values())


def test_losses_that_need_other_things_of_a_forward_do_not_share_it():
    tiny = base("float64")
    shared, models = SharedForward(tiny), [learnt(tiny.open(lora)) for lora in ADAPTERS]
    works = [work(0), work(1, targets=3), work(2, loss="importance_sampling")]
    assert shared.train(list(zip(models, works, strict=True))) == [2, 1, 2]
    other = learnt(tiny.open(ADAPTERS[1]))
    alone = work(1, targets=3)
    other.forward_backward(alone.batch, alone.loss)
    assert torch.equal(gradients(models[1]), gradients(other))


def test_layers_of_gpt2_take_part():
    tiny = base("float64", architecture="gpt2")
    shared, models = SharedForward(tiny), [tiny.open(LoraConfig(rank=rank, seed=rank)) for rank in (2, 4)]
    wanted = []
    for seed, model in enumerate(models):
        one = work(seed)
        model.forward_backward(one.batch, one.loss)
        wanted.append(gradients(model))
        model.clear_gradients()
    assert shared.train([(model, work(seed)) for seed, model in enumerate(models)]) == [2, 2]
    for model, expected in zip(models, wanted, strict=True):
        torch.testing.assert_close(gradients(model), expected, rtol=1e-9, atol=1e-12)


def test_dropout_is_refused():
    tiny = ModelConfig(build=BuildConfig(**TINY), use={"dropout": 0.5})
    with pytest.raises(ModelError, match=r"training\.share_forwards: model\.use\.dropout"):
        SharedForward(Base(tiny, EngineConfig(compute_dtype="float32")))


def test_a_mixture_of_experts_is_refused():
    with pytest.raises(ModelError, match=r"training\.share_forwards: .* mixture of experts"):
        SharedForward(base("float32", architecture="qwen3_moe", options={"num_experts": 4, "num_experts_per_tok": 2}))
