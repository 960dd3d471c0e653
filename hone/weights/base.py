"""The contract of a weight sync: named tensors go in at one side, and each receiver proves what it now serves.

    trainer's process                                             a replica's process (one per rank)
    CheckpointEngineManager.sync (hone/weights/sync.py)
      engine.build_topology, prepare --Offer--> replica.receive_weights(offer) --> delivery.receive(offer, rank, token)
      engine.init_process_group  <---------- token proven by both sides ---------> WeightReceiver.init_process_group
      engine.send_weights        ============== buckets, acknowledged ===========> for name, tensor in delivery: load
      verify(sent, receipts)     <------------------ Receipt per rank ------------ digest of what was taken in

`weights` imports neither side: it moves `(name, tensor)` from a source to a sink. Every replica must acknowledge the
version and the sender's checksum; otherwise the sync is an error and the step does not start.

A rollout server imports this file, `delivery`, and its transport in an environment of its own: they need torch, numpy,
pyzmq and xxhash, nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import torch

from hone.models.parts.boxes import BoxMap
from hone.types import PauseMode
from hone.weights.digests.digest import Method, WeightDigest
from hone.weights.digests.packed import Packed

NamedTensor = tuple[str, torch.Tensor]
NamedTensors = Iterable[NamedTensor]

FORMAT = 2  # of an Offer; a server of another release refuses instead of guessing


class WeightSyncError(RuntimeError):
    """A replica does not serve the weights it was sent; the message names the replica and what differs.

    `replicas` names the replicas that failed; the others serve the new version. `silent` names the failed ones that did
    not even confirm that they stopped: their owner has to kill them.
    """

    def __init__(self, message: str, replicas: Sequence[str] = (), silent: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.replicas = tuple(replicas)
        self.silent = tuple(silent)


# -------------------------------------------------------------------------------------------------- what is sent


@dataclass(frozen=True, slots=True)
class Full:
    """Every weight under its Hugging Face state_dict name, tied heads included."""


@dataclass(frozen=True, slots=True)
class AdapterTensors:
    """The tensors of a LoRA adapter under their PEFT names, and PEFT's configuration of it (JSON values)."""

    name: str
    config: Mapping[str, Any]


Payload = Full | AdapterTensors


@dataclass(frozen=True, slots=True)
class Offer:
    """Message that announces the weights to a replica. It travels as JSON and never contains the token."""

    transport: str
    version: int
    payload: Payload
    timeout_s: float  # deadline of the whole sync
    address: Mapping[str, Any]  # what the transport's receiver needs to find its sender
    replica: str = ""  # whom this copy is for

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values, for `Replica.receive_weights`."""
        payload: dict[str, Any] = {"kind": "full"}
        if isinstance(self.payload, AdapterTensors):
            payload = {"kind": "adapter", "name": self.payload.name, "config": dict(self.payload.config)}
        return {
            "format": FORMAT,
            "transport": self.transport,
            "version": self.version,
            "payload": payload,
            "timeout_s": self.timeout_s,
            "address": dict(self.address),
            "replica": self.replica,
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> Offer:
        """Read an offer from JSON. Raises WeightSyncError with the field that is wrong."""
        if given.get("format") != FORMAT:
            raise WeightSyncError(f"an offer of format {given.get('format')!r}; this release of hone reads {FORMAT}")
        kinds = {"transport": str, "version": int, "payload": Mapping, "timeout_s": int | float, "address": Mapping}
        for name, kind in {**kinds, "replica": str}.items():
            if not isinstance(given.get(name), kind) or isinstance(given[name], bool):
                raise WeightSyncError(f"an offer's {name} is {given.get(name)!r}")
        return cls(
            transport=given["transport"],
            version=given["version"],
            payload=_payload(given["payload"]),
            timeout_s=float(given["timeout_s"]),
            address=given["address"],
            replica=given["replica"],
        )

    def for_replica(self, name: str) -> Offer:
        return replace(self, replica=name)


def _payload(given: Mapping[str, Any]) -> Payload:
    kind, name, config = given.get("kind"), given.get("name"), given.get("config")
    if kind == "full":
        return Full()
    if kind == "adapter" and isinstance(name, str) and isinstance(config, Mapping):
        return AdapterTensors(name, config)
    raise WeightSyncError(f"an offer's payload is {dict(given)!r}; expected kind full, or adapter with name and config")


@dataclass(frozen=True, slots=True)
class Sent:
    """Weights that the trainer sent in one sync."""

    version: int
    digest: str
    tensors: int
    bytes: int
    buckets: int = 0
    lost: Mapping[str, str] = field(default_factory=dict)  # replica -> why it did not get everything
    by_rank: Mapping[int, int] = field(default_factory=dict)  # training rank -> bytes it sent; empty: one process sent
    digests: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Replica -> what each of its ranks was sent, where senders sent different boxes of the weights."""

    def to(self, replica: str, rank: int) -> Sent:
        """Return the weights that were sent to one rank of a replica."""
        return replace(self, digest=self.digests[replica][rank]) if self.digests else self


