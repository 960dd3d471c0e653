"""The built-in engine with many snapshots of weights beside one base, opened and dropped while it runs.

    open(name, load) --a request names it--> load() --> merged into the base (an adapter), or copied over it

One snapshot is in the weights at a time: requests for another one wait until the running ones have ended, in their
order, so nobody waits for ever. A snapshot that cannot be loaded fails its own requests only. The tensors of `KEPT`
adapters stay in memory after their last request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hone.rollout.admission import check_prompt
from hone.rollout.builtin.engine import BuiltinEngine, EngineWeights
from hone.rollout.builtin.scheduler import Scheduler
from hone.rollout.builtin.scoring import Following, score_in_turns
from hone.rollout.settings import BuiltinSettings
from hone.types import Completion, GenerationRequest

KEPT = 16  # loaded adapters


@dataclass(frozen=True, slots=True)
class SnapshotTensors:
    """The tensors of one snapshot."""

    tensors: Mapping[str, Tensor]
    config: Mapping[str, Any] | None  # PEFT's, of an adapter; None: these are all weights of the model


LoadFn = Callable[[], SnapshotTensors]


class SnapshotWeights(EngineWeights):
    """The base, and whichever snapshot is in it now. A snapshot is in memory while somebody uses it."""

    def prepare(self) -> None:
        self.loaders: dict[str, LoadFn] = {}
        self._held: dict[str, SnapshotTensors] = {}
        self._users: Counter[str] = Counter()
        self._base: dict[str, Tensor] = {}  # of all weights, while those of a whole snapshot are in their place

    def switch_to(self, adapter: str) -> None:
        """Put the snapshot of this name, which is in use, into the weights; empty: the base."""
        held = self._held[adapter] if adapter else None
        if held is not None and held.config is None:
            self._copy_whole(held.tensors)
            self.merged = adapter
            return
        if self._base:
            self._copy(self._base.items())
            self._base = {}
        super().switch_to(adapter)

    def begin_use(self, name: str) -> None:
        """Load a snapshot if it is not in memory. Raises what its loader raises, and ValueError for an unknown one."""
        if name not in self._held:
            if name not in self.loaders:
                raise ValueError(f"the snapshot {name!r} is not served any more")
            self._held[name] = self.loaders[name]()
            held = self._held[name]
            if held.config is not None:
                self.adapters[name] = (dict(held.tensors), held.config)
        self._users[name] += 1

    def end_use(self, name: str) -> None:
        self._users[name] -= 1
        if not self._users[name]:
            self._held[name] = self._held.pop(name)  # the last one used is the last one to go
            self._forget(name, self._held[name].config is None or name not in self.loaders)
        for old in list(self._held)[:-KEPT]:
            self._forget(old, not self._users[old])

    def drop(self, name: str) -> None:
        """Serve a snapshot no more, once nobody uses it."""
        del self.loaders[name]
        self._forget(name, name in self._held and not self._users[name])

    def _forget(self, name: str, indeed: bool) -> None:
        if indeed:
            del self._held[name]
            self.adapters.pop(name, None)
            del self._users[name]

    def _copy_whole(self, tensors: Mapping[str, Tensor]) -> None:
        if missing := sorted(self.tensors.keys() - tensors.keys()):
            raise ValueError(f"the snapshot lacks {missing[0]} and {len(missing) - 1} more of the model's weights")
        if not self._base:
            super().switch_to("")
            self._base = {name: tensor.clone() for name, tensor in self.tensors.items()}
        self._copy((name, tensors[name]) for name in self.tensors)

    @torch.no_grad()
    def _copy(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.tensors[name].copy_(tensor)

    @contextmanager
    def holding(self, name: str, idle: bool) -> Iterator[None]:
        """The weights with a snapshot in them; the one before is put back unless the engine is `idle`."""
        before = self.merged
        if before != name:
            self.switch_to(name)
        try:
            yield
        finally:
            if before != name:
                self.switch_to("" if idle else before)


class SnapshotEngine(BuiltinEngine):
    """Serves a base as version 0, and named snapshots (`SamplingParams.adapter`)."""

    def __init__(
        self, settings: BuiltinSettings, model: PreTrainedModel, tokenizer: Any, device: str | torch.device
    ) -> None:
        super().__init__(settings, model.config, tokenizer, device, "snapshots")
        self._snapshots = SnapshotWeights(self.replica, self._config.model_type, self._decoder, {})
        self._snapshots.prepare()
        self._weights = self._snapshots
        self._scheduler = Scheduler(self._state, self._new_batch(), self._snapshots)
        self._limits = replace(self._limits, adapters=self._snapshots.loaders)
        self._snapshots.load(model.state_dict().items())
        self._serve(0)

    def open(self, name: str, load: LoadFn) -> None:
        """Serve a snapshot; `load` is called when a request needs it, and must check what it reads."""
        self._snapshots.loaders[name] = load

    def drop(self, name: str) -> None:
        """Serve a snapshot to no new request; those that run or wait go on."""
        self._snapshots.drop(name)

    @contextmanager
    def using(self, name: str) -> Iterator[None]:
        """Have a snapshot in memory (empty: the base, which always is). Raises what its loader raises."""
        if name:
            self._snapshots.begin_use(name)
        try:
            yield
        finally:
            if name:
                self._snapshots.end_use(name)

    async def generate(self, request: GenerationRequest) -> Completion:
        with self.using(request.sampling.adapter):
            return await super().generate(request)

    def holds(self, name: str) -> bool:
        return name in self._snapshots.loaders

    @torch.inference_mode()
    def score_snapshot(self, name: str, sequence: tuple[int, ...], top_k: int = 0) -> Following:
        """Log-probs at temperature 1 of each token under a snapshot (empty: the base); raises as `score_all` does."""
        self._state.check_serving()
        check_prompt(f"score of {name or 'the base'}", sequence, self._limits.vocabulary, self._longest + 1)
        idle = not len(self._scheduler.batch)
        with self.using(name), self._snapshots.holding(name, idle):
            score = partial(self._decoder.score, temperature=1.0, top_k=min(top_k, self._limits.vocabulary))
            (found,) = score_in_turns(score, [sequence], self._settings.prefill_tokens, self._device)
        return found
