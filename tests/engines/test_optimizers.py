"""Any optimizer of torch by name: it trains, or says in one sentence why it cannot."""

import pytest
import torch

from hone.engines.optimizers import build_optimizer, gradient_norm, scale_gradients
from hone.engines.settings import OptimizerConfig

NAMES = sorted(
    name
    for name, value in vars(torch.optim).items()
    if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
)
REFUSED = {"LBFGS": "evaluates the loss several times", "SparseAdam": "wants sparse gradients", "Muon": "refuses"}


@pytest.fixture
def weights():
    return {"matrix": torch.nn.Parameter(torch.ones(3, 2)), "bias": torch.nn.Parameter(torch.ones(3))}


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_of_torch_steps_or_says_why_not(name, weights):
    config = OptimizerConfig(name=name, lr=0.1)
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]):
            build_optimizer(config, weights)
        return
    optimizer = build_optimizer(config, weights)
    for weight in weights.values():
        weight.grad = torch.ones_like(weight)
    for _ in range(2):
        optimizer.step()
    assert all((weight < 1).all() for weight in weights.values())


def test_only_matrices_decay(weights):
    optimizer = build_optimizer(OptimizerConfig(lr=0.5, weight_decay=0.1), weights)
    for weight in weights.values():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert torch.allclose(weights["matrix"], torch.full((3, 2), 0.95))  # 1 - 0.5 * 0.1
    assert torch.equal(weights["bias"], torch.ones(3))


def test_settings_reach_the_optimizer(weights):
    optimizer = build_optimizer(OptimizerConfig(betas=(0.5, 0.6), options={"eps": 1e-3}), weights)
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.6)
    assert optimizer.param_groups[1]["eps"] == 1e-3
    assert optimizer.param_groups[0]["fused"]
    assert not build_optimizer(OptimizerConfig(options={"foreach": True}), weights).param_groups[0]["fused"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "AdamV"}, "unknown optimizer 'AdamV'; did you mean 'Adam"),
        ({"options": {"epsilon": 1}}, "unknown argument of AdamW 'epsilon'; did you mean 'eps'"),
        ({"name": "SGD", "betas": (0.9, 0.99)}, "unknown argument of SGD 'betas'"),
        ({"name": "Rprop", "weight_decay": 0.1}, "Rprop has no weight decay"),
        ({"options": {"eps": -1.0}}, "AdamW refuses its arguments: Invalid epsilon value: -1.0"),
    ],
)
def test_what_an_optimizer_does_not_take_is_named(settings, message, weights):
    with pytest.raises(ValueError, match=message):
        build_optimizer(OptimizerConfig(**settings), weights)


def test_the_norm_is_over_all_gradients_together(weights):
    assert gradient_norm(weights) == 0.0
    weights["matrix"].grad = torch.tensor([[3.0, 0], [0, 0], [0, 0]])
    weights["bias"].grad = torch.tensor([0, 4.0, 0])
    assert gradient_norm(weights) == 5.0
    scale_gradients(weights, 0.5)
    assert weights["bias"].grad[1] == 2.0
