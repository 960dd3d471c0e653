"""`hone export`: a checkpoint as a Hugging Face folder, or an adapter's as PEFT's."""

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
    merge: Annotated[
        bool, typer.Option("--merge", help="of a LoRA run: the whole model, the adapter merged in")
    ] = False,
    classifier: Annotated[
        bool, typer.Option("--classifier", help="of a reward model: transformers' sequence classification, one label")
    ] = False,
) -> None:
    """Write the policy of a checkpoint in the Hugging Face format; of a LoRA run, the adapter in PEFT's."""
    source = export_checkpoint(run, output, checkpoint, merge, classifier)
    Console().print(f"{escape(str(source))} -> {escape(str(output))}", soft_wrap=True)
