"""Optimizers of `torch.optim` by name, gradient clipping, and the refusal of non-finite gradients."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hone.engines.settings import OptimizerConfig
from hone.registry import unknown

# They exist in torch.optim, but not for an engine that gives each step one dense gradient per weight.
_UNSUITABLE = {
    "LBFGS": "evaluates the loss several times in one step",
    "SparseAdam": "wants sparse gradients",
}


# They do not work element by element, so an update of a part is not a part of the update.
_WHOLE = {
    "Adafactor": "takes means over the rows and columns of a whole matrix",
    "Muon": "orthogonalises a whole matrix",
}


def build_optimizer(config: OptimizerConfig, weights: dict[str, Tensor], in_parts: bool = False) -> Optimizer:
    """The optimizer over named weights: matrices with weight decay, vectors (biases, norms) without.

    `in_parts`: the weights are this rank's parts of larger ones. Raises ValueError naming the key for an unknown
    optimizer, one that cannot work on parts, an argument that it does not have or a value that it does not take.
    """
    cls = _find(config.name)
    if in_parts and config.name in _WHOLE:
        raise ValueError(
            f"engine.optimizer.name: {config.name} {_WHOLE[config.name]}, and each rank has a part of it; choose AdamW"
        )
    known = inspect.signature(cls).parameters
    arguments: dict[str, Any] = {"lr": config.lr, **config.options}
    if config.betas is not None:
        arguments["betas"] = config.betas
    for name in arguments:
        if name not in known:
            listed = [option for option in known if option not in ("params", "lr", "weight_decay")]
            raise ValueError("engine.optimizer.options: " + unknown(f"argument of {cls.__name__}", name, listed))
    if config.weight_decay and "weight_decay" not in known:
        raise ValueError(f"engine.optimizer.weight_decay={config.weight_decay}: {cls.__name__} has no weight decay")
    if "fused" in known and not {"fused", "foreach"} & set(arguments) and _fused_works(weights):
        arguments["fused"] = True
    matrices = [w for w in weights.values() if w.dim() >= 2]
    vectors = [w for w in weights.values() if w.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors}]
    if "weight_decay" in known:
        groups[0]["weight_decay"], groups[1]["weight_decay"] = config.weight_decay, 0.0
    try:
        optimizer: Optimizer = cls([group for group in groups if group["params"]], **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"engine.optimizer: {cls.__name__} refuses its arguments: {error}") from error
    return optimizer


def _find(name: str) -> type[Optimizer]:
    classes = {
        key: value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    if name in _UNSUITABLE:
        raise ValueError(f"engine.optimizer.name: {name} {_UNSUITABLE[name]}; choose another")
    if name not in classes:
        raise ValueError(
            "engine.optimizer.name: " + unknown("optimizer", name, sorted(set(classes) - set(_UNSUITABLE)))
        )
    return classes[name]


def _fused_works(weights: dict[str, Tensor]) -> bool:
    return all(w.is_floating_point() and w.device.type in ("cpu", "cuda") for w in weights.values())


def gradient_norm(weights: dict[str, Tensor]) -> float:
    """The 2-norm of all gradients together, accumulated in float32 at least; 0 if there are none."""
    grads = [w.grad for w in weights.values() if w.grad is not None]
    return float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0


def scale_gradients(weights: dict[str, Tensor], factor: float) -> None:
    torch._foreach_mul_([w.grad for w in weights.values() if w.grad is not None], factor)
