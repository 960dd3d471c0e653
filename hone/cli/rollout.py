"""`hone rollout join RUN`, `hone rollout leave RUN REPLICA`: servers come and go while an asynchronous run trains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
import yaml

from hone.config import ConfigError
from hone.trainers.run.folder import is_claimed
from hone.workers.control import CONTROL, request


def rollout(
    verb: Annotated[Literal["join", "leave"], typer.Argument(help="join: start one more server; leave: end one")],
    run: Annotated[Path, typer.Argument(help="folder of a run that is training")],
    replica: Annotated[str, typer.Argument(help="leave: the server's name, such as vllm-1")] = "",
    timeout_s: Annotated[float, typer.Option(help="longest wait for the run's answer, in seconds")] = 600.0,
) -> None:
    """Let a server join or leave a run that trains asynchronously.

    A server that joins gets requests once it has proven that it serves the run's weights. When a server
    leaves, the other servers continue its answers.
    """
    if (verb == "leave") != bool(replica):
        raise ConfigError("name the server that leaves: hone rollout leave RUN REPLICA; join takes no name")
    if not is_claimed(run):
        raise ConfigError(f"no process is training the run in {run}")
    if not _is_asynchronous(run):
        raise ConfigError(f"the run in {run} is synchronous: servers join and leave with asynchrony.staleness above 0")
    try:
        typer.echo(request(run / CONTROL, verb, replica, timeout_s))
    except (ValueError, TimeoutError) as error:
        raise ConfigError(f"{run}: {error}") from error


def _is_asynchronous(run: Path) -> bool:
    settings = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")) or {}
    return bool((settings.get("asynchrony") or {}).get("staleness"))
