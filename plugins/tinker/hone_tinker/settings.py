"""Settings: `runtime.backend: {name: tinker, url: "http://127.0.0.1:8123"}`. Does not import torch."""

from __future__ import annotations

from typing import ClassVar

from hone.config import Config, setting
from hone.engines.settings import BackendSettings
from hone.runtime.settings import ServiceRuntime


class Prices(Config):
    """Prices of a service for a million tokens, in any currency."""

    prefill: float = setting(0.0, "for a million tokens of prompts", ge=0)
    sample: float = setting(0.0, "for a million sampled tokens", ge=0)
    train: float = setting(0.0, "for a million tokens of forward and backward, and of forward alone", ge=0)


class ServiceKeys(Config):
    """A service that trains and samples; its key is in the environment variable TINKER_API_KEY."""

    url: str = setting("", "address of the service; empty: that in the environment variable TINKER_BASE_URL")
    base_model: str = setting("", "the service's name of the base model; empty: model.path")
    timeout_s: float = setting(600.0, "longest wait for one result, with all retries", unit="s", gt=0)
    named_losses: bool = setting(
        True, "send ppo, cispo and gspo by name where the service's is exactly the run's; false: one forward more"
    )
    check_snapshot: bool = setting(True, "stop the run if a new sampler answers like the one before")
    prices: Prices | None = setting(
        None, "prices of the service, for the metric perf/remote_cost; null: tokens are counted only"
    )


class ServiceRuntimeSettings(ServiceKeys, ServiceRuntime):
    """The service that holds the policy and answers."""

    name: str = "tinker"


class ServiceSettings(ServiceKeys, BackendSettings):
    """The engine of the policy, with the runtime's settings; or of a teacher that a service holds."""

    computes_here: ClassVar[bool] = False

    name: str = "tinker"
