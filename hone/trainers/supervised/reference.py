"""Log-probs of the reference model of preference losses: computed in every step, or once before training.

    live         batch --> forward of the reference model, in every step (a LoRA policy runs without its adapter)
    precomputed  all batches of the run, before step 1 --> reference.safetensors in the run folder --> lookup

Losses of whole answers need one number per answer: the sum over its loss tokens. The file stores this sum under a hash
of the answer's tokens. A row that is drawn again, in another epoch or after a restart, has the same hash; a row whose
data changed has another one and is computed again. A run that is continued reads none of its data before its first
step, if the file is of a run of as many steps.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hone.algorithms.objective import present
from hone.algorithms.segments import on_last_loss_token, sequence_sum
from hone.data.packed_images import image_names
from hone.models.files.tensors import save_tensors
from hone.runtime import ranks
from hone.runtime.watchdog import progress
from hone.types import Batch, BatchImages
from hone.workers.scoring import ScoringModel

FILE = "reference.safetensors"
WRITE_S = 300.0  # between two writes of the file while it grows: a killed run continues from there


class Reference(Protocol):
    """Gives a task the reference's log-probs."""

    def logprobs(self, batch: Batch) -> Tensor:
        """Log-probs [T]; only each sequence's sum over its loss tokens is meaningful."""

    def prepare(self, batches: Iterable[Batch], steps: int) -> None:
        """Compute what is needed for these batches, in this order: all that a run of so many steps still has."""


class LiveReference:
    """Runs the reference model on every batch."""

    def __init__(self, model: ScoringModel) -> None:
        self._model = model

    def logprobs(self, batch: Batch) -> Tensor:
        return present(self._model.infer_batch(batch).logprobs, "the reference model's log-probs")

    def prepare(self, batches: Iterable[Batch], steps: int) -> None:
        """Does nothing: every batch has its own forward."""


class StoredReference:
    """Runs the reference model before training, stores its log-probs in a file, and frees the model.

    If one answer of a batch is missing, the whole batch is computed, and stored numbers are not replaced. So a run that
    was stopped and continued reads exactly the numbers of an uninterrupted run.
    """

    def __init__(self, path: Path, identity: str, load: Callable[[], ScoringModel]) -> None:
        """`load` loads the model; it is called only if something is missing. `identity` describes the model.

        A file with another identity is computed again.
        """
        self._path = path
        self._identity = identity
        self._load = load
        self._sums, self._steps = _read(path, identity)
        self._model: ScoringModel | None = None
        self._written = time.monotonic()

    def prepare(self, batches: Iterable[Batch], steps: int) -> None:
        if steps <= self._steps:  # a run that is continued need not read its data again
            return
        for batch in batches:
            progress()
            self._complete(batch, sequence_keys(batch))
        self._model, self._steps = None, steps
        self._write()

    def logprobs(self, batch: Batch) -> Tensor:
        keys = sequence_keys(batch)
        self._complete(batch, keys)  # of a run that is continued with other data; from then on the model stays
        placed = torch.tensor([self._sums[key] for key in keys], dtype=torch.float32, device=batch.loss_mask.device)
        return on_last_loss_token(placed, batch.loss_mask, batch.cu_seqlens)

    def _complete(self, batch: Batch, keys: Sequence[int]) -> None:
        """Compute a batch of which an answer is missing."""
        if all(key in self._sums for key in keys):
            return
        self._model = self._model or self._load()
        logprobs = present(self._model.infer_batch(batch).logprobs, "the reference model's log-probs")
        sums = sequence_sum(torch.where(batch.loss_mask, logprobs.double(), 0), batch.cu_seqlens).tolist()
        for key, total in zip(keys, sums, strict=True):
            self._sums.setdefault(key, total)
        if time.monotonic() - self._written > WRITE_S:
            self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        if not ranks.is_first():
            return
        tensors = {
            "keys": torch.tensor(list(self._sums), dtype=torch.int64),
            "sums": torch.tensor(list(self._sums.values()), dtype=torch.float64),
            "steps": torch.tensor(self._steps),
        }
        partial = self._path.with_suffix(".partial")
        save_tensors(tensors, partial, {"reference": self._identity})
        partial.replace(self._path)


def _read(path: Path, identity: str) -> tuple[dict[int, float], int]:
    """The stored sums, and for how many steps of the run they are enough; 0: not known."""
    if not path.is_file():
        return {}, 0
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("reference") != identity:
                return {}, 0
            steps = int(file.get_tensor("steps")) if "steps" in file.keys() else 0  # noqa: SIM118  it is no mapping
            keys, sums = file.get_tensor("keys").tolist(), file.get_tensor("sums").tolist()
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read ({error}); remove it, and it is computed again") from error
    return dict(zip(keys, sums, strict=True)), steps


def sequence_keys(batch: Batch) -> list[int]:
    """A hash of each sequence's tokens, loss mask and images."""
    tokens, mask = batch.token_ids.tolist(), batch.loss_mask.tolist()
    ends = batch.cu_seqlens.tolist()
    digests = [b""] * batch.num_sequences if batch.images is None else _image_contents(batch.images)
    keys = []
    for (start, end), images in zip(itertools.pairwise(ends), digests, strict=True):
        content = f"{tokens[start:end]}{mask[start:end]}".encode() + images
        keys.append(int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big", signed=True))
    return keys


def _image_contents(images: BatchImages) -> list[bytes]:
    """Digests of each sequence's images."""
    patches = images.patches.cpu().split(images.grids.prod(1).tolist())
    digests = [hashlib.blake2b(one.contiguous().numpy().tobytes(), digest_size=8).digest() for one in patches]
    return [b"".join(digests[name] for name in names) for names in image_names(images)]
