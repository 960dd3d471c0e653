"""Environments of other projects: Gymnasium, OpenEnv, TextWorld, verifiers, NeMo Gym.

In reading order: `settings`; `text_actions` (what environments share that answer an action in text with an observation
in text), `gymnasium`, `openenv` (environments of OpenEnv servers), `textworld` and `textworld_program`, its side in the
Python that has the package; `verifiers/` and `nemo_gym` (resources servers), whose agents call the policy through
hone's endpoint.
"""

from hone.data import SOURCES
from hone.envs import ENVS, EPISODES

PLUGIN_API = 1


def register() -> None:
    """Add the environments and the data source to hone's registries."""
    ENVS.register(
        "gymnasium",
        "hone_environments.gymnasium:GymnasiumEnv",
        "hone_environments.settings:GymnasiumSettings",
        requires=("gymnasium",),
    )
    ENVS.register("openenv", "hone_environments.openenv:OpenEnv", "hone_environments.settings:OpenEnvSettings")
    ENVS.register(
        "textworld", "hone_environments.textworld:TextWorldEnv", "hone_environments.settings:TextWorldSettings"
    )
    EPISODES.register(
        "nemo_gym", "hone_environments.nemo_gym:NemoGymRunner", "hone_environments.settings:NemoGymSettings"
    )
    EPISODES.register(
        "verifiers",
        "hone_environments.verifiers.episodes:VerifiersRunner",
        "hone_environments.settings:VerifiersSettings",
    )
    SOURCES.register(
        "verifiers", "hone_environments.verifiers.tasks:open_tasks", "hone_environments.settings:VerifiersTasksSettings"
    )
