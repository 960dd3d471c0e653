"""`hone plan`: memory, time and cost of a run, before it is launched.

run file --> sizes of models and rows --> forecast --> tables
         --search--> mappings of the run to the devices, the ten fastest
         --grid----> every combination of some values, see `comparison`
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from hone.cli.calibration import calibrate
from hone.cli.comparison import COSTS, compare
from hone.cli.errors import EXIT_FAILED, say
from hone.cli.grouping import grouped
from hone.cli.prediction import show_held
from hone.cli.recipe import KINDS, load_recipe
from hone.config import ConfigError, Loaded, forget_reads
from hone.models.errors import ModelError
from hone.models.source import is_converted
from hone.planner.costs import fitted
from hone.planner.devices import GIB, Machine, known_devices, parse_devices, this_machine
from hone.planner.lengths import Lengths as LengthsOfAnswers
from hone.planner.lengths import parse_lengths, recorded
from hone.planner.memory import Phase
from hone.platforms.base import current_platform
from hone.registry import resolve
from hone.tracking.trackers.jsonl import ROLLOUTS_FILE
from hone.trainers.forecast.batch import Row, arithmetic
from hone.trainers.forecast.changes import Change, fastest, ways_to_fit
from hone.trainers.forecast.forecast import Forecast, Given, Rates, forecast, why_it_cannot_fit
from hone.trainers.forecast.setup import placement_of
from hone.trainers.forecast.sizes import Sizes, models_of, sizes_of
from hone.trainers.policy.settings import PolicyRunConfig

PLAIN_WIDTH = 120  # of a table that goes into a file
DRAWN = 2000  # lengths whose mean is taken
SHOWN_WAYS = 3


@dataclass(frozen=True, slots=True)
class Hardware:
    """Devices that the run is planned for."""

    devices: Annotated[str, typer.Option(help="8xH100, or the devices of this machine by default")] = ""
    nodes: Annotated[int, typer.Option(min=1, help="machines with so many devices each")] = 1
    device_facts: Annotated[Path | None, typer.Option(help="file of more devices (YAML)")] = None
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="first time this machine on the run's shapes, and keep the facts")
    ] = False

    def machine(self, computed: str) -> Machine:
        """The devices by their facts, for a run that computes in the dtype `computed`.

        Raises ConfigError for devices that no file describes.
        """
        known = known_devices(self.device_facts)
        if self.devices:
            return parse_devices(self.devices, self.nodes, known, computed)
        return replace(this_machine(known, computed), nodes=self.nodes)


@dataclass(frozen=True, slots=True)
class Known:
    """Costs of a step and lengths of answers, where they are known."""

    source: Annotated[Path | None, typer.Option("--from", help="finished synchronous run that costs come from")] = None
    lengths: Annotated[str, typer.Option(help="of answers: lognormal:MEAN:SIGMA, constant:N, or a recorded run")] = ""
    cost: Annotated[list[str] | None, typer.Option(help=f"NAME=SECONDS of {', '.join(COSTS)}; repeat it")] = None


@grouped
def plan(
    recipe: Annotated[Path, typer.Argument(help="run file (YAML), or the folder of a run")],
    hardware: Hardware,
    known: Known,
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value settings of the run file")] = None,
    search: Annotated[bool, typer.Option("--search", help="the ten fastest mappings to these devices")] = False,
    grid: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE[,VALUE...] to compare: staleness, devices, split, ...")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Predict memory by phase, time, cost and the arithmetic of a step, without running anything.

    With `--grid` or `--cost`, compare settings of the schedule instead. For the folder of a run, show the prediction
    made at its launch and what was measured. The exit code is 1 if the run does not fit.
    """
    if recipe.is_dir():
        show_held(recipe, as_json)
        return
    loaded = load_recipe(recipe, overrides or [])
    config = loaded.config
    if grid or known.cost:
        if not isinstance(config, PolicyRunConfig):
            raise ConfigError(
                f"{recipe}: --grid and --cost are for runs that generate answers; found kind {config.kind}"
            )
        compare(config, known.cost or [], known.source, grid or [], as_json)
        return
    if not config.actor.backend.computes_here:
        raise ConfigError(
            f"runtime.backend={config.runtime.backend.name}: the model is on a service, whose memory and time hone "
            "does not predict; to plan the same run on devices of yours, add runtime.backend=local"
        )
    with TemporaryDirectory(prefix="hone-plan-") as folder:
        sizes = _sizes(config, Path(folder), needs_rows=hardware.calibrate)
        if hardware.calibrate:
            _calibrate(config, sizes)
    machine = hardware.machine(config.actor.compute_dtype)
    base = current_platform().memory().allocated if machine.is_cpu else 0
    sizes, given = _given(config, sizes, known.source, known.lengths)
    given = replace(given, base=base)
    found = forecast(config, sizes, placement_of(config, machine), given)
    forget_reads(config)
    rows = arithmetic(config, sizes, found, loaded.provenance)
    ways = [] if found.fits else ways_to_fit(config, sizes, machine, given)[:SHOWN_WAYS]
    best = fastest(config, sizes, machine, given) if search else []
    if as_json:
        typer.echo(json.dumps(_plain(found, rows, ways, best), indent=2))
    else:
        _print(found, rows, ways, best if search else None, machine)
    if not found.fits:
        raise typer.Exit(EXIT_FAILED)


