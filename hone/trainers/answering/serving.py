"""`hone serve EXPORT`: a finished model at an OpenAI-compatible address on this machine.

    any OpenAI client --loopback, key--> Endpoint --> AnsweringModel: built-in engine, or vLLM behind its adapter

The endpoint is the one that agents of a run use; for a finished model it records nothing and streams real tokens. It
waits for requests until the process is interrupted; each answer ends within `rollout.request_timeout_s`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from hone.config import ConfigError
from hone.envs.agents.endpoint import Endpoint
from hone.envs.agents.runner import tool_parser
from hone.envs.agents.sessions import AgentTask
from hone.models.settings import ModelConfig
from hone.trainers.answering.model import Answering, AnsweringModel, answering
from hone.trainers.run.event_loop import EventLoop


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a served model: its name for clients, the port on loopback (0: any that is free), the clients' key."""

    name: str
    port: int = 8000
    key: str = ""  # empty: a new one


def serve_model(model: ModelConfig, how: Answering, at: Address, ready: Callable[[str, str], None]) -> None:
    """Serve a model until an interrupt; `ready(url, key)` is called when requests can come.

    Raises ConfigError for a port that is taken, and as `answering`.
    """
    loop = EventLoop()
    try:
        with answering(model, how, loop) as one:
            loop.run(_serve(one, at, ready))
    finally:
        loop.close()


async def _serve(model: AnsweringModel, at: Address, ready: Callable[[str, str], None]) -> None:
    endpoint = Endpoint(model.renderer, tool_parser("auto", model.renderer.template), at.port)
    try:
        await endpoint.__aenter__()
    except OSError as error:
        raise ConfigError(f"--port {at.port}: {error.strerror}; choose another one, or 0 for any") from error
    try:
        task = AgentTask(
            generate=model.rollout.generate,
            sampling=model.sampling,
            request_id="served",
            seed_of=lambda number: secrets.randbits(62),
            client_sampling=True,
            served=at.name,
        )
        ready(endpoint.base_url, endpoint.open_session(task, at.key))
        await endpoint.ended()  # an interrupt cancels it
    finally:
        await endpoint.__aexit__(None, None, None)
