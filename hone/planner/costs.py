"""Costs of the parts of a step, in seconds: given, or fitted to the timings of a finished run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median

import numpy as np

from hone.config import ConfigError
from hone.tracking.base import TrackingError
from hone.tracking.trackers.jsonl import METRICS_FILE, read_metrics

LEAST_STEPS = 4  # of a run that costs are fitted to, after its first ones
WARM_UP = 2  # first steps, which compile and fill caches


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds. The costs of training are for one device; n devices take an n-th of `train_token_s`."""

    decode_s: float  # a decode step of a server
    decode_row_s: float = 0.0  # each answer in it, additionally
    prefill_token_s: float = 0.0  # a token of a prompt, or of an answer whose KV cache is computed again
    train_token_s: float = 0.0  # a token of prompt or answer in a training step, in device-seconds
    train_step_s: float = 0.0  # a training step, additionally
    copy_s: float = 0.0  # the trainer's copy of its weights
    send_s: float = 0.0  # a send of weights, to however many servers
    reward_s: float = 0.0  # the reward of a group, after its last answer


@dataclass(frozen=True, slots=True)
class Fit:
    """Costs that were fitted to the metrics of a run."""

    costs: Costs
    prompt_tokens: int  # of a prompt, on average
    response_tokens: float  # of an answer, on average


def fitted(run: Path, replicas: int) -> Fit:
    """The costs with which a simulated step takes as long as the steps of a finished synchronous run.

    `replicas` are the servers of that run. Its trainer counts as one device. A token of a prompt is taken to cost what
    one more answer in a decode step costs: both are one more row of the same matrix products, and the prompts of one
    run differ too little to fit a third cost. Raises ConfigError for a run without timings, with too few steps, or an
    asynchronous one, whose generation cannot be told from its training.
    """
    if not (run / METRICS_FILE).is_file():
        raise ConfigError(f"--from {run}: expected the folder of a finished run; it has no {METRICS_FILE}")
    try:
        steps = [one for one in read_metrics(run) if "perf/step_s" in one][WARM_UP:]
    except TrackingError as error:
        raise ConfigError(f"--from {run}: {error}; name the folder of another run") from error
    if any("perf/trainer_wait_s" in one for one in steps):
        raise ConfigError(
            f"--from {run}: the run was asynchronous, so its metrics do not tell how long generation takes; "
            "run some steps with asynchrony.staleness=0 and name that run"
        )
    timed = [one for one in steps if "perf/generate_s" in one and "perf/tokens_per_s" in one]
    if len(timed) < LEAST_STEPS:
        raise ConfigError(
            f"--from {run}: found {len(timed)} steps with timings of generation after the first {WARM_UP}, expected "
            f"{LEAST_STEPS} or more"
        )
    decodes = [_decode_steps(one, replicas) for one in timed]
    rows = [(one["rollout/tokens"] + one.get("rollout/prefill_tokens", 0.0)) / replicas for one in timed]
    decode, row = non_negative([decodes, rows], [one["perf/generate_s"] for one in timed])
    tokens = [one["perf/tokens_per_s"] * one["perf/step_s"] for one in timed]
    each, token = non_negative([[1.0] * len(timed), tokens], [_training_s(one) for one in timed])
    costs = Costs(
        decode_s=decode,
        decode_row_s=row,
        prefill_token_s=row,
        train_token_s=token,
        train_step_s=each,
        send_s=median(one.get("perf/weight_sync_s", 0.0) for one in timed),
        reward_s=median(one.get("perf/reward_s", 0.0) for one in timed),
    )
    answered = sum(one["rollout/trajectories"] for one in timed)
    sampled = sum(one["rollout/tokens"] for one in timed)
    return Fit(costs, max(round((sum(tokens) - sampled) / answered), 0), sampled / answered)


def _decode_steps(step: Mapping[str, float], replicas: int) -> float:
    """Decode steps of a server: counted by the built-in engine; for others, the tokens of the longest answer."""
    if "rollout/batch_size" in step:
        return step["rollout/tokens"] / step["rollout/batch_size"] / replicas
    return step["rollout/response_length_max"]


def _training_s(step: Mapping[str, float]) -> float:
    """All seconds of a synchronous step in which nothing is generated, scored or sent."""
    others = ("perf/generate_s", "perf/reward_s", "perf/weight_sync_s")
    return max(step["perf/step_s"] - sum(step.get(name, 0.0) for name in others), 0.0)


def non_negative(columns: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """The weights of `columns`, none below 0, whose sum comes closest to `values` in squared relative error.

    >>> [round(one, 6) for one in non_negative([[1, 1, 1], [1, 2, 4]], [3, 5, 9])]
    [1.0, 2.0]
    """
    aims = np.asarray(values, dtype=float)
    scale = 1 / np.maximum(aims, np.finfo(float).tiny)
    table = np.asarray(columns, dtype=float).T * scale[:, None]
    best, least = np.zeros(len(columns)), float(len(values))
    for size in range(1, len(columns) + 1):
        for chosen in combinations(range(len(columns)), size):
            part = table[:, chosen]
            found = np.linalg.lstsq(part, np.ones(len(values)), rcond=None)[0]
            error = float(np.sum((part @ found - 1) ** 2))
            if np.all(found >= 0) and error < least * (1 - 1e-9):
                least = error
                best = np.zeros(len(columns))
                best[list(chosen)] = found
    return [float(one) for one in best]


__all__ = ["Costs", "Fit", "fitted", "non_negative"]
