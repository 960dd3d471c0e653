"""Weights between machines: each bucket is a broadcast in a separate process group (NCCL on GPUs, gloo elsewhere).

    sender, rank 0 of 1 + receivers                              receivers, ranks 1 ..
      announce bucket n over the control channel    -- tcp -->     make room
      broadcast(bucket n)                           =========>     broadcast(room); read; taken n

The group is independent of all other groups of the processes, and is kept for the next sync if its members stay the
same. Its ranks find each other through a TCPStore, under a random name that is sent over the control channel after both
sides have proven the run's token. The store listens only on the cluster address, but has no authentication: anybody who
reaches its port while a group is built can read and change its content. A broadcast needs every member: if a receiver
is lost during one, all are, and the next sync builds a new group.

Tensors are neither encrypted nor signed, so the network has to be trusted.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hone.platforms.base import current_platform
from hone.weights import LOOPBACK
from hone.weights.base import Offer, WeightReceiver, WeightSyncError
from hone.weights.transports.bucketed.buckets import Filled
from hone.weights.transports.bucketed.channel import SenderChannel
from hone.weights.transports.bucketed.sync import COUNT, BucketedEngine, BucketedReceiver
from hone.weights.transports.bucketed.wire import BrokenMessage, expect

HOST_BACKEND = "gloo"  # for weights in host memory
POLL_S = 0.0005  # seconds between checks of a broadcast and of lost receivers
DROPPING = "hone-drop-group"  # name of the threads that delete groups


class CollectiveEngine(BucketedEngine):
    """Broadcasts each bucket to all servers in a process group (NCCL, or gloo on CPUs)."""

    transport = "collective"
    all_or_none = True

    def __init__(self, bucket_bytes: int, timeout_s: float, token: str, host: str = LOOPBACK) -> None:
        """`host`: the address of this machine in the cluster, on which the sender listens."""
        super().__init__(bucket_bytes, timeout_s, token)
        self._host = host
        self._group: _Group | None = None
        self._members: list[str] = []
        self._buckets: list[Tensor] = []

    async def finalize(self) -> None:
        if self._channel is not None and self._channel.lost():
            self._leave()
        await super().finalize()

    async def close(self) -> None:
        await self.finalize()
        self._leave()
        self._buckets = []

    @classmethod
    def receiver(cls, offer: Offer, rank: int, token: str) -> WeightReceiver:
        return CollectiveReceiver(offer, rank, token)

    def _open(self, channel: SenderChannel) -> Mapping[str, Any]:
        return {"channel": channel.bind(f"tcp://{self._host}:*")}

    async def _share(self, channel: SenderChannel) -> None:
        """Reuse the group of the last sync if the members are the same and all still hold it; else build a new one."""
        members = [peer.name for peer in channel.left()]
        kept = self._group
        if kept is None or members != self._members or any(p.facts.get("group") != kept.name for p in channel.left()):
            await self._build(channel, members)
        elif kept is not None:
            await channel.send({"type": "group", "name": kept.name})

    async def _build(self, channel: SenderChannel, members: list[str]) -> None:
        self._leave()
        if not members:
            return None
        name, backend = secrets.token_hex(16), backend_for([_facts(), *(peer.facts for peer in channel.left())])
        store, port = _listening_store(self._host, self.timeout_s)
        told = {"type": "group", "name": name, "backend": backend, "host": self._host, "port": port}
        for rank, peer in enumerate(channel.left(), start=1):
            await channel.send({**told, "rank": rank, "world": len(members) + 1}, to=peer)
        facts = (backend, 0, len(members) + 1, self._host, channel.remaining_s())
        try:
            async with asyncio.timeout(channel.remaining_s()):
                self._group, self._members = await _beside(lambda: _Group(name, store, *facts)), members
        except TimeoutError:
            return self._lose_all("not all members joined in time")
        except RuntimeError as error:
            return self._lose_all(str(error))
        if not self._buckets or self._buckets[0].device != self._group.device:
            self._buckets = [torch.empty(self.bucket_bytes, dtype=torch.uint8, device=self._group.device) for _ in "01"]
        return None

    def _bucket(self, number: int) -> Tensor:
        if not self._buckets:  # no receiver connected; the weights are still consumed to the end
            self._buckets = [torch.empty(self.bucket_bytes, dtype=torch.uint8) for _ in "01"]
        return self._buckets[number % COUNT]

    async def _ship(self, number: int, filled: Filled, last: bool) -> None:
        if self._group is None or self.channel.lost():
            return self._lose_all()
        groups, used = filled
        await self.channel.send({"type": "bucket", "number": number, "groups": groups, "used": used, "last": last})
        if used == 0:
            return None
        try:
            work = self._group.broadcast(self._bucket(number)[:used])
            limit = time.monotonic() + min(self.channel.remaining_s(), self.channel.patience_s)
            while not work.is_completed():
                if self.channel.lost() or time.monotonic() >= limit:
                    break
                await asyncio.sleep(POLL_S)
            else:
                work.wait(timedelta(seconds=POLL_S))  # it is done; this raises its error, if any
                return None
        except RuntimeError as error:
            return self._lose_all(str(error))
        return self._lose_all()

    def _leave(self) -> None:
        if self._group is not None:
            self._group.leave()
        self._group, self._members = None, []

    def _lose_all(self, error: str = "") -> None:
        """Mark all receivers as lost: a broadcast needs every member."""
        self._leave()
        first = next(iter(self.channel.lost()), "")
        late = f"it did not end within {self.channel.patience_s:g} s"
        reason = f"the broadcast group lost {first}" if first else f"the broadcast failed: {error or late}"
        for peer in self.channel.peers:
            self.channel.lose(peer, reason)


class CollectiveReceiver(BucketedReceiver):
    """A rank's side."""

    def __init__(self, offer: Offer, rank: int, token: str) -> None:
        super().__init__(offer, rank, token)
        self._group: _Group | None = None
        self._room: list[Tensor] = []

    def init_process_group(self) -> None:
        address = self.offer.address
        expect({"type": "address", **address}, session=str, channel=str)
        facts = {"holds": self.holds, "group": next(iter(_kept), ""), **_facts()}
        self._channel.connect(address["channel"], address["session"], facts)
        message = self._channel.receive("form a group for")
        expect(message, name=str)
        if message["type"] != "group":
            raise BrokenMessage(f"a {message['type'][:40]} message came where a group was due")
        if message["name"] not in _kept:
            _forget()
            _kept[message["name"]] = self._join(message)
        self._group = _kept[message["name"]]
        self._channel.send({"type": "ready"})

    def _join(self, message: Mapping[str, Any]) -> _Group:
        expect(dict(message), backend=str, host=str, port=int, rank=int, world=int)
        limit = timedelta(seconds=self._channel.remaining_s())
        try:
            store = dist.TCPStore(message["host"], message["port"], None, False, limit)
            facts = (message["backend"], message["rank"], message["world"], _own_address(message["host"]))
            return _Group(message["name"], store, *facts, limit.total_seconds())
        except RuntimeError as error:
            raise WeightSyncError(f"{self._channel.name} could not join the group of the sender: {error}") from error

    def _device(self) -> torch.device:
        return torch.device("cpu") if self._group is None else self._group.device

    def _bucket(self, message: Mapping[str, Any]) -> Tensor:
        expect(dict(message), used=int)
        used = message["used"]
        if self._group is None or not 0 <= used < 1 << 40:
            raise BrokenMessage(f"a bucket of {used} bytes was announced")
        if not self._room or self._room[0].numel() < used:
            self._room = [torch.empty(used, dtype=torch.uint8, device=self._group.device)]
        room = self._room[0][:used]
        if used == 0:
            return room
        try:
            work = self._group.broadcast(room)
            while not work.is_completed():
                self._channel.raise_if_aborted()
                time.sleep(POLL_S)
            work.wait(timedelta(seconds=POLL_S))
        except RuntimeError as error:
            _forget()
            if isinstance(error, WeightSyncError):
                raise
            raise WeightSyncError(f"{self._channel.name}: the broadcast of a bucket failed: {error}") from error
        return room

    def _release(self) -> None:
        if self._room and self._room[0].device.type != "cpu":
            torch.accelerator.synchronize(self._room[0].device)

    def finalize(self, failure: str = "", digest: str = "") -> None:
        if failure:
            _forget()
        self._group, self._room = None, []
        super().finalize(failure, digest)


