"""Start a run after its settings have been checked: torch and the models are imported only now."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hone.cli.recipe import KINDS
from hone.config import Loaded
from hone.registry import resolve

Restart = Annotated[bool, typer.Option("--restart", help="rename an earlier run's folder, and begin again")]


def start(kind: str, loaded: Loaded[Any], restart: bool, **control: Any) -> None:
    """Run a run of this kind, and print where its results are; `control` as for `RunControl`.

    The imports are here, so that an error in a run file is shown without waiting for them.
    """
    run = resolve(KINDS[kind].run)
    settings = resolve("hone.trainers.run.context:RunControl")(**control)
    resolve("hone.cli.running:report_run")(Path(loaded.config.run.dir), lambda: run(loaded, settings), restart)
