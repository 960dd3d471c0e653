"""`hone doctor`: what this machine can run, and why not the rest. Looks only; changes nothing and reaches no network.

With `--model`, what a model is (see `model_doctor`); then a name on a hub is looked up there.

machine    processor, its features that matter, threads, memory, disk
software   Python, torch and the packages beside it, optional packages by the extra that brings them
parts      platforms, and every registered name that cannot be used here, with the reason
plug-ins   what was loaded, what failed
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hone import __version__
from hone.cli.finding import Finding
from hone.cli.listing import REGISTRIES, problems
from hone.cli.model_doctor import model_report
from hone.config import ConfigError
from hone.platforms.base import PLATFORM_VARIABLE, PlatformRegistry
from hone.registry import load_plugins

DISTRIBUTION = "hone-rl"
REQUIRED = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "pyarrow")
CPU_FEATURES = {  # flag of /proc/cpuinfo -> what it is good for
    "avx2": "fp32 kernels",
    "avx512f": "wide fp32 kernels",
    "avx512_bf16": "bf16 kernels",
    "amx_bf16": "bf16 matrix tiles: bf16 runs whole steps up to twice as fast as fp32",
}
UNWANTED = (
    "torchvision",
    "torchaudio",
)  # their usual builds are for CUDA and break every model import beside a CPU torch


def doctor(
    model: Annotated[str, typer.Option(help="say what this model is instead: a folder, or a name on a hub")] = "",
    revision: Annotated[str, typer.Option(help="of a model on a hub: branch, tag or commit")] = "",
    devices: Annotated[int, typer.Option(help="devices that share a training; default: 1, 2, 4 and 8", min=0)] = 0,
    lora_rank: Annotated[int, typer.Option(help="rank of the adapter that is counted", min=1)] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="for programs")] = False,
) -> None:
    """Say what this machine can run, and why not the rest; or what a model is, needs and can use."""
    if not model and (revision or devices):
        raise ConfigError("--revision and --devices are about a model: give --model too")
    if model:
        report = model_report(model, revision or None, devices or None, lora_rank)
        if as_json:
            typer.echo(json.dumps(report.numbers, indent=1))
        else:
            _show(report.facts)
        return
    findings = list(examine())
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        _show(findings)


def _show(findings: Iterable[Finding]) -> None:
    console = Console()
    section = ""
    table = Table.grid(padding=(0, 2))
    for finding in findings:
        if finding.section != section:
            section = finding.section
            table.add_row(Text(section, style="bold"), "", "")
        mark = {True: Text("yes", "green"), False: Text("no", "yellow"), None: Text("")}[finding.ok]
        table.add_row(Text(f"  {finding.name}"), mark, Text(finding.detail))
    console.print(table)


def examine() -> Iterator[Finding]:
    """Every finding, section by section."""
    yield from _machine()
    yield from _software()
    yield from _optional()
    yield from _platforms()
    yield from _parts()
    yield from _plugins()


def _machine() -> Iterator[Finding]:
    info = _read(Path("/proc/cpuinfo"))
    model = re.search(r"model name\s*: (.*)", info)
    flags = set((re.search(r"flags\s*: (.*)", info) or [""])[0].split())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("machine", "system", None, f"{platform.system()} {platform.release()} on {platform.machine()}")
    yield Finding("machine", "processor", None, f"{model[1] if model else platform.processor()}, {cores} cores for us")
    for flag, use in CPU_FEATURES.items() if flags else ():
        yield Finding("machine", flag, flag in flags, use)
    set_threads = os.environ.get("OMP_NUM_THREADS")
    stated = f"OMP_NUM_THREADS={set_threads}" if set_threads else "OMP_NUM_THREADS is not set"
    yield Finding("machine", "threads", None, f"{torch.get_num_threads()} in torch; {stated}")
    memory = {key: int(value) for key, value in re.findall(r"(\w+):\s+(\d+) kB", _read(Path("/proc/meminfo")))}
    if memory:
        free, total = memory["MemAvailable"] / 2**20, memory["MemTotal"] / 2**20
        yield Finding("machine", "memory", None, f"{free:.1f} of {total:.1f} GiB free")
    disk = shutil.disk_usage(Path.cwd())
    yield Finding("machine", "disk", None, f"{disk.free / 2**30:.1f} of {disk.total / 2**30:.1f} GiB free here")


def _software() -> Iterator[Finding]:
    version = sys.version_info
    fits = (3, 11) <= version[:2] <= (3, 13)
    wanted = "" if fits else "; 3.11 to 3.13 are supported"
    yield Finding("software", "Python", fits, f"{version.major}.{version.minor}.{version.micro}{wanted}")
    yield Finding("software", "hone", True, __version__)
    for name in REQUIRED:
        found = _version(name)
        yield Finding("software", name, bool(found), found or "not installed")
    for name in UNWANTED if torch.version.cuda is None and torch.version.hip is None else ():
        if _version(name):
            text = f"{_version(name)} is installed beside a CPU build of torch; if models fail to import, uninstall it"
            yield Finding("software", name, False, text)


def _optional() -> Iterator[Finding]:
    """The packages of the distribution's extras, from its own metadata; those for its development are left out."""
    for requirement in importlib.metadata.requires(DISTRIBUTION) or ():
        extra = re.search(r"extra == ['\"](\w+)['\"]", requirement)
        if extra is None or extra[1] in ("test", "check"):
            continue
        name = re.match(r"[\w.-]+", requirement)
        found = _version(name[0]) if name else ""
        missing = f"not installed; it comes with {DISTRIBUTION}[{extra[1]}]"
        yield Finding("optional packages", name[0] if name else requirement, bool(found), found or missing)


def _platforms() -> Iterator[Finding]:
    forced = os.environ.get(PLATFORM_VARIABLE)
    if forced:
        yield Finding("platforms", PLATFORM_VARIABLE, None, forced)
    for name, reason in PlatformRegistry.probe().items():
        yield Finding("platforms", name, not reason, reason or _devices(name))


def _devices(name: str) -> str:
    chosen = PlatformRegistry.choose(name)
    count = chosen.device_count()
    return f"{count} x {chosen.device_name()}" if count > 1 else chosen.device_name()


def _parts() -> Iterator[Finding]:
    for kind in REGISTRIES:
        found = {name: reason for name, reason in problems(kind).items() if kind != "platforms"}
        usable = [name for name, reason in found.items() if not reason]
        if usable:
            yield Finding("parts", kind, True, ", ".join(usable))
        for reason in filter(None, found.values()):
            yield Finding("parts", kind, False, reason)


def _plugins() -> Iterator[Finding]:
    plugins = load_plugins()
    for name, problem in plugins.items():
        yield Finding("plug-ins", name, not problem, problem or "loaded")
    if not plugins:
        yield Finding("plug-ins", "none", None, "entry points of the group hone.plugins, or HONE_USE_EXTERNAL_MODULES")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
