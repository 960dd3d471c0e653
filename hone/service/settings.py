"""Settings of `hone serve`: a run file with `kind: serve`. Does not import torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import model_validator

from hone.config import Config, setting
from hone.models.settings import ModelConfig
from hone.rollout.settings import RolloutConfig

_OF_ROLLOUT = frozenset(
    ("backend", "builtin", "engine", "python", "tensor_parallel", "start_timeout_s", "request_timeout_s")
)


class ListenConfig(Config):
    """The address of the service."""

    host: str = setting("127.0.0.1", "address to listen at; another than loopback needs TLS")
    port: int = setting(8123, "0: a free one", ge=0, le=65535)
    tls_certificate: str | None = setting(None, "file of the certificate chain (PEM); null: no TLS")
    tls_key: str | None = setting(None, "file of the certificate's private key (PEM)")
    behind_proxy: bool = setting(False, "a proxy ends TLS: listen without it on another address than loopback")

    @model_validator(mode="after")
    def _private(self) -> ListenConfig:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together: set both or neither")
        if self.host not in ("127.0.0.1", "::1", "localhost") and self.tls_key is None and not self.behind_proxy:
            raise ValueError(
                f"host={self.host} would send keys and data in clear text over the network; set tls_certificate and "
                "tls_key, or behind_proxy=true if a proxy ends TLS before it"
            )
        return self


class TrainingConfig(Config):
    """Computation of the models that clients train."""

    compute_dtype: Literal["auto", "bfloat16", "float32"] = setting(
        "auto", "dtype of forward and backward; auto: bfloat16 where the device multiplies it natively, else float32"
    )
    max_tokens_per_microbatch: int = setting(
        16384, "hard cap of one forward/backward, and so of one sequence", unit="tokens", ge=2
    )
    activation_checkpointing: bool = setting(False, "recompute layers in the backward to save memory")
    logprob_chunk_tokens: int = setting(
        1024, "compute logits for this many tokens at a time, to save memory", unit="tokens", ge=1
    )
    lora_alpha: float = setting(32.0, "clients send no alpha: the scale of every adapter is this / its rank", gt=0)
    max_lora_rank: int = setting(256, "largest rank that a client may ask for", ge=1)
    share_forwards: bool = setting(
        False,
        "train small commands of several adapters in one forward, as far as they fit into a micro-batch: faster, and "
        "each ends equal to training alone within rounding, no longer bit for bit",
    )
    whole_weights: bool = setting(
        False, "train all weights when a client sends no lora_config; then there is one model at a time"
    )

    @model_validator(mode="after")
    def _shared(self) -> TrainingConfig:
        if self.share_forwards and self.activation_checkpointing:
            raise ValueError("share_forwards does not recompute layers; remove it, or activation_checkpointing")
        return self


class LimitsConfig(Config):
    """Limits for each tenant, and how long things are kept."""

    request_bytes: int = setting(64 << 20, "largest body of a request", unit="bytes", ge=1 << 16)
    decompressed_bytes: int = setting(256 << 20, "largest body after decompression", unit="bytes", ge=1 << 16)
    dense_elements: int = setting(
        64 << 20, "most numbers in the tensors of one request, counted as if none was sparse", ge=1 << 10
    )
    models: int = setting(16, "models that a tenant may have open", ge=1)
    sampling_requests: int = setting(2048, "sampling requests of a tenant that wait; more get 429", ge=1)
    held_bytes: int = setting(
        1 << 30, "a tenant's requests that wait and its results; more get 429", unit="bytes", ge=1 << 20
    )
    replayed_bytes: int = setting(
        256 << 20, "requests of a model that a restart repeats; its gradients are written instead", unit="bytes", ge=1
    )
    samples: int = setting(1024, "most samples of one request", ge=1)
    result_s: float = setting(1800.0, "results are kept so long for a client that does not ask", unit="s", gt=0)
    gap_s: float = setting(900.0, "commands behind one that never came fail after this", unit="s", gt=0)
    session_s: float = setting(
        3600.0, "a session without heartbeat ends, and its open models are dropped from memory", unit="s", gt=0
    )
    poll_s: float = setting(25.0, "longest wait of one question for a result; clients give up after 45", unit="s", gt=0)
    metadata_bytes: int = setting(
        1 << 20, "larger results are announced with their size first, so that a client can hold others back", ge=1
    )


class ServeConfig(Config):
    """A training service for one base model."""

    kind: Literal["serve"] = setting("serve", "what the file is for")
    model: ModelConfig = setting(meaning="the base model")
    names: tuple[str, ...] = setting(
        (), "names by which clients ask for the base model, besides its path; the first one is what they are shown"
    )
    folder: str = setting("runs/serve", "keys, checkpoints and the registry of the service")
    listen: ListenConfig = setting(meaning="address and TLS", factory=ListenConfig)
    training: TrainingConfig = setting(meaning="how models are trained", factory=TrainingConfig)
    rollout: RolloutConfig = setting(meaning="the engine that samples: builtin or vllm", factory=RolloutConfig)
    limits: LimitsConfig = setting(meaning="limits of tenants", factory=LimitsConfig)

    @model_validator(mode="after")
    def _named(self) -> ServeConfig:
        if not self.names and self.model.path is None:
            raise ValueError("names should have at least one entry: a model that is built has no path to ask for it by")
        if other := sorted(self.rollout.model_fields_set - _OF_ROLLOUT):
            raise ValueError(
                f"rollout.{other[0]} is no setting of a service, which has one engine and samples as clients say; of "
                f"rollout it takes {', '.join(sorted(_OF_ROLLOUT))}"
            )
        if self.rollout.backend != "builtin" and self.training.whole_weights:
            raise ValueError(
                f"training.whole_weights with rollout.backend={self.rollout.backend}: its server takes adapters only; "
                "remove one of them"
            )
        return self

    @property
    def root(self) -> Path:
        """The folder of the service."""
        return Path(self.folder).expanduser().absolute()