class RankWeights(ABC):
    """Weights that all training ranks gather: iterated in this process, or sent by the ranks themselves.

    Nothing is gathered before either begins.
    """

    @abstractmethod
    def __iter__(self) -> Iterator[NamedTensor]: ...

    @abstractmethod
    def order(self, order: Any) -> Sequence[Any]:
        """Give every rank an order of `hone.weights.transports.ipc.rank_sender`; return their answers in rank order."""


# ------------------------------------------------------------------------------------------------- the two sides


class CheckpointEngine(ABC):
    """The trainer's side of one transport. Calls come in the order of the methods here, once per sync.

    `receiver` gives the other side of the same transport; a server's process opens it through `hone.weights.delivery`.
    """

    transport: ClassVar[str]  # name in TRANSPORTS
    all_or_none: bool = False  # whether all receivers fail if one is lost during the sync

    def __init__(self, bucket_bytes: int, timeout_s: float, token: str) -> None:
        """`bucket_bytes` is the size of one of two buckets; `timeout_s` the deadline of one sync, in seconds."""
        self.bucket_bytes = bucket_bytes
        self.timeout_s = timeout_s
        self._token = token

    @abstractmethod
    def build_topology(self, ranks: Mapping[str, int]) -> None:
        """Set the receivers of this sync: replica -> number of its ranks. They may differ between syncs."""

    @abstractmethod
    def prepare(self, version: int, payload: Payload) -> Offer:
        """Open the addresses of this sync and describe them. The offer reaches the replicas by other means."""

    @abstractmethod
    async def init_process_group(self) -> None:
        """Connect to every receiver; return when each rank has connected or was dropped. Both sides prove the token."""

    @abstractmethod
    async def send_weights(self, weights: NamedTensors, version: int) -> Sent:
        """Send every tensor once, in buckets. `weights` is consumed to its end even if every receiver is lost.

        Returns when each receiver has confirmed everything or is lost (`Sent.lost`, with the reason).
        Raises ValueError for a name that comes twice.
        """

    def drop(self, replica: str, reason: str) -> None:  # noqa: B027  a transport without waits has nothing to do
        """Stop waiting for a replica that is known to be gone. Callable at any time."""

    @abstractmethod
    async def finalize(self) -> None:
        """End this sync: close its addresses. Buffers may stay for the next one."""

    async def close(self) -> None:
        """Free everything. Called once, also after failures."""
        await self.finalize()

    @classmethod
    @abstractmethod
    def receiver(cls, offer: Offer, rank: int, token: str) -> WeightReceiver:
        """The other side, in the process of one rank of `offer.replica`."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tensors that arrived together."""

    tensors: Iterable[NamedTensor]
    count: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Intake:
    """Handling of arriving tensors in a receiver's process."""

    digest: WeightDigest | None = None  # updated with each tensor before it is handed over
    copy: bool = False  # each owns its memory; else it is valid until the next call only
    targets: Mapping[str, torch.Tensor] = field(default_factory=dict)  # see `hone.weights.delivery.receive`

    def take(self, packed: Packed) -> Arrival:
        """Hand over tensors in place."""
        if self.digest is not None:
            self.digest.add_packed(packed.data, packed.entries)
        return Arrival(packed, len(packed.entries), packed.size)


