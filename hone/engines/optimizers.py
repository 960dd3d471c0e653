"""The update: learning-rate schedule, gradient clipping, the optimizer, and skipped non-finite steps."""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hone.engines.base import MemoryNeeds, Ranks
from hone.engines.decay import is_decayed
from hone.engines.parts import Weights
from hone.engines.registry import SCHEDULES
from hone.engines.settings import CosineConfig, EngineConfig, LinearConfig, OptimizerConfig, ScheduleConfig, WsdConfig
from hone.platforms.base import current_platform
from hone.registry import unknown
from hone.types import Metric, Metrics

# They exist in torch.optim, but not for an engine that gives each step one dense gradient per weight.
_UNSUITABLE = {
    "LBFGS": "evaluates the loss several times in one step",
    "SparseAdam": "needs sparse gradients",
}

# They do not work element by element, so an update of a part is not a part of the update.
_WHOLE = {
    "Adafactor": "takes means over the rows and columns of a whole matrix",
    "Muon": "orthogonalises a whole matrix",
}

# Of bitsandbytes. The state of a weight, or of a rank's part of one, with at least 4096 values is 8-bit codes and a
# float32 scale per 256 codes.
EIGHT_BIT = ("AdEMAMix8bit", "Adam8bit", "AdamW8bit", "Lion8bit")
PROBED = 256  # rows and columns of the matrix whose optimizer state is measured: 8-bit states have blocks of 256


class Update:
    """The optimizer steps of one engine."""

    optimizer: Optimizer

    def __init__(self, config: EngineConfig, total_steps: int, in_parts: bool, in_buffers: bool = False) -> None:
        """`in_parts`: each rank holds parts of the weights; `in_buffers`: parts that are slices of larger buffers.

        Raises ValueError naming the key of a wrong setting.
        """
        self._config = config.optimizer
        if in_buffers and self._config.name in EIGHT_BIT:
            raise ValueError(
                f"{self._config.key_of('name')}: {self._config.name} needs weights that are tensors of their own, and "
                "this backend has slices of buffers; choose AdamW, or the backend fsdp2"
            )
        self._in_buffers = in_buffers  # which have the gradients, too
        self._in_parts = in_parts or in_buffers
        self._max_norm = config.max_grad_norm
        self.schedule = Schedule(config.schedule, total_steps)
        trial = {"trial": nn.Parameter(torch.zeros(1, 1))}
        build_optimizer(
            self._config, trial, self._in_parts
        )  # so that a wrong setting is found before a model is loaded

    def start(self, weights: Weights) -> None:
        """Make the optimizer of an engine's weights."""
        self.optimizer = build_optimizer(self._config, weights.masters, self._in_parts)
        self.apply_schedule()

    def memory_needs(self, weights: Weights) -> MemoryNeeds:
        """Return the memory that the first step adds: gradients, and state that it keeps."""
        gradients = 0 if self._in_buffers else sum(one.nbytes for one in weights.masters.values())
        return MemoryNeeds(0 if self.optimizer.state else self._state_bytes(weights), gradients)

    def _state_bytes(self, weights: Weights) -> int:
        """Bytes of the state of this rank's weights, extrapolated from that of a small matrix."""
        masters = [one for one in weights.masters.values() if one.numel()]
        dtype = masters[0].dtype if masters else torch.float32
        trial = nn.Parameter(torch.zeros(PROBED, PROBED, dtype=dtype))
        trial.grad = torch.ones_like(trial)
        optimizer = build_optimizer(self._config, {"trial": trial}, self._in_parts)
        optimizer.step()
        state = optimizer.state[trial].values()
        kept = sum(one.nbytes for one in state if isinstance(one, Tensor) and one.dim())
        return round(sum(one.numel() for one in masters) * kept / trial.numel())

    def step(self, weights: Weights, ranks: Ranks) -> Metrics:
        """Clip and step; if the gradient norm is not finite, leave weights and optimizer as they are."""
        weights.settle()
        norm = weights.gradient_norm()
        finite = math.isfinite(norm)
        if finite:
            if self._max_norm is not None and norm > self._max_norm:
                _scale_gradients(weights.masters, self._max_norm / norm)
            self.optimizer.step()
            weights.publish()
        weights.clear_gradients()
        skipped = not finite and ranks.data_parallel_rank == 0  # counted once: the metrics of ranks are added up
        metrics = {"train/lr": Metric.mean(self._lr), "train/skipped_steps": Metric.sum(float(skipped))}
        return metrics | ({"train/grad_norm": Metric.mean(norm)} if finite else {})

    def move(self, device: str) -> None:
        """Move the optimizer's state of each weight.

        Counters stay where the optimizer made them. A fused optimizer needs its counters on the device where it
        computes, and a checkpoint may have been read while the weights were elsewhere.
        """
        fused = any(group.get("fused") for group in self.optimizer.param_groups) and device != "cpu"
        for state in self.optimizer.state.values():
            state |= {k: v.to(device) for k, v in state.items() if isinstance(v, Tensor) and (v.dim() or fused)}

    def advance(self) -> None:
        """Go on to the learning rate of the next step."""
        self.schedule.step_count += 1
        self.apply_schedule()

    def apply_schedule(self) -> None:
        """Set the optimizer's learning rate to the schedule's value at the current step."""
        self._lr = self._config.lr * self.schedule.factor(self.schedule.step_count)
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr


