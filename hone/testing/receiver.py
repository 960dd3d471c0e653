"""Processes that receive weights, as the workers of a rollout server do: one for each rank, started by the tests.

    ReceivingReplica --request: offer, rank, fault--> main: receives, keeps, digests what it then holds
                     <--reply: version, digest, kinds of the tensors, or an error--

A fault is what the process does wrong in one sync: `dies:3` is killed at the third tensor, `raises:3` fails there,
`leaves:3` stops reading, `skips:NAME` does not take that tensor in.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hone.platforms.base import current_platform
from hone.plugins import load_plugins
from hone.processes.request_loop import RequestLoop
from hone.processes.request_process import ChildLost, ChildSpec, RequestProcess
from hone.registry import reason
from hone.rollout.base import WeightReceipt
from hone.weights.base import AdapterTensors
from hone.weights.delivery import Delivery, receive
from hone.weights.digests.digest import Method, digest_tensors

PROGRAM = "hone.testing.receiver"
START_S = 120.0  # to import torch, and a vendor's package
REPLY_S = 120.0  # of one sync
LONGEST = 600  # characters of a reason

Kinds = Mapping[str, Sequence[Any]]
"""Name -> dtype as text, shape."""


class _Rank:
    """One receiving process."""

    def __init__(self, replica: str, token: str) -> None:
        self._process = RequestProcess(ChildSpec(f"rank of {replica}", PROGRAM))
        self._turn = threading.Lock()  # the thread of a sync that was given up may still wait for its reply
        try:
            self._process.hello({"token": token}, START_S)
        except BaseException:
            self.kill()
            raise

    def take(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Receive one sync: what is held afterwards. Raises RuntimeError with the process's error, or ChildLost."""
        with self._turn:
            self._process.request(json.dumps(request))
            replies = self._process.replies(time.monotonic() + REPLY_S)
        if not replies:
            raise ChildLost(f"a receiving process did not reply within {REPLY_S:g} s")
        if "error" in replies[0]:
            raise RuntimeError(replies[0]["error"])
        return replies[0]

    def kill(self) -> None:
        self._process.kill()


class ReceivingReplica:
    """A replica of some ranks, each a process that keeps what it received; `asked` lists what its manager wanted."""

    def __init__(self, name: str, ranks: int, token: str) -> None:
        self.name = name
        self.ranks = ranks
        self.fault = ""  # of its last rank, in the next syncs
        self.asked: list[str] = []
        self.facts: Kinds = {}  # what the last rank holds
        self.held: tuple[Method, str] = ("bytes", "")  # method and digest of it
        self._token = token
        self._processes: list[_Rank] = []
        try:
            for _ in range(ranks):
                self._processes.append(_Rank(name, token))
        except BaseException:
            self.close()
            raise

    async def pause(self, mode: str) -> None:
        self.asked.append(f"pause {mode}")

    async def resume(self) -> None:
        self.asked.append("resume")

    async def stop(self, reason: str) -> None:
        self.asked.append(f"stop: {reason}")

    async def receive_weights(self, offer: Mapping[str, Any]) -> Sequence[WeightReceipt]:
        """Give the offer to every rank. Raises RuntimeError with a rank's error, ChildLost if it died."""
        faults = [""] * (self.ranks - 1) + [self.fault]
        taken = (
            asyncio.to_thread(process.take, {"offer": offer, "rank": rank, "fault": fault})
            for rank, (process, fault) in enumerate(zip(self._processes, faults, strict=True))
        )
        found = await asyncio.gather(*taken)
        self.facts = found[-1]["kinds"]
        self.held = found[-1]["method"], found[-1]["digest"]
        proved = ("version", "digest", "tensors", "bytes")
        return [WeightReceipt(self.name, **{name: one[name] for name in proved}) for one in found]

    def replace_rank(self) -> None:
        """Start another process in place of the last rank's."""
        self._processes.pop().kill()
        self._processes.append(_Rank(self.name, self._token))

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        self._processes.clear()


def main() -> None:
    """One rank: receive the weights of each offer, and reply with the digest of everything held afterwards."""
    loop = RequestLoop()
    requests = loop.requests()
    token = next(requests).body["token"]
    load_plugins()
    current_platform().set_device(0)
    held: dict[bool, dict[str, Tensor]] = {False: {}, True: {}}  # whole weights, and an adapter's
    loop.loaded({})
    for request in requests:
        try:
            loop.reply(request.batch, _received(request.body, token, held))
        except Exception as error:  # noqa: BLE001  reported as the reason
            loop.reply(request.batch, {"error": reason(error)[:LONGEST]})


def _received(body: Mapping[str, Any], token: str, held: Mapping[bool, dict[str, Tensor]]) -> dict[str, Any]:
    with receive(body["offer"], body["rank"], token) as delivery:
        holds = held[isinstance(delivery.payload, AdapterTensors)]
        _take_in(delivery, holds, body["fault"])
    return {
        "version": delivery.version,
        "digest": digest_tensors(holds.items(), delivery.method),
        "tensors": delivery.tensors,
        "bytes": delivery.bytes,
        "method": delivery.method,
        "kinds": {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in holds.items()},
    }


def _take_in(delivery: Delivery, holds: dict[str, Tensor], fault: str) -> None:
    kind, _, place = fault.partition(":")
    for count, (name, tensor) in enumerate(delivery, 1):
        if kind == "dies" and count == int(place):
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "raises" and count == int(place):
            raise ValueError("the loader refuses this tensor")
        if kind == "leaves" and count == int(place):
            return
        if kind != "skips" or name != place:
            holds[name] = tensor


if __name__ == "__main__":
    main()
