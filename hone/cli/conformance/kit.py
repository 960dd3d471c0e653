"""Run every section in a child process of its own, and put the results together as a table and a report."""

from __future__ import annotations

import importlib.metadata
import json
import platform as machine
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hone import __version__
from hone.cli.conformance.record import LONGEST, Result
from hone.cli.conformance.section import SECTIONS
from hone.engines.registry import EngineRegistry
from hone.platforms.base import PLATFORM_VARIABLE, PlatformBase, current_platform
from hone.platforms.facts import facts_of
from hone.processes.request_process import ChildLost, ChildSpec, RequestProcess
from hone.rollout import ROLLOUT_ENGINES

PROGRAM = "hone.cli.conformance.section"
START_S = 120.0  # to import torch and the vendor's package
DEADLINE_S = 300.0  # of one section
COLOURS = {"works": "green", "fails": "red", "absent": "yellow"}
FORMAT = 1  # of the report
PACKAGES = ("torch", "transformers", "ray")  # the platform and the engines add theirs


def conformance(as_json: bool) -> bool:
    """Try this process's platform and print a table, or JSON. Returns whether no check failed.

    Raises ConfigError if the platform that HONE_PLATFORM names is unknown or unavailable.
    """
    platform = current_platform()
    results = list(run(platform.name))
    if as_json:
        typer.echo(json.dumps(report(platform, results), indent=1))
    else:
        show(platform, results)
    return not any(result.status == "fails" for result in results)


def run(platform: str, sections: Sequence[str] = tuple(SECTIONS)) -> Iterator[Result]:
    """The results of all checks on the platform of this name, section by section."""
    for section in sections:
        yield from _section(section, platform)


def _section(name: str, platform: str) -> Iterator[Result]:
    """The results of one section; if its process crashes or hangs, the last one says so."""
    process = RequestProcess(ChildSpec(f"process of section {name!r}", PROGRAM, {PLATFORM_VARIABLE: platform}))
    last = "its start"
    try:
        process.hello({}, START_S)
        process.request(json.dumps({"section": name}))
        deadline = time.monotonic() + DEADLINE_S
        while replies := process.replies(deadline):
            for reply in replies:
                if "end" in reply:
                    return
                result = Result(**reply)
                last = repr(result.name)
                yield result
        ended = f"it did not end within {DEADLINE_S:g} s, and was killed"
    except ChildLost as error:
        ended = str(error)
    finally:
        process.kill()
    yield Result(name, f"end of the section, after {last}", "fails", ended[-LONGEST:])


def report(platform: PlatformBase, results: Sequence[Result]) -> dict[str, Any]:
    """Everything that a maintainer needs to read the results without the machine."""
    versions = {}
    engines = [*ROLLOUT_ENGINES, *(package.distribution for package in EngineRegistry.packages.values())]
    for package in (*PACKAGES, *platform.packages, *engines):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    facts = [{"fact": fact.name, "value": fact.value, "source": fact.source} for fact in facts_of(platform)]
    return {
        "format": FORMAT,
        "hone": __version__,
        "python": machine.python_version(),
        "system": f"{machine.system()} {machine.release()} on {machine.machine()}",
        "packages": versions,
        "platform": platform.name,
        "device": f"{platform.device_count()} x {platform.device_name()}",
        "never_run": platform.never_run,
        "facts": facts,
        "results": [asdict(result) for result in results],
    }


def show(platform: PlatformBase, results: Sequence[Result]) -> None:
    """Print the results as a table."""
    table = Table.grid(padding=(0, 2))
    section = ""
    for result in results:
        if result.section != section:
            section = result.section
            table.add_row(Text(section, style="bold"), "", "")
        figures = ", ".join(f"{name} {value}" for name, value in result.figures.items())
        table.add_row(
            Text(f"  {result.name}"), Text(result.status, COLOURS[result.status]), Text(result.reason or figures)
        )
    counts = {status: sum(result.status == status for result in results) for status in COLOURS}
    console = Console()
    console.print(f"platform {platform.name}: {platform.device_count()} x {platform.device_name()}")
    if platform.never_run:
        console.print(f"note: {platform.never_run}; please report this table")
    console.print(table)
    console.print(", ".join(f"{count} {status}" for status, count in counts.items()))
