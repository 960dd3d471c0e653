"""Settings of a training engine: how a model is computed and optimised."""

from __future__ import annotations

from typing import Any, Literal

from hone.config import Config, setting


class OptimizerConfig(Config):
    """Any optimizer of `torch.optim` by its class name."""

    name: str = setting("AdamW", "class name in torch.optim: AdamW, SGD, Adafactor ...")
    lr: float = setting(1e-6, "peak learning rate", gt=0)
    weight_decay: float = setting(0.0, "of matrices; biases and norms are never decayed", ge=0)
    betas: tuple[float, float] | None = setting(None, "null: the optimizer's own (AdamW: 0.9, 0.999)")
    options: dict[str, Any] = setting(factory=dict, meaning="other arguments of the class, such as eps or momentum")


class ScheduleConfig(Config):
    """The learning rate over the optimizer steps of the run, as a factor of `optimizer.lr`."""

    name: Literal["constant", "linear", "cosine", "wsd"] = setting(
        "constant", "shape after the warm-up; wsd: constant, then a linear decay at the end"
    )
    warmup_steps: int = setting(0, "optimizer steps of linear warm-up", unit="steps", ge=0)
    min_ratio: float = setting(0.0, "the factor at the last step (not for constant)", ge=0, le=1)
    decay_fraction: float = setting(0.1, "share of all steps that wsd decays over", gt=0, le=1)


class EngineConfig(Config):
    """One model's engine."""

    backend: str = setting("fsdp2", "which engine")
    max_tokens_per_microbatch: int = setting(
        16384, "hard cap of one forward/backward; sequences are never cut", unit="tokens", ge=1
    )
    compute_dtype: Literal["bfloat16", "float32", "float64"] = setting(
        "bfloat16", "of forward and backward; the optimizer updates weights in model.dtype"
    )
    activation_checkpointing: bool = setting(False, "recompute layers in the backward to save memory")
    logprob_chunk_tokens: int = setting(1024, "at most so many rows of logits exist at once", unit="tokens", ge=1)
    optimizer: OptimizerConfig = setting(factory=OptimizerConfig, meaning="how weights are updated")
    schedule: ScheduleConfig = setting(factory=ScheduleConfig, meaning="learning rate over the run")
    max_grad_norm: float | None = setting(1.0, "gradients are scaled down to this norm; null: never", gt=0)
