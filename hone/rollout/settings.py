"""Settings of rollouts: which engine generates, how much at once, and how tokens are sampled. No torch in here."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from hone.config import Config, setting
from hone.registry import load_plugins, unknown
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


class BuiltinSettings(Config):
    """The built-in engine: continuous batching over the Hugging Face model classes."""

    process: Literal["inside", "separate"] = setting(
        "inside", "inside: in the trainer's process; separate: a server process, reached as vLLM is"
    )
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
    """The rollout side of a run: which engine generates, where, and how it samples."""

    backend: str = setting("builtin", "the engine that generates: builtin, vllm, sglang, or a plug-in's")
    builtin: BuiltinSettings = setting(meaning="the built-in engine; others leave it alone", factory=BuiltinSettings)
    engine: dict[str, Any] = setting(
        meaning="options of a server's engine by its own names, such as enforce_eager; it refuses unknown ones itself",
        factory=dict,
    )
    python: str = setting("", "interpreter that has the server's engine; default: .venv-<backend>/bin/python, if there")
    replicas: int = setting(1, "servers that share the requests", ge=1)
    tensor_parallel: int = setting(1, "devices that one server spreads its model over", unit="devices", ge=1)
    start_timeout_s: float = setting(600.0, "deadline for a server to be ready", unit="s", gt=0)
    request_timeout_s: float = setting(600.0, "deadline of one request to a server", unit="s", gt=0)
    requests_per_replica: int = setting(
        512, "requests that one of several replicas, or a server, has at a time; others wait in order", ge=1
    )
    max_restarts: int = setting(3, "how often a dead server is started again in one run", ge=0)
    sleep_while_training: Literal["auto", "none", "level_1", "level_2"] = setting(
        "auto",
        "what the rollout gives back before training: its KV cache (1), weights too (2); auto: none on a CPU or on "
        "devices of its own, else 1 inside the trainer's process or where LoRA adapters are sent by themselves, else 2",
    )
    sampling: SamplingConfig = setting(meaning="how training completions are sampled", factory=SamplingConfig)

    @field_validator("backend")
    @classmethod
    def _exists(cls, value: str) -> str:
        if value not in ROLLOUT_ENGINES:
            load_plugins()
        if value not in ROLLOUT_ENGINES:
            raise ValueError(unknown("rollout engine", value, list(ROLLOUT_ENGINES)))
        return value


__all__ = ["BuiltinSettings", "RolloutConfig", "SamplingConfig"]
