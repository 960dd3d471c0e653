"""Speed of each rank at its own work: ranks wait for each other in every layer, so the time of a step names none.

    layer's forward:  gather its weights (waits for the others) | its own work, which is timed | give the weights back
    train_batch:      its tokens / seconds of this work, the median of all layers and micro-batches
                      --exchange--> the slowest rank, and its share of the others' speed

Ranks that share a layer (tensor, sequence and expert parallel) wait for each other inside it, and have equal speeds.
Engines whose layers are not those of transformers are not timed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
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


class Pace:
    """Times the forwards of a model's layers, those that a backward repeats included."""

    def __init__(self, engine: Any, device: str) -> None:
        """`engine` has its model; `device` is torch's name of its kind of device."""
        model = getattr(engine, "model", None)
        self._on = False
        self._begun: list[Any] = []  # of layers that run: one may be inside another
        self._timed: list[tuple[int, Any, Any]] = []  # tokens, fewer than the batch's where answers share their prompt
        self._least_s = SLICES_S.get(device, 0.0)
        self._events = None if device == "cpu" else torch.get_device_module(device)
        for layer in layers_of(model) if isinstance(model, nn.Module) else []:
            # after `fully_shard` has gathered the weights, and before it gives them back
            layer.register_forward_pre_hook(self._begin)
            layer.register_forward_hook(self._end, prepend=True)

    def _begin(self, *_: object) -> None:
        if self._on:
            self._begun.append(self._now())

    def _end(self, layer: nn.Module, inputs: Any, output: Any) -> None:
        if not self._on:
            return
        hidden = output[0] if isinstance(output, tuple) else output
        self._timed.append((hidden.numel() // hidden.shape[-1], self._begun.pop(), self._now()))

    def _now(self) -> Any:
        """The time, or on a device an event in the queue of its work: the host runs ahead of the device."""
        if self._events is None:
            return time.perf_counter()
        event = self._events.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        """Time the forwards from now on, until `slowest`."""
        self._timed.clear()
        self._begun.clear()  # of a step that failed
        self._on = True

    def slowest(self, batch: Batch, equal_cost_length: float | None) -> Metrics:
        """The slowest rank, and its share of the others' speed; `batch` is what this rank worked on since `start`.

        Every rank has to call this. Empty if fewer than two ranks have worked.
        """
        self._on = False
        a_token = sum(sequence_costs(batch, equal_cost_length)) / max(batch.num_tokens, 1)  # more in long sequences
        timed = [(tokens, self._seconds(*span)) for tokens, *span in self._timed]
        speeds = [tokens * a_token / seconds for tokens, seconds in timed if seconds > self._least_s]
        own = median(speeds) if speeds and a_token else None
        return slowest_of([json.loads(one) for one in ranks.exchange(json.dumps(own).encode())])

    def _seconds(self, begun: Any, ended: Any) -> float:
        return float(ended - begun if self._events is None else begun.elapsed_time(ended) / 1000)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The layers of the language model; not those of a vision tower, whose images are not in a rank's costs."""
    body: Any = getattr(model, "body", None) or getattr(model, "base_model", model)
    text = getattr(body, "language_model", body)
    return [module for module in text.modules() if isinstance(module, GradientCheckpointingLayer)]


def slowest_of(speeds: Sequence[float | None]) -> Metrics:
    """Metrics of the rank with the lowest speed; None: a rank that had nothing to do."""
    known = {rank: one for rank, one in enumerate(speeds) if one is not None}
    if len(known) < 2:
        return {}
    slowest = min(known, key=lambda rank: known[rank])
    share = known[slowest] / median(one for rank, one in known.items() if rank != slowest)
    return {
        "perf/train/slowest_rank": Metric.max(slowest),
        "perf/train/slowest_rank_speed": Metric.min(share),
    }
