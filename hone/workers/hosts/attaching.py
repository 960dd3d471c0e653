"""Rollout servers that a run does not start (`rollout.addresses`): what they serve, and serving at an address.

hone rollout serve: serve_at --> server in a private folder <== Front at HOST:PORT <== runs, one at a time
a run:              attached --> AttachedHost for each address, which compares `served` on both sides
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from transformers import AutoConfig

from hone import __version__
from hone.config import ConfigError
from hone.models.tokenizer import vocabulary_digest
from hone.processes.child import ServerFailed
from hone.rollout.base import ServerSpec
from hone.rollout.servers.adapter import RolloutServer
from hone.rollout.servers.attached import AttachedHost
from hone.rollout.servers.front import Front
from hone.rollout.servers.host import SOCKET
from hone.rollout.servers.shape import shape_of
from hone.rollout.settings import split_address

WITHOUT_EFFECT = (
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
)  # of a model's config


def served(spec: ServerSpec, tokenizer: Any) -> dict[str, Any]:
    """Return the facts of a server that have to be equal on both sides: JSON values by the names of `attached.KEYS`."""
    settings = spec.settings
    config = AutoConfig.from_pretrained(spec.model, trust_remote_code=spec.trust_remote_code).to_dict()
    chosen = settings.builtin.dtype if settings.backend == "builtin" else settings.engine.get("dtype", "auto")
    kind = spec.adapter
    return {
        "hone": __version__,
        "backend": settings.backend,
        "model": {name: _plain(value) for name, value in config.items() if name not in WITHOUT_EFFECT},
        "vocabulary": vocabulary_digest(tokenizer),
        "context": spec.context,
        "dtype": spec.dtype if chosen == "auto" else chosen,
        "tensor_parallel": settings.tensor_parallel,
        "ranks": shape_of(settings).ranks,
        "keep_cache": spec.keep_cache,
        "adapter": None if kind is None else {"rank": kind.rank, "dora": kind.dora, "whole": kind.whole_modules},
        "adapters": sorted(spec.adapters),
        "routed_layers": list(spec.routed_layers),
    }


def _plain(value: Any) -> Any:
    """A value of a config as JSON has it."""
    if isinstance(value, dict):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)


def attached(specs: Sequence[ServerSpec], tokenizer: Any) -> list[ServerSpec]:
    """The specs of servers that run at `rollout.addresses`, one for each."""
    addresses = specs[0].settings.addresses
    expected = served(specs[0], tokenizer)
    hosts = [AttachedHost(address, specs[0].token, expected) for address in addresses]
    return [replace(one, host=host, devices=()) for one, host in zip(specs, hosts, strict=True)]


async def serve_at(
    server: RolloutServer, spec: ServerSpec, address: str, tokenizer: Any, ready: Callable[[str], None]
) -> None:
    """Start a server, and let one run at a time attach at HOST:PORT; `ready` is called with the address (port 0 takes a
    free one). Returns never: raises ServerFailed when the server ends, ConfigError for an address of another machine.
    """
    host, port = split_address(address)
    front: Front | None = None
    try:
        await server.start()
        folder, process = server.connection.folder, server.connection.process
        assert folder is not None
        assert process is not None
        front = Front(folder / SOCKET, spec.token, served(spec, tokenizer), server.resume)
        try:
            port = await front.open(host, port)
        except OSError as error:
            raise ConfigError(f"nothing can listen at {address}: {error}") from error
        ready(f"{host}:{port}")
        await process.wait_dead()
        raise ServerFailed(f"server {server.name} ended with {process.ended}; its last lines:\n{process.last_lines()}")
    finally:
        if front is not None:
            await front.close()
        await server.close()


__all__ = ["attached", "serve_at", "served"]
