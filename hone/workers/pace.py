"""Speed of each rank at its own work: ranks wait for each other in every layer, so the time of a step names none.

    layer's forward:  gather its weights (waits for the others) | its own work, which is timed | give the weights back
    train_batch:      its tokens / seconds of this work, over all layers and micro-batches
                      --exchange--> the speed of every rank, as a share of the others' median

Ranks that share a layer (tensor, sequence and expert parallel) wait for each other inside it, and have equal speeds.
Only layers of transformers are timed; an engine with layers of its own has no speeds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hone.data.packing import sequence_costs
from hone.runtime import ranks
from hone.types import Batch, Metric, Metrics

SLICES_S = {"cpu": 0.004}
"""Device -> the shortest forward that is compared: a shorter one takes as long as the slices of other processes."""
FULL = 0.25
"""Share of the rank's largest forward: forwards with fewer tokens, such as fillers and the last ones, are left out."""
ALIKE = 1.1
"""Largest ratio of a rank's cost per token to the median cost, up to which the rank is compared.

Costs assume full attention. A model without it would seem fast on ranks with long sequences.
"""


class Pace:
    """Times the forwards of a model's layers, without those that a backward repeats: these stop inside the layer."""

    def __init__(self, engine: Any, device: str) -> None:
        """`engine` has its model; `device` is torch's name of its kind of device."""
        model = getattr(engine, "model", None)
        self._on = False
        self._begun: dict[nn.Module, Any] = {}  # the last begin of each layer: one that is repeated has no end
        self._timed: list[tuple[int, Any, Any]] = []  # tokens, fewer than the batch's where answers share their prompt
        self._least_s = SLICES_S.get(device, 0.0)
        self._events = None if device == "cpu" else torch.get_device_module(device)
        for layer in layers_of(model) if isinstance(model, nn.Module) else []:
            # after `fully_shard` has gathered the weights, and before it gives them back
            layer.register_forward_pre_hook(self._begin)
            layer.register_forward_hook(self._end, prepend=True)

    def _begin(self, layer: nn.Module, inputs: Any) -> None:
        if self._on:
            self._begun[layer] = self._now()

    def _end(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        if not self._on:
            return
        hidden = output[0] if isinstance(output, tuple) else output
        self._timed.append((hidden.numel() // hidden.shape[-1], self._begun[layer], self._now()))

    def _now(self) -> Any:
        """The time, or on a device an event in the queue of its work: the host runs ahead of the device."""
        if self._events is None:
            return time.perf_counter()
        event = self._events.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Time the forwards of the block, for `speeds`."""
        self._timed.clear()  # of a step that failed
        self._on = True
        try:
            yield
        finally:
            self._on = False
            self._begun.clear()

    def speeds(self, batch: Batch, equal_cost_length: float | None) -> Metrics:
        """The speed of each rank, relative to the others; `batch` is this rank's part of the work in `timing`.

        Every rank has to call this. Empty if fewer than two ranks can be compared.
        """
        a_token = sum(sequence_costs(batch, equal_cost_length)) / max(batch.num_tokens, 1)  # more in long sequences
        tokens_per_s = speed_of([(tokens, self._seconds(*span)) for tokens, *span in self._timed], self._least_s)
        self._timed.clear()
        own = (tokens_per_s * a_token, a_token)
        return shares_of([json.loads(one) for one in ranks.exchange(json.dumps(own).encode())])

    def _seconds(self, begun: Any, ended: Any) -> float:
        return float(ended - begun if self._events is None else begun.elapsed_time(ended) / 1000)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Find the layers of the language model. The costs do not count images, so a vision tower is left out."""
    body: Any = getattr(model, "body", None) or getattr(model, "base_model", model)
    text = getattr(body, "language_model", body)
    return [module for module in text.modules() if isinstance(module, GradientCheckpointingLayer)]


def speed_of(timed: Sequence[tuple[int, float]], least_s: float = 0.0) -> float:
    """Tokens per second of forwards, each with its tokens and seconds; 0 if a forward takes `least_s` or less."""
    largest = max((tokens for tokens, _ in timed), default=0)
    full = [(tokens, seconds) for tokens, seconds in timed if tokens >= FULL * largest]
    total = sum(seconds for _, seconds in full)
    return sum(tokens for tokens, _ in full) / total if total > least_s * len(full) else 0.0


def shares_of(ranks_work: Sequence[tuple[float, float]]) -> Metrics:
    """Metrics of all ranks from their speed and their cost of a token; both are 0 for a rank that had nothing to do.

    A rank whose cost of a token is far from the others' is left out: it has far longer or shorter sequences.
    """
    usual = median([cost for speed, cost in ranks_work if speed * cost > 0] or [0.0])
    known = {
        rank: speed
        for rank, (speed, cost) in enumerate(ranks_work)
        if speed * cost > 0 and usual / ALIKE <= cost <= usual * ALIKE
    }
    if len(known) < 2:
        return {}
    others = {rank: median(one for other, one in known.items() if other != rank) for rank in known}
    # means, so that the optimizer steps of one trainer step count alike
    return {f"perf/train/rank_speed/{rank}": Metric.mean(known[rank] / others[rank]) for rank in known}
