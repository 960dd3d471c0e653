"""Log-probs of a reference model, for losses that measure against one: asked for in every step, or once for all.

    live         batch --> the reference model's forward, every time (of a LoRA policy: its own, without the adapter)
    precomputed  every batch that is to come, once, before step 1 --> run folder: reference.safetensors --> looked up

Losses of whole answers read one number of the reference for each answer: the sum over its learnt tokens. That is what
is kept, under a key made of the answer's tokens; so a row that is drawn again, in another epoch or after a restart, is
found again, and data that have changed are not.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hone.algorithms.objective import present
from hone.algorithms.segments import on_last_loss_token, sequence_sum
from hone.data.packed_images import image_names
from hone.engines.settings import EngineConfig
from hone.runtime import ranks
from hone.types import Batch, BatchImages, ModelOutput
from hone.workers.handles import TrainHandle

FILE = "reference.safetensors"


class AskedModel(Protocol):
    """A language model that is asked and never trained: `TrainHandle` is one."""

    def infer_batch(self, batch: Batch, needs: frozenset[str] = frozenset()) -> ModelOutput: ...


class WithoutAdapter:
    """A LoRA policy before training: its frozen weights, so that no second model is loaded."""

    def __init__(self, policy: TrainHandle) -> None:
        self._policy = policy

    def infer_batch(self, batch: Batch, needs: frozenset[str] = frozenset()) -> ModelOutput:
        return self._policy.infer_batch(batch, needs, adapter=False)


def is_its_own_reference(policy: EngineConfig) -> bool:
    """Whether a policy without its adapter is the policy before training: not where an adapter is gone on with."""
    return policy.lora is not None and policy.lora.path is None


def only_asked(engine: EngineConfig, as_trained: bool = False) -> EngineConfig:
    """The engine of a model that is never trained: without an adapter, but for the policy that begins with one."""
    return engine if as_trained else engine.model_copy(update={"lora": None})


class Reference(Protocol):
    """What a task asks."""

    def logprobs(self, batch: Batch) -> Tensor:
        """[T], of which only each sequence's sum over its loss tokens means anything."""

    def prepare(self, batches: Iterable[Batch]) -> None:
        """Get ready for these batches, in this order."""


class LiveReference:
    """Asks the reference model for every batch."""

    def __init__(self, model: AskedModel) -> None:
        self._model = model

    def logprobs(self, batch: Batch) -> Tensor:
        return present(self._model.infer_batch(batch).logprobs, "the reference model's log-probs")

    def prepare(self, batches: Iterable[Batch]) -> None:
        """Nothing: the model stays."""


class StoredReference:
    """Asks the reference model before training, keeps its answers in a file, and lets go of it.

    A batch is computed as a whole if anything in it is unknown, and what is known stays as it is: so the numbers of a
    run that was stopped and continued are those of an uninterrupted one, to the bit.
    """

    def __init__(self, path: Path, identity: str, load: Callable[[], AskedModel]) -> None:
        """`load` gives the model, and is called only if something is missing; `identity` says which model it is.

        A file of another identity is computed anew.
        """
        self._path = path
        self._identity = identity
        self._load = load
        self._sums = _read(path, identity)

    def prepare(self, batches: Iterable[Batch]) -> None:
        model: AskedModel | None = None
        for batch in batches:
            keys = sequence_keys(batch)
            if all(key in self._sums for key in keys):
                continue
            model = model or self._load()
            logprobs = present(model.infer_batch(batch).logprobs, "the reference model's log-probs")
            sums = sequence_sum(torch.where(batch.loss_mask, logprobs.double(), 0), batch.cu_seqlens).tolist()
            for key, total in zip(keys, sums, strict=True):
                self._sums.setdefault(key, total)
        if model is not None and ranks.is_first():
            self._write()

    def logprobs(self, batch: Batch) -> Tensor:
        sums = [self._sums[key] for key in sequence_keys(batch)]
        placed = torch.tensor(sums, dtype=torch.float32, device=batch.loss_mask.device)
        return on_last_loss_token(placed, batch.loss_mask, batch.cu_seqlens)

    def _write(self) -> None:
        tensors = {
            "keys": torch.tensor(list(self._sums), dtype=torch.int64),
            "sums": torch.tensor(list(self._sums.values()), dtype=torch.float64),
        }
        partial = self._path.with_suffix(".partial")
        save_file(tensors, partial, metadata={"reference": self._identity})
        partial.replace(self._path)


def _read(path: Path, identity: str) -> dict[int, float]:
    if not path.is_file():
        return {}
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("reference") != identity:
                return {}
            keys, sums = file.get_tensor("keys").tolist(), file.get_tensor("sums").tolist()
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read ({error}); remove it to have it computed anew") from error
    return dict(zip(keys, sums, strict=True))


def sequence_keys(batch: Batch) -> list[int]:
    """A number for each sequence, from its tokens, which of them are learnt, and its images: equal for equal ones."""
    tokens, mask = batch.token_ids.tolist(), batch.loss_mask.tolist()
    ends = batch.cu_seqlens.tolist()
    shown = [b""] * batch.num_sequences if batch.images is None else _image_contents(batch.images)
    keys = []
    for (start, end), images in zip(itertools.pairwise(ends), shown, strict=True):
        content = f"{tokens[start:end]}{mask[start:end]}".encode() + images
        keys.append(int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big", signed=True))
    return keys


def _image_contents(images: BatchImages) -> list[bytes]:
    """For each sequence, digests of the images that it shows."""
    patches = images.patches.cpu().split(images.grids.prod(1).tolist())
    digests = [hashlib.blake2b(one.contiguous().numpy().tobytes(), digest_size=8).digest() for one in patches]
    return [b"".join(digests[name] for name in names) for names in image_names(images)]
