"""`hone export`: write a checkpoint as a Hugging Face folder, or a LoRA adapter as a PEFT folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from hone.trainers.run.export import export_checkpoint


def export(
    run: Annotated[Path, typer.Argument(help="run folder")],
    output: Annotated[Path, typer.Argument(help="folder to create")],
    checkpoint: Annotated[str, typer.Option(help="latest, best, or a step number")] = "latest",
    merge: Annotated[
        bool, typer.Option("--merge", help="LoRA run: write the whole model, with the adapter merged")
    ] = False,
    classifier: Annotated[
        bool, typer.Option("--classifier", help="reward model: write a transformers sequence classifier with one label")
    ] = False,
) -> None:
    """Write the model of a checkpoint as a Hugging Face folder; for a LoRA run, the adapter as a PEFT folder."""
    source = export_checkpoint(run, output, checkpoint, merge, classifier)
    Console().print(f"{escape(str(source))} -> {escape(str(output))}", soft_wrap=True)