def _sizes(config: Any, folder: Path, needs_rows: bool) -> Sizes:
    """Sizes of the run's models and rows; a line on stderr says so where the rows cannot be counted here."""
    try:
        sizes = sizes_of(config, folder, needs_rows=needs_rows)
    except ModelError as error:
        named = [str(one.path) for one in models_of(config).values() if one.path and not is_converted(one.path)]
        if all(Path(one).expanduser().exists() for one in named):
            raise
        raise ModelError(f"{error}; for a plan, a folder that holds the model's config.json is enough") from error
    if not sizes.lengths.rows:
        say(
            f"the rows are unknown ({sizes.lengths.source}): each counts as long as the run file allows, and passes "
            "over the data are not counted"
        )
    return sizes


def _calibrate(config: Any, sizes: Sizes) -> None:
    """Time this machine, for this plan and all later ones."""
    launched = resolve(KINDS[config.kind].run)
    begin = time.monotonic()

    def run(settings: Any, control: Any) -> None:
        launched(Loaded(settings, {}), control)

    path = calibrate(config, sizes, run, lambda line: typer.echo(line, err=True))
    typer.echo(f"timed in {time.monotonic() - begin:.0f} s; the facts are in {path}", err=True)


def _given(config: Any, sizes: Sizes, source: Path | None, lengths: str) -> tuple[Sizes, Given]:
    """Costs and lengths that the user gives, and the sizes with these lengths."""
    rates, answers = None, None
    if (source is not None or lengths) and not isinstance(config, PolicyRunConfig):
        raise ConfigError("--from and --lengths are for runs that generate answers: hone train and hone distill")
    if source is not None:
        fit = fitted(source, config.rollout.replicas)
        rates = Rates(fit.costs, 0.0, f"the run {source}")
        longest = config.rollout.sampling.max_response_tokens
        if (source / ROLLOUTS_FILE).is_file():
            answers = recorded(source, longest, fit.response_tokens)
    if lengths:
        answers = parse_lengths(lengths, config.rollout.sampling.max_response_tokens)
    if answers is not None:
        told = replace(sizes.lengths, response=_mean(answers), source=f"answers: {answers.text}")
        sizes = replace(sizes, lengths=told)
    return sizes, Given(rates, answers)


def _mean(answers: LengthsOfAnswers) -> float:
    from_one_seed = Random(0)
    return sum(answers.draw(from_one_seed) for _ in range(DRAWN)) / DRAWN


def _plain(found: Forecast, rows: Sequence[Row], ways: Sequence[Change], best: Sequence[Change]) -> dict[str, Any]:
    def shown(one: Change) -> dict[str, Any]:
        return {
            "overrides": dict(one.overrides),
            "saves_bytes": one.saves,
            "peak_bytes": one.peak_bytes,
            "fits": one.fits,
            "step_s": None if one.found is None else one.found.step_s,
        }

    return {
        **found.plain(),
        "fits": found.fits,
        "devices_given": found.placement.machine.total,
        "batch": [asdict(one) for one in rows],
        "ways_to_fit": [shown(one) for one in ways],
        "search": [shown(one) for one in best],
    }


def _print(
    found: Forecast, rows: Sequence[Row], ways: Sequence[Change], best: Sequence[Change] | None, machine: Machine
) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    for line in _devices(found):
        console.print(line, soft_wrap=True)
    console.print(memory_table(found))
    for line in _verdict(found, ways):
        console.print(line, soft_wrap=True)
    console.print(time_table(found))
    for line in _time(found):
        console.print(line, soft_wrap=True)
    console.print(batch_table(rows))
    if best:
        console.print(search_table(best, machine))
    elif best is not None:
        console.print(f"No mapping to {machine} fits; take more devices, or what lowers the peak, as said above")


