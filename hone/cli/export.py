"""`hone export`: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from hone.trainers.export import export_checkpoint


def export(
    run: Annotated[Path, typer.Argument(help="run folder")],
    output: Annotated[Path, typer.Argument(help="new folder for the model")],
    checkpoint: Annotated[str, typer.Option(help="latest, best, or a step number")] = "latest",
) -> None:
    """Write the policy of a checkpoint in the Hugging Face format."""
    source = export_checkpoint(run, output, checkpoint)
    Console().print(f"{escape(str(source))} -> {escape(str(output))}", soft_wrap=True)
