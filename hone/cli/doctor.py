"""`hone doctor`: what this machine can run, and why it cannot run the rest. It changes nothing and uses no network.

With a run file, it shows what that run needs of the machine, and its model. With `--model`, it describes a model
instead (see `model_doctor`), and looks up a hub name on that hub. With `--conformance`, it computes on the device and
compares the results with the CPU's (see `conformance`).

machine    processor, the features that speed up training, threads, memory, disk
software   Python, torch and the other required packages, optional packages with the extra that installs each
platforms  which devices can be used, with the reason if not
sandboxes  where code of a policy can run: each local one runs a program, and says what it stops or why it does not work
           (a service is not asked: only whether there is a key)
engines    which training engines have the package that they need
servers    whether vLLM and other servers have a Python environment
parts      the names that a run file may use; with `--full`, each is imported, and the reason shown if that fails
plug-ins   loaded or failed, and those of hone's repository that are not installed
"""

from __future__ import annotations

import asyncio
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

import hone
from hone import __version__, machine
from hone.cli.finding import Finding
from hone.cli.listing import REGISTRIES, problems, registered
from hone.config import ConfigError
from hone.engines.registry import EngineRegistry
from hone.models.numerics.products import described
from hone.platforms.base import (
    AUTO,
    PLATFORM_VARIABLE,
    PlatformRegistry,
    compute_dtype,
    why_compute_dtype,
    why_no_triton,
)
from hone.platforms.cuda import is_cpu_build
from hone.plugins import OURS, elsewhere, install_line, load_plugins
from hone.registry import CannotLoad, resolve
from hone.rollout import ROLLOUT_ENGINES
from hone.sandboxes import SANDBOXES
from hone.sandboxes.choice import LOCAL
from hone.sandboxes.choice import examine as examine_sandbox

DISTRIBUTION = "hone-rl"
REQUIRED = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic", "pyarrow")
CPU_FEATURES = {  # flag of /proc/cpuinfo -> what it speeds up
    "avx2": "fp32 kernels",
    "avx512f": "wide fp32 kernels",
    "avx512_bf16": "bf16 kernels",
    "amx_bf16": "bf16 matrix tiles: a step in bf16 takes up to half the time of one in fp32",
}
# rollout engines that run in a Python environment of their own; one that trains too is a service
SERVERS = ("vllm", *(name for name in elsewhere("rollout engine") if name not in elsewhere("training engine")))
UNWANTED = ("torchvision", "torchaudio")  # their CUDA builds break every model import when torch is a CPU build
CONFORMANCE = "hone.cli.conformance.kit:conformance"  # imports engines and rollouts
RUN_REPORT = "hone.cli.model_doctor:run_report"
MODEL_REPORT = "hone.cli.model_doctor:model_report"  # imports transformers: seconds that the machine's report saves


def doctor(
    run: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN_FILE] [KEY=VALUE]...",
            help="show what this run file needs, with these settings, not everything",
        ),
    ] = None,
    model: Annotated[
        str, typer.Option(help="describe this model instead: a folder, or NAME or NAME@REVISION on a hub")
    ] = "",
    devices: Annotated[int, typer.Option(help="devices that train the model; default: 1, 2, 4 and 8", min=0)] = 0,
    lora_rank: Annotated[int, typer.Option(help="rank of the LoRA adapter in the memory table", min=1)] = 16,
    conformance: Annotated[
        bool, typer.Option("--conformance", help="try on the device everything that depends on it; exit 1 if one fails")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help="also import every part, to see whether it works here")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Show what this machine can run, and why it cannot run the rest; with --model, what a model needs and supports."""
    if run and (model or full or conformance or as_json):
        raise ConfigError("a run file is shown with its model: leave out --model, --full, --conformance and --json")
    if run:
        _show(resolve(RUN_REPORT)(Path(run[0]), run[1:], examine(full=False)))
        return
    if conformance and (model or full):
        raise ConfigError("--conformance tries the device: give it without --model and --full")
    if not model and devices:
        raise ConfigError("--devices is for a model: give --model too")
    if model:
        name, _, revision = model.partition("@") if not Path(model).exists() else (model, "", "")
        report = resolve(MODEL_REPORT)(name, revision or None, devices or None, lora_rank)
        if as_json:
            typer.echo(json.dumps(report.numbers, indent=1))
        else:
            _show(report.facts)
        return
    if conformance:
        raise typer.Exit(0 if resolve(CONFORMANCE)(as_json) else 1)
    findings = list(examine(full))
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


def examine(full: bool) -> Iterator[Finding]:
    """Every finding, section by section; `full` imports all parts."""
    yield from _machine()
    yield from _software()
    yield from _optional()
    yield from _platforms()
    yield from _sandboxes()
    yield from _engines()
    yield from _servers()
    yield from _tried_parts() if full else _named_parts()
    yield from _plugins()


def _machine() -> Iterator[Finding]:
    info = _read(Path("/proc/cpuinfo"))
    model = re.search(r"model name\s*: (.*)", info)
    flags = set((re.search(r"flags\s*: (.*)", info) or [""])[0].split())
    cores = machine.cores()
    yield Finding("machine", "system", None, f"{platform.system()} {platform.release()} on {platform.machine()}")
    yield Finding(
        "machine", "processor", None, f"{model[1] if model else platform.processor()}, {cores} cores available"
    )
    for flag, use in CPU_FEATURES.items() if flags else ():
        yield Finding("machine", flag, flag in flags, use)
    set_threads = os.environ.get("OMP_NUM_THREADS")
    stated = f"OMP_NUM_THREADS={set_threads}" if set_threads else "OMP_NUM_THREADS is not set"
    yield Finding("machine", "threads", None, f"{torch.get_num_threads()} in torch; {stated}")
    for dtype in (torch.float32, torch.bfloat16):
        yield Finding("machine", f"products of {str(dtype).removeprefix('torch.')}", None, described(dtype))
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
    if _version("hone"):
        text = (
            f"{_version('hone')}: the package 'hone' of PyPI is another program with the same module and command; "
            f"uninstall 'hone' and '{DISTRIBUTION}', and install this one again from its repository or wheel"
        )
        yield Finding("software", "another hone", False, text)
    for name in REQUIRED:
        found = _version(name)
        yield Finding("software", name, bool(found), found or "not installed")
    for name in UNWANTED if is_cpu_build() else ():
        if _version(name):
            text = f"{_version(name)} is installed with a CPU build of torch; uninstall it if models fail to import"
            yield Finding("software", name, False, text)


def _optional() -> Iterator[Finding]:
    """The packages of hone's extras, read from its metadata, without the extras for development."""
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or ()
    except importlib.metadata.PackageNotFoundError:
        yield Finding("optional packages", DISTRIBUTION, None, "runs from a folder, so its extras are not known")
        return
    for requirement in requirements:
        extra = re.search(r"extra == ['\"](\w+)['\"]", requirement)
        if extra is None or extra[1] in ("test", "check"):
            continue
        name = re.match(r"[\w.-]+", requirement)
        found = _version(name[0]) if name else ""
        wanted = requirement.partition(";")[0].strip()
        missing = f"not installed; to add it ({extra[1]}): pip install '{wanted}'"
        yield Finding("optional packages", name[0] if name else requirement, bool(found), found or missing)


