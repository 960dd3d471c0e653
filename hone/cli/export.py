"""`hone export`: write a checkpoint as a Hugging Face folder, or a LoRA adapter as a PEFT folder, and upload it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from hone.cli.grouping import grouped
from hone.config import ConfigError
from hone.registry import resolve
from hone.trainers.exports.checkpoint import export_checkpoint

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Hub:
    """Upload of the export."""

    push: Annotated[str, typer.Option(help="also upload it to this repository of a hub, OWNER/NAME")] = ""
    private: Annotated[bool, typer.Option("--private", help="a new repository is private")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would be uploaded, and upload nothing")] = False


@grouped
def export(
    run: Annotated[Path, typer.Argument(help="run folder")],
    output: Annotated[Path, typer.Argument(help="folder to create; with --push, one that is there is uploaded")],
    hub: Hub,
    checkpoint: Annotated[str, typer.Option(help="latest, best, or a step number")] = "latest",
    merge: Annotated[
        bool, typer.Option("--merge", help="LoRA run: write the whole model, with the adapter merged")
    ] = False,
    classifier: Annotated[
        bool, typer.Option("--classifier", help="reward model: write a transformers sequence classifier with one label")
    ] = False,
) -> None:
    """Write the model of a checkpoint as a Hugging Face folder; for a LoRA run, the adapter as a PEFT folder.

    Its README.md is a model card.
    """
    if not hub.push and (hub.private or hub.dry_run):
        raise ConfigError("--private and --dry-run say how to upload: name the repository with --push OWNER/NAME")
    console = Console()
    if hub.push:
        resolve("hone.trainers.exports.push:check_repository")(hub.push)
    there = bool(hub.push) and output.is_dir()
    if there and (checkpoint != "latest" or merge or classifier):
        raise ConfigError(
            f"{output} is there already, and --push uploads it as it is: name a new folder, or leave out "
            "--checkpoint, --merge and --classifier"
        )
    if not there:
        source = export_checkpoint(run, output, checkpoint, merge, classifier)
        console.print(f"{escape(str(source))} -> {escape(str(output))}", soft_wrap=True)
    if hub.push:
        _upload(output, hub, console)


def _upload(folder: Path, hub: Hub, console: Console) -> None:
    upload = resolve("hone.trainers.exports.push:planned")(folder, hub.push, hub.private)
    if not hub.dry_run:
        where = resolve("hone.trainers.exports.push:push")(upload)
        console.print(f"{escape(str(folder))} -> {escape(where)}", soft_wrap=True)
        return
    kind = "a private repository, if it is new" if hub.private else "a public repository, if it is new"
    console.print(f"would upload {len(upload.files)} files, {upload.bytes / MIB:.1f} MiB, to {hub.push} ({kind}):")
    for path, size in upload.files:
        console.print(f"  {size:>14,} {escape(path)}", soft_wrap=True)
    found = "a token was found" if resolve("hone.trainers.exports.push:has_token")() else "no token was found"
    console.print(f"nothing was uploaded; {found} (hf auth login)")