class _Group:
    """One process group; the sender is rank 0."""

    def __init__(
        self, name: str, store: dist.Store, backend: str, rank: int, world: int, host: str, timeout_s: float
    ) -> None:
        self.name = name
        platform = current_platform()
        on_device = backend != HOST_BACKEND
        self.device = torch.device("cpu")
        if on_device:
            self.device = platform.torch_device(torch.accelerator.current_device_index())
        limit = timedelta(seconds=max(timeout_s, 1.0))
        prefixed = dist.PrefixStore(name, store)
        self._store = store  # rank 0's store is the server of the others
        if on_device:
            self._group: Any = platform.device_group(prefixed, rank, world, limit.total_seconds())
            self._meet(limit.total_seconds())
        else:
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # torch's stubs lack it
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = limit
            options._threads = 1
            self._group = dist.ProcessGroupGloo(prefixed, rank, world, options)

    def _meet(self, timeout_s: float) -> None:
        """Broadcast one byte: NCCL connects the members in the first broadcast, which blocks until all are there.

        Here it does so in a thread, where an event loop can stop waiting for it. Raises RuntimeError.
        """
        work = self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self.device))
        ends = time.monotonic() + timeout_s
        while not work.is_completed():
            if time.monotonic() >= ends:
                raise RuntimeError(f"not all members joined within {timeout_s:.0f} s")
            time.sleep(POLL_S)
        work.wait(timedelta(seconds=POLL_S))

    def leave(self) -> None:
        """Abort running broadcasts, and delete the group in a thread.

        gloo's `abort` does not end a broadcast. Deleting its group waits for a peer that hangs, until that peer is
        killed or the group's timeout has passed.
        """
        self._group.abort()
        dropped = [self._group]
        self._group = None
        threading.Thread(target=dropped.clear, name=DROPPING).start()

    def broadcast(self, tensor: Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.asyncOp = True
        return self._group.broadcast([tensor], options)


async def _beside(make: Callable[[], _Group]) -> _Group:
    """Make a group in a thread that does not keep the process alive: NCCL may wait in it for ever."""
    done: futures.Future[_Group] = futures.Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(make())
        except Exception as error:  # noqa: BLE001  raised where it is awaited
            done.set_exception(error)

    threading.Thread(target=run, name="weight group", daemon=True).start()
    return await asyncio.wrap_future(done)


def _facts() -> dict[str, Any]:
    """The backends and device that this process can use in a group."""
    platform = current_platform()
    if not platform.supports_broadcast:
        return {"backends": [HOST_BACKEND], "device": ""}
    device = platform.device_uuids()[torch.accelerator.current_device_index()]
    return {"backends": [HOST_BACKEND, platform.collectives_backend], "device": device}


def backend_for(members: Sequence[Mapping[str, Any]]) -> str:
    """The devices' backend if every member has the same and no two share a device, which NCCL refuses; else gloo."""
    devices = [one.get("device") for one in members]
    ours = [name for name in members[0].get("backends", ()) if name != HOST_BACKEND] if members else []
    everywhere = [name for name in ours if all(name in one.get("backends", ()) for one in members)]
    return everywhere[0] if everywhere and len(set(devices)) == len(devices) else HOST_BACKEND


_kept: dict[str, _Group] = {}  # the group of this receiver process's last sync


def _forget() -> None:
    for group in _kept.values():
        group.leave()
    _kept.clear()


def _listening_store(host: str, timeout_s: float) -> tuple[dist.TCPStore, int]:
    """A store that listens only on `host`; by default it would listen on every interface."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        listener.listen(128)
        port = listener.getsockname()[1]
        limit = timedelta(seconds=timeout_s)
        store = dist.TCPStore(
            host, port, None, True, limit, wait_for_workers=False, master_listen_fd=listener.detach(), use_libuv=True
        )
    return store, port


def _own_address(host: str) -> str:
    """The address of this machine on the route to `host`."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        return str(probe.getsockname()[0])
