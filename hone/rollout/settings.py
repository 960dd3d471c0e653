"""Settings of rollouts: which engine generates, how much at once, and how tokens are sampled. No torch in here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import SerializeAsAny, field_validator

from hone.config import Choice, Config, FromRegistry, setting
from hone.rollout import ROLLOUT_ENGINES
from hone.types import SamplingParams


class SamplingConfig(Config):
    """How completions are sampled: temperature, then top-k, then top-p, then min-p, each over what the last left."""

    max_response_tokens: int = setting(512, "longest completion", unit="tokens", ge=1)
    temperature: float = setting(1.0, "divides the logits; 0 takes the likeliest token (greedy)", ge=0)
    top_k: int = setting(0, "sample among the k likeliest tokens; 0: all", unit="tokens", ge=0)
    top_p: float = setting(1.0, "sample among the likeliest tokens that together have this probability", gt=0, le=1)
    min_p: float = setting(0.0, "sample among tokens with this fraction of the likeliest one's probability", ge=0, le=1)
    stop: tuple[str, ...] = setting((), "strings that end a completion; the token that completes one is kept")

    @field_validator("stop")
    @classmethod
    def _not_empty(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if "" in stop:
            raise ValueError("a stop string should not be empty: it would end every completion at once")
        return stop

    def params(self, seed: int) -> SamplingParams:
        """What one request asks of an engine; `seed` is the request's own."""
        return SamplingParams(
            max_tokens=self.max_response_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            stop=self.stop,
            seed=seed,
        )


class BuiltinSettings(Choice):
    """The engine inside the trainer's process: continuous batching over the Hugging Face model classes."""

    name: str = "builtin"
    slots: int = setting(256, "sequences decoded together at most; further requests wait", unit="sequences", ge=1)
    max_sequence_tokens: int | None = setting(
        None, "longest prompt plus completion; null: the model's context, within kv_cache_tokens", unit="tokens", ge=2
    )
    kv_cache_tokens: int = setting(
        262_144, "size of the KV cache at most: sequences in it times the longest one's room", unit="tokens", ge=64
    )
    prefill_tokens: int = setting(8192, "prompt tokens in one forward, except for a longer prompt", unit="tokens", ge=1)
    share_prompts: bool = setting(True, "compute the KV of identical prompts once and copy it")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = setting(
        "auto", "of weights and KV cache; auto: the dtype of the model that the engine is built from"
    )
    execution: Literal["auto", "fused", "generic"] = setting(
        "auto", "fused: the decoder written for Llama, Mistral, Qwen2 and Qwen3; generic: transformers' own forward"
    )


class RolloutConfig(Config):
    """The rollout side of a run: the engine and how it samples."""

    engine: Annotated[SerializeAsAny[Choice], FromRegistry(ROLLOUT_ENGINES)] = setting(
        meaning="the engine that generates", factory=BuiltinSettings
    )
    sampling: SamplingConfig = setting(meaning="how training completions are sampled", factory=SamplingConfig)


__all__ = ["BuiltinSettings", "RolloutConfig", "SamplingConfig"]
