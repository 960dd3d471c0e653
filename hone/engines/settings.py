"""Settings of a training engine: how a model is computed and optimised."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from pydantic import SerializeAsAny, model_validator

from hone.config import Choice, Config, FromRegistry, setting
from hone.engines.registry import SCHEDULES, EngineRegistry
from hone.models.settings import FourBitConfig
from hone.platforms.layout import Layout

TOKENS = 16_384  # of a micro-batch, unless a run file says otherwise
CPU_TOKENS = 2_048  # a CPU is as fast with these, if they hold a group that shares its prompt, and needs less memory


class OptimizerConfig(Config):
    """Any optimizer of `torch.optim` by its class name, or one of bitsandbytes that keeps its state in 8 bits."""

    name: str = setting(
        "AdamW", "class name in torch.optim: AdamW, SGD, Adafactor ...; or AdamW8bit, Adam8bit, Lion8bit, AdEMAMix8bit"
    )
    lr: float = setting(1e-6, "peak learning rate", gt=0)
    weight_decay: float = setting(
        0.0, "weight decay of matrices; biases and norms of any shape are never decayed", ge=0
    )
    betas: tuple[float, float] | None = setting(None, "null: the optimizer's own (AdamW: 0.9, 0.999)")
    options: dict[str, Any] = setting(factory=dict, meaning="other arguments of the class, such as eps or momentum")

    @model_validator(mode="after")
    def _each_has_one_place(self) -> OptimizerConfig:
        for name in ("lr", "weight_decay", "betas"):
            if name in self.options:
                raise ValueError(f"options has {name}, which has a key of its own; set {self.key_of(name)} instead")
        return self


class ScheduleConfig(Choice):
    """The learning rate over the optimizer steps of the run, as a factor of `optimizer.lr`; here constant."""

    name: str = "constant"
    warmup_steps: int = setting(0, "optimizer steps of linear warm-up", unit="steps", ge=0)
    warmup_fraction: float = setting(0.0, "the warm-up as a share of all optimizer steps, instead", ge=0, lt=1)

    @model_validator(mode="after")
    def _one_warmup(self) -> ScheduleConfig:
        if self.warmup_steps and self.warmup_fraction:
            raise ValueError(
                f"warmup_steps = {self.warmup_steps} and warmup_fraction = {self.warmup_fraction:g} both set the "
                "warm-up; remove one of them"
            )
        return self

    def warmup(self, total_steps: int) -> int:
        """The optimizer steps of the warm-up. Raises ValueError if they leave none for the decay that follows."""
        fraction, steps = self.warmup_fraction, self.warmup_steps
        steps = steps or min(round(fraction * total_steps), total_steps - 1)
        if self.name != "constant" and steps >= total_steps:
            raise ValueError(
                f"{self.key_of('warmup_steps')}={steps} leaves no step for the {self.name} decay, because the run has "
                f"{total_steps} optimizer steps; set {self.key_of('warmup_steps')}=0 and "
                f"{self.key_of('warmup_fraction')}=0.1, or train for more steps"
            )
        return steps


class LinearConfig(ScheduleConfig):
    """A linear decay from the end of the warm-up to the last step."""

    name: str = "linear"
    min_ratio: float = setting(0.0, "the factor at the last step", ge=0, le=1)


class CosineConfig(LinearConfig):
    """A decay along half a cosine from the end of the warm-up to the last step."""

    name: str = "cosine"


class WsdConfig(LinearConfig):
    """Constant after the warm-up, then a linear decay at the end of the run."""

    name: str = "wsd"
    decay_fraction: float = setting(0.1, "share of all steps that the decay takes", gt=0, le=1)

    def decay(self, warmup: int, total_steps: int) -> int:
        """The optimizer steps of the decay. Raises ValueError if it would begin before the warm-up has ended."""
        left, wanted = total_steps - warmup, self.decay_fraction * total_steps
        if wanted >= left + 1:  # less is rounding
            key, most = self.key_of("decay_fraction"), math.floor(100 * left / total_steps) / 100
            raise ValueError(
                f"{key}={self.decay_fraction:g} begins the decay before the warm-up ends: {round(wanted)} and {warmup} "
                f"optimizer steps are more than the {total_steps} of the run, and the learning rate would jump; set "
                f"{key}={most:g} or less, or shorten the warm-up"
            )
        return min(max(1, round(wanted)), left)


class LoraConfig(Config):
    """A low-rank adapter on frozen weights (LoRA), by PEFT."""

    rank: int = setting(16, "columns of B and rows of A in W + scale B A", ge=1)
    alpha: float = setting(32.0, "scale is alpha / rank", gt=0)
    targets: Literal["all-linear"] | tuple[str, ...] = setting(
        "all-linear", "layers by names in their paths (q_proj, self_attn, experts.down_proj); all-linear: not the head"
    )
    exclude: tuple[str, ...] = setting((), "layers that get no adapter although `targets` names them")
    dropout: float = setting(0.0, "share of the adapter's inputs that is dropped in training", ge=0, lt=1)
    dora: bool = setting(False, "weight-decomposed LoRA: the norm of each output row is learned separately")
    rslora: bool = setting(False, "scale is alpha / sqrt(rank)")
    init: Literal["default", "gaussian", "orthogonal", "pissa", "olora"] = setting(
        "default", "first values of A and B; pissa, olora: from the weights' SVD or QR"
    )
    seed: int = setting(0, "seed of the first A and of dropout", ge=0)
    modules_to_save: tuple[str, ...] = setting(
        (), "modules that are trained whole, by the ends of their paths (lm_head, embed_tokens)"
    )
    quantise: FourBitConfig | None = setting(
        None, "hold the frozen linear layers in 4 bits (QLoRA); null: in compute_dtype"
    )
    path: str | None = setting(
        None, "folder of an adapter to continue from; it sets rank, alpha, targets, dora, rslora, modules_to_save"
    )
    sync: Literal["auto", "adapter", "merged"] = setting(
        "auto",
        "what each weight sync sends: the adapter alone, or all weights with it merged in; auto: the adapter if the "
        "rollout supports it",
    )


class MoeConfig(Config):
    """A mixture of experts: load balancing and routing replay."""

    router_aux_loss_coef: float = setting(0.0, "strength of the load-balancing loss; 0: none", ge=0)
    router_z_loss_coef: float = setting(0.0, "strength of the loss on large router logits; 0: none", ge=0)
    indexer_loss_coef: float = setting(
        0.0, "strength of the loss by which indexers of sparse attention (DSA) learn; 0: they stay as they are", ge=0
    )
    balance_over: Literal["sequence", "batch"] = setting(
        "sequence", "balance loads within each sequence, or over the optimizer step (one more forward)"
    )
    routing_replay: Literal["none", "rollout", "old_logprobs"] = setting(
        "none",
        "experts in training: as the router chooses, as recorded in the rollout, or as in the old log-probs",
    )


class BackendSettings(Choice):
    """Settings that only one engine has; each backend derives its own from this class."""

    computes_here: ClassVar[bool] = True  # False: a service holds the model, and needs no memory of these devices
    dimensions: ClassVar[tuple[str, ...]] = ()  # numbers of `parallel` that `hone plan --search` may choose

    def alone(self) -> BackendSettings:
        """The same settings for one process, whatever number of ranks the model was trained on."""
        return self

    def layout(self, ranks: int) -> Layout:
        """Mesh of the model over so many ranks, for forecasts. Raises ValueError for dimensions that do not fit."""
        return Layout(shard=ranks)


def _fsdp2() -> BackendSettings:
    cls: Any = EngineRegistry.backends.settings("fsdp2")
    settings: BackendSettings = cls()
    return settings


class EngineConfig(Config):
    """Computation and optimisation of one model."""

    backend: Annotated[SerializeAsAny[BackendSettings], FromRegistry(EngineRegistry.backends)] = setting(
        meaning="the engine that runs the model, with the settings that only it has",
        factory=_fsdp2,
    )
    max_tokens_per_microbatch: int | None = setting(
        None,
        "hard cap of one forward/backward; sequences are never cut; null: 16,384, of which a CPU packs 2,048, or as "
        "many as the largest group of answers has",
        unit="tokens",
        ge=1,
    )
    compute_dtype: Literal["auto", "bfloat16", "float32", "float64"] = setting(
        "auto",
        "dtype of forward and backward; the optimizer updates weights in model.dtype; auto: bfloat16 where the device "
        "multiplies it natively, else float32",
    )
    head_dtype: Literal["float32"] | None = setting(
        None, "float32: multiply hidden states and output layer in float32 for log-probs; null: in compute_dtype"
    )
    activation_checkpointing: bool | Literal["offload", "selective"] = setting(
        False,
        "recompute layers in the backward to save memory; offload: their inputs wait in CPU memory meanwhile; "
        "selective: recompute parts of layers (backend.recompute_modules, where the backend has it)",
    )
    logprob_chunk_tokens: int = setting(
        1024, "compute logits for this many tokens at a time, to save memory", unit="tokens", ge=1
    )
    optimizer: OptimizerConfig = setting(factory=OptimizerConfig, meaning="how weights are updated")
    schedule: Annotated[SerializeAsAny[ScheduleConfig], FromRegistry(SCHEDULES)] = setting(
        factory=ScheduleConfig, meaning="learning rate over the run"
    )
    max_grad_norm: float | None = setting(1.0, "gradients are scaled down to this norm; null: never", gt=0)
    lora: LoraConfig | None = setting(None, "train a LoRA adapter on frozen weights; null: all weights")
    moe: MoeConfig | None = setting(None, "load balancing and routing replay of a mixture of experts")

    @property
    def token_limit(self) -> int:
        """Return the most tokens of one forward/backward, which no sequence exceeds."""
        return TOKENS if self.max_tokens_per_microbatch is None else self.max_tokens_per_microbatch

    def packed_tokens(self, longest: int, device: str) -> int:
        """Return how many tokens share a micro-batch on a kind of device; `longest`: tokens that belong together."""
        if self.max_tokens_per_microbatch is None and device == "cpu":
            return min(max(CPU_TOKENS, longest), TOKENS)
        return self.token_limit

    @property
    def routing_replay(self) -> str:
        """Return the source of the experts that training replays; `none` without the section."""
        return "none" if self.moe is None else self.moe.routing_replay

    def alone(self) -> EngineConfig:
        """The same engine in one process, whatever number of ranks the model was trained on."""
        return self.model_copy(update={"backend": self.backend.alone()})
