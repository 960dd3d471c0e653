"""Settings of the episode loop."""

from __future__ import annotations

from typing import Annotated

from hone.config import Choice, Config, FromRegistry, setting
from hone.envs import ENVS


class AgentSettings(Choice):
    """An agent program that talks to the policy over the OpenAI protocol, and knows nothing else of hone."""

    name: str = setting("agent", "an agent program at the endpoint")
    program: str = setting(meaning="async function (base_url, api_key, prompt): file.py:name or package.module:name")
    client_sampling: bool = setting(
        False,
        "whether temperature, top_p ... of the agent's requests count; else rollout.sampling does, as training needs",
    )
    adapters: dict[str, str] = setting(
        meaning="folders of LoRA adapters by name, which the requests may name as their model: an opponent, say",
        factory=dict,
    )


class EpisodeConfig(Config):
    """How one prompt is played out."""

    env: Annotated[Choice, FromRegistry(ENVS)] = setting(
        meaning="the environment an episode runs in", factory=lambda: Choice(name="chat")
    )
    max_turns: int = setting(8, "completions in one episode at most", unit="turns", ge=1)
    timeout_s: float = setting(600.0, "deadline of one episode, its wait for a rollout slot included", unit="s", gt=0)
