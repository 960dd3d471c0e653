"""Weights between machines by NIXL: each receiver reads the sender's buckets (by RDMA where there is any, else TCP).

    sender                                                    receiver
      two registered buckets; tells where they are -- tcp -->   registers room of its own
      announces bucket n over the control channel  -- tcp -->   READ bucket n  <=====
                                                   <-- tcp --   taken n

No receiver waits for another, so one that is lost costs the others nothing; with `collective` it costs all of them the
sync. NIXL (https://github.com/ai-dynamo/nixl, Apache 2.0) is optional: `pip install nixl` in the environments of the
trainer and of the servers. It moves the bytes by UCX, which chooses the network: see UCX_NET_DEVICES and UCX_TLS.

NIXL's own progress thread keeps a core busy for as long as an agent exists. So agents have none: during a sync a thread
of the sender lets NIXL serve the reads (over TCP the sender's side takes part), and a receiver does so while it waits.

The sender describes its buckets over the control channel, after both sides have proven the run's token. The bytes
themselves are neither encrypted nor signed, and UCX has no token of its own, so the network has to be trusted. If the
trainer listens on loopback, UCX is limited to it.
"""

from __future__ import annotations

import importlib
import os
import secrets
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hone.platforms.base import current_platform
from hone.weights import LOOPBACK
from hone.weights.base import NamedTensors, Offer, Sent, WeightReceiver, WeightSyncError
from hone.weights.transports.bucketed.buckets import Filled
from hone.weights.transports.bucketed.channel import SenderChannel
from hone.weights.transports.bucketed.sync import COUNT, BucketedEngine, BucketedReceiver
from hone.weights.transports.bucketed.wire import BrokenMessage, expect

POLL_S = 0.00005  # seconds between two polls of NIXL, during a sync
END_S = 10.0  # for a poll to return


class NixlEngine(BucketedEngine):
    """Servers read each bucket from the trainer by NIXL: RDMA if the network has it, else TCP."""

    transport = "nixl"

    def __init__(self, bucket_bytes: int, timeout_s: float, token: str, host: str = LOOPBACK) -> None:
        """`host`: the address of this machine in the cluster, on which the control channel listens."""
        super().__init__(bucket_bytes, timeout_s, token)
        self._host = host
        self._memory: _Memory | None = None
        self._service: _Service | None = None

    async def send_weights(self, weights: NamedTensors, version: int) -> Sent:
        assert self._service is not None  # `_share` began it
        try:
            return await super().send_weights(weights, version)
        finally:
            self._service.check()  # why receivers did not get a bucket

    async def finalize(self) -> None:
        service, self._service = self._service, None
        try:
            await super().finalize()  # receivers that are still reading learn that the sync is over
        finally:
            if service is not None:
                service.end()

    async def close(self) -> None:
        await self.finalize()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    @classmethod
    def receiver(cls, offer: Offer, rank: int, token: str) -> WeightReceiver:
        return NixlReceiver(offer, rank, token)

    def _open(self, channel: SenderChannel) -> Mapping[str, Any]:
        return {"channel": channel.bind(f"tcp://{self._host}:*"), "loopback": self._host == LOOPBACK}

    async def _share(self, channel: SenderChannel) -> None:
        """The buckets stay registered for the next sync; a receiver learns where they are each time."""
        buckets = self._buckets()
        await channel.send({"type": "nixl", **buckets.describe()})
        self._service = _Service(buckets.agent)

    def _bucket(self, number: int) -> Tensor:
        return self._buckets().tensors[number % COUNT]

    async def _ship(self, number: int, filled: Filled, last: bool) -> None:
        self._buckets().synchronize()
        groups, used = filled
        await self.channel.send({"type": "bucket", "number": number, "groups": groups, "used": used, "last": last})

    def _buckets(self) -> _Memory:
        if self._memory is None:
            self._memory = _Memory(_agent(self._host == LOOPBACK), COUNT, self.bucket_bytes)
        return self._memory


