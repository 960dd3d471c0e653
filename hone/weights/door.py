"""The door of a rollout server's process: it takes an offer and gives the tensors that come in.

    with receive(offer, rank, token) as delivery:
        for name, tensor in delivery:
            ...load...
    WeightReceipt(replica, delivery.version, digest, delivery.tensors, delivery.bytes)

Needs torch, numpy, pyzmq and xxhash only: it runs in the environment of vLLM or SGLang.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from hone.models.digest import Method, new_digest
from hone.weights import TRANSPORTS
from hone.weights.base import Intake, NamedTensor, Offer, Payload, WeightReceiver, WeightSyncError


class Delivery:
    """One sync, as one rank receives it: an iterable of (name, tensor), once.

    `digest`, `tensors` and `bytes` are of everything that came, and known when the iteration has ended.
    """

    def __init__(self, receiver: WeightReceiver, copy: bool, targets: Mapping[str, Tensor]) -> None:
        self._receiver = receiver
        self._copy = copy
        self._targets = targets
        self._hexdigest = ""
        self._state = "new"
        self.tensors = 0
        self.bytes = 0

    @property
    def version(self) -> int:
        return self._receiver.offer.version

    @property
    def replica(self) -> str:
        return self._receiver.offer.replica

    @property
    def payload(self) -> Payload:
        return self._receiver.offer.payload

    @property
    def complete(self) -> bool:
        """Whether the sender said that this was all, and all was taken."""
        return self._state == "complete"

    @property
    def method(self) -> Method:
        """By which both sides take the digest."""
        return self._receiver.method

    @property
    def digest(self) -> str:
        """Digest of every tensor that came (`hone.models.digest`). Raises WeightSyncError before the end."""
        if not self.complete:
            raise WeightSyncError(f"{self.replica}: version {self.version} has not arrived whole: no digest")
        return self._hexdigest

    def __iter__(self) -> Iterator[NamedTensor]:
        if self._state != "new":
            raise WeightSyncError(f"{self.replica}: the weights of version {self.version} can be taken once")
        self._state = "partial"
        digest = new_digest(self.method)
        for came in self._receiver.stream(Intake(digest, self._copy, self._targets)):
            self.tensors += came.count
            self.bytes += came.bytes
            yield from came.tensors
        self._hexdigest = digest.hexdigest()
        if self._receiver.expected not in ("", self._hexdigest):
            raise WeightSyncError(
                f"{self.replica}/{self._receiver.rank}: what came as weight version {self.version} has digest "
                f"{self._hexdigest}, the sender's has {self._receiver.expected}: it was changed on the way"
            )
        self._state = "complete"


@contextmanager
def receive(
    offer: Mapping[str, Any],
    rank: int,
    token: str,
    copy: bool = True,
    targets: Mapping[str, Tensor] | None = None,
) -> Iterator[Delivery]:
    """Meet the sender of `offer` as `rank` of its replica, and take what it sends.

    With `copy` each tensor owns its memory; without, it is valid only until the next is asked for. `targets` are
    tensors of this process, by name: what comes may be written right into the one of its name, dtype and shape, which
    is then what is handed over. A sync that fails leaves them partly written, and `digest` is of what came: of targets
    that share memory, only their own digest tells what they hold.

    The sender learns how the block ended: that everything was taken in, or the exception. A block that ends before
    all was taken is a failure too. Raises WeightSyncError: refused token, another version, a sender that is absent,
    dies, stays silent past the offer's deadline, or sends what makes no sense.
    """
    parsed = Offer.from_json(offer)
    receiver: WeightReceiver = TRANSPORTS.get(parsed.transport).receiver(parsed, rank, token)
    delivery = Delivery(receiver, copy, targets or {})
    failure = "it stopped without an error"
    try:
        receiver.init_process_group()
        yield delivery
        if not delivery.complete:
            raise WeightSyncError(
                f"{parsed.replica}/{rank} took {delivery.tensors} tensors of weight version {parsed.version} and left"
            )
        failure = ""
    except BaseException as error:
        failure = f"{type(error).__name__}: {error}"
        raise
    finally:
        receiver.finalize(failure, delivery.digest if not failure else "")
