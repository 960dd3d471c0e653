"""Receive weights in a rollout server's process: from an offer to an iterator of tensors.

    with receive(offer, rank, token) as delivery:
        for name, tensor in delivery:
            ...load...
    WeightReceipt(replica, delivery.version, digest, delivery.tensors, delivery.bytes)

It runs in the Python environment of a server such as vLLM, and needs only torch, numpy, pyzmq and xxhash there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from hone.models.parts.boxes import Boxed, BoxMap, to_text
from hone.weights import TRANSPORTS
from hone.weights.base import Intake, NamedTensor, Offer, Payload, WeightReceiver, WeightSyncError
from hone.weights.digests.digest import Method, add_label, new_digest

LONGEST_S = 1e7  # a third of a year; sockets and polls take no more than their system's largest number


class Delivery:
    """One sync on one rank: iterate once to get every (name, tensor).

    After the iteration, `digest`, `tensors` and `bytes` describe everything that was received.
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
    def boxes(self) -> BoxMap:
        """The tensors of which only a box comes; empty if everything comes whole."""
        return self._receiver.boxes

    @property
    def complete(self) -> bool:
        """Return whether the sender finished and every tensor was iterated over."""
        return self._state == "complete"

    @property
    def method(self) -> Method:
        """The digest method of both sides."""
        return self._receiver.method

    @property
    def digest(self) -> str:
        """Digest of all received tensors. Raises WeightSyncError before the end of the iteration."""
        if not self.complete:
            raise WeightSyncError(
                f"{self.replica}: version {self.version} has not arrived completely, so it has no digest"
            )
        return self._hexdigest

    def __iter__(self) -> Iterator[NamedTensor]:
        if self._state != "new":
            raise WeightSyncError(
                f"{self.replica}: the weights of version {self.version} can be iterated over only once"
            )
        self._state = "partial"
        digest = new_digest(self.method)
        known, boxes = self.boxes, dict[str, Boxed]()  # `boxes`: of what came
        for came in self._receiver.stream(Intake(digest, self._copy, self._targets)):
            self.tensors += came.count
            self.bytes += came.bytes
            for name, tensor in came.tensors:
                if name in known:
                    boxes[name] = known[name]
                yield name, tensor
        if boxes:
            add_label(digest, to_text(boxes))
        self._hexdigest = digest.hexdigest()
        if self._receiver.expected not in ("", self._hexdigest):
            raise WeightSyncError(
                f"{self.replica}/{self._receiver.rank}: weight version {self.version} arrived with digest "
                f"{self._hexdigest}, expected the sender's {self._receiver.expected}: it was changed on the way"
            )
        self._state = "complete"


@contextmanager
def receive(
    offer: Mapping[str, Any],
    rank: int,
    token: str,
    copy: bool = True,
    targets: Mapping[str, Tensor] | None = None,
    wants: str = "",
) -> Iterator[Delivery]:
    """Connect to the sender of `offer` as `rank` of its replica, and receive its weights.

    With `copy` each tensor owns its memory; without, it is valid only until the next one is requested. `targets` are
    tensors of this process by name. A received tensor may be written directly into the target of the same name, dtype
    and shape, which is then returned for it. A failed sync leaves targets partly written. `digest` covers what was
    received; if targets share memory, digest the targets themselves to learn what they hold. `wants` is the text of the
    boxes that this process needs (`hone.models.parts.boxes`). The sender may send no more than them: see
    `Delivery.boxes`.

    When the block ends, the sender gets the result: everything received, or the exception. Leaving the block early is a
    failure too. Raises WeightSyncError if the token is refused, the version differs, or the sender is absent, dies,
    stays silent past the offer's deadline or breaks the protocol.
    """
    if not isinstance(offer, Mapping):
        raise WeightSyncError(f"an offer is {offer!r:.100}, expected an object")
    parsed = Offer.from_json(offer)
    if not 0 < parsed.timeout_s < LONGEST_S:
        raise WeightSyncError(f"an offer's timeout_s is {parsed.timeout_s:g}, expected above 0 and below {LONGEST_S:g}")
    receiver: WeightReceiver = TRANSPORTS.get(parsed.transport).receiver(parsed, rank, token)
    receiver.wants = wants
    delivery = Delivery(receiver, copy, targets or {})
    failure = "it stopped without an error"
    try:
        receiver.init_process_group()
        yield delivery
        if not delivery.complete:
            raise WeightSyncError(
                f"{parsed.replica}/{rank} stopped after {delivery.tensors} tensors of weight version {parsed.version}"
            )
        failure = ""
    except BaseException as error:
        failure = f"{type(error).__name__}: {error}"
        raise
    finally:
        receiver.finalize(failure, delivery.digest if not failure else "")
