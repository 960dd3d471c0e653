"""The rollout of a training service: samples from a base model and from snapshots of models trained on it.

A snapshot is served only if the digest of the tensors that were read is the one that the trainer computed when it wrote
them (`Snapshot.digest`); otherwise its requests fail with `WrongWeights`.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from safetensors.torch import load_file

from hone.models.loading import DTYPES, load_language_model
from hone.models.numerics.precision import hold_in
from hone.models.settings import ModelConfig
from hone.platforms.base import compute_dtype, current_platform
from hone.rollout.adapters import CONFIG_FILE, WEIGHTS_FILE
from hone.rollout.builtin.scoring import Following
from hone.rollout.builtin.snapshots import SnapshotEngine, SnapshotTensors
from hone.rollout.settings import BuiltinSettings
from hone.types import Completion, GenerationRequest
from hone.weights.digests.digest import digest_tensors
from hone.workers.tenants.training import WHOLE_FILE, Snapshot


class WrongWeights(RuntimeError):
    """The files of a snapshot are not what the trainer wrote."""


class SnapshotRollout:
    """All methods are called on one event loop."""

    at_once = 1  # snapshots that answer at the same time

    def __init__(self, model: ModelConfig, settings: BuiltinSettings, dtype: str, tokenizer: Any) -> None:
        """`dtype`: the trainer's compute dtype, or auto. Raises ModelError for a model that cannot be loaded."""
        weights: Any = load_language_model(model)
        hold_in(weights, DTYPES[compute_dtype(dtype, current_platform())])
        self._engine = SnapshotEngine(settings, weights, tokenizer, current_platform().device)
        self.longest: int = int(self._engine.longest)
        self.vocabulary = int(weights.config.get_text_config().vocab_size)
        self.architecture = str(weights.config.model_type)
        self.layers = frozenset(part for path, _ in weights.named_modules() for part in path.split("."))

    def open(self, name: str, snapshot: Snapshot) -> None:
        """Serve a snapshot under a name, from now on."""
        self._engine.open(name, partial(proven, snapshot))

    def drop(self, name: str) -> None:
        if self._engine.holds(name):
            self._engine.drop(name)

    def holds(self, name: str) -> bool:
        return self._engine.holds(name)

    async def generate(self, request: GenerationRequest) -> Completion:
        """See `BuiltinEngine.generate`; `sampling.adapter` is the name of a snapshot, empty: the base."""
        return await self._engine.generate(request)

    async def score(self, name: str, sequence: tuple[int, ...], top_k: int = 0) -> Following:
        """See `SnapshotEngine.score_snapshot`."""
        return self._engine.score_snapshot(name, sequence, top_k)


def proven(snapshot: Snapshot) -> SnapshotTensors:
    """Read a snapshot. Raises WrongWeights unless its digest is the trainer's."""
    file = snapshot.folder / (WEIGHTS_FILE if snapshot.adapter else WHOLE_FILE)
    try:
        tensors = load_file(file)
        config = json.loads((snapshot.folder / CONFIG_FILE).read_text(encoding="utf-8")) if snapshot.adapter else None
    except Exception as error:
        raise WrongWeights(f"the snapshot in {snapshot.folder.name} cannot be read: {error}") from error
    found = digest_tensors(tensors.items())
    if found != snapshot.digest:
        raise WrongWeights(
            f"the snapshot in {snapshot.folder.name} has the digest {found}, and the trainer wrote {snapshot.digest}: "
            "it is not served"
        )
    return SnapshotTensors(tensors, config)
