"""`hone rollout join RUN`, `leave RUN REPLICA`: servers come and go while an asynchronous run trains; and
`serve RUN_FILE HOST:PORT`: a server for a run elsewhere."""

from __future__ import annotations

import ipaddress
import logging
import os
from pathlib import Path
from typing import Annotated, Literal

import typer
import yaml

from hone.cli.errors import sigterm_as_ctrl_c
from hone.cli.recipe import load_recipe
from hone.config import ConfigError
from hone.registry import resolve
from hone.rollout.servers.attached import shared_token
from hone.rollout.settings import split_address
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.folder import is_claimed
from hone.workers.control import CONTROL, request


def rollout(
    verb: Annotated[
        Literal["join", "leave", "serve"],
        typer.Argument(help="join: start one more server; leave: end one; serve: start one for a run elsewhere"),
    ],
    run: Annotated[Path, typer.Argument(help="folder of a run that is training; serve: the run file")],
    more: Annotated[
        list[str] | None,
        typer.Argument(help="leave: the server's name, such as vllm-1; serve: HOST:PORT to listen at, then key=value"),
    ] = None,
    timeout_s: Annotated[float, typer.Option(help="join, leave: longest wait for the answer, in seconds")] = 600.0,
) -> None:
    """Let a server join or leave a run that trains asynchronously, or serve a run elsewhere.

    A server that joins gets requests once it has proven that it serves the run's weights. When a server
    leaves, the other servers continue its answers. A server of `serve` waits at HOST:PORT for a run of the same
    run file whose rollout.addresses names it; both need the same secret in HONE_ROLLOUT_TOKEN.
    """
    rest = more or []
    if verb == "serve":
        _serve(run, rest)
        return
    if len(rest) != (verb == "leave"):
        raise ConfigError("name the server that leaves: hone rollout leave RUN REPLICA; join takes no name")
    if not is_claimed(run):
        raise ConfigError(f"no process is training the run in {run}")
    if not _is_asynchronous(run):
        raise ConfigError(f"the run in {run} is synchronous: servers join and leave with asynchrony.staleness above 0")
    try:
        typer.echo(request(run / CONTROL, verb, rest[0] if rest else "", timeout_s))
    except (ValueError, TimeoutError) as error:
        raise ConfigError(f"{run}: {error}") from error


def _is_asynchronous(run: Path) -> bool:
    settings = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")) or {}
    return bool((settings.get("asynchrony") or {}).get("staleness"))


def _serve(run_file: Path, rest: list[str]) -> None:
    if not rest or "=" in rest[0]:
        raise ConfigError("say where to listen: hone rollout serve RUN_FILE HOST:PORT, such as 127.0.0.1:8700")
    try:
        host, _ = split_address(rest[0])
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if _is_everywhere(host):
        raise ConfigError(f"{rest[0]} is every network of this machine; name the address that the trainer connects to")
    shared_token(os.environ)  # before anything is built
    config = load_recipe(run_file, rest[1:]).config
    if not isinstance(config, PolicyRunConfig):
        raise ConfigError(
            f"{run_file} has kind: {config.kind}, which has no rollout; give a run file of kind rl or distill"
        )
    if not config.actor.backend.computes_here:
        raise ConfigError(
            f"{run_file}: runtime.backend={config.runtime.backend.name} is a service, which answers itself; there is "
            "no server to start"
        )
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    with sigterm_as_ctrl_c():
        resolve("hone.trainers.policy.evaluate_model:serve_run")(
            config, rest[0], lambda address: typer.echo(f"serving {run_file} at {address}")
        )


def _is_everywhere(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return False
