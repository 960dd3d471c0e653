"""Forecast of a run: memory by phase, seconds of a step by phase, cost to the last step.

settings, sizes, devices --> Setup --> phases of memory
                         --> costs (roofline, or an earlier run) --> the run's own schedule --> seconds
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hone.config import ConfigError
from hone.machine import MEMINFO
from hone.planner.calibrated import TimedShape, Work, costs_from, shape_of
from hone.planner.costs import Costs
from hone.planner.lengths import Lengths as LengthsOfAnswers
from hone.planner.lengths import parse_lengths
from hone.planner.memory import Phase, Setup, certain_bytes, peak, phases
from hone.planner.roofline import Load, Pass, costs_of, forward_operations
from hone.planner.simulation import Outcome, Setting, simulate
from hone.schedule.settings import AsynchronyConfig
from hone.trainers.forecast.setup import (
    DevicePlacement,
    Models,
    cache_size,
    cached_columns,
    not_counted,
    setup_of,
    shared_tokens,
    step_sequences,
    width_of,
)
from hone.trainers.forecast.sizes import Lengths, Sizes
from hone.trainers.policy.generation import has_servers
from hone.trainers.policy.settings import PolicyRunConfig

GIB = 2**30
MEASURED_STEPS = 3  # of a simulated run
ROOFLINE = "facts of the device"
CALIBRATED = "timings of these shapes on the device"


@dataclass(frozen=True, slots=True)
class Rates:
    """Costs of the parts of a step, and the share of training that is forwards before the update."""

    costs: Costs
    forward_share: float
    source: str = ROOFLINE
    rest_s: float = 0.0  # of `costs.train_step_s`: what no model does


@dataclass(frozen=True, slots=True)
class Forecast:
    """Memory of the device that needs most, in bytes, and time of a step, in seconds, before a run is launched."""

    placement: DevicePlacement
    setup: Setup
    phases: Sequence[Phase]
    rates: Rates
    seconds: dict[str, float]  # by phase, as in `perf/<phase>_s`
    step_s: float
    tokens: float  # of a step
    steps: int
    outcome: Outcome | None  # of the simulated schedule; None: the run generates nothing
    left_out: tuple[str, ...]

    @property
    def peak(self) -> Phase:
        return peak(self.phases)

    @property
    def peak_bytes(self) -> int:
        return self.peak.total

    @property
    def device_bytes(self) -> int:
        return self.placement.machine.device.memory_bytes

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.device_bytes

    @property
    def hours(self) -> float:
        """Hours to the last step, evaluation and checkpoints left out."""
        return self.steps * self.step_s / 3600

    @property
    def device_hours(self) -> float:
        return self.hours * self.placement.devices

    @property
    def price(self) -> float:
        """US dollars to the last step; 0: the device has no price."""
        return self.device_hours * self.placement.machine.device.price_per_hour

    def plain(self) -> dict[str, Any]:
        """The forecast as JSON-compatible data."""
        return {
            "device": str(self.placement.machine),
            "devices": self.placement.devices,
            "memory": {
                one.name: {"bytes": one.total, "parts": [asdict(part) for part in one.parts]} for one in self.phases
            },
            "peak": {"phase": self.peak.name, "bytes": self.peak_bytes, "device_bytes": self.device_bytes},
            "step_s": self.step_s,
            "seconds": self.seconds,
            "tokens_per_step": self.tokens,
            "steps": self.steps,
            "hours": self.hours,
            "device_hours": self.device_hours,
            "price": self.price,
            "costs": asdict(self.rates.costs),
            "costs_from": self.rates.source,
            "staleness": None if self.outcome is None else self.outcome.staleness,
            "left_out": list(self.left_out),
        }


@dataclass(frozen=True, slots=True)
class Given:
    """Facts of a user or an earlier run beyond the settings."""

    rates: Rates | None = None
    answers: LengthsOfAnswers | None = None
    base: int = 0  # bytes of the process before it loads anything
    ranks: int = 0  # of a launch by torchrun; 0: as many as the machine has devices


def forecast(config: Any, sizes: Sizes, placement: DevicePlacement, given: Given | None = None) -> Forecast:
    """Predict a run. Raises ConfigError for settings that do not fit the devices."""
    given = given or Given()
    setup = checked_setup(config, sizes, placement, given)
    rates = given.rates or rates_of(config, sizes, placement)
    tokens = step_tokens(config, sizes.lengths)
    costs, devices = rates.costs, placement.trainer
    training = costs.train_step_s + costs.train_token_s * tokens / devices
    models = training - rates.rest_s
    seconds = {"forward": models * rates.forward_share, "backward": models * (1 - rates.forward_share)}
    if rates.rest_s:
        seconds["other_work"] = rates.rest_s
    outcome, step_s = None, training
    if isinstance(config, PolicyRunConfig):
        outcome = simulate(setting_of(config, sizes, placement, costs, given.answers))
        step_s = 1 / outcome.steps_per_s
        seconds |= {"reward": costs.reward_s, "weight_sync": costs.send_s + costs.copy_s}
        rest = step_s - sum(seconds.values())
        seconds["trainer_wait" if _is_ahead(config) else "generate"] = max(rest, 0.0)
    return Forecast(
        placement=placement,
        setup=setup,
        phases=phases(setup),
        rates=rates,
        seconds=seconds,
        step_s=step_s,
        tokens=tokens,
        steps=total_steps(config, sizes.lengths),
        outcome=outcome,
        left_out=tuple(not_counted(config)),
    )


def checked_setup(config: Any, sizes: Sizes, placement: DevicePlacement, given: Given) -> Setup:
    """Everything on a device. Raises ConfigError for a mesh that does not fit the ranks."""
    try:
        return setup_of(config, sizes, placement, given.base)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def least_seconds(config: Any, sizes: Sizes, placement: DevicePlacement, given: Given) -> float:
    """The shortest time of a step, without waiting: of generation and training the sum, or ahead the larger."""
    costs = (given.rates or rates_of(config, sizes, placement)).costs
    training = costs.train_step_s + costs.train_token_s * step_tokens(config, sizes.lengths) / placement.trainer
    if not isinstance(config, PolicyRunConfig):
        return training
    rows = step_sequences(config) / max(placement.servers, 1)
    together = min(rows, rows_of(config, sizes, placement))
    writing = sizes.lengths.response * (costs.decode_s * rows / together + costs.decode_row_s * rows)
    return max(writing, training) if _is_ahead(config) else writing + training


def _is_ahead(config: PolicyRunConfig) -> bool:
    return config.asynchrony is not None and config.asynchrony.staleness > 0


def why_it_cannot_fit(found: Forecast, more: int = 0) -> str:
    """Empty if the run may fit, else the arithmetic: only of what is certain, so no run is refused for an estimate.

    `more`: bytes that the system has beyond the device's memory.
    """
    needed = certain_bytes(found.setup)
    if needed <= found.device_bytes + more:
        return ""
    parts = [
        f"{part.role} {part.what} {part.bytes / GIB:.1f} GiB" for part in found.peak.parts if part.bytes > GIB / 20
    ]
    return (
        f"this run cannot fit: weights, gradients and optimizer state alone take {needed / GIB:.1f} GiB of "
        f"{found.placement.machine.device.name}'s {found.device_bytes / GIB:.1f} ({', '.join(parts)})"
    )


def swap_bytes() -> int:
    """Bytes of swap on this machine, which a CPU's processes may use, too; 0 where they are not known."""
    if not MEMINFO.is_file():
        return 0
    lines = MEMINFO.read_text(encoding="ascii").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("SwapTotal:")), 0)


