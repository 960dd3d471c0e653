"""Training on a service that speaks Tinker's protocol: the engine `tinker_api` and the rollout `tinker_api`.

In reading order: `settings`; `connection`, one session of a service: requests, retries, results, heartbeats;
`messages`, the protocol's requests and results as tensors; `gradients`, any loss of log-probs as weights of tokens;
`base_scorer`, scores of the model before training; `engine`, which trains through the service; `rollout`, which samples
from it and checks that a new snapshot has the new weights.
"""

from hone.engines.registry import EngineRegistry
from hone.rollout import ROLLOUT_ENGINES

PLUGIN_API = 1
NAME = "tinker_api"


def register() -> None:
    """Add both engines to hone's registries."""
    EngineRegistry.register(
        model_type="language_model",
        backend=NAME,
        target="hone_tinker.engine:ServiceEngine",
        settings="hone_tinker.settings:ServiceSettings",
    )
    ROLLOUT_ENGINES.register(NAME, "hone_tinker.rollout:ServiceRollout")