def _platforms() -> Iterator[Finding]:
    forced = os.environ.get(PLATFORM_VARIABLE)
    if forced:
        yield Finding("platforms", PLATFORM_VARIABLE, None, forced)
    for name, reason in PlatformRegistry.probe().items():
        yield Finding("platforms", name, not reason, reason or _devices(name))
        if not reason:
            platform = PlatformRegistry.choose(name)
            said = f"{compute_dtype(AUTO, platform)} ({why_compute_dtype(AUTO, platform)})"
            yield Finding("platforms", f"compute_dtype on {name}", None, said)
            yield Finding("platforms", f"Triton kernels on {name}", None, why_no_triton(platform) or "used")


def _devices(name: str) -> str:
    chosen = PlatformRegistry.choose(name)
    count = chosen.device_count()
    return f"{count} x {chosen.device_name()}" if count > 1 else chosen.device_name()


def _sandboxes() -> Iterator[Finding]:
    for name in LOCAL:
        works, detail = asyncio.run(examine_sandbox(name))
        yield Finding("sandboxes", name, works, detail)
    for name in SANDBOXES:
        try:
            configured = getattr(SANDBOXES.get(name), "configured", None)
        except CannotLoad as error:
            yield Finding("sandboxes", name, None, str(error))
        else:
            if configured is not None:
                yield Finding("sandboxes", name, None, configured())


def _engines() -> Iterator[Finding]:
    """Find the training engines that can be chosen here: each may need a package of its own."""
    for backend in EngineRegistry.backends:
        package = EngineRegistry.packages.get(backend)
        found = "" if package is None else _version(package.distribution)
        if package is None:
            yield Finding("training engines", backend, True, "no other package needed")
        elif package.is_installed:
            yield Finding("training engines", backend, True, f"{package.distribution} {found}")
        else:
            missing = f"{package.distribution} is not installed; to add it: {package.install}"
            yield Finding("training engines", backend, False, missing)


def _servers() -> Iterator[Finding]:
    """Find the Python environments of the rollout servers; no server is started."""
    for backend in (name for name in SERVERS if name in ROLLOUT_ENGINES):
        places = [place / f".venv-{backend}" for place in (Path.cwd(), Path(hone.__file__).parents[1])]
        found = next((place for place in places if (place / "bin" / "python").is_file()), None)
        missing = f"no .venv-{backend} here: make .venv-{backend} (CPUs), or docs/rollout.md; or set rollout.python"
        packages = "" if found is None else next((str(one) for one in found.glob(f"lib/*/site-packages/{backend}")), "")
        detail = missing if found is None else f"{found}{'' if packages else f' has no {backend}'}"
        yield Finding("rollout servers", backend, bool(packages), detail)


def _named_parts() -> Iterator[Finding]:
    yield Finding("parts", "not examined", None, "whether each part can be imported here: hone doctor --full")
    for kind in REGISTRIES:
        if kind != "platforms":
            yield Finding("parts", kind, None, ", ".join(part.name for part in registered(kind)))


def _tried_parts() -> Iterator[Finding]:
    for kind in REGISTRIES:
        found = {name: reason for name, reason in problems(kind).items() if kind != "platforms"}
        usable = [name for name, reason in found.items() if not reason and name not in SERVERS]
        if usable:
            yield Finding("parts", kind, True, ", ".join(usable))
        for reason in filter(None, found.values()):
            yield Finding("parts", kind, False, reason)


def _plugins() -> Iterator[Finding]:
    plugins = load_plugins()
    for name, problem in plugins.items():
        yield Finding("plug-ins", name, not problem, problem or "loaded")
    for name, kinds in OURS.items():
        if name not in plugins:
            parts = "; ".join(f"{kind} {', '.join(names)}" for kind, names in kinds.items())
            yield Finding("plug-ins", name, False, f"not installed ({parts}); to add it: {install_line(name)}")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