Shape = Callable[[int], float]
"""The factor of an optimizer step after the warm-up, counted from 0 at the begin of the run."""


class Schedule:
    """The learning rate of each optimizer step, as a factor of the peak, and the number of the current step.

    Warm-up rises linearly: step s (from 0) of w has factor (s + 1) / w, so the first step already learns. After it,
    with x from 0 (first step after the warm-up) to 1 (last step of the run):
    constant 1; linear 1 - x (1 - min); cosine min + (1 - min) (1 + cos pi x) / 2; wsd 1, and over the last
    `decay_fraction` of all steps linearly down to min. Steps beyond `total_steps` keep the last factor.
    """

    def __init__(self, config: ScheduleConfig, total_steps: int) -> None:
        """Raises ValueError if the warm-up leaves no step for the rest."""
        self.step_count = 0
        self._warmup = config.warmup(total_steps)
        self._shape: Shape = SCHEDULES.get(config.name)(config, self._warmup, total_steps)

    def factor(self, step: int) -> float:
        """The factor of optimizer step `step`, counted from 0."""
        return (step + 1) / self._warmup if step < self._warmup else self._shape(step)


def constant(config: ScheduleConfig, warmup: int, total: int) -> Shape:
    """The learning rate stays at its peak."""
    return lambda step: 1.0


def linear(config: LinearConfig, warmup: int, total: int) -> Shape:
    """The learning rate falls on a line to `min_ratio` times its peak."""
    least = config.min_ratio
    return lambda step: 1 - _progress(step, warmup, total) * (1 - least)


def cosine(config: CosineConfig, warmup: int, total: int) -> Shape:
    """The learning rate falls on half a cosine to `min_ratio` times its peak."""
    least = config.min_ratio
    return lambda step: least + (1 - least) * (1 + math.cos(math.pi * _progress(step, warmup, total))) / 2


def wsd(config: WsdConfig, warmup: int, total: int) -> Shape:
    """The learning rate stays at its peak, and falls on a line at the end of the run."""
    return linear(config, max(total - 1 - config.decay(warmup, total), 0), total)


def _progress(step: int, start: int, total: int) -> float:
    return min(max(step - start, 0) / max(total - 1 - start, 1), 1.0)


