"""`hone serve`: a finished model at an OpenAI-compatible address, or a base model that clients train (a run file)."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated

import typer

from hone.cli.errors import EXIT_DONE, sigterm_as_ctrl_c
from hone.cli.flags import Threads
from hone.cli.recipe import RUN_FILES
from hone.cli.service import KEY, manage_keys, serve_run_file
from hone.composition import COMMAND_LINE, read_overrides
from hone.config import ConfigError, build
from hone.registry import resolve
from hone.rollout.settings import RolloutConfig

KEY_VARIABLE, SHORTEST_KEY = "HONE_SERVE_KEY", 16
PORT = 8000


def serve(
    target: Annotated[
        str,
        typer.Argument(
            help="model folder, GGUF file, hub name or packaged:NAME, or the folder of a run; a run file of kind: serve"
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="settings, as rollout.backend=vllm; key: add NAME, remove NAME, list"),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="port on this machine; 0: any that is free")] = PORT,
    threads: Threads = 0,
    adapters: Annotated[int | None, typer.Option(min=1, help="key add: most models in training")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="key add: tokens trained and sampled")] = None,
    bytes_: Annotated[int | None, typer.Option("--bytes", min=1, help="key add: bytes of all checkpoints")] = None,
) -> None:
    """Serve a model at http://127.0.0.1:PORT/v1, for every client of OpenAI's interface, until Ctrl-C.

    It answers by the built-in engine, or by vLLM (rollout.backend=vllm). Clients need the key that is printed, or the
    one in HONE_SERVE_KEY. Only programs on this machine reach the address.

    hone serve RUN.yaml, a run file of kind: serve, serves a base model for training by the protocol of Tinker.
    hone serve key add NAME makes the key of one of its tenants and prints it once.
    """
    if target == KEY:
        manage_keys(overrides or [], adapters, tokens_per_minute, bytes_)
        return
    if Path(target).suffix in RUN_FILES:
        moved = [] if port == PORT else [f"listen.port={port}"]
        serve_run_file(Path(target), [*(overrides or []), *moved])
        return
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
    try:
        with sigterm_as_ctrl_c():
            resolve("hone.trainers.answering.serving:serve_model")(model, answering, address, ready)
    except KeyboardInterrupt as stop:
        raise typer.Exit(EXIT_DONE) from stop


def _rollout(overrides: list[str]) -> RolloutConfig:
    found = read_overrides(overrides)
    if other := next((key for key in found if key != "rollout"), None):
        raise ConfigError(f"{COMMAND_LINE}: {other} is no setting of hone serve, which takes keys of rollout only")
    return build(RolloutConfig, found.get("rollout", {}), COMMAND_LINE)