class WeightReceiver(ABC):
    """A rank's side of one sync. Synchronous, as the loaders of all engines are."""

    def __init__(self, offer: Offer, rank: int, token: str) -> None:
        self.offer = offer
        self.rank = rank
        self.expected = ""  # the sender's digest, known when the stream has ended
        self.holds = ""  # what this process has from an earlier sync; sent to the sender
        self.wants = ""  # the boxes that this process needs, as text; empty: whole tensors
        self.boxes: BoxMap = {}  # the boxes that are sent, known once the sender is connected; others come whole
        self._token = token

    @property
    def method(self) -> Method:
        """The checksum's method, chosen by the memory in which weights arrive; known once the sender is connected."""
        return "bytes"

    @abstractmethod
    def init_process_group(self) -> None:
        """Find the sender and prove the token to each other. Raises WeightSyncError: absent, refused, wrong version."""

    @abstractmethod
    def stream(self, intake: Intake) -> Iterator[Arrival]:
        """Yield every tensor once, some together.

        Raises WeightSyncError when the sender dies, is silent past the deadline, or sends invalid data.
        """

    @abstractmethod
    def finalize(self, failure: str = "", digest: str = "") -> None:
        """Report the result to the sender and disconnect; a sender that is gone is no error.

        `failure` empty: everything was received; `digest`: the checksum of what was received.
        """


# ----------------------------------------------------------------------------------------------------- the proof


class Receipt(Protocol):
    """Statement of a replica about the weights that it serves after a sync; one of each rank."""

    @property
    def replica(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def digest(self) -> str: ...


class LoadedWeights(Protocol):
    """The tensors that a rollout engine in this process serves after a sync (`hone.rollout.base.LoadedWeights`)."""

    @property
    def replica(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def tensors(self) -> Mapping[str, torch.Tensor]: ...


class Replica(Protocol):
    """A rollout engine in another process, as the manager of the sync sees it. All on one event loop."""

    @property
    def name(self) -> str: ...

    @property
    def ranks(self) -> int:
        """Return the number of its processes that open the offer (tensor parallel size)."""

    async def pause(self, mode: PauseMode) -> None:
        """Stop sampling; see `PauseMode` for the requests that run."""

    async def receive_weights(self, offer: Mapping[str, Any]) -> Sequence[Receipt]:
        """Make every rank receive what `offer` announces, drop caches of older weights, and return the receipts."""

    async def resume(self) -> None:
        """Sample again. Called only after a proven sync."""

    async def stop(self, reason: str) -> None:
        """Serve nothing more: its weights are unknown or partly new. Its owner restarts it, or it gets a whole sync."""


StreamFn = Callable[[], NamedTensors]
"""Function that starts a new stream of tensors."""


@dataclass(frozen=True, slots=True)
class Source:
    """The weights that the trainer has to send."""

    whole: StreamFn  # every weight, without an adapter that is sent separately
    adapter: tuple[StreamFn, AdapterTensors] | None = None  # tensors and description of a separate adapter


@dataclass(frozen=True, slots=True)
class VersionWeights:
    """The weights of one version, to be sent: the trainer's own tensors while it waits, or a copy while it trains."""

    version: int
    source: Source
    is_current: Callable[[], bool]
    """Check that the tensors are still of this version; for a copy this takes a while.

    Called after each send too, so that changed weights never count as sent. Raises WeightSyncError if a copy changed.
    """


def verify(sent: Sent, receipts: Sequence[Receipt]) -> None:
    """Raise WeightSyncError unless every replica acknowledges the version and digest that were sent."""
    if not receipts:
        raise WeightSyncError(f"no replica acknowledged weight version {sent.version}")
    for receipt in receipts:
        if receipt.version != sent.version:
            raise WeightSyncError(
                f"replica {receipt.replica} serves weight version {receipt.version}, sent was {sent.version}",
                [receipt.replica],
            )
        if receipt.digest != sent.digest:
            raise WeightSyncError(
                f"replica {receipt.replica} serves weights with digest {receipt.digest} for version {sent.version}, "
                f"the trainer sent {sent.digest}: a tensor was lost, stale or changed on the way",
                [receipt.replica],
            )
