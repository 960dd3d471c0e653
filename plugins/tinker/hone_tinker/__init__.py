"""Training on a service that speaks Tinker's protocol: the runtime `tinker`, with an engine and a rollout of this name.

In reading order: `settings`; `runtime`; `connection`, one session of a service: requests, retries, results, heartbeats;
`messages`, the protocol's requests and results as tensors; `gradients`, any loss of log-probs as weights of tokens;
`named_losses`, the losses that services have too;
`base_scorer`, scores of the model before training; `engine`, which trains through the service; `rollout`, which samples
from it and checks that a new snapshot has the new weights.
"""

from hone.engines.registry import EngineRegistry
from hone.rollout import ROLLOUT_ENGINES
from hone.runtime import RUNTIMES

PLUGIN_API = 1
NAME = "tinker"


def register() -> None:
    """Add runtime, engine and rollout to hone's registries."""
    RUNTIMES.register(NAME, "hone_tinker.runtime:ServiceWorkerGroup", "hone_tinker.settings:ServiceRuntimeSettings")
    EngineRegistry.register(
        model_type="language_model",
        backend=NAME,
        target="hone_tinker.engine:ServiceEngine",
        settings="hone_tinker.settings:ServiceSettings",
    )
    ROLLOUT_ENGINES.register(NAME, "hone_tinker.rollout:ServiceRollout")
