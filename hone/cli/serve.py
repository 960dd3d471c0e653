"""`hone serve`: a finished model at an OpenAI-compatible address."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Annotated

import typer

from hone.cli.errors import EXIT_DONE
from hone.cli.flags import Threads
from hone.composition import COMMAND_LINE, read_overrides
from hone.config import ConfigError, build
from hone.registry import resolve
from hone.rollout.settings import RolloutConfig

KEY_VARIABLE, SHORTEST_KEY = "HONE_SERVE_KEY", 16
RUN_FILES = (".yaml", ".yml")


def serve(
    target: Annotated[str, typer.Argument(help="model folder, GGUF file or hub name, or the folder of a run")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="rollout settings, such as rollout.backend=vllm")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="port on this machine; 0: any that is free")] = 8000,
    threads: Threads = 0,
) -> None:
    """Serve a model at http://127.0.0.1:PORT/v1, for every client of OpenAI's interface, until Ctrl-C.

    It answers by the built-in engine, or by vLLM (rollout.backend=vllm). Clients need the key that is printed, or the
    one in HONE_SERVE_KEY. Only programs on this machine reach the address.
    """
    if Path(target).suffix in RUN_FILES:
        raise ConfigError(f"{target} is a run file, and hone serve takes a finished model: the folder of its run")
    rollout = _rollout(overrides or [])
    key = os.environ.get(KEY_VARIABLE, "")
    if key and (len(key) < SHORTEST_KEY or not key.isascii() or not key.isalnum()):
        raise ConfigError(f"{KEY_VARIABLE} should be at least {SHORTEST_KEY} letters and digits, found {len(key)}")
    answering = resolve("hone.trainers.answering.model:Answering")(rollout, threads=threads)
    model = resolve("hone.trainers.answering.model:finished_model")(target)
    name = resolve("hone.trainers.answering.model:name_of")(model)
    address = resolve("hone.trainers.answering.serving:Address")(name, port, key)

    def ready(url: str, key: str) -> None:
        typer.echo(f"serving {name} at {url}")
        typer.echo(f"key: {key}" if KEY_VARIABLE not in os.environ else f"key: as in {KEY_VARIABLE}")

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        resolve("hone.trainers.answering.serving:serve_model")(model, answering, address, ready)
    except KeyboardInterrupt as stop:
        raise typer.Exit(EXIT_DONE) from stop


def _rollout(overrides: list[str]) -> RolloutConfig:
    found = read_overrides(overrides)
    if other := next((key for key in found if key != "rollout"), None):
        raise ConfigError(f"{COMMAND_LINE}: {other} is no setting of hone serve, which takes keys of rollout only")
    return build(RolloutConfig, found.get("rollout", {}), COMMAND_LINE)