def step_tokens(config: Any, lengths: Lengths) -> float:
    """Tokens of all sequences of a step."""
    return step_sequences(config) * lengths.sequences * lengths.sequence


def total_steps(config: Any, lengths: Lengths) -> int:
    """Steps of the run, counted from its rows where the run file sets epochs."""
    if config.run.steps is not None:
        return int(config.run.steps)
    per_step = config.update.prompts_per_step if isinstance(config, PolicyRunConfig) else config.samples_per_step
    passes = float(config.run.epochs)
    return max(math.ceil(passes * lengths.rows / per_step), 1)


def rates_of(config: Any, sizes: Sizes, placement: DevicePlacement) -> Rates:
    """Costs from the facts of the device: from timings of the models' shapes, if it has them."""
    passes = Models(config, sizes, placement).passes()
    rl = isinstance(config, PolicyRunConfig)
    policy, machine = passes[0].role, placement.machine
    updates = config.update.minibatches * config.update.epochs if rl else 1
    shared = shared_tokens(config, sizes.lengths, policy, machine)
    known = [machine.device.calibrated.get(shape_of(one.role)) for one in passes]
    if all(
        facts is not None and needed <= facts.keys() for facts, needed in zip(known, _parts(passes, rl), strict=True)
    ):
        work = Work(
            tokens=step_tokens(config, sizes.lengths) * shared,
            sequences=step_sequences(config),
            microbatches=policy.microbatches * (config.update.minibatches if rl else 1),
            updates=updates,
            columns=cached_columns(sizes.lengths),
            prefilled=_prefilled(config, sizes, placement) if rl else 1.0,
        )
        shapes = [TimedShape.read(facts, config.kind) for facts in known if facts is not None]
        found = costs_from(shapes, [(one.role, one.forwards, one.epochs) for one in passes], work)
        costs = replace(found.costs, train_token_s=found.costs.train_token_s * shared)
        return Rates(costs, found.forward_share, CALIBRATED, found.rest_s)
    rows = min(rows_of(config, sizes, placement), step_sequences(config) / max(placement.servers, 1)) if rl else 1.0
    across = machine.nodes > 1 and policy.layout.updaters > machine.devices
    load = Load(
        sequence_tokens=sizes.lengths.sequence,
        tokens=step_tokens(config, sizes.lengths),
        optimizer_steps=updates,
        microbatches=policy.microbatches * (config.update.minibatches if rl else 1),
        rows=rows,
        server_devices=placement.server_devices,
        serving_width=width_of(config.actor.compute_dtype, machine),
        link_is_network=across,
        node_devices=machine.devices,
    )
    costs = costs_of(machine.device, passes, load)
    costs = replace(costs, train_token_s=costs.train_token_s * shared)
    forward = sum(one.forwards * forward_operations(one.role.anatomy, load.sequence_tokens) for one in passes)
    backward = sum(3 * one.epochs * forward_operations(one.role.anatomy, load.sequence_tokens) for one in passes)
    return Rates(costs, forward / (forward + backward))


