"""Decode steps that are recorded once and replayed: a device then launches one graph in place of hundreds of kernels.

A graph has fixed shapes and fixed addresses. So it is recorded for a number of rows and columns, rounded up (`bucket`),
over buffers of its own for the step's inputs. It belongs to the cache's memory and goes when that moves or is freed.
The rows beyond those of the step read token 0 at column 0 of cache rows that no request has.

    step --inputs--> buffers of the bucket --replay--> logits[: step.rows]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.platforms.base import PlatformBase, Recording
from hone.rollout.builtin.cache import COLUMN_STEP, MINIMUM_ROWS, CacheShape, KVCache, PackedPrompts, Step, rounded
from hone.rollout.builtin.fused import FusedDecoder
from hone.rollout.builtin.scoring import Following

FEWEST_COLUMNS = 8 * COLUMN_STEP  # attention over fewer costs as much


def bucket(number: int, fewest: int) -> int:
    """The size that is recorded for `number`: at least `fewest`, and else less than a quarter larger."""
    if number <= fewest:
        return fewest
    return rounded(number, max(1 << (number - 1).bit_length() - 3, fewest // 4))


RecordFn = Callable[[Callable[[], Tensor], Recording | None], Recording]


@dataclass(frozen=True, slots=True)
class _Recorded:
    inputs: Tensor  # as `Step.inputs`: the graph reads them here
    recording: Recording
    rope: Tensor  # the graph holds its address, so it must not be freed


class GraphedDecoder:
    """A `FusedDecoder` whose decode steps are recorded at first use. Prefill and scores are computed as without."""

    def __init__(self, decoder: FusedDecoder, record: RecordFn) -> None:
        """`record` is `PlatformBase.record` of the decoder's device."""
        self._decoder = decoder
        self._record = record
        self.cache_shapes: tuple[CacheShape, ...] = decoder.cache_shapes
        self.routers = decoder.routers

    def weights(self) -> Mapping[str, Tensor]:
        return self._decoder.weights()

    def prefill(self, prompts: PackedPrompts, cache: KVCache) -> None:
        self._decoder.prefill(prompts, cache)

    def score(self, prompts: PackedPrompts, temperature: float, top_k: int = 0) -> Following:
        return self._decoder.score(prompts, temperature, top_k)

    def decode(self, step: Step, cache: KVCache) -> Tensor:
        """See `Decoder`. The logits are overwritten by the next step."""
        rows = min(bucket(step.rows, MINIMUM_ROWS), cache.rows)
        columns = min(bucket(step.columns, FEWEST_COLUMNS), cache.columns)
        inputs = F.pad(step.inputs, (0, max(rows, MINIMUM_ROWS) - step.inputs.shape[1]))
        graph: _Recorded | None = cache.bound.get((rows, columns))
        if graph is None:
            graph = cache.bound[rows, columns] = self._recorded(inputs, rows, columns, cache)
        graph.inputs.copy_(inputs)
        graph.recording.replay()
        return graph.recording.result[: step.rows]

    def _recorded(self, inputs: Tensor, rows: int, columns: int, cache: KVCache) -> _Recorded:
        """Record a step of this size. It may run meanwhile, which writes what the replay writes again."""
        logits = self._logits(cache)[:rows]

        def work() -> Tensor:  # a new Step each time: its mask is part of the graph
            return logits.copy_(self._decoder.decode(Step(inputs, rows, columns, cache.dtype), cache))

        others = (one.recording for one in cache.bound.values() if isinstance(one, _Recorded))
        return _Recorded(inputs, self._record(work, next(others, None)), self._decoder.rope)

    def _logits(self, cache: KVCache) -> Tensor:
        """Return the output of graphs of every size, [cache.rows, V]: each would keep memory of its own for it."""
        if "logits" not in cache.bound:
            vocabulary, dtype = len(self.weights()["lm_head.weight"]), torch.promote_types(cache.dtype, torch.float32)
            cache.bound["logits"] = torch.empty(cache.rows, vocabulary, dtype=dtype, device=cache.device)
        found: Tensor = cache.bound["logits"]
        return found


def why_no_graphs(platform: PlatformBase, device: torch.device) -> str:
    """Empty if decode steps on `device` can be recorded, else why not."""
    if platform.records_graphs and device.type == platform.device:
        return ""
    return f"the platform {platform.name} records no graphs on {device.type}"