class NixlReceiver(BucketedReceiver):
    """A rank's side."""

    def __init__(self, offer: Offer, rank: int, token: str) -> None:
        super().__init__(offer, rank, token)
        self._room: _Memory | None = None
        self._agent: Any = None
        self._sender = ""
        self._kind = ""
        self._places: list[tuple[int, int]] = []

    def init_process_group(self) -> None:
        address = self.offer.address
        expect({"type": "address", **address}, session=str, channel=str, loopback=bool)
        self._agent = _agent(address["loopback"])
        self._channel.connect(address["channel"], address["session"], {"holds": self.holds})
        message = self._channel.receive("tell its memory to")
        expect(message, agent=str, kind=str, size=int, places=list)
        if message["type"] != "nixl" or len(message["places"]) != COUNT:
            raise BrokenMessage(f"a {message['type'][:40]} message came where memory was due")
        self._places = [(int(place), int(device)) for place, device in message["places"]]
        self._kind = message["kind"]
        try:
            self._sender = self._agent.add_remote_agent(bytes.fromhex(message["agent"])).decode()
        except _errors() as error:
            raise WeightSyncError(f"{self._channel.name} cannot reach the sender by NIXL: {error}") from error
        self._room = _kept_room(self._agent, message["size"])
        self._channel.send({"type": "ready"})

    def _device(self) -> torch.device:
        return torch.device("cpu") if self._room is None else self._room.tensors[0].device

    def _bucket(self, message: Mapping[str, Any]) -> Tensor:
        expect(dict(message), used=int)
        used = message["used"]
        if self._room is None or not 0 <= used <= self._room.size:
            raise BrokenMessage(f"a bucket of {used} bytes was announced")
        room = self._room.tensors[0][:used]
        if used:
            place, device = self._places[message["number"] % COUNT]
            self._read(room, (place, used, device))
        return room

    def _read(self, room: Tensor, where: tuple[int, int, int]) -> None:
        """Read the sender's bytes into `room`; over RDMA the sender's process takes no part."""
        agent, request = self._agent, None
        theirs = agent.get_xfer_descs([where], mem_type=self._kind)
        try:
            request = agent.initialize_xfer("READ", agent.get_xfer_descs([room]), theirs, self._sender)
            state = agent.transfer(request)
            while state not in ("DONE", "ERR"):
                self._channel.raise_if_aborted()
                if self._channel.remaining_s() <= 0:
                    raise WeightSyncError(f"{self._channel.name}: the read of a bucket did not end in time")
                time.sleep(POLL_S)
                state = agent.check_xfer_state(request)
        except _errors() as error:
            raise WeightSyncError(f"{self._channel.name}: the read of a bucket failed: {error}") from error
        finally:
            if request is not None:
                agent.release_xfer_handle(request)
        if state == "ERR":
            raise WeightSyncError(f"{self._channel.name}: the read of a bucket failed")

    def _release(self) -> None:
        if self._room is not None:
            self._room.synchronize()

    def finalize(self, failure: str = "", digest: str = "") -> None:
        if self._sender:
            self._agent.remove_remote_agent(self._sender)
        self._sender, self._room = "", None
        super().finalize(failure, digest)


class _Memory:
    """Buffers that NIXL may read or write: on the device if there is one, else in host memory."""

    def __init__(self, agent: Any, count: int, size: int) -> None:
        platform = current_platform()
        on_device = platform.device != "cpu"
        index = torch.accelerator.current_device_index() if on_device else 0
        device = platform.torch_device(index) if on_device else torch.device("cpu")
        self.agent = agent
        self._index = index
        self.size = size
        self.kind = "VRAM" if on_device else "DRAM"
        self.tensors = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]
        try:
            self._registered = agent.register_memory(self.tensors)
        except _errors() as error:
            raise WeightSyncError(f"NIXL cannot register {count} buckets of {size} bytes: {error}") from error

    def describe(self) -> dict[str, Any]:
        """Return the facts with which a receiver reads the buffers."""
        places = [[tensor.data_ptr(), self._index] for tensor in self.tensors]
        return {"agent": self.agent.get_agent_metadata().hex(), "kind": self.kind, "size": self.size, "places": places}

    def synchronize(self) -> None:
        if self.kind != "DRAM":
            torch.accelerator.synchronize(self.tensors[0].device)

    def close(self) -> None:
        self.agent.deregister_memory(self._registered)
        self.tensors = []


class _Service:
    """A thread that lets NIXL serve the reads of a sync, until `end`."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        self._failure: Exception | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="nixl", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            while not self._over.wait(POLL_S):
                self._agent.get_new_notifs()  # there are none; the call makes NIXL progress
        except Exception as error:  # noqa: BLE001  raised by `check`, on the sender's thread
            self._failure = error

    def check(self) -> None:
        """Raise WeightSyncError if NIXL has failed."""
        if self._failure is not None:
            raise WeightSyncError(f"NIXL cannot serve the reads of receivers: {self._failure}") from self._failure

    def end(self) -> None:
        """Raises WeightSyncError if NIXL does not return."""
        self._over.set()
        self._thread.join(END_S)
        if self._thread.is_alive():
            raise WeightSyncError(f"NIXL did not return from a poll within {END_S:g} s")


_agents: list[Any] = []  # the one agent of this process
_rooms: list[_Memory] = []  # the room of this receiver process's last sync


def _kept_room(agent: Any, size: int) -> _Memory:
    """Room for one bucket; registering it again for each sync would take as long as a small sync."""
    if not _rooms or _rooms[0].size < size:
        while _rooms:
            _rooms.pop().close()
        _rooms.append(_Memory(agent, 1, size))
    return _rooms[0]


def _agent(on_loopback: bool) -> Any:
    """This process's NIXL agent. Raises WeightSyncError if NIXL is not installed or does not start."""
    if not _agents:
        if on_loopback:
            device = current_platform().device
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
            os.environ.setdefault("UCX_TLS", "tcp" if device == "cpu" else f"tcp,{device}_copy")
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        try:
            api = importlib.import_module("nixl._api")
            strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT  # the event loop and `_Service` call it
            config = api.nixl_agent_config(enable_prog_thread=False, sync_mode=strict, backends=["UCX"])
            _agents.append(api.nixl_agent(f"hone-{secrets.token_hex(8)}", config))
        except ImportError as error:
            raise WeightSyncError(
                f"weights.transport=nixl: NIXL cannot be imported ({error}); pip install nixl in the environments of "
                "the trainer and of its rollout servers"
            ) from error
        except RuntimeError as error:
            raise WeightSyncError(f"weights.transport=nixl: NIXL does not start: {error}") from error
    return _agents[0]


def _errors() -> tuple[type[Exception], ...]:
    """The exceptions of NIXL's bindings."""
    bindings = importlib.import_module("nixl._bindings")
    own = (getattr(bindings, name) for name in dir(bindings) if name.endswith("Error"))
    return (RuntimeError, *(one for one in own if isinstance(one, type) and issubclass(one, Exception)))