def build_optimizer(config: OptimizerConfig, weights: Mapping[str, Tensor], in_parts: bool = False) -> Optimizer:
    """Make the optimizer of named weights: those that `is_decayed` names with weight decay, the others without.

    `in_parts`: the weights are this rank's parts of larger ones. Raises ValueError naming the key for an unknown
    optimizer, one that does not work on parts, or an argument or value that it does not take.
    """
    cls = _find(config.name, config.key_of("name"))
    if in_parts and config.name in _WHOLE:
        raise ValueError(
            f"{config.key_of('name')}: {config.name} {_WHOLE[config.name]}, and each rank holds a part; choose AdamW"
        )
    if config.name in EIGHT_BIT:
        _check_eight_bit(config, weights, in_parts)
        weights = {name: weight for name, weight in weights.items() if weight.numel()}  # a rank may hold no rows
    known = inspect.signature(cls).parameters
    arguments: dict[str, Any] = {"lr": config.lr, **config.options}
    if config.betas is not None:
        arguments["betas"] = config.betas
    for name in arguments:
        if name not in known:
            listed = [option for option in known if option not in ("params", "lr", "weight_decay")]
            raise ValueError(f"{config.key_of('options')}: " + unknown(f"argument of {cls.__name__}", name, listed))
    if config.weight_decay and "weight_decay" not in known:
        key = config.key_of("weight_decay")
        raise ValueError(f"{key}={config.weight_decay}: {cls.__name__} has no weight decay")
    if "fused" in known and not {"fused", "foreach"} & set(arguments) and _fused_works(weights):
        arguments["fused"] = True
    decayed = [w for name, w in weights.items() if is_decayed(name, w)]
    others = [w for name, w in weights.items() if not is_decayed(name, w)]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": others}]
    if "weight_decay" in known:
        groups[0]["weight_decay"], groups[1]["weight_decay"] = config.weight_decay, 0.0
    try:
        optimizer: Optimizer = cls([group for group in groups if group["params"]], **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{config.key_of('options')}: {cls.__name__} refuses its arguments: {error}") from error
    return optimizer


def _find(name: str, key: str) -> type[Optimizer]:
    classes = {
        key: value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    if name in _UNSUITABLE:
        raise ValueError(f"{key}: {name} {_UNSUITABLE[name]}; choose another")
    if name in EIGHT_BIT:
        return _find_eight_bit(name, key)
    if name not in classes:
        known = sorted({*classes, *EIGHT_BIT} - set(_UNSUITABLE))
        raise ValueError(f"{key}: " + unknown("optimizer", name, known))
    return classes[name]


def _check_eight_bit(config: OptimizerConfig, weights: Mapping[str, Tensor], in_parts: bool) -> None:
    if in_parts and config.options.get("max_unorm"):
        key = config.key_of("options")
        raise ValueError(f"{key}: max_unorm needs the norm of a whole weight, and each rank holds a part; remove it")
    for name, weight in weights.items():
        if not weight.is_contiguous():  # bitsandbytes would update a copy
            raise ValueError(
                f"{config.key_of('name')}: {config.name} needs contiguous weights, and {name} is not; choose AdamW"
            )


def quantises(optimizer: Optimizer) -> bool:
    """Return whether an optimizer keeps its state in blocks of 8-bit codes."""
    return type(optimizer).__name__ in EIGHT_BIT


def _find_eight_bit(name: str, key: str) -> type[Optimizer]:
    try:
        found: type[Optimizer] = getattr(importlib.import_module("bitsandbytes").optim, name)
    except ImportError as error:
        raise ValueError(f"{key}: {name} needs the package bitsandbytes: pip install 'bitsandbytes>=0.50'") from error
    return found


def _fused_works(weights: Mapping[str, Tensor]) -> bool:
    platform = current_platform()
    kinds = {"cpu", platform.device} if platform.fused_optimizers else {"cpu"}
    return all(w.is_floating_point() and w.device.type in kinds for w in weights.values())


def _scale_gradients(weights: dict[str, Tensor], factor: float) -> None:
    torch._foreach_mul_([w.grad for w in weights.values() if w.grad is not None], factor)