def _devices(found: Forecast) -> Iterator[str]:
    """A sentence for a run that takes fewer devices than there are, or more."""
    machine, taken = found.placement.machine, found.placement.devices
    if taken != machine.total:
        yield (
            f"The run file takes {taken} devices, and {machine} has {machine.total}: the tables are for these {taken}. "
            "Set runtime.backend.nodes, runtime.backend.devices and rollout.replicas to what you have, or use "
            "--search\n"
        )


def memory_table(found: Forecast) -> Table:
    """Memory by phase, of the device that needs most; the largest phase is marked."""
    shown = Table(title=f"Memory of one device ({found.placement.machine})", title_justify="left", title_style="bold")
    for name in ("phase", "GiB", "of it"):
        shown.add_column(name, justify="right" if name == "GiB" else "left")
    for phase in found.phases:
        mark = " (peak)" if phase is found.peak else ""
        shown.add_row(f"{phase.name}{mark}", f"{phase.total / GIB:.2f}", _parts(phase))
    return shown


def _parts(phase: Phase) -> str:
    parts = sorted(phase.parts, key=lambda one: -one.bytes)
    return ", ".join(f"{one.role} {one.what} {_size(one.bytes)}" for one in parts)


def _size(number: int) -> str:
    return f"{number / GIB:.2f}" if number >= GIB / 100 else f"{number / 2**20:.1f} MiB"


def _verdict(found: Forecast, ways: Sequence[Change]) -> Iterator[str]:
    needs = f"{found.peak_bytes / GIB:.2f} of {found.device_bytes / GIB:.1f} GiB"
    share = f"{found.peak_bytes / found.device_bytes:.0%}"
    if found.fits:
        yield f"It fits: {needs} ({share}), the most in {found.peak.name}.\n"
        return
    yield why_it_cannot_fit(found) or f"It does not fit: {needs} in {found.peak.name}."
    if not ways:
        yield "No change of these settings lowers the peak; take more devices.\n"
    for one in ways:
        enough = "fits" if one.fits else f"still {one.peak_bytes / GIB:.1f} GiB"
        yield f"  {one.text}   saves {one.saves / GIB:.2f} GiB: {enough}"


def time_table(found: Forecast) -> Table:
    """Seconds of a step by phase."""
    shown = Table(title=f"Time of a step, by {found.rates.source}", title_justify="left", title_style="bold")
    for name in ("phase", "s", "share"):
        shown.add_column(name, justify="left" if name == "phase" else "right")
    for name, seconds in found.seconds.items():
        if seconds > 0:
            shown.add_row(name.replace("_", " "), f"{seconds:.3g}", f"{seconds / found.step_s:.0%}")
    shown.add_row("step", f"{found.step_s:.3g}", "")
    return shown


def _time(found: Forecast) -> Iterator[str]:
    rate = f"{3600 / found.step_s:,.0f} steps per hour, {found.tokens / found.step_s:,.0f} tokens per second"
    whole = f"{found.steps:,} steps: {found.hours:,.2f} h on {found.placement.devices} devices, "
    price = f"{found.device_hours:,.1f} device hours" + (f", ${found.price:,.0f}" if found.price else "")
    yield f"{rate}\n{whole}{price} (without evaluations and checkpoints)"
    if found.outcome is not None and found.outcome.staleness:
        yield f"mean age of trained tokens: {found.outcome.staleness:.2f} updates"
    yield f"not counted: {', '.join(found.left_out)}\n" if found.left_out else ""


def batch_table(rows: Sequence[Row]) -> Table:
    """The numbers of a step, and where each came from."""
    shown = Table(title="Arithmetic of a step", title_justify="left", title_style="bold")
    for name in ("number", "value", "from"):
        shown.add_column(name, justify="right" if name == "value" else "left")
    for one in rows:
        shown.add_row(one.what, one.value, one.source)
    return shown


def search_table(best: Sequence[Change], machine: Machine) -> Table:
    """The fastest candidates, with overrides to paste."""
    shown = Table(title=f"Fastest on {machine}, by facts of the device", title_justify="left", title_style="bold")
    for name in ("s / step", "peak GiB", "age", "overrides"):
        shown.add_column(name, justify="left" if name == "overrides" else "right", overflow="fold")
    for one in best:
        assert one.found is not None
        age = "" if one.found.outcome is None else f"{one.found.outcome.staleness:.1f}"
        shown.add_row(f"{one.found.step_s:.3g}", f"{one.peak_bytes / GIB:.1f}", age, one.text or "(as it is)")
    return shown


__all__ = ["plan"]
