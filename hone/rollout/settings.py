"""Settings of rollouts: engine, capacity and sampling. Does not import torch."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator, model_validator

from hone.config import Config, setting
from hone.registry import unknown
from hone.rollout import ROLLOUT_ENGINES
from hone.types import SamplingParams

CONTROLS = 16  # connections to one server for everything but the `requests_per_replica` requests


class SamplingConfig(Config):
    """Sampling of completions: temperature, top-k, top-p, min-p, in this order, each on what the last one kept."""

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

    @model_validator(mode="after")
    def _greedy_has_no_filter(self) -> SamplingConfig:
        if self.temperature == 0 and (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0):
            raise ValueError(
                "temperature is 0 (greedy), so top_k, top_p and min_p have no effect; set temperature above 0, or "
                "remove them"
            )
        return self

    def params(self, seed: int) -> SamplingParams:
        """Return the sampling parameters of one request; `seed` is the request's own."""
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
        "inside", "inside: in the trainer's process; separate: in a server process, like vLLM"
    )
    slots: int = setting(256, "most sequences decoded together; other requests wait", unit="sequences", ge=1)
    max_sequence_tokens: int | None = setting(
        None, "longest prompt plus completion; null: the model's context, within kv_cache_tokens", unit="tokens", ge=2
    )
    kv_cache_tokens: int = setting(
        262_144, "largest size of the KV cache: number of sequences x room of the longest", unit="tokens", ge=64
    )
    kept_kv_tokens: int = setting(
        65_536, "KV kept between the turns of episodes, in addition to kv_cache_tokens; 0: none", unit="tokens", ge=0
    )
    prefill_tokens: int = setting(8192, "prompt tokens per forward; a longer prompt goes alone", unit="tokens", ge=1)
    share_prompts: bool = setting(True, "compute the KV of identical prompts once and copy it")
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = setting(
        "auto", "dtype of weights and KV cache; auto: the dtype of the model that the engine is built from"
    )
    execution: Literal["auto", "fused", "graphed", "generic"] = setting(
        "auto",
        "fused: the decoder written for Llama, Mistral, Qwen2 and Qwen3; graphed: that with decode steps replayed as "
        "graphs, on GPUs; generic: transformers' own forward; auto: the first of graphed, fused and generic that fits",
    )


class RolloutConfig(Config):
    """The rollout of a run: which engine generates, where, and how it samples."""

    backend: str = setting("builtin", "the engine that generates: builtin, vllm, or a plug-in's")
    builtin: BuiltinSettings = setting(meaning="settings of the built-in engine only", factory=BuiltinSettings)
    engine: dict[str, Any] = setting(
        meaning="options of vLLM or another server under its own names, such as enforce_eager; it refuses unknown ones",
        factory=dict,
    )
    python: str = setting("", "Python of the engine's environment; default: .venv-<backend>/bin/python, if there")
    replicas: int = setting(1, "servers that share the requests; default with addresses: one for each", ge=1)
    addresses: tuple[str, ...] = setting(
        (), "servers started elsewhere (hone rollout serve), HOST:PORT each; none: the run starts its own"
    )
    tensor_parallel: int = setting(1, "devices that one server spreads its model over", unit="devices", ge=1)
    start_timeout_s: float = setting(600.0, "deadline for a server to be ready", unit="s", gt=0)
    request_timeout_s: float = setting(600.0, "deadline of one request to a server", unit="s", gt=0)
    requests_per_replica: int = setting(
        512, "requests that a server, or one of several replicas, gets at a time; others wait in order", ge=1
    )
    max_restarts: int = setting(
        3, "restarts of one server within an hour, or failed starts in a row, before hone gives it up", ge=0
    )
    sleep_while_training: Literal["auto", "none", "level_1", "level_2"] = setting(
        "auto",
        "memory freed before training: the KV cache (level_1), weights too (level_2); auto: none on "
        "a CPU or on devices of its own, else level_1 in the trainer's process or with separate adapters, else level_2",
    )
    sampling: SamplingConfig = setting(meaning="how training completions are sampled", factory=SamplingConfig)

    @model_validator(mode="before")
    @classmethod
    def _one_replica_for_each(cls, values: Any) -> Any:
        addresses = values.get("addresses") if isinstance(values, dict) else None
        if isinstance(addresses, list | tuple) and addresses and "replicas" not in values:
            return {**values, "replicas": len(addresses)}
        return values

    @field_validator("addresses")
    @classmethod
    def _host_and_port(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        for one in addresses:
            split_address(one)
        if twice := [one for one in addresses if addresses.count(one) > 1]:
            raise ValueError(f"{twice[0]} is there twice; name each server once")
        return addresses

    @model_validator(mode="after")
    def _addresses_fit(self) -> RolloutConfig:
        if not self.addresses:
            return self
        if self.replicas != len(self.addresses):
            raise ValueError(
                f"replicas is {self.replicas}, and addresses names {len(self.addresses)} servers; remove replicas"
            )
        if self.backend == "builtin" and self.builtin.process == "inside":
            raise ValueError("addresses needs servers in processes of their own; set builtin.process to separate")
        if self.sleep_while_training not in ("auto", "none"):
            raise ValueError(
                f"sleep_while_training is {self.sleep_while_training}, and servers at addresses never sleep"
            )
        return self

    @field_validator("backend")
    @classmethod
    def _exists(cls, value: str) -> str:
        if value not in ROLLOUT_ENGINES:
            raise ValueError(unknown("rollout engine", value, list(ROLLOUT_ENGINES)))
        return value


def split_address(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT. Raises ValueError."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 1 << 16):
        raise ValueError(f"{address!r} should be HOST:PORT, such as 127.0.0.1:8700")
    return host.strip("[]"), int(port)


__all__ = ["BuiltinSettings", "RolloutConfig", "SamplingConfig", "split_address"]
