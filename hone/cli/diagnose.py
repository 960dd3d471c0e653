"""`hone diagnose`: what is wrong with a run, with the figures that show it and what to try."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from hone.cli.errors import say
from hone.config import ConfigError
from hone.diagnosis.evidence import Evidence, Finding, read_evidence
from hone.diagnosis.rules import RULES, findings
from hone.tracking.trackers.jsonl import METRICS_FILE
from hone.trainers.run.folder import is_claimed

STYLES = {"stops": "bold red", "hurts": "bold yellow", "note": "bold"}


def diagnose(
    run: Annotated[Path, typer.Argument(help="run folder; the run may still be in progress")],
    as_json: Annotated[bool, typer.Option("--json", help="print a JSON object for each finding")] = False,
) -> None:
    """Compare the metrics of a run with known patterns, and say what was seen, what it means and what to try."""
    evidence = read_evidence(run, is_claimed(run))
    found = findings(evidence)
    if evidence.unread and not (evidence.steps or found):
        raise ConfigError(
            f"{run}: nothing was judged, because no step could be read: {' '.join(evidence.unread)} Expected an object "
            "for each step, as the tracker jsonl writes it; restore the file from a copy"
        )
    for sentence in evidence.unread:
        say(f"warning: {run}: {sentence}")
    if as_json:
        for one in found:
            typer.echo(json.dumps(asdict(one)))
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(Text(_head(evidence, found)))
    for one in found:
        console.print(_paragraph(one))


def _head(evidence: Evidence, found: list[Finding]) -> str:
    if found:
        what = f"{len(found)} of {len(RULES)} rules found something"
    elif evidence.steps:
        what = f"none of {len(RULES)} rules found anything"
    else:
        what = f"nothing was judged: the rules compare steps, and there is none in {METRICS_FILE} yet"
    return f"{evidence.folder}: {evidence.steps} logged steps; {what}"


def _paragraph(found: Finding) -> Text:
    text = Text(f"\n{found.title}", style=STYLES[found.weight])
    rows = [("seen", found.seen), ("means", found.meaning)]
    rows += [("try" if number == 0 else "", one) for number, one in enumerate(found.tries)]
    rows += [("look at", ", ".join(found.metrics))] if found.metrics else []
    for label, value in rows:
        text.append(f"\n  {label:<8}", style="dim").append(value, style="not bold default")
    return text
