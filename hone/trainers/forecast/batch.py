"""The arithmetic of a step, from prompts and samples to optimizer steps and micro-batches, and where each is from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hone.trainers.forecast.forecast import Forecast
from hone.trainers.forecast.setup import packed_tokens
from hone.trainers.forecast.sizes import Sizes
from hone.trainers.policy.settings import PolicyRunConfig


@dataclass(frozen=True, slots=True)
class Row:
    """One number of a step."""

    what: str
    value: str
    source: str  # the key and who set it, or the arithmetic


def arithmetic(config: Any, sizes: Sizes, found: Forecast, provenance: Mapping[str, str]) -> list[Row]:
    """All numbers of a step, each with where it came from."""

    def key(what: str, name: str, value: Any) -> Row:
        return Row(what, _shown(value), f"{name} ({provenance.get(name, 'default')})")

    rl = isinstance(config, PolicyRunConfig)
    rows = [
        *(_policy_rows(config, key) if rl else [key("samples per step", "samples_per_step", config.samples_per_step)])
    ]
    lengths, policy = sizes.lengths, found.setup.roles[0]
    if rl:
        rows.append(Row("tokens of a prompt", _shown(lengths.prompt), lengths.source))
        rows.append(Row("tokens of an answer", _shown(lengths.response), lengths.source))
    else:
        rows.append(Row("tokens of a sequence", _shown(lengths.sequence), lengths.source))
        if lengths.sequences > 1:
            rows.append(Row("sequences of a sample", _shown(lengths.sequences), "a pair has two answers"))
    rows.append(Row("tokens per step", _shown(found.tokens), "sequences x their tokens"))
    parallel = policy.layout.replicate * policy.layout.shard
    rows.append(Row("ranks that split a batch", _shown(parallel), f"of {found.placement.trainer} ranks"))
    most = packed_tokens(config, config.actor, lengths, found.placement.machine)
    rows.append(key("tokens of a micro-batch, at most", "actor.max_tokens_per_microbatch", most))
    rows.append(Row("micro-batches per optimizer step", _shown(policy.microbatches), "tokens of a rank / that budget"))
    rows.append(Row("tokens of its row", _shown(policy.tokens), "answers of a group share their prompt"))
    each = config.update.minibatches * config.update.epochs if rl else 1
    if config.run.steps is not None:
        rows.append(key("steps", "run.steps", config.run.steps))
    else:
        rows.append(
            Row("steps", _shown(found.steps), f"run.epochs={config.run.epochs:g} x {lengths.rows:,} rows / per step")
        )
    rows.append(Row("optimizer steps of the run", _shown(found.steps * each), "steps x optimizer steps per step"))
    per_step = config.update.prompts_per_step if rl else config.samples_per_step
    if lengths.rows:
        passes = found.steps * per_step / lengths.rows
        rows.append(Row("passes over the data", f"{passes:.3g}", f"steps x {per_step:,} / {lengths.rows:,} rows"))
    return rows


def _policy_rows(config: PolicyRunConfig, key: Any) -> Iterator[Row]:
    update = config.update
    yield key("prompts per step", "update.prompts_per_step", update.prompts_per_step)
    yield key("answers per prompt", "update.samples_per_prompt", update.samples_per_prompt)
    yield Row("answers per step", _shown(update.prompts_per_step * update.samples_per_prompt), "the product")
    yield key("mini-batches", "update.minibatches", update.minibatches)
    yield key("passes over a step's answers", "update.epochs", update.epochs)
    each = update.minibatches * update.epochs
    yield Row("optimizer steps per step", _shown(each), "mini-batches x passes")
    prompts = update.prompts_per_step / update.minibatches
    said = "prompts per step / mini-batches"
    yield Row("prompts of an optimizer step", _shown(prompts), said)
    yield Row("answers of an optimizer step", _shown(prompts * update.samples_per_prompt), "x answers per prompt")


def _shown(value: float) -> str:
    if isinstance(value, int) or math.isclose(value, round(value)):
        return f"{round(value):,}"
    return f"{value:,.1f}"


__all__ = ["Row", "arithmetic"]
