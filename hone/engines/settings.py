"""Settings of a training engine: how a model is computed and optimised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from hone.config import Config, setting
from hone.models.settings import FourBitConfig


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


@dataclass(frozen=True, slots=True)
class Sizes:
    """How many ranks each dimension of the mesh has; replicate x shard x sequence x tensor is all of them."""

    replicate: int
    shard: int
    sequence: int
    tensor: int
    expert: int

    @property
    def world(self) -> int:
        return self.replicate * self.shard * self.sequence * self.tensor


class ParallelConfig(Config):
    """How a model and its batches lie over the ranks; by default all ranks share out both (FSDP)."""

    replicate: int = setting(1, "copies of the sharded model, each with batches of its own (HSDP)", ge=1)
    shard: int | None = setting(None, "ranks that share out weights and batches; null: all that is left", ge=1)
    sequence: int = setting(1, "ranks that share out the tokens of each micro-batch (Ulysses)", ge=1)
    tensor: int = setting(1, "ranks that share out each layer's matrices", ge=1)
    expert: int = setting(1, "ranks that share out the experts; they are the same ranks as above, not more", ge=1)

    def sizes(self, world: int) -> Sizes:
        """The mesh over `world` ranks. Raises ValueError naming the dimension that does not fit."""
        rest = world
        for name, size in (("replicate", self.replicate), ("sequence", self.sequence), ("tensor", self.tensor)):
            if rest % size:
                whole = f"{rest} of {world} ranks" if rest != world else f"{world} ranks"
                raise ValueError(f"parallel.{name} = {size} does not divide {whole}")
            rest //= size
        if self.shard is not None and self.shard != rest:
            raise ValueError(
                f"parallel.shard = {self.shard}, but {rest} of {world} ranks are left for it (replicate x shard x "
                f"sequence x tensor should be {world}); leave it null, or change the number of ranks"
            )
        holders = rest * self.sequence * self.tensor
        if holders % self.expert:
            raise ValueError(
                f"parallel.expert = {self.expert} does not divide the {holders} ranks of one copy of the model "
                "(shard x sequence x tensor)"
            )
        if self.expert > 1 and self.expert % self.tensor:
            raise ValueError(f"parallel.expert = {self.expert} should be a multiple of parallel.tensor = {self.tensor}")
        return Sizes(self.replicate, rest, self.sequence, self.tensor, self.expert)


class LoraConfig(Config):
    """A low-rank adapter beside frozen weights (LoRA), by PEFT."""

    rank: int = setting(16, "columns of B and rows of A in W + scale B A", ge=1)
    alpha: float = setting(32.0, "scale is alpha / rank", gt=0)
    targets: Literal["all-linear"] | tuple[str, ...] = setting(
        "all-linear", "layers by names in their paths (q_proj, self_attn, experts.down_proj); all-linear: not the head"
    )
    exclude: tuple[str, ...] = setting((), "layers that stay as they are although `targets` has them")
    dropout: float = setting(0.0, "share of the adapter's inputs that is dropped in training", ge=0, lt=1)
    dora: bool = setting(False, "direction by the adapter, length of each row apart (DoRA)")
    rslora: bool = setting(False, "scale is alpha / sqrt(rank)")
    init: Literal["default", "gaussian", "orthogonal", "pissa", "olora"] = setting(
        "default", "how A and B begin; pissa, olora: from the weights' SVD or QR, which the frozen weights keep"
    )
    seed: int = setting(0, "of the first A and of dropout", ge=0)
    modules_to_save: tuple[str, ...] = setting(
        (), "modules that are trained whole beside the adapter, by the ends of their paths (lm_head, embed_tokens)"
    )
    quantise: FourBitConfig | None = setting(
        None, "hold the frozen linear layers in 4 bits (QLoRA); null: in compute_dtype"
    )
    path: str | None = setting(
        None, "folder of an adapter to go on from; it says rank, alpha, targets, dora, rslora and modules_to_save"
    )
    sync: Literal["auto", "adapter", "merged"] = setting(
        "auto",
        "what each weight sync sends: the adapter alone, or all weights with it merged in; auto: the adapter where the "
        "rollout can take it",
    )


class MoeConfig(Config):
    """A mixture-of-experts model: balance between its experts, and whose choice of experts training takes over."""

    router_aux_loss_coef: float = setting(0.0, "strength of the load-balancing loss; 0: none", ge=0)
    router_z_loss_coef: float = setting(0.0, "strength of the loss on large router logits; 0: none", ge=0)
    balance_over: Literal["sequence", "batch"] = setting(
        "sequence", "where loads are to be even: within each sequence, or over the optimizer step (one more forward)"
    )
    routing_replay: Literal["none", "rollout", "old_logprobs"] = setting(
        "none", "experts that training forwards choose: their own, those of the rollout, of the old log-probs' forward"
    )


class EngineConfig(Config):
    """One model's engine."""

    backend: str = setting("fsdp2", "which engine")
    max_tokens_per_microbatch: int = setting(
        16384, "hard cap of one forward/backward; sequences are never cut", unit="tokens", ge=1
    )
    compute_dtype: Literal["bfloat16", "float32", "float64"] = setting(
        "bfloat16", "of forward and backward; the optimizer updates weights in model.dtype"
    )
    activation_checkpointing: bool | Literal["offload"] = setting(
        False, "recompute layers in the backward to save memory; offload: their inputs wait in CPU memory meanwhile"
    )
    offload: bool = setting(False, "keep weights and optimizer state in CPU memory while the model is not at work")
    logprob_chunk_tokens: int = setting(1024, "at most so many rows of logits exist at once", unit="tokens", ge=1)
    optimizer: OptimizerConfig = setting(factory=OptimizerConfig, meaning="how weights are updated")
    schedule: ScheduleConfig = setting(factory=ScheduleConfig, meaning="learning rate over the run")
    max_grad_norm: float | None = setting(1.0, "gradients are scaled down to this norm; null: never", gt=0)
    parallel: ParallelConfig = setting(factory=ParallelConfig, meaning="how the work is spread over several ranks")
    lora: LoraConfig | None = setting(None, "train an adapter beside frozen weights; null: all weights")
    moe: MoeConfig | None = setting(None, "load balancing and routing replay of a mixture of experts")

    @property
    def routing_replay(self) -> str:
        """Whose choice of experts is replayed in training; `none` without the section."""
        return "none" if self.moe is None else self.moe.routing_replay

    def alone(self) -> EngineConfig:
        """The same engine in one process, whatever mesh it was trained on."""
        return self.model_copy(update={"parallel": ParallelConfig()})
