"""`hone watch`: the live page of runs, on this machine, behind a token."""

from __future__ import annotations

import secrets
import socket
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
import uvicorn
from rich.console import Console
from rich.markup import escape

from hone.config import ConfigError
from hone.processes.guard import LOOPBACK, PathToken, TokenGuard, same_token
from hone.processes.listening import Refusals, bounded
from hone.tracking.watch.app import application
from hone.tracking.watch.runs import Watched

MOST_CONNECTIONS = 64  # a browser holds six for each page
STOP_S = 1  # for answers that are under way when the command ends; streams of events never end by themselves


def watch(
    runs: Annotated[list[Path], typer.Argument(help="run folders, or a folder with run folders in it")],
    port: Annotated[int, typer.Option(help="port on this machine; 0: a free one", min=0, max=65535)] = 0,
    browser: Annotated[bool, typer.Option("--open", help="open the page in the browser")] = False,
) -> None:
    """Show runs in a live page: curves grow and rollouts appear while the runs write them. Ctrl-C ends it."""
    watched = Watched(runs)
    token = secrets.token_urlsafe(24)
    guarded = PathToken(TokenGuard(application(watched), lambda given: same_token(given, token)))
    with _listening(port) as listener:
        address = f"http://{LOOPBACK}:{listener.getsockname()[1]}/s/{token}/"
        count = len(watched.runs)
        Console().print(
            f"{count} run{'s' if count > 1 else ''}; the page is for this machine and the bearer of its address:"
        )
        typer.echo(address)
        if browser and not webbrowser.open(address):
            Console().print(escape("no browser was found; open the address in one"))
        config = uvicorn.Config(
            guarded,
            ws="none",
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=STOP_S,
            http=bounded(Refusals("hone watch"), lambda: MOST_CONNECTIONS, head_s=60.0),
        )
        uvicorn.Server(config).run([listener])


@contextmanager
def _listening(port: int) -> Iterator[socket.socket]:
    try:
        listener = socket.create_server((LOOPBACK, port), backlog=128)
    except OSError as error:
        raise ConfigError(
            f"--port {port}: {error.strerror or error}; another program may use it: give another port, or none for a "
            "free one"
        ) from error
    with listener:
        yield listener