def _parts(passes: Sequence[Pass], rl: bool) -> list[set[str]]:
    """Parts of a step that each model of `passes` takes, the policy first; a calibration may lack some."""
    needed = [{"forward", "training", "optimizer"} if one.epochs else {"forward"} for one in passes]
    if rl:
        needed[0].add("decode")
    return needed


def _prefilled(config: PolicyRunConfig, sizes: Sizes, placement: DevicePlacement) -> float:
    """Tokens of prompts that are computed together: those that begin with a step, and each later one by itself."""
    update = config.update
    prompts = max(update.prompts_per_step / max(placement.servers, 1), 1.0)
    first = min(max(rows_of(config, sizes, placement) // update.samples_per_prompt, 1), prompts)
    tokens = prompts * sizes.lengths.prompt
    calls = max(1 + prompts - first, tokens / config.rollout.builtin.prefill_tokens)
    return max(tokens / calls, 1.0)


def rows_of(config: PolicyRunConfig, sizes: Sizes, placement: DevicePlacement) -> int:
    """Answers that a server writes at a time."""
    if config.rollout.backend == "builtin":
        rows, _ = cache_size(config, sizes.lengths)
        return min(rows, config.rollout.requests_per_replica) if has_servers(config.rollout) else rows
    return config.rollout.requests_per_replica


def setting_of(
    config: PolicyRunConfig, sizes: Sizes, placement: DevicePlacement, costs: Costs, answers: LengthsOfAnswers | None
) -> Setting:
    """The run as the simulation takes it."""
    asynchrony = config.asynchrony or AsynchronyConfig()
    longest = config.rollout.sampling.max_response_tokens
    mean = max(round(sizes.lengths.response), 1)
    return Setting(
        costs=costs,
        lengths=answers or parse_lengths(f"constant:{mean}", longest),
        prompts_per_step=config.update.prompts_per_step,
        samples_per_prompt=config.update.samples_per_prompt,
        staleness=asynchrony.staleness,
        new_weights=asynchrony.new_weights,
        replicas=placement.servers or 1,
        seats=rows_of(config, sizes, placement),
        trainer_devices=float(placement.trainer),
        prompt_tokens=round(sizes.lengths.prompt),
        steps=MEASURED_STEPS,
        seed=config.run.seed,
    )


__all__ = [
    "Forecast",
    "Given",
    "Rates",
    "checked_setup",
    "forecast",
    "least_seconds",
    "rates_of",
    "rows_of",
    "setting_of",
    "step_tokens",
    "swap_bytes",
    "total_steps",
    "why_it_cannot_fit",
]
