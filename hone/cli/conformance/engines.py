"""Section `engines`: the training engine on the device against the same engine on the CPU."""

from __future__ import annotations

import time
from typing import Any, Literal

import torch
from torch import Tensor

from hone.cli.conformance.record import Recorder, require
from hone.data.packing import Sample, pack_samples
from hone.engines.base import BaseEngine
from hone.engines.registry import EngineRegistry
from hone.engines.settings import EngineConfig, OptimizerConfig
from hone.models.settings import BuildConfig, ModelConfig
from hone.platforms.base import current_platform
from hone.types import Batch, LossOutput, ModelOutput
from hone.workers.train import TrainSpec

BACKEND = "fsdp2"  # the only one that needs no launcher and no further package
SIZES: dict[str, Any] = {"hidden_size": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp_size": 48, "max_positions": 64}
LENGTHS = (9, 5, 12, 5, 20, 7, 13)  # ragged: four micro-batches of at most `CAP` tokens
CAP = 24
STEPS = 2
TOLERANCE = 1e-3  # of log-probs and losses in float32; kernels add in other orders
WEIGHT_TOLERANCE = 1e-3  # a third of a learning rate


def engines(record: Recorder) -> None:
    """Log-probs, two optimizer steps, masters of a bfloat16 model, and offloading."""
    platform = current_platform()
    device = platform.device
    made: dict[str, BaseEngine] = {}
    with record.check(f"{BACKEND}: build a model in float32") as figures:
        made = {where: _engine(where) for where in ("cpu", device)}
        figures["class"] = type(made[device]).__name__
    if not made:
        return
    with record.check(f"{BACKEND}: log-probs equal the CPU's") as figures:
        ours, theirs = (made[where].infer_batch(_batch(0)).logprobs for where in (device, "cpu"))
        figures["error"] = _gap(ours, theirs, TOLERANCE)
    with record.check(f"{BACKEND}: losses and weights of {STEPS} steps equal the CPU's") as figures:
        losses = {}
        for where, engine in made.items():
            started = time.perf_counter()
            losses[where] = [engine.train_batch(_batch(n), _likelihood)["train/loss"].value for n in range(STEPS)]
            figures[f"seconds on {where}"] = round(time.perf_counter() - started, 3)
        figures["loss error"] = _gap(torch.tensor(losses[device]), torch.tensor(losses["cpu"]), TOLERANCE)
        weights = {where: dict(engine.get_per_tensor_param()[0]) for where, engine in made.items()}
        gaps = [_gap(weights[device][name], weights["cpu"][name], WEIGHT_TOLERANCE) for name in weights["cpu"]]
        figures["weight error"] = max(gaps)
    if "bfloat16" in platform.dtypes:
        with record.check(f"{BACKEND}: a step in bfloat16 moves every float32 weight"):
            _moves(_engine(device, "bfloat16"))
    with record.check(f"{BACKEND}: to the CPU and back (offloading)") as figures:
        before = made[device].infer_batch(_batch(0)).logprobs
        made[device].to("cpu", model=True, optimizer=True, grad=True)
        platform.empty_cache()
        made[device].to(device, model=True, optimizer=True, grad=True)
        figures["error"] = _gap(made[device].infer_batch(_batch(0)).logprobs, before, 1e-6)


def _engine(device: str, compute: Literal["float32", "bfloat16"] = "float32") -> BaseEngine:
    platform = current_platform()
    settings: Any = EngineRegistry.backends.settings(BACKEND)
    config = EngineConfig(
        compute_dtype=compute,
        max_tokens_per_microbatch=CAP,
        optimizer=OptimizerConfig(lr=3e-3, options={"eps": 1e-4}),  # so that rounding noise moves no weight
        backend=settings(),
    )
    cls: Any = EngineRegistry.find("language_model", BACKEND, device, platform.vendor)
    engine: BaseEngine = cls(TrainSpec(ModelConfig(build=BuildConfig(**SIZES)), config, total_steps=100), device)
    engine.initialize()
    return engine


def _batch(seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(8, 104, (length,), generator=generator).tolist() for length in LENGTHS]
    batch = pack_samples([Sample(tuple(row), (0, 0) + (1,) * (len(row) - 2)) for row in rows])
    return batch.with_(loss_weights=torch.full((batch.num_tokens,), 1 / int(batch.loss_mask.sum())))


def _likelihood(output: ModelOutput, batch: Batch) -> LossOutput:
    assert output.logprobs is not None
    return LossOutput(-output.logprobs)


def _moves(engine: BaseEngine) -> None:
    before = {name: weight.detach().cpu().clone() for name, weight in engine.get_per_tensor_param()[0]}
    engine.train_batch(_batch(0), _likelihood)
    still = [
        name for name, after in engine.get_per_tensor_param()[0] if torch.equal(after.detach().cpu(), before[name])
    ]
    require(not still, f"no value changed of {', '.join(still[:3])}")


def _gap(found: Tensor | None, expected: Tensor | None, tolerance: float) -> float:
    """The largest difference. Raises RuntimeError above the tolerance, or if there is nothing to compare."""
    if found is None or expected is None:
        raise RuntimeError("the engine returned no log-probs")
    gap = float((found.detach().cpu().double() - expected.detach().cpu().double()).abs().max())
    require(gap <= tolerance, f"the largest difference is {gap:.3g}, at most {tolerance:g} is right")
    return float(f"{gap:.2g}")
